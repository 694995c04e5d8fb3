"""`Mirror`: follows a remote store and publishes each newest version again in a local one.

One process a node reads the network, once a version; every rank of the node maps the local store.
Bytes of a whole version go from the remote file straight to their place in the local one; deltas
are applied there. Tensors are verified before the version is published, if the sender publishes
checksums. Versions keep their ids and their metadata.

Between clusters without a common mount a bucket lies between the two stores: one mirror copies
versions into it, and one on each node copies them out of it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from dbuffer.errors import (
    ClosedError,
    NotReadyError,
    OptionError,
    WaitTimeoutError,
)
from dbuffer.format.manifest import Versioned
from dbuffer.io.copier import Copier
from dbuffer.mirror.bucket import Bucket
from dbuffer.mirror.download import BucketSource
from dbuffer.mirror.loop import NO_STATS, MirrorLoop
from dbuffer.mirror.stores import (
    OneStoreError,
    StoreSource,
    StoreTarget,
    Upstream,
    state_of_senders,
)
from dbuffer.mirror.upload import BucketTarget
from dbuffer.publish.publisher import Publication
from dbuffer.runtime import options
from dbuffer.runtime.closing import Closing, ProcessBound
from dbuffer.runtime.cores import leave_core
from dbuffer.runtime.timing import TIMING
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer

logger = logging.getLogger(__name__)

_FIT_S = 10.0
"""Time for a target to become fit to be read, before :meth:`Mirror.start` raises an error."""


class Mirror(Closing, ProcessBound):
    """Keeps a local store the same as a remote one, or a bucket between the two.

    Any number may be started for one local store: one is elected, by a lock that the kernel drops
    when its process ends, and the others stand by. Acknowledgements of the local store's receivers
    are relayed to the remote one, where the sender waits for them.

    If the remote store forks from the copied version, the local store goes on with the fork; each
    of its receivers decides for itself whether to follow.

    Args:
        remote: the store to follow; it may come later. Or the URL of a bucket and a prefix in it,
            as ``s3://bucket/policy``.
        local: the store to publish in, on ``/dev/shm`` best, or the URL of a bucket,
            which another mirror follows. A sender's own store is refused.
        poll_interval_s: how often the remote store is looked at, where no event comes.
        num_threads: threads that read. Default: this process's cores, at most 8.
        reader_timeout_s: how long to wait for local readers of the buffer to be written.
        allow_shared_store: accept directories that belong to someone else, or that others can
            write to.
        on_copied: called with each version that was published, in the mirror's thread: readers may
            have it already; :attr:`version` and :meth:`wait_until_current` wait until the call has
            returned. The publication's ``duration_s`` is from finding the version to having
            published it. An error of the call ends the mirror.

    Raises:
        OptionError: an option is invalid.
    """

    def __init__(
        self,
        remote: str | os.PathLike[str],
        local: str | os.PathLike[str],
        *,
        poll_interval_s: float = 0.5,
        num_threads: int | None = None,
        reader_timeout_s: float = 60.0,
        allow_shared_store: bool = False,
        on_copied: Callable[[Publication], None] | None = None,
    ) -> None:
        super().__init__()
        poll_s = options.positive_seconds("poll_interval_s", poll_interval_s)
        timeout_s = options.seconds("reader_timeout_s", reader_timeout_s)
        shared = options.flag("allow_shared_store", allow_shared_store)
        self._copier = copier = Copier(num_threads)
        source, target = _open_end("remote", remote), _open_end("local", local)
        _require_two_ends(source, target)
        self._buckets = [end for end in (source, target) if isinstance(end, Bucket)]
        self._source: Upstream = (
            BucketSource(source, poll_s, copier)
            if isinstance(source, Bucket)
            else StoreSource(source, poll_s, copier.num_threads, allow_shared_store=shared)
        )
        self._target = (
            BucketTarget(target, copier)
            if isinstance(target, Bucket)
            else StoreTarget(target, copier, reader_timeout_s=timeout_s, allow_shared_store=shared)
        )
        self._loop = MirrorLoop(self._source, self._target, on_copied)
        self._stop = threading.Event()
        self._starting = threading.Lock()
        """Held while ``_stop`` and ``_thread`` change."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        """Error that ended the mirror's thread."""

    @property
    def is_elected(self) -> bool:
        """Whether it is this mirror that copies, and no other of the node."""
        return self._target.is_elected

    @property
    def version(self) -> int | None:
        """The newest version that it has published, or that was published before it."""
        return self._loop.published

    @property
    def error(self) -> BaseException | None:
        """Error that ended the mirror's thread, or None if it runs or was closed."""
        return self._error

    @property
    def stats(self) -> dict[str, float]:
        """Versions and bytes copied, seconds that took, failures."""
        return {**NO_STATS, **self._loop.record.current.stats}

    @property
    def requests(self) -> dict[str, int]:
        """Number of requests that it has made to a bucket, by kind: get, put, list, delete.

        A put of a file's part that is repeated counts once.
        """
        return dict(self._buckets[0].requests) if self._buckets else {}

    def start(self) -> Self:
        """Mirror in a thread, until :meth:`close`. Returns when the local store is fit to be read.

        A mirror that raises is closed.

        Raises:
            OptionError: the local store is a sender's.
            WaitTimeoutError: after 10 s the local store still holds versions of another run, and no
                mirror is copying a version of the source.
            NotReadyError: it runs already.
            StoreAccessError, StoreCorruptError: after 10 s it still cannot compare its two ends.
            ClosedError: it was closed.
        """
        thread = self._begin()
        try:
            self._wait_until_fit(thread)
        except BaseException:
            self._stop.set()
            raise
        return self

    def run(self, stop_event: threading.Event | None = None) -> None:
        """Mirror, once, until :meth:`close` is called.

        Args:
            stop_event: closes it when it is set; :meth:`close` sets it.

        Errors that may pass (a network that is cut, a full disk, a damaged version, an emptied
        store) are logged, noted in the remote store, and retried with backoff.

        Raises:
            OptionError: the local store is a sender's, or both ends are one store.
            WriterSupersededError: another writer took the local store over.
            ClosedError: it was closed before.
            NotReadyError: it runs already.
        """
        thread = self._begin(stop_event, is_awaited=True)
        try:
            thread.join()
        finally:
            self.close()
        if self._error is not None:
            raise self._error

    def _begin(
        self, stop_event: threading.Event | None = None, *, is_awaited: bool = False
    ) -> threading.Thread:
        name = self._target.name
        with self._starting:
            if self._thread is not None and self._thread.is_alive():
                raise NotReadyError(f"this mirror to {name} runs already: close it first")
            if self._thread is not None or self._stop.is_set() or self._is_inherited:
                raise ClosedError(
                    f"this mirror to {name} is closed, or was made before a fork; make a new one"
                )
            self._stop = stop_event or self._stop
            thread = threading.Thread(
                target=self._run, args=(is_awaited,), name="dbuffer-mirror", daemon=True
            )
            thread.start()
            self._thread = thread  # a thread that could not begin cannot be joined
        return thread

    def _run(self, is_awaited: bool) -> None:
        leave_core()
        try:
            self._loop.run(self._stop)
        except BaseException as error:
            if isinstance(error, OneStoreError) and not is_awaited:
                logger.info("%s", str(error))
                return
            # `start` or `wait_until_current` raises it; the log has it if neither is called.
            self._error = error
            if not is_awaited and self._loop.is_fit.is_set():
                logger.exception("the mirror of %s has ended", self._source.name)
        finally:
            self._end()

    def _end(self) -> None:
        self._copier.close()
        self._target.resign()
        for bucket in self._buckets:
            bucket.close()

    def wait_until_current(self, timeout_s: float = 60.0) -> None:
        """Wait until the local store holds the version that is the remote store's newest now.

        If this mirror copies it, ``on_copied`` has returned by then; it must not wait itself.

        Raises:
            OptionError: ``timeout_s`` is no time.
            WaitTimeoutError: it does not, in time.
            DBufferError: the error that ended this mirror.
        """
        deadline = time.monotonic() + options.seconds("timeout_s", timeout_s)
        newest = self._source.newest()
        self._loop.wake()
        while newest is not None and not self._has(newest):
            if self._error is not None:
                raise self._error
            if time.monotonic() > deadline:
                problem = self._loop.record.current.problem
                raise WaitTimeoutError(
                    f"{self._target.name} did not catch up with {self._source.name} within "
                    f"{timeout_s:g} s" + ("" if problem is None else f": {problem}")
                )
            time.sleep(TIMING.look_s)

    def close(self) -> None:
        """Stop after the version that is being copied. A mirror that stands by takes over.

        A bucket gets the last acknowledgements. A request to it that hangs fails after 30 s, and is
        not repeated; an upload, after 5 minutes at most. In ``on_copied`` it returns at once, and
        the mirror stops after that call.
        """
        if self._is_inherited:
            return  # a fork: threads and files are its parent's
        with self._starting:
            self._stop.set()
            thread = self._thread
        for bucket in self._buckets:
            bucket.close()
        if thread is None:
            self._end()
        elif thread is not threading.current_thread():
            thread.join()

    def _has(self, newest: Versioned) -> bool:
        pointer = self._target.newest()
        if pointer is None or not pointer.lineage.reaches(newest.id):
            return False
        is_copied_here = self.is_elected or self._error is not None
        return not is_copied_here or (self._loop.published or 0) >= newest.version

    def _wait_until_fit(self, thread: threading.Thread) -> None:
        deadline = time.monotonic() + _FIT_S
        while not self._loop.is_fit.wait(TIMING.look_s) and not self._stop.is_set():
            if not thread.is_alive():
                if self._error is not None:
                    raise self._error
                return  # there is nothing to mirror
            problem = self._loop.problem
            if problem is not None and time.monotonic() > deadline:
                raise problem


