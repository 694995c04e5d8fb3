"""What two hosts see of each other's writes: `doctor --peer` on one, `doctor` on the other.

This publishes with files of its own, because it measures what a real receiver hides: opening by
name alone, stale handles, and files that are not whole when their pointer is seen.

The peer makes a directory and waits in it; the first host finds it there, and from then on tells
the peer what to do. They talk through small files that are replaced. Every duration is measured
on the first host's clock, from the end of its own write to the sight of the peer's answer: no
two clocks are compared, and what is measured is never less than what a reader would have waited.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dbuffer.errors import (
    DBufferError,
    StoreCorruptError,
    StoreInsecureError,
    StoreNotFoundError,
)
from dbuffer.store import filesystem
from dbuffer.store.media import medium_of
from dbuffer.tools.doctor.scratch import PREFIX, remove_stale, remove_tree, scratch
from dbuffer.tools.doctor.talk import TICK_S, Talk

logger = logging.getLogger(__name__)

How = Literal["by-name", "directory-first"]
Progress = Callable[[str], None]

_ROUNDS: dict[How, int] = {"by-name": 10, "directory-first": 20}
_LIMIT_S: dict[How, float] = {"by-name": 3.0, "directory-first": 10.0}
"""How long one round may take. By name may take a minute, and nobody relies on it."""
_SERIES_LIMIT_S = 15.0

_ANSWER_TIMEOUT_S = 15.0
_SILENCE_S = 120.0
"""After this long without a message the first host has gone. Longer than any series of rounds."""
_POLL_S = 0.001
_POLL_SLOWLY_S = 0.02
_DATA_BYTES = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """How long after one host had replaced a file the other one saw that."""

    how: How
    """``by-name``: by opening the file. ``directory-first``: as dbuffer's readers do."""
    num_rounds: int
    num_unseen: int
    """Rounds given up after ``limit_ms``, with which they are counted."""
    limit_ms: float
    median_ms: float
    max_ms: float
    num_errors: int
    """Looks that found no file, or a stale handle."""
    num_files: int
    """Files read when the pointer to them was seen."""
    num_wrong_files: int
    """Those that were not whole, or not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What this host and a peer saw of each other."""

    host: str
    pid: int
    filesystem: str
    """As the peer sees it."""
    is_network: bool
    is_same_kernel: bool
    locks_exclude: bool | None
    """Whether a lock held here keeps the peer out; None if it cannot lock at all."""
    by_name: Delay
    directory_first: Delay


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReport:
    """What a peer has to say; the results are with the first host."""

    host: str
    """The first host."""
    pid: int
    num_seen: int
    """Replaced pointers seen."""
    num_errors: int


def wait_for_host(
    directory: Path, *, timeout_s: float, progress: Progress | None = None
) -> PeerReport | None:
    """Be the second host: wait for a first one and do what it says; None if none came in time.

    Raises:
        StoreAccessError: the first host fell silent, or removed the directory.
        StoreFullError, StoreNotFoundError: nothing can be written here.
    """
    remove_stale(directory)
    time.sleep(TICK_S)
    with scratch(directory, "peer") as place:
        series = (f"{how}{part}" for how in _ROUNDS for part in ("", "-files", "-seen"))
        for name in ("to-peer", "to-host", "scratch", *series):
            filesystem.make_directory(place / name)
        (place / "lock").touch(0o600)
        peer = _Peer(place)
        peer.introduce()
        if progress is not None:
            progress(f"waiting for 'dbuffer doctor {directory}' on another host")
        return peer.serve(timeout_s)


def meet(
    directory: Path,
    *,
    timeout_s: float,
    allow_shared_store: bool = False,
    progress: Progress | None = None,
) -> tuple[Meeting, ...]:
    """Be the first host: measure with every peer that waits, or comes within ``timeout_s``.

    Raises:
        StoreAccessError, StoreNotFoundError: a peer went away in the middle.
    """
    deadline = time.monotonic() + timeout_s
    meetings: list[Meeting] = []
    while True:
        for place in _waiting(directory, allow_shared_store=allow_shared_store):
            with _taken(place) as is_ours:
                if is_ours:
                    meetings.append(_FirstHost(place, progress or _say_nothing).measure())
        if meetings or time.monotonic() >= deadline:
            return tuple(meetings)
        if progress is not None:
            progress(f"waiting for 'dbuffer doctor {directory} --peer' on another host")
        time.sleep(0.1)


def _say_nothing(_: str) -> None: ...


