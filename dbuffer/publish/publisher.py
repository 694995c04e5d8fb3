"""`Publisher`: the path of every version: find what changed, claim, write, commit.

One thread at a time publishes or closes, and no forked child does. A writer that was closed in the
middle of a publish would write into whatever file has got its descriptor's number since; a lock
that was held during a fork is never released in the child.
"""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dbuffer.errors import ClosedError, StoreBusyError
from dbuffer.format.layout import Layout
from dbuffer.format.manifest import Manifest, decode, encode
from dbuffer.io.copier import Copier
from dbuffer.io.footer import Footer
from dbuffer.publish.delta_chain import UNREADABLE, DeltaChain, is_worth_a_delta
from dbuffer.publish.draft import Draft, Progress, checked_metadata
from dbuffer.publish.publication import Publication
from dbuffer.publish.shares import ClaimInfo, Share
from dbuffer.ranks.world import World
from dbuffer.runtime.closing import Closing, ProcessBound
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.hold import hold_version
from dbuffer.weights.sources import Source

EARLIER_SENDER = 0
"""Base of a sender that has published nothing: it resumes from the last version in the store."""


@dataclass(frozen=True, slots=True, eq=False)
class PublishRequest:
    """Weights to publish, and what is published with them."""

    source: Source
    footer: Footer | None
    """Footer of their file; None for a stream."""
    version: int | None
    """Number of the version on rank 0; None: one above the last."""
    metadata: Mapping[str, Any] | None
    """Metadata on rank 0."""
    base: int | None = None
    """Version that a delta may lead from, alike on all ranks; None: none."""
    progress: Progress | None = None
    check: Callable[[], None] = lambda: None
    """Called when the weights have been read, before the commit; an error prevents that."""


class Published(NamedTuple):
    """Result of a publish."""

    version: int
    layout: Layout
    delta_bytes: int | None
    """Bytes of the delta that leads to the version; None: there is none."""