def _open_end(name: str, place: str | os.PathLike[str]) -> Path | Bucket:
    """Open an end of a mirror: a bucket for its URL, else a directory."""
    checked = options.directory_or_bucket(name, place)
    if isinstance(checked, Path):
        return checked
    if checked.startswith("memory:"):
        options.refuse(name, place, "a bucket that outlives the mirror and its process")
    return Bucket(checked)


def _require_two_ends(source: Path | Bucket, target: Path | Bucket) -> None:
    if isinstance(source, Bucket) and isinstance(target, Bucket):
        raise OptionError(
            f"{source.url} and {target.url} are both buckets: a mirror's other end is a store"
        )
    paths = [filesystem.real_path(end) for end in (source, target) if isinstance(end, Path)]
    if len(paths) < 2:
        return
    if paths[0] == paths[1]:
        raise OptionError(f"{source} and {target} are one directory: there is nothing to mirror")
    if paths[0] in paths[1].parents or paths[1] in paths[0].parents:
        raise OptionError(
            f"one of {source} and {target} is inside the other: name a target outside of the source"
        )


def start_mirror(
    remote: str | os.PathLike[str],
    local: str | os.PathLike[str] | None,
    **mirror_options: Any,
) -> Mirror | None:
    """Start a mirror for a receiver, which reads ``local``; None where there are no two stores.

    Every receiver of a node may call it: one mirror works, and the others stand by.

    Raises:
        OptionError: an option is invalid.
        DBufferError: as `Mirror.start`.
    """
    if local is None:
        return None
    source = options.directory_or_bucket("remote", remote)
    local = options.directory("local", local)
    if isinstance(source, Path):
        if filesystem.real_path(local) == filesystem.real_path(source):
            return None
        if has_source_at_local(source, local):
            logger.info("there is no store at %s: reading the sender's store at %s", source, local)
            return None
    return Mirror(remote, local, **mirror_options).start()


def has_source_at_local(remote: Path, local: Path) -> bool:
    """Whether ``local`` is a sender's store, and there is none at ``remote``.

    Then both are one store, under names of two hosts, and there is nothing to mirror.
    """
    remote_store, store = (DoubleBuffer(p, allow_shared_store=True) for p in (remote, local))
    return not remote_store.exists() and store.exists() and state_of_senders(store) is not None
