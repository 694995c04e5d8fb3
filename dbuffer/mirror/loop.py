"""`MirrorLoop`: a mirror's steps, all under one retry with backoff.

A mirror is elected, looks for a newer version, copies it, and compares the target with it now and
then. A step that fails is logged, noted in the source, and tried again; a mirror that loses its
target is elected anew. Only the errors of `FINAL` end a mirror: all others may pass.

Acknowledgements go the other way, under a retry of the same kind but in a thread of their own
(`AcknowledgementRelay`): a copy may take minutes, and a sender must not take its receivers for dead
meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection

from msgspec.structs import replace

from dbuffer.errors import (
    ClosedError,
    OptionError,
    StoreCorruptError,
    WriterSupersededError,
)
from dbuffer.format.lineage import Lineage, Relation, relation
from dbuffer.format.manifest import ReceiverRecord
from dbuffer.mirror.records import (
    ReceiverKey,
    ReceiversOfBucket,
    RecordWriter,
    key_of,
    mirror_id,
)
from dbuffer.mirror.sources import Source, SourceReceiver
from dbuffer.mirror.stores import StoreTarget
from dbuffer.mirror.upload import BucketTarget
from dbuffer.publish.publication import Publication
from dbuffer.receive.follow_loop import FollowLoop
from dbuffer.runtime.timing import TIMING
from dbuffer.runtime.trouble import RetryLoop, log_once
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.hold import OvertakenError
from dbuffer.store.records import OwnRecord

logger = logging.getLogger(__name__)

FINAL = (ClosedError, OptionError, WriterSupersededError)
"""Errors that end a mirror, besides errors of ``on_copied``: no retry mends them. The section "What
ends a mirror" of docs/object-storage.md says what to do about each."""

RELAY_S = 0.05
"""Interval at which a store's records are read; only changed ones go over the network."""

NO_STATS = {"copied": 0.0, "copied_bytes": 0.0, "copy_s": 0.0, "failures": 0.0}


