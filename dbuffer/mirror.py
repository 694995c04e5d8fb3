"""`Mirror`: follows a remote store and publishes each newest version again in a local one.

One process a node reads the network, once a version; every rank of the node maps the local store.
Bytes go from the remote file straight to their place in the local one, and are checked there
before the version is published. Versions keep their numbers, their metadata and their identity.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import xxhash

from dbuffer import filesystem
from dbuffer.buffer import (
    POINTER_FILE,
    RECEIVERS_DIRECTORY,
    WRITER_FILE,
    DoubleBuffer,
    HeldBuffer,
)
from dbuffer.errors import (
    OptionError,
    StoreAccessError,
    StoreCorruptError,
    StoreMismatchError,
    StoreNotFoundError,
    VersionTimeoutError,
)
from dbuffer.filesystem import Descriptor, os_errors
from dbuffer.layout import Layout
from dbuffer.manifest import BUFFERS, host_in_id
from dbuffer.output import Footer, KeptMappings
from dbuffer.parts import copy_parts, read_parts
from dbuffer.receiver import WeightReceiver
from dbuffer.relay import AcknowledgementRelay
from dbuffer.spans import copy_tensors, read_tensors
from dbuffer.tensors import Copier
from dbuffer.writer import BufferWriter, Claim, process_may_live, writer_lock

logger = logging.getLogger(__name__)

MIRROR_LOCK_FILE = "mirror.lock"

_STAND_BY_S = 0.5
"""How often a mirror that stands by looks whether the one before it has ended."""

_RETRY_MIN_S = 0.5
_RETRY_MAX_S = 30.0

_PREPARED_S = 10.0
"""How long another mirror may take between its election and having a stale store put away."""

_LOOK_S = 0.01

_PASSING = (StoreAccessError, StoreNotFoundError, StoreCorruptError)
"""What is tried again: a network that is cut, a full disk, a damaged version."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A version that a mirror has published."""

    version: int
    num_tensors: int
    num_bytes: int
    """Bytes of all tensors."""
    duration_s: float
    """From finding it to having published it."""


class _OneStoreError(OptionError):
    """Remote and local store are one, seen through two mounts: fine for readers."""


