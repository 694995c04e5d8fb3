"""Probes of a mount. Each probe acts like a store, in a temporary directory."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, TypeAlias

from dbuffer.errors import DBufferError, OptionError, StoreAccessError
from dbuffer.format.places import POINTER_FILE, WRITER_FILE
from dbuffer.runtime.messages import format_bytes
from dbuffer.store import filesystem
from dbuffer.store.filesystem import MOUNT_VARIABLE, Descriptor, os_errors
from dbuffer.store.medium import Medium, medium_of
from dbuffer.store.watcher import Watcher

logger = logging.getLogger(__name__)

Verdict = Literal["good", "adapted", "broken", "unknown"]

Outcome: TypeAlias = tuple[Verdict, str, str]
"""Verdict, result and consequence of a probe.

Verdict ``good``: the probed feature works. ``adapted``: the feature is missing, and dbuffer works
without the feature. ``broken``: the feature is missing, so a store would not be safe. ``unknown``:
the probe has no result. The consequence is how dbuffer adapts, or advice for the user.
"""

Finding: TypeAlias = dict[str, str]
"""Name and outcome of a probe, as `dbuffer doctor --json` prints them."""


def finding(probe: str, outcome: Outcome) -> Finding:
    return dict(zip(("probe", "verdict", "result", "consequence"), (probe, *outcome), strict=True))


def find(probe: str, run: Callable[[], Outcome], cure: str) -> Finding:
    """Run a probe. If it raises an error, return the error's message with the advice ``cure``."""
    try:
        return finding(probe, run())
    except OptionError:  # the path is wrong, not the mount
        raise
    except (DBufferError, OSError) as error:
        return finding(probe, ("broken", str(error), cure))


PREFIX = ".dbuffer-doctor-"
"""Prefix of all files that `dbuffer doctor` makes in a user's directory."""

POLLING = "receivers poll every poll_interval_s (0.5 s by default)"

_PROBE_BYTES = 1 << 20
_EVENT_S = 1.0
"""Longest wait for an inotify event."""


def examine(path: Path) -> list[Finding]:
    """Probe the mount at a store's path, without touching or making a store.

    If ``path`` does not exist, probe the nearest existing directory above it.
    """
    base = existing(path)
    medium = medium_of(base)
    return [
        find("mount", lambda: _mount(medium), ""),
        find("room", lambda: _room(base), "make room for two versions"),
        find("trust", lambda: _trust(path, base), "no store can be made here"),
        find("locks", lambda: _locks(medium, base), "no sender can open a store here"),
        find("mapping", lambda: _mapping(medium, base), "weights cannot be mapped here"),
        find("events", lambda: _events(medium, base), "receivers cannot wait here"),
    ]


def existing(path: Path) -> Path:
    """Return the directory at ``path``, or the nearest existing directory above it."""
    with os_errors("look", path):
        base = next(base for base in (path, *path.parents) if base.exists())
        if not base.is_dir():
            raise NotADirectoryError(20, "not a directory", str(base))
    if base == base.parent != path:
        raise OptionError(
            f"{path}: there is no {base / path.parts[1]}, and probes of {base} would test "
            "another mount; check the path"
        )
    return base


@contextlib.contextmanager
def scratch(directory: Path, kind: str = "probe") -> Iterator[Path]:
    """Make a private temporary directory, and remove it when the ``with`` block ends."""
    # Choose the name before ``try``: a Ctrl-C can come right after the directory is made.
    place = directory / f"{PREFIX}{kind}-{secrets.token_hex(4)}"
    try:
        with os_errors("make a directory", directory):
            place.mkdir(mode=0o700)
        yield place
    finally:
        remove_tree(place)


def remove_tree(path: Path) -> None:
    """Remove a directory. Retry while a network mount keeps names of open files in it."""
    for _ in range(20):
        shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(path):
            return
        time.sleep(0.1)
    logger.warning("%s could not be removed; remove it by hand", path)


def _mount(medium: Medium) -> Outcome:
    result = f"{medium.filesystem} from {medium.source}"
    kind = os.environ.get(MOUNT_VARIABLE, "auto")
    if kind != "auto":
        result += f", overridden by {MOUNT_VARIABLE}={kind}"
    if medium.reaches_other_hosts:
        return (
            "adapted",
            f"{result}: a network mount",
            "each version gets a new file, which is flushed; readers poll, read into memory, and "
            "check sizes and checksums",
        )
    if medium.can_rewrite_in_place:
        return "good", f"{result}: local", "a store's two weights files are rewritten in place"
    return (
        "adapted",
        f"{result}: local, may copy on write",
        "mapped; a new file for each version, because a copy-on-write filesystem can run out of "
        "space when a file is rewritten",
    )


