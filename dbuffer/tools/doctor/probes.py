"""Probes of a mount. Each does the operation itself, in a directory of its own.

The documentation and options of a network mount do not show how its servers behave.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar

from dbuffer.errors import DBufferError, OptionError, StoreAccessError
from dbuffer.format.places import POINTER_FILE, WRITER_FILE
from dbuffer.runtime.messages import format_bytes
from dbuffer.runtime.timing import TIMING
from dbuffer.store import filesystem, mounts
from dbuffer.store.filesystem import MOUNT_VARIABLE, os_errors
from dbuffer.store.medium import Medium, medium_of
from dbuffer.store.watcher import Watcher
from dbuffer.tools.doctor.process import OtherProcess
from dbuffer.tools.doctor.scratch import scratch

GUARANTEES = {
    1: "No torn reads",
    2: "Monotonic versions",
    3: "Crash safety",
    4: "One version per engine",
    5: "Bounded waiting",
    6: "Bad input is rejected",
}
"""Guarantees by their numbers in the README."""

POLLING = "receivers poll every poll_interval_s (0.5 s by default)"

OnStep = Callable[[str], None]
"""Function that is called with the next step."""

Verdict = Literal["good", "adapted", "broken", "unknown"]

Outcome: TypeAlias = tuple[Verdict, str, str]
"""Verdict, result and consequence of a probe, as in its `Finding`."""

_PROBE_BYTES = 1 << 20
_INOTIFY_INSTANCES = 8
"""Each receiver takes one instance; an engine has a receiver for each rank of a host."""

_OPTIONS_TO_SHOW = (
    *("ro", "vers=", "nfsvers=", "proto=", "hard", "soft", "softerr", "nolock", "local_lock="),
    *("nocto", "noac", "actimeo=", "acregm", "acdirm", "lookupcache=", "cache=", "nobrl"),
    *("barrier=0", "nobarrier", "data=", "size=", "nr_inodes=", "sync"),
)
_OPTIONS_TO_NOTE = {
    "local_lock=all": "locks work on this host only; no guarantee depends on them",
    "local_lock=flock": "locks work on this host only; no guarantee depends on them",
    "soft": "soft: a slow server makes a publish fail; mount with hard",
    "softerr": "softerr: a slow server makes a publish fail; mount with hard",
    "nocto": "nocto: this host sees other hosts' versions late; mount it without",
    "nobarrier": "nobarrier: a power cut may lose versions, even with durable=True",
    "barrier=0": "barrier=0: a power cut may lose versions, even with durable=True",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one probe."""

    probe: str
    verdict: Verdict
    """``good``: it works; ``adapted``: it does not work, and dbuffer does without; ``broken``: it
    does not work, and a guarantee cannot hold; ``unknown``: it could not be determined."""
    result: str
    consequence: str
    """Consequence for dbuffer and its users."""
    guarantee: int | None = None
    """Number in `GUARANTEES` of the guarantee that cannot hold; None unless broken."""


def make_finding(probe: str, outcome: Outcome, guarantee: int) -> Finding:
    """Return the finding of a probe on which a guarantee depends."""
    return Finding(probe, *outcome, guarantee if outcome[0] == "broken" else None)


@dataclass(frozen=True, slots=True)
class Site:
    """Place that is probed."""

    path: Path
    base: Path
    """Directory of the probes: ``path``, or the nearest existing directory above it."""
    medium: Medium
    allow_shared_store: bool

    @classmethod
    def at(cls, path: Path, allow_shared_store: bool) -> Site:
        """Find the directory to probe in, and its medium."""
        with os_errors("look", path):
            base = next(base for base in (path, *path.parents) if base.exists())
            if not base.is_dir():
                raise NotADirectoryError(20, "not a directory", str(base))
        if base == base.parent != path:
            raise OptionError(
                f"{path}: there is no {base / path.parts[1]}, and probes of {base} would tell of "
                "another mount; check the path"
            )
        return cls(path, base, medium_of(base), allow_shared_store)


SiteT = TypeVar("SiteT")


class Probe(NamedTuple, Generic[SiteT]):
    """Row of a table of probes."""

    title: str
    run: Callable[[SiteT], Outcome]
    guarantee: int
    """Guarantee that cannot hold if the probe fails."""
    cure: str
    """Consequence if the probe raises an error."""

    def try_on(self, site: SiteT, progress: OnStep) -> Finding:
        """Run the probe; an error is a finding too."""
        progress(self.title)
        try:
            outcome = self.run(site)
        except OptionError:  # no finding about the place
            raise
        except (DBufferError, OSError) as error:
            outcome = "broken", str(error), self.cure
        return make_finding(self.title, outcome, self.guarantee)


