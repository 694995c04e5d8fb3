"""The two ends of a mirror, each of which is a store's directory or a bucket."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from dbuffer.format.layout import digest
from dbuffer.format.manifest import Pointer, host_in_id
from dbuffer.format.objects import BucketPointer
from dbuffer.io.copier import Copier
from dbuffer.mirror.relay import RecordWriter
from dbuffer.publish.draft import Progress
from dbuffer.publish.publication import Publication
from dbuffer.receive.follow_loop import Followed
from dbuffer.receive.reader import VersionVerifier
from dbuffer.store.hold import HeldVersion
from dbuffer.store.liveness import Process


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorOptions:
    """Checked options of a mirror, as both of its ends get them."""

    poll_interval_s: float
    reader_timeout_s: float
    allow_shared_store: bool
    copier: Copier
    """Reads and hashes."""
    progress: Progress | None


class SourceReceiver(Followed, Protocol):
    """Receiver that a mirror follows its source with."""

    @property
    def reader(self) -> VersionVerifier:
        """Verifies the versions that are held."""

    def hold_seen(
        self, newer_than: int | None = None
    ) -> AbstractContextManager[HeldVersion | None]:
        """Hold the version that `wait_for_version` has just returned; None: none is so new."""

    def wake(self) -> None:
        """Let a wait in another thread look at the source at once."""

    def close(self) -> None: ...


class Source(Protocol):
    """Store or bucket that a mirror follows."""

    @property
    def name(self) -> str:
        """Its path or URL, for messages."""

    def exists(self) -> bool:
        """Whether it is there, published to or not."""

    def newest(self) -> Pointer | BucketPointer | None:
        """Read which version is the newest; None: there is none."""

    def is_copy(self) -> bool:
        """Whether a mirror published its newest version."""

    def open_receiver(self, name: str) -> SourceReceiver:
        """Follow it, as the receiver of this name."""

    def records(self, receiver: SourceReceiver) -> RecordWriter:
        """Return the place in it to which acknowledgements are relayed."""


class Copy(Protocol):
    """Target of a mirror while it copies."""

    def copy(self, held: HeldVersion, receiver: SourceReceiver) -> Publication:
        """Publish a held version once more.

        Raises:
            OvertakenError: it was overwritten meanwhile.
        """

    def close(self) -> None: ...


class Target(Protocol):
    """Store or bucket in which a mirror publishes."""

    @property
    def name(self) -> str:
        """Its path or URL, for messages."""

    @property
    def is_elected(self) -> bool:
        """Whether it is this mirror that copies."""

    def elect(self, source: Source) -> bool:
        """Become the mirror of the target, if no other is.

        Raises:
            OptionError: it is a sender's.
        """

    def resign(self) -> None:
        """Let another mirror be elected."""

    def is_removed(self) -> bool:
        """Whether it was removed since this mirror was elected, which is over with it."""

    def is_fit(self, source: Source) -> bool:
        """Whether its version leads to the source's, as far as both can be read."""

    def newest(self) -> Pointer | BucketPointer | None:
        """Read which version is the newest; None: there is none."""

    def begin(self, source: Source, receiver: SourceReceiver) -> Copy:
        """Become the writer, once there is something to write.

        Raises:
            OptionError: it holds versions that must not be replaced.
        """


def mirror_id(target: str) -> str:
    """Return the id of a mirror; it stays the same when the container starts it again.

    Containers of one host name and one path, in two clusters say, relay to one bucket.
    """
    here = Process.here()
    known = f"{here.machine} {here.pid_namespace} {target}"
    return f"mirror-{host_in_id()}-{digest(os.fsencode(known))}"
