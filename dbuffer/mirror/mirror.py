"""`Mirror`: copies each newest version of a store or bucket into another store or bucket.

A mirror is one loop (`Mirror._mirror`). Each round is one attempt of one step: be elected, check
the target, or wait for a version and copy it. A failed attempt is retried with backoff, and then
source and target are compared anew. If the target was removed, the mirror waits to be elected
again. An `AcknowledgementRelay` copies acknowledgements from the target to the source in a separate
thread: copying a version can take minutes, and meanwhile the sender must not presume that the
target's receivers are dead.
"""

from __future__ import annotations

import contextlib
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
    WriterSupersededError,
)
from dbuffer.format.layout import digest
from dbuffer.format.lineage import Relation, VersionId, relation
from dbuffer.format.manifest import Versioned, host_in_id
from dbuffer.io.copier import Copier
from dbuffer.mirror.bucket import Bucket
from dbuffer.mirror.bucket_source import BucketSource
from dbuffer.mirror.bucket_target import BucketTarget
from dbuffer.mirror.ends import OneStoreError, Source, has_source_at_local, require_two_ends
from dbuffer.mirror.records import AcknowledgementRelay, BucketRecords, StoreRecords
from dbuffer.mirror.store_target import StoreTarget
from dbuffer.publish.publisher import Publication
from dbuffer.receive.follow_loop import FollowLoop
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime import options
from dbuffer.runtime.closing import Closing, ProcessBound, join
from dbuffer.runtime.cores import leave_core
from dbuffer.runtime.timing import TIMING
from dbuffer.runtime.trouble import log_once
from dbuffer.store import filesystem
from dbuffer.store.liveness import Process
from dbuffer.store.open_version import OvertakenError

logger = logging.getLogger(__name__)

FINAL = (ClosedError, OptionError, WriterSupersededError)
"""Errors that end a mirror without a retry. Any error of ``on_copied`` also ends the mirror."""


