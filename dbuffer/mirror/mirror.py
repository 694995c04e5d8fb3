"""`Mirror`: follows a remote store and publishes each newest version again in a local one.

One process a node reads the network, once a version; every rank of the node maps the local store.
Bytes go from the remote file straight to their place in the local one, and are checked there
before the version is published. Versions keep their numbers, their metadata and their identity.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import xxhash

from dbuffer.errors import (
    ClosedError,
    OptionError,
    StoreNotFoundError,
    WaitTimeoutError,
    WriterSupersededError,
)
from dbuffer.format.manifest import Pointer, host_in_id
from dbuffer.io.copier import Copier
from dbuffer.mirror.local_copy import LocalCopy
from dbuffer.mirror.refusals import is_stale, refusal, require_not_put_back, require_not_stale
from dbuffer.publish.draft import Progress
from dbuffer.publish.publication import Publication
from dbuffer.receive.follow_loop import FollowLoop
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime import options
from dbuffer.runtime.closing import Closing, ProcessBound
from dbuffer.runtime.timing import TIMING
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.filesystem import Descriptor
from dbuffer.store.foreign import require_no_other_weights
from dbuffer.store.writer import BufferWriter

logger = logging.getLogger(__name__)

MIRROR_LOCK_FILE = "mirror.lock"


_FINAL = (ClosedError, OptionError, WriterSupersededError)
"""Errors that no retry mends. All others may pass: a network that is cut, a full disk, a damaged
version, a store that is being emptied, a mode that is corrected."""

_NO_STATS = {"copied": 0.0, "copied_bytes": 0.0, "copy_s": 0.0, "failures": 0.0}


class _OneStoreError(OptionError):
    """Remote and local store are one, seen through two mounts: fine for readers."""


class Mirror(Closing, ProcessBound):
    """Keeps a local store the same as a remote one.

    Any number may be started for one local store: one is elected, by a lock that the kernel drops
    when its process ends, and the others stand by. Acknowledgements of the local store's receivers
    are relayed to the remote one, where the sender waits for them.

    Where the remote store is started over while it is mirrored, the local one goes on with what it
    holds then; each receiver of that one decides for itself whether to follow.

    Args:
        remote: the store to follow; it may come later.
        local: the store to publish in, on ``/dev/shm`` best. One that holds another store's
            versions is refused.
        poll_interval_s: how often the remote store is looked at, where no event comes.
        num_threads: threads that read. Default: the machine's cores, at most 8.
        reader_timeout_s: how long to wait for local readers of the buffer to be written.
        allow_shared_store: accept directories that belong to someone else, or that others can
            write to.
        move_torchrl_aside: where the local directory holds weights of TorchRL's own double buffer,
            move them into ``before-dbuffer`` below it. Default: refuse such a directory.
        on_copied: called with each version that was published, in the mirror's thread: readers may
            have it already, :attr:`version` and :attr:`stats` say so, and
            :meth:`wait_until_current` waits until the call has returned. Its ``duration_s`` is from
            finding the version to having published it. An error from it ends the mirror.
        progress: called with the bytes read so far, and in all, from several threads.

    Raises:
        OptionError: an option is invalid.
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
        move_torchrl_aside: bool = False,
        on_copied: Callable[[Publication], None] | None = None,
        progress: Progress | None = None,
    ) -> None:
        remote, local = options.directory("remote", remote), options.directory("local", local)
        self._remote = DoubleBuffer(remote, allow_shared_store=allow_shared_store)
        self._local = DoubleBuffer(local, allow_shared_store=allow_shared_store)
        if filesystem.real_path(remote) == filesystem.real_path(local):
            raise OptionError(f"{remote} and {local} are one directory: there is nothing to mirror")
        self._poll_interval_s = options.positive_seconds("poll_interval_s", poll_interval_s)
        self._reader_timeout_s = options.seconds("reader_timeout_s", reader_timeout_s)
        self._allow_shared_store = allow_shared_store
        self._move_torchrl_aside = options.flag("move_torchrl_aside", move_torchrl_aside)
        self._on_copied = on_copied
        self._progress = progress
        self._copier = Copier(num_threads)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock: Descriptor | None = None
        """Held by the elected mirror."""
        self._receiver: WeightReceiver | None = None
        self._copy: LocalCopy | None = None
        """Open from the first version of a history to its end."""
        self._copied_history: str | None = None
        """History that this mirror has copied; it may replace that in the local store."""
        self._published: int | None = None
        """Newest version in the local store, of the history that is followed."""
        self._announced: int | None = None
        """Newest version for which ``on_copied`` has returned."""
        self._error: Exception | None = None
        """Error that ended the mirror's thread."""

    @property
    def is_elected(self) -> bool:
        """Whether it is this mirror that copies, and no other of the node."""
        return self._lock is not None

    @property
    def version(self) -> int | None:
        """The newest version that it has published, or that was published before it."""
        return self._published

    @property
    def stats(self) -> dict[str, float]:
        """Versions and bytes copied, seconds that took, failures."""
        return dict(_NO_STATS if self._receiver is None else self._receiver.record.current.stats)

    def start(self) -> Self:
        """Mirror in a thread, until :meth:`close`. Returns when the local store is fit to be read.

        Raises:
            OptionError: the local store holds another store's versions.
        """
        if not self._elect():
            self._wait_until_prepared()
        thread = threading.Thread(target=self._run_in_thread, name="dbuffer-mirror", daemon=True)
        thread.start()
        self._thread = thread  # one that could not begin cannot be joined
        return self

    def run(self, stop_event: threading.Event | None = None) -> None:
        """Mirror in this thread, until ``stop_event`` is set.

        Errors that may pass (a network that is cut, a full disk, a damaged version, an emptied
        store) are logged, noted in the remote store, and retried with backoff.

        Raises:
            OptionError: the local store holds another store's versions.
            WriterSupersededError: another writer took the local store over.
        """
        stop = stop_event or self._stop
        if self._lock is None and not self._elect():
            self._wait_until_prepared()
            logger.info("another mirror of %s is at work: standing by", self._local.root)
            while self._lock is None and not stop.wait(TIMING.stand_by_s):
                self._elect()
        if not stop.is_set():
            self._follow(stop)

    def wait_until_current(self, timeout_s: float = 60.0) -> None:
        """Wait until the local store holds what was the newest version when this was called.

        Where it is this mirror that copied it, ``on_copied`` has been called with it by then; it
        must not wait itself.

        Raises:
            OptionError: ``timeout_s`` is no time.
            WaitTimeoutError: it does not, in time.
            DBufferError: the error that ended this mirror.
        """
        deadline = time.monotonic() + options.seconds("timeout_s", timeout_s)
        newest = self._remote.newest_pointer()
        if self._receiver is not None:
            self._receiver.wake()
        while newest is not None and not self._has(newest):
            if self._error is not None:
                raise self._error
            if time.monotonic() > deadline:
                problem = None if self._receiver is None else self._receiver.record.current.problem
                raise WaitTimeoutError(
                    f"{self._local.root} did not catch up with {self._remote.root} within "
                    f"{timeout_s:g} s" + ("" if problem is None else f": {problem}")
                )
            time.sleep(TIMING.mirror_look_s)

    def close(self) -> None:
        """Stop. What was copied stays; a mirror that stands by takes over."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._copier.close()
        self._resign()

    def _has(self, newest: Pointer) -> bool:
        pointer = self._local.newest_pointer() if self._local.exists() else None
        if pointer is None or pointer.version < newest.version or pointer.history != newest.history:
            return False
        is_announced_here = self.is_elected or self._error is not None
        return not is_announced_here or (self._announced or 0) >= newest.version

    def _run_in_thread(self) -> None:
        try:
            self.run()
        except _OneStoreError as error:
            logger.info("%s", error)
        # No caller is there to raise it to: `wait_until_current` raises it, and the log has it.
        except Exception as error:
            self._error = error
            logger.exception("the mirror of %s has ended", self._remote.root)
        finally:
            self._resign()

    # Election

    def _elect(self) -> bool:
        """Become the mirror of the local store, if no other is, and the store is fit to be read.

        Raises:
            OptionError: the local store holds another store's versions.
        """
        filesystem.make_directory(self._local.root, parents=True)
        self._local.check()
        require_no_other_weights(self._local.root, move_torchrl_aside=self._move_torchrl_aside)
        path = self._local.root / MIRROR_LOCK_FILE
        lock = filesystem.take_lock(path, "mirror's", may_lack_locks=False)
        if lock is None:
            return False
        try:
            require_not_stale(self._remote, self._local)
        except BaseException:
            lock.close()
            raise
        self._lock = lock
        return True

    def _resign(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _wait_until_prepared(self) -> None:
        """Wait until the elected mirror has begun with what the remote store holds now."""
        deadline = time.monotonic() + TIMING.prepared_s
        while is_stale(self._remote, self._local) and not self._elect():
            if time.monotonic() > deadline:
                raise OptionError(
                    f"a mirror of another store than {self._remote.root} is at work in "
                    f"{self._local.root}; stop it, or give another directory"
                )
            time.sleep(TIMING.mirror_look_s)

    # Following

    def _follow(self, stop: threading.Event) -> None:
        with self._open_receiver() as receiver:
            loop = FollowLoop(
                receiver, "mirroring", logger, new_history="follow", final=_FINAL, stop=stop
            )
            try:
                while not stop.is_set():
                    copied = None
                    with loop.attempt():
                        if loop.wait(self._published) is not None:
                            copied = self._copy_newest(receiver)
                            loop.used()
                    if copied is not None:
                        if self._on_copied is not None:
                            self._on_copied(copied)
                        self._announced = copied.version
                    elif loop.has_started_over:
                        self._close_copy()
                        self._published = self._announced = None
            finally:
                self._close_copy()

    def _open_receiver(self) -> WeightReceiver:
        # The same name when it is started again: one record a node and local store.
        of_local = xxhash.xxh3_64_hexdigest(os.fsencode(self._local.root))
        name = f"mirror-{host_in_id()}-{of_local}"
        receiver = WeightReceiver(
            self._remote.root,
            receiver_id=name,
            poll_interval_s=self._poll_interval_s,
            num_threads=self._copier.num_threads,
            allow_shared_store=self._allow_shared_store,
        )
        receiver.record.count(**_NO_STATS)
        self._receiver = receiver
        return receiver

    def _copy_newest(self, receiver: WeightReceiver) -> Publication | None:
        """Copy the version that was just seen; None: it is there, or was overwritten meanwhile."""
        if self._copy is None:
            self._copy = self._begin_history(receiver.history)
        with receiver.hold_seen(self._published) as held:
            copied = None if held is None else self._copy.copy(held, receiver)
        if copied is not None:
            self._published = copied.version
            receiver.record.count(copied=1, copied_bytes=copied.num_bytes, copy_s=copied.duration_s)
            receiver.record.write(staged_version=copied.version, problem=None, problem_version=None)
        return copied

    def _close_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.close()

    def _begin_history(self, history: str | None) -> LocalCopy:
        """Become the local store's writer, once there is something to write.

        Raises:
            OptionError: it holds versions that must not be replaced.
        """
        remote, local = self._remote.writer(), self._local.writer()
        if remote is None:
            raise StoreNotFoundError(f"{self._remote.root} has no record of its sender")
        if local is not None and local.run == remote.run:
            raise _OneStoreError(
                f"{self._remote.root} and {self._local.root} are one store under two names: "
                "there is nothing to mirror"
            )
        history = history or remote.history
        pointer = self._local.pointer()
        if pointer is not None and local is not None and local.history == history:
            require_not_put_back(self._remote, self._local, pointer.version)
            self._published = self._announced = pointer.version
        elif pointer is not None and (local is None or local.history != self._copied_history):
            what = f"version {pointer.version} of another store than {self._remote.root}"
            raise refusal(self._local, what)
        writer = BufferWriter(
            self._local.root,
            durable=False,
            reader_timeout_s=self._reader_timeout_s,
            allow_shared_store=self._allow_shared_store,
            history=history,
        )
        copy = LocalCopy(
            writer, self._local, self._remote.root, copier=self._copier, progress=self._progress
        )
        self._copied_history = history
        return copy


def start_mirror(
    remote: str | os.PathLike[str],
    local: str | os.PathLike[str] | None,
    **more: Any,
) -> Mirror | None:
    """Start a mirror for a receiver, which reads ``local``; None where there are no two stores.

    Every receiver of a node may call it: one mirror works, and the others stand by. ``more``:
    options of `Mirror`.

    Raises:
        OptionError: an option is invalid, or the local store holds another store's versions.
    """
    if local is None:
        return None
    remote, local = options.directory("remote", remote), options.directory("local", local)
    if filesystem.real_path(local) == filesystem.real_path(remote):
        return None
    return Mirror(remote, local, **more).start()