class Publisher(Closing, ProcessBound, ABC):
    """A store's writer, closed for good when its ``with`` block is left.

    Args:
        store: the store.
        world: the ranks that publish together.
        copier: its threads do the work.
        chain: rank 0's; None on all others.
        hashed: whether versions have checksums.
        has_deltas: whether versions are published as deltas where that is worth it.
    """

    _closed_message: str
    """Message for calls of a closed one, with ``{store}`` in it."""

    def __init__(
        self,
        store: DoubleBuffer,
        world: World,
        copier: Copier,
        chain: DeltaChain | None,
        *,
        hashed: bool,
        has_deltas: bool,
    ) -> None:
        self._pid = os.getpid()
        # Reentrant: a callback in a publish, or a signal handler on top of it, may come here too.
        self._lock = threading.RLock()
        self._publishing_thread: int | None = None
        self._must_close = False
        names = ("versions", "bytes", "deltas", "delta_bytes", "publish_s")
        self._stats = dict.fromkeys(names, 0.0)
        self._buffers = store
        self._world = world
        self._copier = copier
        self._chain = chain
        self._hashed = hashed
        self._has_deltas = has_deltas
        self._base = EARLIER_SENDER if has_deltas else None
        """Version that the next one may build upon, as far as this rank knows; None: none."""
        self._share: Share | None = None
        """This rank's part of that version."""
        self._draft: Draft | None = None
        """Version that is being published; on rank 0."""
        self._metadata: dict[str, Any] = {}

    @property
    def store(self) -> Path:
        """The store's directory."""
        return self._buffers.root

    @property
    def stats(self) -> dict[str, float]:
        """Versions and their bytes, deltas and theirs, seconds that publishing took."""
        return dict(self._stats)

    def wait_applied(
        self, version: int, *, receivers: int | str | Collection[str] = 1, timeout_s: float = 60.0
    ) -> None:
        """Wait until receivers have applied ``version`` or a later one.

        An engine of many ranks is one receiver, and has applied it when all ranks have.

        Args:
            version: as `send` or `publish` returned it.
            receivers: how many of them, whichever; or the id of one, or the ids of those to wait
                for.
            timeout_s: for how long.

        Raises:
            OptionError: one of these is not what it may be.
            WaitTimeoutError: they have not, in time; the message says who has.
            ReceiverFailedError: one of those named cannot apply it, or its process has ended.
            StoreNotFoundError, WriterSupersededError: the store was removed, or another sender has
                it.
        """
        self._check_open()
        self._world.first(
            "wait for receivers",
            lambda: self._lead().drafts.writer.wait_applied(version, receivers, timeout_s),
        )

    def close(self) -> None:
        """Give the store up, after the publish under way. The last version stays published."""
        if self._pid != os.getpid():  # nobody publishes here, and who had the lock is not here
            self._close()
            return
        with self._lock:
            if self._is_publishing:
                self._must_close = True  # this very thread: when it ends
            else:
                self._close()

    def _close(self) -> None:
        """Close it, for good; called once at least."""
        self._world.close()
        self._copier.close()
        if self._chain is not None:
            self._chain.drafts.close()

    def _check_open(self) -> None:
        """Raise a `ClosedError` where it is closed, or this is a forked child."""
        if self._pid != os.getpid() or not self._world.is_open:
            raise ClosedError(self._closed_message.format(store=self.store))

    @property
    def _is_publishing(self) -> bool:
        """Whether a publish is under way; with the lock held, in this very thread."""
        return self._publishing_thread is not None

    @contextlib.contextmanager
    def _publishing(self) -> Iterator[None]:
        """Publish in a ``with`` block, when those of other threads are over.

        Raises:
            ClosedError: before anything is waited for, and after.
            StoreBusyError: this very thread is in the middle of a publish.
        """
        self._check_open()
        with self._lock:
            if self._is_publishing:
                raise StoreBusyError("this thread is already publishing with this sender")
            self._publishing_thread = threading.get_ident()
            try:
                self._check_open()
                yield
            finally:
                self._publishing_thread = None
                if self._must_close:
                    self._close()

    def _note(self, started: float, published: Published) -> Publication:
        """Count a version in, which took since ``started``, by `time.monotonic`."""
        version, layout, delta_bytes = published
        publication = Publication.of(version, layout, started, delta_bytes)
        self._stats["versions"] += 1
        self._stats["bytes"] += publication.num_bytes
        self._stats["publish_s"] += publication.duration_s
        if delta_bytes is not None:
            self._stats["deltas"] += 1
            self._stats["delta_bytes"] += delta_bytes
        return publication

    @abstractmethod
    def _make_share(self, footer: Footer | None) -> Share:
        """Return this rank's part of versions with such a file, empty."""

    def _lead(self) -> DeltaChain:
        if self._chain is None:
            raise ClosedError(f"rank {self._world.rank} is not the writer of {self.store}")
        return self._chain

    def _publish(self, request: PublishRequest) -> Published:
        """Publish weights, whole or as what changed. Collective.

        Raises:
            DBufferError: nothing was published, on any rank, and the next version is whole.
        """
        return self._write(request, self._find_diff(request))

    def _find_diff(self, request: PublishRequest) -> Share | None:
        """Return this rank's part of the base, with what changed since; None: publish it whole.

        Until the version is committed, there is no base for the next one.
        """
        share, footer = self._share, request.footer
        self._share, self._base = None, None
        if request.base == EARLIER_SENDER:
            share = self._resume(footer)
        if request.base is None or share is None or share.footer is None or footer is None:
            return None
        # By content: the footers of one rank may be the same object, and those of another not.
        if share.footer.layout_xxh3 != footer.layout_xxh3:
            return None
        num_changed = share.find(request.source)
        return share if is_worth_a_delta(num_changed, footer.layout) else None

    def _write(self, request: PublishRequest, base: Share | None) -> Published:
        """Claim a buffer, write and commit: what changed in ``base``, or all weights without it."""
        try:
            return self._claim_write_commit(request, base)
        except BaseException:
            self._abandon()
            raise

    def _claim_write_commit(self, request: PublishRequest, base: Share | None) -> Published:
        is_delta = base is not None
        claim = self._world.first("claim a buffer", lambda: self._claim(request, is_delta=is_delta))
        info, draft = ClaimInfo(**claim), self._draft
        if base is not None:
            share = base
            checksums = share.write_diff(info, draft)
        else:
            share = self._make_share(request.footer)
            checksums = share.write_all(request.source, info, draft, request.progress)
        delta_bytes = self._world.first(
            "commit the version", lambda: self._commit(request, share, checksums, is_delta=is_delta)
        )
        if self._has_deltas:
            self._share, self._base = share, info.version
        footer = request.footer or self._lead().last.footer
        return Published(info.version, footer.layout, delta_bytes)

    def _claim(self, request: PublishRequest, *, is_delta: bool) -> dict[str, Any]:
        """Begin a version on rank 0, for all ranks to fill: the fields of a `ClaimInfo`."""
        chain = self._lead()
        version = chain.drafts.writer.next_version(request.version)
        self._metadata = checked_metadata(request.metadata)
        hashed = self._hashed
        draft = chain.begin(version, request.footer, is_delta=is_delta, hashed=hashed)
        self._draft = draft
        # Not where there are checksums: those of a file's bytes are taken as they lie there, and
        # what is not written now may have been damaged since it was.
        is_patched = is_delta and not hashed and chain.base.follows(draft.claim.held_before)
        return asdict(ClaimInfo.of(version, draft, is_patched=is_patched))

    def _commit(
        self,
        request: PublishRequest,
        share: Share,
        checksums: list[int] | None,
        *,
        is_delta: bool,
    ) -> int | None:
        """Publish on rank 0 what all ranks have written; the bytes of the delta that leads to it.

        Where the store is to be flushed, one flush is enough: pages that other processes of this
        machine have written are pages of the same file.
        """
        chain, draft = self._lead(), self._draft
        if draft is None:
            raise ClosedError("no version was begun, so there is nothing to commit")
        if is_delta:
            chain.add_delta(draft, share.take_diff(checksums), self._copier)
        request.check()
        delta_bytes = chain.commit(draft, self._metadata, checksums)
        self._draft = None
        return delta_bytes

    def _abandon(self) -> None:
        """Give up what was begun, if anything was."""
        if self._draft is not None:
            self._draft.abandon()
            self._draft = None

    def _resume(self, footer: Footer | None) -> Share | None:
        """Build upon the version that an earlier sender left, if all ranks can read it. Collective.

        It is read whole, and compared with its checksums, where it has them. Once: after an error,
        the next version is whole.
        """
        world = self._world
        encoded = world.first("look at the last version", lambda: self._look(footer))
        if encoded is None:
            return None
        manifest = decode(Manifest, encoded.encode())
        share = self._make_share(footer or self._lead().last.footer)
        problems = world.each("read it back", lambda: self._read_back(manifest, share))
        checksums = None
        if self._hashed and not any(problems):
            checksums = share.checksums()
        is_right = world.first("compare it", lambda: self._is_right(problems, checksums))
        return share if is_right else None

    def _look(self, footer: Footer | None) -> str | None:
        """Return on rank 0 the manifest of the version that can be built upon, encoded."""
        head = self._lead().resume_from_store(footer, hashed=self._hashed)
        return None if head is None else encode(head.manifest).decode()

    def _read_back(self, manifest: Manifest, share: Share) -> str | None:
        """Read this rank's part of a version; return what hinders that, if anything does."""
        try:
            held = hold_version(self._buffers, manifest.version, manifest.history)
            if held is not None:
                with held:
                    if held.manifest == manifest:
                        share.read_back(held)
                        return None
        except UNREADABLE as error:
            return str(error)
        return f"it does not see version {manifest.version} as rank 0 does"

    def _is_right(self, problems: Sequence[str | None], checksums: list[int] | None) -> bool:
        """Whether all ranks have what was published; else log why not. On rank 0."""
        chain = self._lead()
        for rank, problem in enumerate(problems):
            if problem is not None:
                chain.log_full_publish(
                    f"rank {rank}: {problem}" if self._world.size > 1 else problem
                )
                return False
        if chain.head is None or chain.head.checksums != checksums:
            chain.log_full_publish("it was damaged after it was published")
            return False
        return True