class MirrorLoop:
    """Follows a source and copies its versions into a target; see the module.

    Args:
        source: where versions come from.
        target: where they go, if this mirror is elected.
        on_copied: called with each version that was copied.
    """

    def __init__(
        self,
        source: Source,
        target: StoreTarget | BucketTarget,
        on_copied: Callable[[Publication], None] | None,
    ) -> None:
        self._source = source
        self._target = target
        self._on_copied = on_copied
        self._retry: FollowLoop | None = None
        self._receiver: SourceReceiver | None = None
        """Follows the source while this mirror is elected and runs."""
        self._relay: AcknowledgementRelay | None = None
        """Relays acknowledgements while the target is open, from the first version on."""
        self._check_at = 0.0
        self.record = OwnRecord("mirror")
        """The receiver's record; before this mirror is elected, no other process sees it."""
        self.is_fit = threading.Event()
        """Set once readers of the target find nothing of an earlier run."""
        self.published: int | None = None
        """Number of the newest version of the source that need not be copied; ``on_copied`` has
        returned then."""

    def run(self, stop: threading.Event) -> None:
        """Take step after step until ``stop`` is set; an error of `FINAL` ends it as well."""
        retry = self._retry = FollowLoop(
            self, "mirroring", logger, forked="follow", final=FINAL, stop=stop
        )
        try:
            while not stop.is_set():
                copied = None
                with retry.attempt():
                    until_check_s = self._check_at - time.monotonic()
                    if until_check_s <= 0:
                        self._check()
                    elif retry.wait(self.published, timeout_s=until_check_s) is not None:
                        copied = self._copy_newest()
                        retry.used()
                if copied is not None:
                    if self._on_copied is not None:
                        self._on_copied(copied)
                    self.published = copied.version
                elif retry.has_forked:
                    self._close_target()
                    self.published = None
                elif self._target.is_removed():
                    logger.warning("%s was removed: it is made anew", self._target.name)
                    self._close()
                    self._target.resign()
                    self.published = None
        finally:
            self._close()

    @property
    def problem(self) -> Exception | None:
        """Error of the last step, or None if it worked."""
        failure = None if self._retry is None else self._retry.failure
        return None if failure is None else failure.error

    def wake(self) -> None:
        """Look for a version soon."""
        if self._receiver is not None:
            self._receiver.wake()

    # What is followed, as `FollowLoop` sees it

    @property
    def store(self) -> str:
        return self._source.name

    @property
    def seen(self) -> Lineage | None:
        return None if self._receiver is None else self._receiver.seen

    def wait_for_version(
        self,
        newer_than: int | None = None,
        timeout_s: float | None = None,
        stop_event: threading.Event | None = None,
    ) -> int | None:
        """Wait for this mirror's turn if it is not elected, else for a version to copy."""
        if self._receiver is None:
            self._elect()
        if self._receiver is not None:
            return self._receiver.wait_for_version(newer_than, timeout_s, stop_event)
        wait_s = TIMING.retry_min_s if timeout_s is None else min(timeout_s, TIMING.retry_min_s)
        (stop_event or threading.Event()).wait(wait_s)
        return None

    def follow_fork(self) -> None:
        if self._receiver is not None:
            self._receiver.follow_fork()

    # Steps

    def _elect(self) -> None:
        """Become the mirror of the target and follow the source, if no other mirror is at work.

        Raises:
            WaitTimeoutError: readers of the target find another run's version.
        """
        if self._target.is_elected or self._target.elect(self._source):  # by an earlier run
            self._receiver = self._source.open_receiver(mirror_id(self._target.name))
            self.record = self._receiver.record
            self.record.count(**NO_STATS)
            self.is_fit.set()
        elif self._target.is_fit(self._source):
            if not self.is_fit.is_set():
                logger.info("another mirror of %s is at work: standing by", self._target.name)
            self.is_fit.set()

    def _copy_newest(self) -> Publication | None:
        """Copy the version that was just seen; None: it is there, or was overwritten meanwhile."""
        receiver = self._receiver
        assert receiver is not None  # noqa: S101 - it has seen a version
        if self._relay is None:
            self._target.open(self._source)
            self._relay = AcknowledgementRelay(self._target.receivers, self._source.records())
        self._note_published(receiver)
        with receiver.hold_seen(self.published) as held:
            if held is None:
                return None
            try:
                copied = self._target.copy(held, receiver)
            except OvertakenError:
                return None
        receiver.record.count(copied=1, copied_bytes=copied.num_bytes, copy_s=copied.duration_s)
        receiver.record.write(staged=copied.id, problem=None, problem_version=None)
        return copied

    def _note_published(self, receiver: SourceReceiver) -> None:
        """Note which of the source's versions the target has: of a commit that failed, too."""
        there, seen = self._target.newest(), receiver.seen
        if there is None or seen is None or there.version == self.published:
            return
        match relation(there.lineage, seen):
            case Relation.SAME | Relation.BEHIND:
                self.published = there.version
                receiver.record.write(staged=there.id)
            case Relation.AHEAD:  # which the source may have lost; what comes next is copied
                log_once(
                    logger,
                    "%s went back to version %d, and %s has version %d: it stays, until more is "
                    "published",
                    *(self._source.name, seen.id.number, self._target.name, there.version),
                )
                self.published = seen.id.number

    def _check(self) -> None:
        """Compare the target with the copied version; if they differ, it is copied again.

        Raises:
            StoreCorruptError: they differ.
        """
        self._check_at = time.monotonic() + TIMING.bucket_heartbeat_s
        try:
            if self._relay is not None:
                self._target.check()
        except StoreCorruptError:
            self.published = None
            raise

    def _close(self) -> None:
        """Close what was opened for the turn, which may go on in another run."""
        # First the receiver: the last records that are relayed say that it has ended.
        receiver, self._receiver = self._receiver, None
        try:
            if receiver is not None:
                receiver.close()
        finally:
            self._close_target()

    def _close_target(self) -> None:
        relay, self._relay = self._relay, None
        try:
            if relay is not None:
                relay.close()
        finally:
            self._target.close()


class AcknowledgementRelay:
    """Copies receivers' records from the target to the source, until :meth:`close`.

    A sender waits for receivers by the records in its own store; a mirror's readers have theirs in
    the local store, or in the bucket. Relays chain as mirrors do: a relay of the next store finds
    these records again. A relay keeps a record alive for as long as the receiver itself may live;
    then it copies the record's last state, and with it that the receiver has ended.

    Args:
        reader: reads the records.
        writer: writes them.
    """

    def __init__(self, reader: DoubleBuffer | ReceiversOfBucket, writer: RecordWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._records: list[ReceiverRecord] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dbuffer-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Relay what there is, and stop."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        name = self._writer.name
        retry = RetryLoop(logger, failed=f"cannot relay acknowledgements to {name}: ")
        of_bucket = isinstance(self._reader, ReceiversOfBucket)
        interval_s = TIMING.bucket_list_s if of_bucket else RELAY_S
        while not self._stop.wait(interval_s if retry.error is None else retry.retry_s):
            with retry.attempt():
                self._relay()
                retry.succeeded(f"relaying acknowledgements to {name}")
        for last in (self._relay, self._writer.close):
            with retry.attempt():
                last()

    def _relay(self) -> None:
        # Before records are read: a record that is read after its receiver's end is the last one.
        ended = {key_of(record) for record in self._records if not self._reader.may_live(record)}
        self._records = self._reader.receivers()
        self._writer.write([_relayed(record, ended) for record in self._records])


def _relayed(record: ReceiverRecord, ended: Collection[ReceiverKey]) -> ReceiverRecord:
    """Return the part of a record that concerns the sender; the version held is in the mirror."""
    has_ended = record.has_ended or key_of(record) in ended
    return replace(record, held=None, stats={}, is_relayed=True, has_ended=has_ended)
