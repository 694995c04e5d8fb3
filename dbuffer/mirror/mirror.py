"""`Mirror`: copies each newest version of a store or bucket into another store or bucket."""

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
from dbuffer.runtime.closing import Closing, ProcessBound, join
from dbuffer.runtime.cores import leave_core
from dbuffer.runtime.timing import TIMING
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer

logger = logging.getLogger(__name__)

_FIT_S = 10.0
"""Time after which :meth:`Mirror.start` raises an error that occurs at every retry."""


class Mirror(Closing, ProcessBound):
    """Mirror that copies each newest version of a store or bucket into another store or bucket.

    Any number of mirrors can be started for one local store. One mirror is elected and copies; the
    other mirrors stand by until the elected mirror's process ends. The elected mirror relays the
    acknowledgements of the local store's receivers to the remote store, where the sender waits for
    these acknowledgements. A copy keeps the version's id and metadata. If the version has
    checksums, the mirror verifies all tensors before it publishes the copy.

    If the copied version and the remote store's newest version have forked (neither version leads
    to the other version), the mirror copies the newest version. Each receiver of the local store
    decides for itself whether to load a forked version.

    Args:
        remote: the directory of the store to follow, which need not exist yet; or a URL of a bucket
            and a prefix, such as ``s3://bucket/policy``.
        local: the directory of the store to publish in, preferably on ``/dev/shm``; or the URL of a
            bucket, which another mirror follows. A store that a sender publishes in is refused.
        poll_interval_s: how often to look at the remote store if the filesystem reports no events.
        num_threads: threads that read. Default: this process's cores, at most 8.
        reader_timeout_s: how long to wait for local receivers that still read the buffer that the
            next version goes into.
        allow_shared_store: accept directories that other users own or can write to.
        on_copied: called in the mirror's thread after each version was published. :attr:`version`
            and :meth:`wait_until_current` count the version as copied only after the call has
            returned. If the call raises, the mirror ends.

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
        self._bucket = next((end for end in (source, target) if isinstance(end, Bucket)), None)
        self._source: Upstream = (
            BucketSource(source, poll_s, copier)
            if isinstance(source, Bucket)
            else StoreSource(source, poll_s, copier.num_threads, allow_shared_store=shared)
        )
        self._target = (
            BucketTarget(target, self._source, copier)
            if isinstance(target, Bucket)
            else StoreTarget(
                target,
                self._source,
                copier,
                reader_timeout_s=timeout_s,
                allow_shared_store=shared,
            )
        )
        self._loop = MirrorLoop(self._source, self._target, on_copied)
        self._stop = threading.Event()
        self._starting = threading.Lock()
        """Lock that protects ``_stop`` and ``_thread``."""
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None
        """Error that ended the mirror's thread, or None."""

    @property
    def is_elected(self) -> bool:
        """Whether this mirror copies into the local store, not a mirror in another process."""
        return self._target.is_elected

    @property
    def version(self) -> int | None:
        """Number of the newest version in the local store, or None if the store has no version."""
        return self._loop.published

    @property
    def stats(self) -> dict[str, float]:
        """Counts of versions (``copied``), ``copied_bytes``, seconds (``copy_s``), ``failures``."""
        return {**NO_STATS, **self._loop.record.current.stats}

    @property
    def requests(self) -> dict[str, int]:
        """Number of requests to the bucket by kind, such as ``get``, without retries of uploads."""
        return {} if self._bucket is None else dict(self._bucket.requests)

    def start(self) -> Self:
        """Mirror in a thread until :meth:`close`; return once receivers can use the local store.

        Receivers can use the local store once no version in it has forked from the remote store's
        newest version. If this method raises an error, the mirror is closed.

        Raises:
            OptionError: a sender publishes in the local store.
            WaitTimeoutError: for 10 s the local store has held versions of another run of the
                sender, and no mirror has been replacing these versions.
            StoreAccessError, StoreCorruptError: for 10 s the mirror could not compare the stores.
            ClosedError, NotReadyError: the mirror was closed, or already runs.
        """
        thread = self._begin()
        try:
            self._wait_until_fit(thread)
        except BaseException:
            self._stop.set()
            raise
        return self

    def run(self, stop_event: threading.Event | None = None) -> None:
        """Mirror in this thread until :meth:`close` is called or ``stop_event`` is set.

        :meth:`close` sets ``stop_event``, too. Transient errors (a broken network, a full disk, a
        damaged version, an emptied store) are logged, reported in the remote store, and retried.

        Raises:
            OptionError: a sender publishes in the local store, or both paths are the same store.
            WriterSupersededError: another writer took the local store over.
            ClosedError, NotReadyError: the mirror was closed, or already runs.
        """
        thread = self._begin(stop_event, is_awaited=True)
        try:
            while thread.is_alive() and not self._stop.is_set():
                thread.join(TIMING.stop_check_s)
        finally:
            self.close()
        if self.error is not None:
            raise self.error

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
            self._thread = thread  # set last: `close` cannot join a thread that did not start
        return thread

    def _run(self, is_awaited: bool) -> None:
        leave_core()
        try:
            self._loop.run(self._stop)
        except BaseException as error:
            if isinstance(error, OneStoreError) and not is_awaited:
                logger.info("%s", str(error))
                return
            # `run`, `start` or `wait_until_current` raises the error. If none of these methods is
            # waiting, only the log shows the error.
            self.error = error
            if not is_awaited and self._loop.is_fit.is_set():
                logger.exception("the mirror of %s has ended", self._source.name)
        finally:
            self._end()

    def _end(self) -> None:
        self._copier.close()
        self._target.resign()
        if self._bucket is not None:
            self._bucket.close()

    def wait_until_current(self, timeout_s: float = 60.0) -> None:
        """Wait until the local store has the version that is the remote store's newest now.

        If this mirror copies the version, wait also until ``on_copied`` has returned. Don't call
        this method in ``on_copied``.

        Raises:
            WaitTimeoutError: the version was not copied within ``timeout_s``.
            DBufferError: the error that ended this mirror.
        """
        deadline = time.monotonic() + options.seconds("timeout_s", timeout_s)
        newest = self._source.newest()
        self._loop.wake()
        while newest is not None and not self._has(newest):
            if self.error is not None:
                raise self.error
            if time.monotonic() > deadline:
                problem = self._loop.record.current.problem
                raise WaitTimeoutError(
                    f"{self._target.name} did not catch up with {self._source.name} within "
                    f"{timeout_s:g} s" + ("" if problem is None else f": {problem}")
                )
            time.sleep(TIMING.look_s)

    def close(self) -> None:
        """Stop after the version that is being copied. Another mirror that stands by takes over.

        Before it stops, the mirror relays the last acknowledgements. A hanging request to a bucket
        fails after 30 s and is not retried; a hanging upload fails after 5 minutes at most. If
        ``on_copied`` calls this method, ``close`` returns at once, and the mirror stops when
        ``on_copied`` has returned.
        """
        if self._is_inherited:
            return  # in a forked process: threads and files belong to the parent
        with self._starting:
            self._stop.set()
            thread = self._thread
        if self._bucket is not None:
            self._bucket.close()
        if thread is None:
            self._end()
        elif thread is not threading.current_thread():
            join(thread)

    def _has(self, newest: Versioned) -> bool:
        pointer = self._target.newest()
        if pointer is None or not pointer.lineage.reaches(newest.id):
            return False
        is_copied_here = self.is_elected or self.error is not None
        return not is_copied_here or (self._loop.published or 0) >= newest.version

    def _wait_until_fit(self, thread: threading.Thread) -> None:
        deadline = time.monotonic() + _FIT_S
        while not self._loop.is_fit.wait(TIMING.look_s) and not self._stop.is_set():
            if not thread.is_alive():
                if self.error is not None:
                    raise self.error
                return  # there is nothing to mirror
            problem = self._loop.problem
            if problem is None:  # another mirror is copying, which may take long
                deadline = time.monotonic() + _FIT_S
            elif time.monotonic() > deadline:
                raise problem


def _open_end(name: str, place: str | os.PathLike[str]) -> Path | Bucket:
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
    """Start a mirror from ``remote`` to ``local``, for a receiver of ``local``.

    Return None if ``local`` is None or is itself the store that the sender publishes in. Every
    receiver of a node can call this function: one mirror copies, and the other mirrors stand by.
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
    """Whether ``local`` is a sender's store, and no store exists at ``remote``.

    Then the paths probably name one store: ``remote`` is its path on another host.
    """
    remote_store, store = (DoubleBuffer(p, allow_shared_store=True) for p in (remote, local))
    return not remote_store.exists() and store.exists() and state_of_senders(store) is not None