def not_tried(probes: Sequence[Probe[SiteT]], consequence: str) -> Finding:
    """Return the finding of probes that need what another one has found broken."""
    titles = ", ".join(probe.title for probe in probes)
    return Finding("the rest", "unknown", f"not tried: {titles}", consequence)


# ---------------------------------------------------------------------------------------------
# Probes that write nothing


def _probe_mount(site: Site) -> Outcome:
    medium = site.medium
    result = f"{medium.filesystem} from {mounts.mount_of(site.base).source}"
    kind = os.environ.get(MOUNT_VARIABLE, "auto")
    if kind != "auto":
        result += f", overridden by {MOUNT_VARIABLE}={kind}"
    if medium.reaches_other_hosts:
        return (
            "adapted",
            f"{result}: a network mount",
            "a new file for each version, flushed and read back; readers look by polling, open "
            "the directory before the pointer, read into memory, and check sizes and checksums",
        )
    if medium.can_rewrite_in_place:
        return "good", f"{result}: local", "two files, mapped and rewritten in place"
    return (
        "adapted",
        f"{result}: local, may copy on write",
        "mapped; a new file for each version, because rewriting a page may need new space",
    )


def _probe_options(site: Site) -> Outcome:
    options = mounts.mount_of(site.base).options
    shown = [
        option
        for option in options
        for known in _OPTIONS_TO_SHOW
        if option == known or (known[-1] in "=m" and option.startswith(known))
    ]
    result = ", ".join(shown) or "default options"
    notes = [note for option, note in _OPTIONS_TO_NOTE.items() if option in options]
    if notes:
        return "adapted", result, "; ".join(notes)
    if site.medium.filesystem in ("tmpfs", "ramfs"):
        return "adapted", result, "in memory: nothing survives a reboot, not even with durable=True"
    return "good", result, "nothing to do: no option is missing or harmful"


def _probe_trust(site: Site) -> Outcome:
    missing = site.path.relative_to(site.base).parts
    if missing:
        result = f"{site.path} does not exist"
        if len(missing) > 1:
            first = site.base / missing[0]
            return "adapted", f"{result}, nor does {first}", "check the path, or its mount"
        return "good", result, "a sender makes it, with mode 0700"
    status = site.path.stat()
    result = f"mode {stat.S_IMODE(status.st_mode):04o}, user {status.st_uid}"
    try:
        filesystem.check_trust(site.path)
    except StoreAccessError as error:
        if site.allow_shared_store:
            return "adapted", result, "used because of allow_shared_store"
        is_store = any((site.path / name).exists() for name in (POINTER_FILE, WRITER_FILE))
        others_can_rename = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        if is_store or others_can_rename:
            return "broken", result, f"refused: {error}"
        return "adapted", result, "not a store itself; a sender makes one in it, with mode 0700"
    return "good", f"{result}, the current user", "used"


def _probe_room(site: Site) -> Outcome:
    room = os.statvfs(site.base)
    if room.f_blocks == 0:
        return (
            "unknown",
            "the mount does not tell",
            "a version that is too large fails while it is written",
        )
    free = room.f_bavail * room.f_frsize
    result = f"{format_bytes(free)} free of {format_bytes(room.f_blocks * room.f_frsize)}"
    if room.f_files and not room.f_favail:
        return "broken", f"{result}, and no room for another file (inode)", "remove some files"
    if free < 2 * _PROBE_BYTES:
        return "broken", result, "make room for two versions"
    return (
        "good",
        result,
        f"room for two versions of {format_bytes(free / 2)} each; of {format_bytes(free / 3)}, "
        "where readers keep an old one",
    )


# ---------------------------------------------------------------------------------------------
# Probes that write, each in a directory of its own


def _probe_writing(site: Site) -> Outcome:
    with scratch(site.base) as place:
        with filesystem.make_file(place / "file", os.O_RDWR) as file, os_errors("write", place):
            filesystem.write_at(file.number, 0, bytes(_PROBE_BYTES))
            started = time.perf_counter()
            filesystem.sync_file(file.number, place / "file")
            file_ms = 1e3 * (time.perf_counter() - started)
        started = time.perf_counter()
        with os_errors("flush the directory", place):
            filesystem.sync_directory(place)
        directory_ms = 1e3 * (time.perf_counter() - started)
    result = f"a file of 1 MiB in {file_ms:.1f} ms, a directory in {directory_ms:.1f} ms"
    if site.medium.reaches_other_hosts:
        return "good", result, "every publish is flushed, so that other hosts see it"
    return "good", result, "with durable=True every publish is flushed"