def _waiting(directory: Path, *, allow_shared_store: bool) -> list[Path]:
    """The directories of peers; only of our own user, who lays no links there for us to follow."""
    filesystem.refresh(directory)
    found = []
    for path in sorted(directory.glob(f"{PREFIX}peer-*")):
        with contextlib.suppress(StoreInsecureError, StoreNotFoundError):
            if path.is_symlink():
                continue
            if not allow_shared_store:
                filesystem.check_trust(path)
            if os.path.lexists(path / "to-host" / "message"):
                found.append(path)
    return found


@contextlib.contextmanager
def _taken(place: Path) -> Iterator[bool]:
    """Whether this host is the one that talks with the peer; nobody else does then."""
    try:
        (place / "taken").mkdir()
    except (FileExistsError, FileNotFoundError, PermissionError):
        yield False
        return
    try:
        yield True
    except BaseException:
        remove_tree(place)  # the peer is gone, or learns from this that it is to go
        raise


class _FirstHost:
    def __init__(self, place: Path, progress: Progress) -> None:
        self._place = place
        self._progress = progress
        self._talk = Talk(place / "to-peer", place / "to-host")

    def measure(self) -> Meeting:
        peer = self._talk.hear(_ANSWER_TIMEOUT_S)
        self._ask(do="greet", host=socket.gethostname(), pid=os.getpid())
        try:
            meeting = Meeting(
                host=str(peer["host"]),
                pid=int(peer["pid"]),
                filesystem=str(peer["filesystem"]),
                is_network=bool(peer["is_network"]),
                is_same_kernel=peer["kernel"] == _kernel(),
                by_name=self._delay("by-name"),
                directory_first=self._delay("directory-first"),
                locks_exclude=self._locks_exclude(),
            )
        except (KeyError, ValueError, TypeError) as error:
            raise StoreCorruptError(f"the peer in {self._place} is not a doctor: {error}") from None
        self._talk.say(do="leave")
        return meeting

    def _ask(self, **message: Any) -> dict[str, Any]:
        self._talk.say(**message)
        return self._talk.hear(_ANSWER_TIMEOUT_S)

    def _delay(self, how: How) -> Delay:
        self._ask(do="watch", how=how)
        # Seen once before the rounds begin: caches are warm, and what is held open is old.
        self._replace(how, 0)
        self._round_s(how, 0)
        delays, num_unseen = [], 0
        end = time.monotonic() + _SERIES_LIMIT_S
        for number in range(1, _ROUNDS[how] + 1):
            self._progress(f"how late another host sees a change, opened {how}: {number}")
            self._replace(how, number)
            delay_s = self._round_s(how, number)
            num_unseen += delay_s is None
            delays.append(1e3 * (_LIMIT_S[how] if delay_s is None else delay_s))
            if time.monotonic() > end:
                break
        report = self._ask(do="report")
        return Delay(
            how=how,
            num_rounds=len(delays),
            num_unseen=num_unseen,
            limit_ms=1e3 * _LIMIT_S[how],
            median_ms=statistics.median(delays),
            max_ms=max(delays),
            num_errors=int(report["num_errors"]),
            num_files=int(report["num_files"]),
            num_wrong_files=int(report["num_wrong_files"]),
        )

    def _replace(self, how: How, number: int) -> None:
        """As a publish does: a new file, flushed, and then the pointer to it."""
        files = self._place / f"{how}-files"
        path = files / str(number)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with filesystem.os_errors("write", path):
                filesystem.write_at(descriptor, 0, _data(number))
            filesystem.sync_file(descriptor, path)
        finally:
            os.close(descriptor)
        time.sleep(TICK_S)
        pointer = self._place / how / "pointer"
        filesystem.replace_file(pointer, b"%d" % number, scratch=files, durable=True)

    def _round_s(self, how: How, number: int) -> float | None:
        """Seconds until the peer has seen it; None if it has not within the limit."""
        started = time.monotonic()
        # A new file each time, which is not opened: whoever opens one over NFSv4 may be lent it,
        # and then a tenth of a second goes by before another host can replace it.
        seen = self._place / f"{how}-seen" / str(number)
        while (elapsed_s := time.monotonic() - started) < _LIMIT_S[how]:
            filesystem.refresh(seen.parent)
            if os.path.lexists(seen):
                return elapsed_s
            time.sleep(_POLL_S)
        return None

    def _locks_exclude(self) -> bool | None:
        self._progress("whether a lock keeps another host out")
        with filesystem.os_errors("open", self._place / "lock"):
            descriptor = os.open(self._place / "lock", os.O_RDWR | os.O_CLOEXEC)
        try:
            if not _can_lock(descriptor):
                return None
            locked = self._ask(do="lock")["locked"]
            return None if locked is None else not locked
        finally:
            os.close(descriptor)