def _room(base: Path) -> Outcome:
    """Probe free space. Flush a file, because a full network mount may fail only at the flush."""
    with scratch(base) as place, filesystem.make_file(place / "file", os.O_RDWR) as file:
        with os_errors("write", place):
            filesystem.write_at(file.number, 0, bytes(_PROBE_BYTES))
        filesystem.sync_file(file.number, place / "file")
    room = os.statvfs(base)
    if room.f_blocks == 0:
        consequence = "a version that is too large fails while it is written"
        return "unknown", "the mount does not report its size", consequence
    free = room.f_bavail * room.f_frsize
    return (
        "good",
        f"{format_bytes(free)} free of {format_bytes(room.f_blocks * room.f_frsize)}",
        f"room for two versions of {format_bytes(free / 2)} each, or for three of "
        f"{format_bytes(free / 3)}, if slow readers still hold an old version",
    )


def _trust(path: Path, base: Path) -> Outcome:
    with scratch(base) as place:
        # Check a new directory: a file server may give it another owner or mode than requested.
        filesystem.check_trust(place)
    missing = path.relative_to(base).parts
    if missing:
        result = f"{path} does not exist"
        if len(missing) > 1:
            first = base / missing[0]
            return "adapted", f"{result}, nor does {first}", "check the path, or its mount"
        return "good", result, "a sender makes it, with mode 0700"
    status = path.stat()
    result = f"mode {stat.S_IMODE(status.st_mode):04o}, user {status.st_uid}"
    try:
        filesystem.check_trust(path)
    except StoreAccessError as error:
        is_store = any((path / name).exists() for name in (POINTER_FILE, WRITER_FILE))
        others_can_rename = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        if is_store or others_can_rename:
            return "broken", result, f"refused: {error}"
        consequence = "a sender cannot use this directory itself, but can make a store inside it"
        return "adapted", result, consequence
    return "good", f"{result}, the current user", "a sender can use the directory"


def _locks(medium: Medium, base: Path) -> Outcome:
    second_sender = "a second sender is not refused, but detected when it has opened the store"
    with (
        scratch(base) as place,
        filesystem.make_file(place / "lock", os.O_RDWR) as file,
        Descriptor.open(place / "lock", os.O_RDWR) as second_file,
    ):
        try:
            filesystem.try_lock(file.number, exclusive=True)
        except StoreAccessError as error:
            if not medium.reaches_other_hosts or error.errno not in filesystem.NO_LOCKS:
                raise
            return "adapted", "the mount has no locks", f"readers need no locks; {second_sender}"
        if filesystem.try_lock(second_file.number, exclusive=True):
            result = "two open files can hold the same exclusive lock"
            return "adapted", result, f"readers check manifests instead; {second_sender}"
    result = "a lock excludes other locks"
    if medium.reaches_other_hosts:
        return "good", result, "a second sender on this host is refused; readers need no locks"
    return "good", result, "readers lock the version that they read; a second sender is refused"


def _mapping(medium: Medium, base: Path) -> Outcome:
    if medium.reaches_other_hosts:
        return "good", "not probed: not used on a network mount", "readers read into memory"
    with scratch(base) as place, filesystem.make_file(place / "file", os.O_RDWR) as file:
        filesystem.allocate(file.number, mmap.PAGESIZE, place / "file")
        with (
            os_errors("map a file", place),
            mmap.mmap(file.number, mmap.PAGESIZE) as shared,
            mmap.mmap(file.number, mmap.PAGESIZE, mmap.MAP_PRIVATE) as private,
        ):
            shared[:] = b"s" * mmap.PAGESIZE
            is_seen = filesystem.read_at(file.number, 0, mmap.PAGESIZE) == private[:] == shared[:]
    if not is_seen:
        return "broken", "a mapped write is not seen in the file", "use another filesystem"
    result = "a mapped write is seen at once"
    return "good", result, "publishing is a copy into a mapped file; receivers map it"


def _events(medium: Medium, base: Path) -> Outcome:
    if medium.reaches_other_hosts:
        result = "not probed: changes by other hosts cause no event"
        return "adapted", result, f"{POLLING}; no inotify"
    with scratch(base) as place:
        watcher = Watcher(place, "pointer")
        try:
            watcher.wait(0.0)  # the first call begins to watch
            started = time.perf_counter()
            filesystem.make_directory(place / "from")
            filesystem.replace_file(place / "pointer", b"1", scratch=place / "from")
            came = watcher.wait(_EVENT_S)
            delay_ms = 1e3 * (time.perf_counter() - started)
        finally:
            watcher.close()
    if not came:
        return "adapted", f"no event within {_EVENT_S:g} s", POLLING
    return "good", f"an event after {delay_ms:.1f} ms", "receivers are woken by each publish"