def mirror_id(target: str) -> str:
    """Return the receiver id of a mirror into ``target``. All its mirrors on a machine share it."""
    place = target
    # Use device and inode: two containers can have different directories at the same path.
    with contextlib.suppress(OSError):
        directory = Path(target).stat()
        place = f"{directory.st_dev} {directory.st_ino}"
    return f"mirror-{host_in_id()}-{digest(os.fsencode(f'{Process.here().machine} {place}'))}"


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
        require_two_ends(source, target)
        self._bucket = next((end for end in (source, target) if isinstance(end, Bucket)), None)
        name = target.url if isinstance(target, Bucket) else str(target)
        self._source: Source = (
            BucketSource(source, mirror_id(name), poll_s, copier)
            if isinstance(source, Bucket)
            else WeightReceiver(
                source,
                receiver_id=mirror_id(name),
                poll_interval_s=poll_s,
                num_threads=num_threads,
                allow_shared_store=shared,
            )
        )
        self._source.record.count(copied=0.0, copied_bytes=0.0, copy_s=0.0, failures=0.0)
        self._target = (
            BucketTarget(target, self._source, copier)
            if isinstance(target, Bucket)
            else StoreTarget(target, self._source, copier, timeout_s, allow_shared_store=shared)
        )
        self._on_copied = on_copied
        self.on_current: Callable[[VersionId], None] | None = None
        """Function that is called with the newest version's id if the target already has it."""
        self._relay: AcknowledgementRelay | None = None
        """Relay of acknowledgements, or None until there is a version to copy."""
        self._check_at = 0.0
        self._is_fit = threading.Event()
        """Event that is set once the target has no version of an earlier start of the sender."""
        self._has_start_failed = False
        """Whether `start` has raised a WaitTimeoutError. The mirror goes on trying."""
        self._stop = threading.Event()
        self._starting = threading.Lock()
        """Lock that protects ``_stop`` and ``_thread``."""
        self._thread: threading.Thread | None = None
        self.is_elected = False
        """Whether this mirror is elected: it copies versions, and other mirrors stand by."""
        self.version: int | None = None
        """Number of the newest version that this mirror has copied, or has found in the local
        store."""
        self.error: BaseException | None = None
        """Error that ended the mirror's thread, or None."""

    @property
    def stats(self) -> dict[str, float]:
        """Totals: ``copied`` versions, ``copied_bytes``, ``copy_s`` (seconds), ``failures``."""
        return dict(self._source.record.current.stats)

    @property
    def requests(self) -> dict[str, int]:
        """Number of requests to the bucket by kind, such as ``get``, without retries of uploads."""
        return {} if self._bucket is None else dict(self._bucket.requests)

    def start(self, timeout_s: float = 60.0) -> Self:
        """Mirror in a thread until :meth:`close`; return once receivers can use the local store.

        Receivers can use the local store once all its versions are predecessors of the remote
        store's newest version. Until then, it can hold versions of another run of the sender.

        Args:
            timeout_s: how long to wait while each attempt fails. While another mirror replaces
                versions of another run, this method waits without a limit.

        Raises:
            OptionError: a sender publishes in the local store, or both paths are the same store.
            WaitTimeoutError: each attempt to compare the stores has failed, or the local store has
                versions of a mirror that follows another store. This mirror goes on trying.
            ClosedError, NotReadyError: the mirror was closed, or already runs.
        """
        limit_s = options.seconds("timeout_s", timeout_s)
        thread = self._begin()
        deadline = time.monotonic() + limit_s
        while not self._is_fit.wait(TIMING.look_s) and not self._stop.is_set():
            if not thread.is_alive():
                if self.error is not None:
                    raise self.error
                break  # there is nothing to mirror
            problem = self._source.record.current.problem
            if problem is None:  # another mirror is copying, which may take long
                deadline = time.monotonic() + limit_s
            elif time.monotonic() > deadline:
                self._has_start_failed = True
                raise WaitTimeoutError(f"receivers cannot use {self._target.name} yet: {problem}")
        return self

    def run(self, stop_event: threading.Event | None = None) -> None:
        """Mirror in this thread until :meth:`close` is called or ``stop_event`` is set.

        :meth:`close` sets ``stop_event``, too. Transient errors (a broken network, a full disk, a
        damaged version, an emptied store) are logged, reported in the remote store, and retried.

        Raises:
            OptionError: as :meth:`start`.
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
                    f"this mirror to {name} is closed, or is of a parent process; make a new one"
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
            self._mirror()
        except BaseException as error:
            if isinstance(error, OneStoreError) and not is_awaited:
                logger.info("%s", str(error))
                return
            # `run`, `start` and `wait_until_current` raise this error. If no caller waits in one of
            # these methods, only the log shows the error.
            self.error = error
            if not is_awaited and (self._is_fit.is_set() or self._has_start_failed):
                logger.exception("the mirror of %s has ended", self._source.store)
        finally:
            try:
                self._end()
            except Exception as error:
                self.error = self.error or error
                logger.exception("the mirror of %s could not be closed", self._source.store)

    def _mirror(self) -> None:
        stop = self._stop
        retry = FollowLoop(
            self._source, "mirroring", logger, forked="follow", final=FINAL, stop=stop
        )
        while not stop.is_set():
            copied = current = None
            version = None if retry.is_failing else self.version
            with retry.attempt():
                until_check_s = self._check_at - time.monotonic()
                if not self.is_elected:
                    self._elect()
                    if self.is_elected:
                        retry.used()
                    else:
                        self._stand_by(retry)
                elif until_check_s <= 0:
                    self._check_at = time.monotonic() + TIMING.bucket_heartbeat_s
                    if self._relay is not None:
                        self._target.take_over()
                elif retry.wait(version, timeout_s=until_check_s) is not None:
                    copied = self._copy_newest(retry.is_failing)
                    retry.used()
                if self.on_current is not None and copied is None:
                    newest = self._source.newest()
                    current = newest if newest is not None and self._has(newest) else None
            if copied is not None:
                if self._on_copied is not None:
                    self._on_copied(copied)
                self.version, self.on_current = copied.version, None
            elif current is not None and self.on_current is not None:
                self.on_current(current.id)
                self.on_current = None
            elif not self.is_elected:
                stop.wait(TIMING.retry_min_s)
            elif retry.has_forked:
                self._close_relay()
                self.version = None
            elif self._is_target_removed():
                logger.warning("%s was removed: making it again", self._target.name)
                self._leave_target()
                self.version = None

    def _elect(self) -> None:
        target = self._target
        # The mirror of a bucket that was started last is the writer: buckets have no election.
        if isinstance(target, BucketTarget) or target.elect():
            self._source.record.rename(mirror_id(self._target.name))
            self.is_elected = True
            self._is_fit.set()
        elif not self._is_fit.is_set() and target.is_fit():
            logger.info("another mirror copies into %s: standing by", self._target.name)
            self._is_fit.set()

    def _stand_by(self, retry: FollowLoop) -> None:
        """Leave no record in the source: the elected mirror has one under the same id."""
        record = self._source.record
        record.set(problem=None, problem_version=None)
        record.remove()
        retry.succeeded(f"mirroring {self._source.store}")

    def _copy_newest(self, is_failing: bool) -> Publication | None:
        """Copy the newest version, or return None if it is already copied or was overwritten.

        ``is_failing``: whether the last attempt failed. If so, first check the target again.
        """
        source, target = self._source, self._target
        if self._relay is None or is_failing:
            target.take_over()
        if self._relay is None:
            writer = (
                BucketRecords(source.bucket, source.record)
                if isinstance(source, BucketSource)
                else StoreRecords(source.store)
            )
            self._relay = AcknowledgementRelay(target.receivers, writer)
        self._compare()
        with source.open_seen(self.version) as opened:
            if opened is None:
                return None
            try:
                copied = target.copy(opened)
            except OvertakenError:
                return None
            except WriterSupersededError:
                if self._is_target_removed():  # another mirror was elected in the new directory
                    return None
                raise
        source.record.count(copied=1, copied_bytes=copied.num_bytes, copy_s=copied.duration_s)
        source.record.write(staged=copied.id)
        return copied

    def _is_target_removed(self) -> bool:
        return isinstance(self._target, StoreTarget) and self._target.is_removed()

    def _compare(self) -> None:
        """Set :attr:`version` to the newest version that need not be copied again, or to None."""
        target, newest, record = self._target.newest(), self._source.last_seen, self._source.record
        self.version = None
        if target is None or newest is None:
            return
        match relation(target.lineage, newest):
            case Relation.BEHIND:
                self.version = target.version
                if record.current.staged != target.id:
                    record.write(staged=target.id)
            case Relation.AHEAD:  # the source may have lost this version; copy the next version
                log_once(
                    logger,
                    "%s went back to version %d, and %s has version %d: it stays, until more is "
                    "published",
                    *(self._source.store, newest.id.number, self._target.name, target.version),
                )
                self.version = newest.id.number

    def _close_relay(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.close()

    def _close_target(self) -> None:
        self.is_elected = False
        with contextlib.closing(self._target):
            self._close_relay()

    def _leave_target(self) -> None:
        """Stop copying, and take back this mirror's record, until the mirror is elected again."""
        record = self._source.record
        record.set(has_ended=True)  # for the relay's last records: a bucket has this record, too
        self._close_target()
        record.remove()
        # Forget `staged`, so that the record is written again after the election.
        record.set(has_ended=False, staged=None)

    def _end(self) -> None:
        with contextlib.ExitStack() as ends:
            ends.callback(self._copier.close)
            ends.callback(self._close_target)
            # Close the source before the relay: then the last records that the relay writes show
            # that this mirror has ended.
            self._source.close()

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
        self._source.wake()
        while newest is not None and not self._has(newest):
            if self.error is not None:
                raise self.error
            if time.monotonic() > deadline:
                problem = self._source.record.current.problem
                raise WaitTimeoutError(
                    f"{self._target.name} did not catch up with {self._source.store} within "
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
        return not is_copied_here or (self.version or 0) >= newest.version


def _open_end(name: str, place: str | os.PathLike[str]) -> Path | Bucket:
    checked = options.directory_or_bucket(name, place)
    if isinstance(checked, Path):
        return checked
    if checked.startswith("memory:"):
        options.refuse(name, place, "a bucket that outlives the mirror and its process")
    return Bucket(checked)


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
    mirror = Mirror(remote, local, **mirror_options)
    try:
        return mirror.start()
    except BaseException:
        mirror.close()
        raise