def _probe_directories(site: Site) -> Outcome:
    with scratch(site.base) as place:
        filesystem.make_directory(place / "store")
        status = (place / "store").stat()
    result = f"mode {stat.S_IMODE(status.st_mode):04o}, user {status.st_uid}"
    if status.st_uid != os.geteuid():
        result += f", made by user {os.geteuid()}"
        consequence = "a store made here would appear to belong to another user"
    elif stat.S_IMODE(status.st_mode) != 0o700:
        result += ", requested 0700"
        consequence = "a store made here could be written to or read by others"
    else:
        return "good", result, "a new store is for its owner only"
    if site.allow_shared_store:
        return "adapted", result, f"{consequence}; used because of allow_shared_store"
    return "broken", result, f"{consequence}: pass --allow-shared-store if that is intended"


def _probe_rename(site: Site) -> Outcome:
    with scratch(site.base) as place, OtherProcess() as other:
        filesystem.make_directory(place / "from")
        path, number = place / "pointer", 0
        filesystem.replace_file(path, b"0" * 300, scratch=place / "from")
        other.begin("watch", str(path), TIMING.doctor_watch_s)
        while not other.is_done():
            number += 1
            filesystem.replace_file(path, b"%d" % (number % 10) * 300, scratch=place / "from")
        seen = other.answer()
    result = f"replaced {number} times, read {seen['reads']} times by another process: "
    if seen["mixed"]:
        return (
            "broken",
            f"{result}{seen['mixed']} mixed or empty",
            "the version pointer cannot be flipped atomically",
        )
    if not seen["missing"]:
        return (
            "good",
            f"{result}always the old bytes or the new",
            "the version pointer is flipped like this",
        )
    result += f"never mixed, {seen['missing']} times missing or stale"
    if site.medium.reaches_other_hosts:
        return "adapted", result, "readers look again, and fall back on the buffers' manifests"
    return "broken", result, "a reader may find no pointer; use another filesystem"


def _probe_locks(site: Site) -> Outcome:
    with scratch(site.base) as place, filesystem.make_file(place / "lock", os.O_RDWR) as file:
        if site.medium.reaches_other_hosts and not _knows_locks(file.number):
            return (
                "adapted",
                "not supported by the mount",
                "readers need none; a second sender is detected by its epoch, not prevented",
            )
        with OtherProcess() as other:
            taken = other.ask("lock", str(place / "lock"))
            excludes = taken and not filesystem.try_lock(file.number, exclusive=True)
        # Over a network, the lock of a dead process is released after a moment.
        is_dropped = filesystem.lock_within(file.number, timeout_s=5.0) if excludes else True
    if not excludes:
        return (
            "adapted",
            "two processes can hold the same exclusive lock",
            "readers read the manifest again after they have read; a second sender is "
            "detected by its epoch, not prevented",
        )
    if not is_dropped:
        return (
            "broken",
            "one process excludes another, and still does after it was killed",
            "a lock left by a crash must be removed by hand",
        )
    result = "one process excludes another, until it dies"
    if site.medium.reaches_other_hosts:
        return "good", result, "a second sender on this host is refused; readers need none"
    return "good", result, "readers lock the version that they read; a second sender is refused"


def _knows_locks(file: int) -> bool:
    """Whether the mount supports locks; Lustre, by default, does not."""
    try:
        filesystem.try_lock(file, exclusive=True)
    except OSError as error:
        if error.errno not in filesystem.NO_LOCKS:
            raise
        return False
    filesystem.unlock(file)
    return True


def _probe_allocation(site: Site) -> Outcome:
    with scratch(site.base) as place, filesystem.make_file(place / "file", os.O_RDWR) as file:
        try:
            filesystem.allocate(file.number, _PROBE_BYTES, place / "file")
        except DBufferError as error:
            if not site.medium.reaches_other_hosts:
                raise
            return "adapted", str(error), "free space is checked first, and confirmed by the flush"
        reserved = 512 * os.fstat(file.number).st_blocks
    result = f"{reserved / _PROBE_BYTES:.0%} of the requested bytes have blocks"
    if site.medium.reaches_other_hosts:
        # The blocks that this host reports do not tell how much room the server has.
        return "good", result, "free space is checked first, and confirmed by the flush"
    if reserved >= _PROBE_BYTES:
        return "good", result, "a full disk is detected before anything is written"
    if not site.medium.can_rewrite_in_place:
        return (
            "adapted",
            result,
            "a disk that fills up during a publish may kill the sender (SIGBUS)",
        )
    return "broken", result, "a disk that fills up during a publish would kill the sender (SIGBUS)"