class Mirror:
    """Keeps a local store the same as a remote one.

    Any number may be started for one local store: one is elected, by a lock that the kernel drops
    when its process ends, and the others stand by. What receivers of the local store acknowledge
    is carried to the remote one, where the sender waits for it.

    Args:
        remote: the store to follow; it may come later.
        local: the store to publish in, on ``/dev/shm`` best. What an earlier mirror left there of
            another store is removed, unless a receiver uses it.
        poll_interval_s: how often the remote store is looked at, where no event comes.
        num_threads: threads that read. Default: the machine's cores, at most 8.
        reader_timeout_s: how long to wait for local readers of the buffer to be written.
        allow_shared_store: accept directories that belong to someone else, or that others can
            write to.
        on_copied: called with each version that was published.
        progress: called with the bytes read so far, and in all, from several threads.

    Raises:
        OptionError: an option is not what it may be.
    """

    def __init__(
        self,
        remote: str | os.PathLike[str],
        local: str | os.PathLike[str],
        *,
        poll_interval_s: float = 1.0,
        num_threads: int | None = None,
        reader_timeout_s: float = 60.0,
        allow_shared_store: bool = False,
        on_copied: Callable[[Copied], None] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._remote = DoubleBuffer(remote, allow_shared_store=allow_shared_store)
        self._local = DoubleBuffer(local, allow_shared_store=allow_shared_store)
        if self._remote.root.resolve() == self._local.root.resolve():
            raise OptionError(f"{remote} and {local} are one directory: there is nothing to mirror")
        self._poll_interval_s = poll_interval_s
        self._reader_timeout_s = reader_timeout_s
        self._allow_shared_store = allow_shared_store
        self._on_copied = on_copied
        self._progress = progress
        self._copier = Copier(num_threads)
        self._mapped = KeptMappings()
        self._known: _Known | None = None
        self._have: int | None = None
        self._tried: int | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock: Descriptor | None = None
        self._receiver: WeightReceiver | None = None
        self._error: Exception | None = None
        self._stats = {"copied": 0.0, "copied_bytes": 0.0, "copy_s": 0.0, "failures": 0.0}

    @property
    def is_elected(self) -> bool:
        """Whether it is this mirror that copies, and no other of the node."""
        return self._lock is not None

    @property
    def version(self) -> int | None:
        """The newest version that it has published, or found published."""
        return self._have

    @property
    def stats(self) -> dict[str, float]:
        """Versions and bytes copied, seconds that took, failures."""
        return dict(self._stats)

    def start(self) -> Self:
        """Mirror in a thread, until :meth:`close`. Returns when the local store is fit to be read.

        Raises:
            StoreMismatchError: the local store holds another store's versions, and is in use.
        """
        if not self._elect():
            self._wait_until_prepared()
        self._thread = threading.Thread(target=self._run_in_thread, name="dbuffer-mirror")
        self._thread.daemon = True
        self._thread.start()
        return self

    def run(self, stop_event: threading.Event | None = None) -> None:
        """Mirror in this thread, until ``stop_event`` is set.

        What may pass (a network that is cut, a full disk, a damaged version) is logged once, noted
        in the remote store, and tried again.

        Raises:
            StoreMismatchError: the local store holds another store's versions.
            VersionRegressedError: the remote store was emptied or replaced.
            WriterSupersededError, StoreInsecureError: as for a sender.
        """
        stop = stop_event or self._stop
        if self._lock is None and not self._elect():
            self._wait_until_prepared()
            logger.info("another mirror of %s is at work: standing by", self._local.root)
            while self._lock is None and not stop.wait(_STAND_BY_S):
                self._elect()
        if not stop.is_set():
            self._follow(stop)

    def is_current(self) -> bool:
        """Whether the local store holds the remote one's newest version, or both hold nothing."""
        remote, local = _newest_identity(self._remote), _newest_identity(self._local)
        return remote == local

    def wait_until_current(self, timeout_s: float = 60.0) -> None:
        """Wait until the local store holds what was the newest version when this was called.

        Raises:
            VersionTimeoutError: it does not, in time.
            DBufferError: what ended this mirror.
        """
        deadline = time.monotonic() + timeout_s
        wanted = self._remote.newest_pointer(not_below=0)
        if self._receiver is not None:
            self._receiver.wake()
        while not self._has(None if wanted is None else wanted.version):
            if self._error is not None:
                raise self._error
            if time.monotonic() > deadline:
                raise VersionTimeoutError(
                    f"{self._local.root} was not brought up to {self._remote.root} within "
                    f"{timeout_s:g} s"
                )
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Stop. What was copied stays; a mirror that stands by takes over."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._copier.close()
        self._give_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _has(self, version: int | None) -> bool:
        if version is None:
            return True
        pointer = self._local.newest_pointer(not_below=0) if self._local.exists() else None
        return pointer is not None and pointer.version >= version and self._is_same_history()

    def _run_in_thread(self) -> None:
        try:
            self.run()
        except _OneStoreError as error:
            logger.info("%s", error)
        # There is nobody to raise it to: it is kept for who waits, and told.
        except Exception as error:
            self._error = error
            logger.exception("the mirror of %s has ended", self._remote.root)
        finally:
            self._give_up()

    def _elect(self) -> bool:
        """Become the mirror of the local store, if no other is; see that it is fit to be read."""
        filesystem.make_directory(self._local.root, parents=True)
        self._local.check()
        path = self._local.root / MIRROR_LOCK_FILE
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with os_errors("open the mirror's lock", path):
            lock = Descriptor(os.open(path, flags, 0o600))
        if not filesystem.try_lock(lock.number, exclusive=True):
            lock.close()
            return False
        try:
            self._put_away_stale()
        except BaseException:
            lock.close()
            raise
        self._lock = lock
        return True

    def _give_up(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _wait_until_prepared(self) -> None:
        """Wait until the elected mirror has seen to what was in the local store.

        Raises:
            StoreMismatchError: it has not, as what is there is what it mirrors.
        """
        deadline = time.monotonic() + _PREPARED_S
        while self._is_stale() and not self._are_users_right():
            if time.monotonic() > deadline:
                raise StoreMismatchError(
                    f"a mirror of another store than {self._remote.root} is at work in "
                    f"{self._local.root}; stop it, or give another directory"
                )
            time.sleep(_LOOK_S)

    def _is_stale(self) -> bool:
        """Whether there are versions in the local store that a mirror made from another store."""
        pointer = self._local.pointer()
        if pointer is None or self._is_same_history():
            return False
        # The newest decides: where a sender has taken a mirror over, the older one may be a copy.
        manifest = self._local.manifest(pointer.buffer)
        return manifest is not None and manifest.origin is not None

    def _is_same_history(self) -> bool:
        if not self._remote.exists():
            return False
        remote, local = self._remote.writer(), self._local.writer()
        return remote is not None and local is not None and remote.history == local.history

    def _put_away_stale(self) -> None:
        """Empty the local store of what an earlier mirror left there, if nobody uses it.

        Raises:
            StoreMismatchError: a receiver uses it.
        """
        if not self._is_stale():
            return
        if self._are_users_right():
            return
        if users := self._users():
            raise StoreMismatchError(
                f"{self._local.root} holds versions of another store than {self._remote.root}, "
                f"and {', '.join(users)} use them; stop them, or give another directory"
            )
        logger.warning("%s holds versions of another store: emptying it", self._local.root)
        root = self._local.root
        with writer_lock(root), os_errors("empty a stale store", root):
            # What was applied was of that store: the next one's sender must not hear of it.
            for path in (root / RECEIVERS_DIRECTORY).glob("*.json"):
                path.unlink(missing_ok=True)
            # The pointer before the rest: without it nobody looks at that.
            for name in (POINTER_FILE, WRITER_FILE):
                (root / name).unlink(missing_ok=True)
            for buffer in BUFFERS:
                shutil.rmtree(root / buffer)

    def _users(self) -> list[str]:
        return [r.receiver for r in self._local.receivers() if process_may_live(r.host, r.pid)]

    def _are_users_right(self) -> bool:
        """Whether the network may be away, and receivers use what came before."""
        return not self._remote.exists() and bool(self._users())

    def _follow(self, stop: threading.Event) -> None:
        receiver = WeightReceiver(
            self._remote.root,
            receiver_id=self._receiver_id(),
            poll_interval_s=self._poll_interval_s,
            num_threads=self._copier.num_threads,
            allow_shared_store=self._allow_shared_store,
        )
        self._receiver = receiver
        retry_s = _RETRY_MIN_S
        with receiver, self._writing() as writer:
            while not stop.is_set():
                try:
                    self._copy_newer(receiver, writer, stop)
                    retry_s = _RETRY_MIN_S
                except _PASSING as error:
                    self._note_problem(receiver, error)
                    self._wait_to_retry(receiver, retry_s, stop)
                    retry_s = min(2 * retry_s, _RETRY_MAX_S)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Callable[[], BufferWriter]]:
        """Gives the local store's writer, which is made when there is something to write."""
        writer: BufferWriter | None = None
        relay: AcknowledgementRelay | None = None

        def get() -> BufferWriter:
            nonlocal writer, relay
            if writer is None:
                writer = self._open_writer()
                relay = AcknowledgementRelay(self._local, self._remote.root)
            return writer

        try:
            yield get
        finally:
            self._mapped.clear()
            if relay is not None:
                relay.close()
            if writer is not None:
                writer.close()

    def _open_writer(self) -> BufferWriter:
        remote, local = self._remote.writer(), self._local.writer()
        if remote is None:
            raise StoreNotFoundError(f"{self._remote.root} has no record of its sender")
        if local is not None and local.run == remote.run:
            raise _OneStoreError(
                f"{self._remote.root} and {self._local.root} are one store under two names: "
                "there is nothing to mirror"
            )
        pointer = self._local.pointer()
        if pointer is not None and (local is None or local.history != remote.history):
            raise StoreMismatchError(
                f"{self._local.root} holds version {pointer.version} of another store than "
                f"{self._remote.root}; give another directory, or remove that one"
            )
        if pointer is not None:
            self._remote.newest_pointer(not_below=pointer.version)
            self._have = pointer.version
            self._tried = max(self._tried or 0, pointer.version)
        return BufferWriter(
            self._local.root,
            durable=False,
            reader_timeout_s=self._reader_timeout_s,
            allow_shared_store=self._allow_shared_store,
            history=remote.history,
        )

    def _copy_newer(
        self,
        receiver: WeightReceiver,
        get_writer: Callable[[], BufferWriter],
        stop: threading.Event,
    ) -> None:
        """Wait for a version that the local store does not have, and copy it."""
        self._forget_problem(receiver)
        newest = receiver.wait_for_version(self._have, None, stop)
        if newest is None:
            return
        self._tried = newest
        writer = get_writer()
        with receiver.hold(self._have) as held:
            if held is None:
                return
            copied = self._copy(held, receiver, writer)
        if copied is None:
            return
        self._have = copied.version
        self._stats["copied"] += 1
        self._stats["copied_bytes"] += copied.num_bytes
        self._stats["copy_s"] += copied.duration_s
        receiver.record.write(
            staged_version=copied.version, problem=None, problem_version=None, stats=self.stats
        )
        if self._on_copied is not None:
            self._on_copied(copied)

    def _copy(
        self, held: HeldBuffer, receiver: WeightReceiver, writer: BufferWriter
    ) -> Copied | None:
        """Publish a version once more; None if it was overwritten meanwhile."""
        started = time.monotonic()
        known = self._find_out(held)
        footer = known.footer
        self._mapped.drop_other_layouts(footer.layout)
        version = held.manifest.version
        claim = self._claim(writer, version, footer)
        try:
            if claim.is_new:
                footer.write(claim)
            checksums = self._read_into(claim, known, held, writer)
            if not self._is_whole(held, footer, checksums, receiver):
                self._abandon(writer, claim)
                return None
            self._commit(claim, footer, held, checksums, writer)
        except BaseException:
            self._abandon(writer, claim)
            raise
        return Copied(
            version=version,
            num_tensors=len(footer.layout.specs),
            num_bytes=footer.layout.num_bytes,
            duration_s=time.monotonic() - started,
        )

    def _find_out(self, held: HeldBuffer) -> _Known:
        """The layouts there and here; those of the last version, where nothing has changed."""
        if self._known is None or self._known.remote_xxh3 != held.manifest.layout_xxh3:
            remote = held.read_layout()
            footer = Footer.of(remote.joined())
            self._known = _Known(held.manifest.layout_xxh3, remote, footer)
        return self._known

    def _claim(self, writer: BufferWriter, version: int, footer: Footer) -> Claim:
        try:
            return writer.claim(
                version, layout_xxh3=footer.layout_xxh3, file_bytes=footer.file_bytes
            )
        except BaseException:
            self._mapped.clear()
            raise

    def _abandon(self, writer: BufferWriter, claim: Claim) -> None:
        writer.abandon(claim)
        # A mapping keeps an unlinked file's room, which the next one may need.
        self._mapped.clear()

    def _read_into(
        self, claim: Claim, known: _Known, held: HeldBuffer, writer: BufferWriter
    ) -> list[int]:
        """Copy all tensors into the claimed file; their checksums, if there are any to compare."""
        hashed = held.manifest.checksums_xxh3 is not None
        footer = known.footer
        on_bytes = self._count_bytes(footer.layout.checksums_offset)
        source, path, copier = held.file.number, held.path, self._copier
        if writer.mount.is_network:
            copy = copy_parts if known.remote.is_in_parts else copy_tensors
            file, layout = claim.file.number, known.remote
            return copy(source, file, path, layout, copier, hashed=hashed, on_bytes=on_bytes)
        mapped = self._mapped.of(claim.path, claim.file, footer)
        if known.remote.is_in_parts:
            layout = known.remote
            return read_parts(
                source, path, layout, mapped, copier, hashed=hashed, on_bytes=on_bytes
            )
        return read_tensors(source, path, mapped, copier, hashed=hashed, on_bytes=on_bytes)

    def _count_bytes(self, total: int) -> Callable[[int], None] | None:
        progress = self._progress
        if progress is None:
            return None
        done = 0
        lock = threading.Lock()

        def count(num_bytes: int) -> None:
            nonlocal done
            with lock:
                done += num_bytes
                progress(done, total)

        return count

    def _is_whole(
        self, held: HeldBuffer, footer: Footer, checksums: list[int], receiver: WeightReceiver
    ) -> bool:
        if checksums and not receiver.is_right(held, footer.layout, checksums):
            return False
        return self._remote.is_unchanged(held)

    def _commit(
        self,
        claim: Claim,
        footer: Footer,
        held: HeldBuffer,
        checksums: list[int],
        writer: BufferWriter,
    ) -> None:
        manifest = held.manifest
        complete = dataclasses.replace(
            footer.seal(claim, checksums or None, manifest.metadata),
            published_at=manifest.published_at,
            origin=manifest.identity,
        )
        writer.commit(claim, complete)

    def _note_problem(self, receiver: WeightReceiver, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if text != receiver.record.current.problem:
            logger.error("cannot mirror %s, trying again: %s", self._remote.root, text)
        self._stats["failures"] += 1
        receiver.record.write(problem=text[:2000], stats=self.stats)

    def _forget_problem(self, receiver: WeightReceiver) -> None:
        """Take a problem with the remote store off the record, when it has passed."""
        if receiver.record.current.problem is not None and self._tried == self._have:
            receiver.wait_for_version(None, 0)
            receiver.record.write(problem=None, stats=self.stats)

    def _wait_to_retry(
        self, receiver: WeightReceiver, wait_s: float, stop: threading.Event
    ) -> None:
        """Wait; not any longer, when there is a newer version than the one that failed."""
        try:
            receiver.wait_for_version(self._tried, wait_s, stop)
        except _PASSING:
            stop.wait(wait_s)

    def _receiver_id(self) -> str:
        """The same when it is started again: one record a node and local store."""
        return f"mirror-{host_in_id()}-{xxhash.xxh3_64_hexdigest(os.fsencode(self._local.root))}"


@dataclass(frozen=True, slots=True)
class _Known:
    """What was found out about a version, for the next."""

    remote_xxh3: str | None
    remote: Layout
    footer: Footer
    """Of the local file, in which parts are put together."""


def start_mirror(
    remote: str | os.PathLike[str],
    local: str | os.PathLike[str] | None,
    *,
    poll_interval_s: float = 1.0,
    num_threads: int | None = None,
    reader_timeout_s: float = 60.0,
    allow_shared_store: bool = False,
) -> Mirror | None:
    """Start a mirror for a receiver, which reads ``local``; None where there are no two stores.

    Every receiver of a node may call it: one mirror works, and the others stand by.
    """
    if local is None or Path(local).resolve() == Path(remote).resolve():
        return None
    return Mirror(
        remote,
        local,
        poll_interval_s=poll_interval_s,
        num_threads=num_threads,
        reader_timeout_s=reader_timeout_s,
        allow_shared_store=allow_shared_store,
    ).start()


def _newest_identity(store: DoubleBuffer) -> str | None:
    pointer = store.newest_pointer(not_below=0) if store.exists() else None
    manifest = None if pointer is None else store.manifest(pointer.buffer)
    return None if manifest is None else manifest.identity
