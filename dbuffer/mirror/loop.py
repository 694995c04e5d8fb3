"""`MirrorLoop`: a mirror's steps. Each step is retried with backoff.

A mirror waits until it is elected, and then copies each newer version. If the target was removed,
the mirror waits to be elected again. An `AcknowledgementRelay` copies acknowledgements from the
target to the source in a separate thread. Copying a version can take minutes, and meanwhile the
sender must not presume that the target's receivers are dead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dbuffer.errors import (
    ClosedError,
    OptionError,
    StoreCorruptError,
    WriterSupersededError,
)
from dbuffer.format.layout import digest
from dbuffer.format.lineage import Relation, relation
from dbuffer.format.manifest import host_in_id
from dbuffer.mirror.records import AcknowledgementRelay
from dbuffer.mirror.stores import StoreTarget, Upstream, UpstreamReceiver
from dbuffer.mirror.upload import BucketTarget
from dbuffer.publish.publisher import Publication
from dbuffer.receive.follow_loop import FollowLoop
from dbuffer.runtime.timing import TIMING
from dbuffer.runtime.trouble import RetryLoop, log_once
from dbuffer.store.liveness import Process
from dbuffer.store.open_version import OvertakenError
from dbuffer.store.records import OwnRecord

logger = logging.getLogger(__name__)

FINAL = (ClosedError, OptionError, WriterSupersededError)
"""Errors that end a mirror without a retry. Any error of ``on_copied`` also ends the mirror."""

NO_STATS = {"copied": 0.0, "copied_bytes": 0.0, "copy_s": 0.0, "failures": 0.0}


def mirror_id(target: str) -> str:
    """Return the receiver id that all mirrors into the same target on one machine share."""
    place = target
    # Use device and inode: two containers can have different directories at the same path.
    with contextlib.suppress(OSError):
        directory = Path(target).stat()
        place = f"{directory.st_dev} {directory.st_ino}"
    return f"mirror-{host_in_id()}-{digest(os.fsencode(f'{Process.here().machine} {place}'))}"


class MirrorLoop:
    """Loop of a mirror: it follows a source, and copies the source's versions into a target."""

    def __init__(
        self,
        source: Upstream,
        target: StoreTarget | BucketTarget,
        on_copied: Callable[[Publication], None] | None,
    ) -> None:
        self._source = source
        self._target = target
        self._on_copied = on_copied
        self._receiver: UpstreamReceiver | None = None
        """Receiver that reads the source, or None while this mirror is not elected."""
        self._relay: AcknowledgementRelay | None = None
        self._check_at = 0.0
        self.record = OwnRecord("mirror")
        """Status record of this mirror. Other processes see it once the mirror is elected."""
        self.is_fit = threading.Event()
        """Event that is set once the target has no version of an earlier start of the sender."""
        self.problem: Exception | None = None
        """Error of the last attempt to be elected, or None if the attempt raised no error."""
        self.published: int | None = None
        """Number of the newest version of the source that the mirror need not copy again."""

    def run(self, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                receiver = self._wait_for_turn(stop)
                if receiver is not None:
                    self._mirror(receiver, stop)
        finally:
            self._close()

    def wake(self) -> None:
        if self._receiver is not None:
            self._receiver.wake()

    def _wait_for_turn(self, stop: threading.Event) -> UpstreamReceiver | None:
        name = self._source.name
        retry = RetryLoop(logger, failed=f"mirroring {name}: ", final=FINAL, stop=stop)
        while not stop.is_set():
            with retry.attempt():
                # The mirror is already elected if the last attempt failed after the election.
                if self._target.is_elected or self._target.elect():
                    retry.succeeded(f"mirroring {name}")
                    self._receiver = self._source.open_receiver(mirror_id(self._target.name))
                    self.record = self._receiver.record
                    self.record.count(**NO_STATS)
                    self.is_fit.set()
                    return self._receiver
                is_fit = self._target.is_fit()
                retry.succeeded(f"mirroring {name}")
                if is_fit and not self.is_fit.is_set():
                    logger.info("another mirror of %s is at work: standing by", self._target.name)
                    self.is_fit.set()
            self.problem, wait_s = retry.error, TIMING.retry_min_s
            if retry.error is not None:
                wait_s = min(retry.retry_s, 2 * TIMING.retry_min_s)
                self.record.count(failures=1)
                self.record.write_problem(retry.error, None)
            stop.wait(wait_s)
        return None

    def _mirror(self, receiver: UpstreamReceiver, stop: threading.Event) -> None:
        retry = FollowLoop(receiver, "mirroring", logger, forked="follow", final=FINAL, stop=stop)
        while not stop.is_set():
            copied = None
            with retry.attempt():
                until_check_s = self._check_at - time.monotonic()
                if until_check_s <= 0:
                    self._check()
                elif retry.wait(self.published, timeout_s=until_check_s) is not None:
                    copied = self._copy_newest(receiver)
                    retry.used()
            if copied is not None:
                if self._on_copied is not None:
                    self._on_copied(copied)
                self.published = copied.version
            elif retry.has_forked:
                self._close_target()
                self.published = None
            elif self._target.is_removed():
                logger.warning("%s was removed: making it again", self._target.name)
                self._close()
                self._target.resign()
                self.published = None
                return

    def _copy_newest(self, receiver: UpstreamReceiver) -> Publication | None:
        """Copy the newest version, or return None if it is already copied or was overwritten."""
        if self._relay is None:
            self._target.open()
            writer = self._source.records(receiver.record)
            self._relay = AcknowledgementRelay(self._target.receivers, writer)
        self._note_published(receiver)
        with receiver.open_seen(self.published) as opened:
            if opened is None:
                return None
            try:
                copied = self._target.copy(opened, receiver)
            except OvertakenError:
                return None
        receiver.record.count(copied=1, copied_bytes=copied.num_bytes, copy_s=copied.duration_s)
        receiver.record.write(staged=copied.id, problem=None, problem_version=None)
        return copied

    def _note_published(self, receiver: UpstreamReceiver) -> None:
        target, source = self._target.newest(), receiver.last_seen
        if target is None or source is None or target.version == self.published:
            return
        match relation(target.lineage, source):
            case Relation.SAME | Relation.BEHIND:
                self.published = target.version
                receiver.record.write(staged=target.id)
            case Relation.AHEAD:  # the source may have lost this version; copy the next version
                log_once(
                    logger,
                    "%s went back to version %d, and %s has version %d: it stays, until more is "
                    "published",
                    *(self._source.name, source.id.number, self._target.name, target.version),
                )
                self.published = source.id.number

    def _check(self) -> None:
        self._check_at = time.monotonic() + TIMING.bucket_heartbeat_s
        try:
            if self._relay is not None:
                self._target.check()
        except StoreCorruptError:
            self.published = None
            raise

    def _close(self) -> None:
        # Close the receiver first: then the relay's last records say that the receiver has ended.
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