def _probe_mapping(site: Site) -> Outcome:
    num_bytes = mmap.PAGESIZE
    if site.medium.reaches_other_hosts:
        return "good", "not probed: not used on a network mount", "readers read into memory"
    with scratch(site.base) as place, OtherProcess() as other:
        path = place / "file"
        with filesystem.make_file(path, os.O_RDWR) as file, os_errors("map a file", path):
            filesystem.allocate(file.number, num_bytes, path)
            with (
                mmap.mmap(file.number, num_bytes) as shared,
                mmap.mmap(file.number, num_bytes, mmap.MAP_PRIVATE) as own,
            ):
                shared[:] = b"s" * num_bytes
                seen = other.ask("see", str(path), num_bytes)
                own[:] = b"p" * num_bytes
                still = other.ask("see", str(path), num_bytes)
                other.ask("write_mapped", str(path), (b"t" * num_bytes).hex())
                came = bytes(shared[:])
    expected = {"read": (b"s" * num_bytes).hex(), "mapped": (b"s" * num_bytes).hex()}
    if still != seen:
        return "broken", "writes into a private mapping reach the file", "use another filesystem"
    if seen != expected or came != b"t" * num_bytes:
        return "broken", "a mapped write is not seen by another process", "use another filesystem"
    return (
        "good",
        "writes are seen by other processes at once, private ones are not",
        "publishing is a copy into a mapped file; receivers map it",
    )


def _probe_events(site: Site) -> Outcome:
    if site.medium.reaches_other_hosts:
        return "adapted", "not probed: it sees no change by other hosts", f"{POLLING}; no inotify"
    with scratch(site.base) as place:
        filesystem.make_directory(place / "from")
        watcher = Watcher(place / "pointer")
        try:
            watcher.wait(0.0)  # starts to watch
            started = time.perf_counter()
            filesystem.replace_file(place / "pointer", b"1", scratch=place / "from")
            came = watcher.wait(TIMING.doctor_event_s)
            delay_ms = 1e3 * (time.perf_counter() - started)
        finally:
            watcher.close()
    if not came:
        return "adapted", f"no event within {TIMING.doctor_event_s:g} s", POLLING
    return "good", f"an event after {delay_ms:.1f} ms", "receivers are woken by each publish"


def _probe_inotify(site: Site) -> Outcome:
    if site.medium.reaches_other_hosts:
        return "good", "not probed: not used on a network mount", POLLING
    begin = getattr(ctypes.CDLL(None, use_errno=True), "inotify_init1", None)
    if begin is None:
        return "adapted", "this system has no inotify", POLLING
    instances: list[int] = []
    try:
        while len(instances) < _INOTIFY_INSTANCES and (descriptor := begin(os.O_CLOEXEC)) >= 0:
            instances.append(descriptor)
    finally:
        for descriptor in instances:
            os.close(descriptor)
    if len(instances) == _INOTIFY_INSTANCES:
        return "good", f"{_INOTIFY_INSTANCES} or more free", "each receiver takes one"
    return (
        "adapted",
        f"only {len(instances)} free",
        f"each receiver takes one; for those that get none, {POLLING}: raise "
        "fs.inotify.max_user_instances",
    )


READING = (
    Probe("mount", _probe_mount, 1, ""),
    Probe("mount options", _probe_options, 3, ""),
    Probe("owner and mode", _probe_trust, 6, ""),
    Probe("room", _probe_room, 3, "make room for two versions"),
)
WRITING = Probe(
    "write and flush", _probe_writing, 3, "nothing can be published: see mount, mode and room"
)
PROBES = (
    Probe("private directories", _probe_directories, 6, "no store can be made here"),
    Probe("replacing a file", _probe_rename, 1, "the version pointer cannot be flipped"),
    Probe("locks (flock)", _probe_locks, 1, "no sender can open a store here: locking is an error"),
    Probe("allocation", _probe_allocation, 3, "no buffer can be made here"),
    Probe("shared mappings", _probe_mapping, 1, "weights cannot be mapped here"),
    Probe("inotify", _probe_events, 5, "receivers cannot wait here"),
    Probe("inotify instances", _probe_inotify, 5, ""),
)