class _Peer:
    def __init__(self, place: Path) -> None:
        self._place = place
        self._talk = Talk(place / "to-host", place / "to-peer")
        self._num_seen = self._num_errors = 0

    def introduce(self) -> None:
        medium = medium_of(self._place)
        self._talk.say(
            host=socket.gethostname(),
            pid=os.getpid(),
            kernel=_kernel(),
            filesystem=medium.filesystem,
            is_network=medium.reaches_other_hosts,
        )

    def serve(self, timeout_s: float) -> PeerReport | None:
        greeting = self._first_message(timeout_s)
        if greeting is None:
            return None
        self._talk.say()
        while (message := self._talk.hear(_SILENCE_S))["do"] != "leave":
            if message["do"] == "watch":
                self._watch("by-name" if message["how"] == "by-name" else "directory-first")
            elif message["do"] == "lock":
                self._talk.say(locked=self._try_lock())
            else:
                raise StoreCorruptError(f"{self._place}: asked to {message['do']!r:.40}")
        return PeerReport(
            host=str(greeting["host"]),
            pid=int(greeting["pid"]),
            num_seen=self._num_seen,
            num_errors=self._num_errors,
        )

    def _first_message(self, timeout_s: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + timeout_s
        while (message := self._talk.heard()) is None:
            if time.monotonic() > deadline:
                return None
            os.utime(self._place)  # so that nobody takes it for a dead one's
            time.sleep(_POLL_SLOWLY_S)
        return message

    def _watch(self, how: How) -> None:
        """Say which pointer is seen, whenever that changes, until the host says to stop."""
        self._talk.say()
        pointer = self._place / how / "pointer"
        files, seen = self._place / f"{how}-files", self._place / f"{how}-seen"
        last, num_errors, num_files, num_wrong_files = -1, 0, 0, 0
        next_look = 0.0
        with contextlib.ExitStack() as kept:
            while True:
                now = time.monotonic()
                if now >= next_look:
                    if self._talk.heard() is not None:
                        break
                    next_look = now + _POLL_SLOWLY_S
                number = _look(pointer, how)
                num_errors += number is None
                if number is not None and number > last:
                    if last < 0:
                        # A reader somewhere always has an old one open, which keeps it alive.
                        _keep_open(pointer, kept)
                    last = number
                    # First of all, because the first host's clock is running.
                    (seen / str(number)).touch(0o600, exist_ok=False)
                    num_files += 1
                    num_wrong_files += not _is_whole(files / str(number), number)
                # Before the first one there is nothing to find.
                num_errors = 0 if last < 0 else num_errors
                time.sleep(_POLL_S)
        self._num_seen += num_files
        self._num_errors += num_errors
        self._talk.say(num_errors=num_errors, num_files=num_files, num_wrong_files=num_wrong_files)

    def _try_lock(self) -> bool | None:
        try:
            descriptor = os.open(self._place / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return _can_lock(descriptor)
        finally:
            os.close(descriptor)


def _can_lock(descriptor: int) -> bool | None:
    """Whether it can be locked now; None if such files cannot be locked at all."""
    try:
        return filesystem.try_lock(descriptor, exclusive=True)
    except OSError as error:
        logger.warning("flock: %s", error)
        return None


def _look(pointer: Path, how: How) -> int | None:
    """The pointer's number; None if it cannot be read just now."""
    try:
        if how == "directory-first":
            return _number_in(filesystem.read_small(pointer, 32, owner_only=False))
        descriptor = filesystem.open_regular(pointer, os.O_RDONLY, owner_only=False)
        try:
            return _number_in(os.read(descriptor, 32))
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return None


def _keep_open(path: Path, kept: contextlib.ExitStack) -> None:
    with contextlib.suppress(OSError):
        kept.callback(os.close, os.open(path, os.O_RDONLY | os.O_CLOEXEC))


def _number_in(data: bytes) -> int:
    return int(data) if data.isdigit() else -1


def _data(number: int) -> bytes:
    return bytes([1 + number % 255]) * _DATA_BYTES


def _is_whole(path: Path, number: int) -> bool:
    try:
        descriptor = filesystem.open_regular(path, os.O_RDONLY, owner_only=False)
        try:
            return filesystem.read_at(descriptor, 0, _DATA_BYTES + 1) == _data(number)
        finally:
            os.close(descriptor)
    except (OSError, DBufferError):
        return False


def _kernel() -> str:
    """What this boot of this machine's kernel calls itself; containers on it share that."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except FileNotFoundError:  # not Linux
        return socket.gethostname()
