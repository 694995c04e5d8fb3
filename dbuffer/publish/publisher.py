"""`Publisher`: the path of every version, with the functions that do each step.

1. Check: the sender's `send`, before anything is touched.
2. Find the base of a delta, if there is to be one: `_take_base`. It also says why there is none.
3. On a network mount, with deltas: bring the copy in memory to the next version, and learn what
   changed (`Share.update`).
4. Claim the idle buffer: `_claim`, `DeltaChain.begin`, `Draft`, `BufferWriter.claim`.
5. Write: `Share.write`.
6. On a local mount, with deltas: compare the file with the last version's (`Share.compare`).
7. Commit: `_commit`, `DeltaChain.add_delta` and `commit`, `Draft.commit`, `BufferWriter.commit`,
   which replaces the pointer: from then on receivers see the version.

A sharded trainer does each step on all ranks, 2, 4 and 7 on rank 0 for all.

One thread at a time publishes or closes, and no forked child does. A writer that was closed in the
middle of a publish would write into another file that has its descriptor's number since; a lock
that was held during a fork is never released in the child.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dbuffer.errors import ClosedError, StoreBusyError
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import Lag
from dbuffer.io.changes import Changes
from dbuffer.io.copier import Copier
from dbuffer.io.footer import Footer
from dbuffer.publish.delta_chain import DeltaChain
from dbuffer.publish.draft import ClaimInfo
from dbuffer.publish.publication import Publication
from dbuffer.publish.shares import PublishRequest, Share
from dbuffer.ranks.world import World
from dbuffer.runtime.closing import Closing, ProcessBound
from dbuffer.store.acknowledgements import receiver_lags
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.weights.sources import Source

_FIRST = "this sender has published no version yet"
_FAILED = "the last publish failed"


class Publisher(Closing, ProcessBound, ABC):
    """A store's writer, closed for good when its ``with`` block is left.

    Args:
        store: the store.
        world: the ranks that publish together.
        copier: its threads do the work.
        chain: rank 0's; None on all others.
        maps_files: whether the store is on a local mount, where each version has a file.
        hashed: whether versions have checksums.
        has_deltas: whether versions with few changes are published as deltas.
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
        maps_files: bool,
        hashed: bool,
        has_deltas: bool,
    ) -> None:
        super().__init__()
        # Reentrant: a progress callback, or a signal handler during a publish, may call close().
        self._lock = threading.RLock()
        self._publishing_thread: int | None = None
        self._must_close = False
        names = ("versions", "bytes", "deltas", "delta_bytes", "publish_s")
        self._stats = dict.fromkeys(names, 0.0)
        self._buffers = store
        self._world = world
        self._copier = copier
        self._chain = chain
        self._maps_files = maps_files
        self._hashed = hashed
        self._has_deltas = has_deltas
        self._last_share: Share | None = None
        """This rank's part of the last version, if the next version may come with a delta."""
        self._why_no_base = _FIRST
        """Why there is none, if there is none."""
        self._footer: Footer | None = None

    @property
    def store(self) -> Path:
        """The store's directory."""
        return self._buffers.root

    @property
    def run(self) -> str:
        """Id of its run; on rank 0."""
        return self._lead().writer.record.token

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
            OptionError: an argument is invalid.
            WaitTimeoutError: too few did so in time; the message names the version of each.
            ReceiverFailedError: a named receiver cannot apply it, or its process has ended.
            StoreNotFoundError, WriterSupersededError: the store was removed, or another sender has
                it.
        """
        self._check_open()
        self._world.first(
            "wait for receivers",
            lambda: self._lead().writer.wait_applied(version, receivers, timeout_s),
        )

    def receiver_lags(self) -> dict[str, Lag]:
        """Return the lag behind the newest version of each living receiver, by its id.

        An engine of many ranks is one receiver. If several receivers have one id, the longest lag
        counts. A receiver that has applied no version is absent.

        Raises:
            StoreAccessError, StoreCorruptError: the store cannot be read.
        """
        return receiver_lags(self._buffers)

    def close(self) -> None:
        """Give the store up, after the publish under way. The last version stays published."""
        if self._is_inherited:  # the thread that holds the lock is not in this process
            self._close()
            return
        with self._lock:
            if self._publishing_thread is not None:
                self._must_close = True  # in this very thread: when its publish ends
            else:
                self._close()

    def _close(self) -> None:
        """Close it, for good; called once at least."""
        self._world.close()
        self._copier.close()
        if self._chain is not None:
            self._chain.close()
        self._last_share = None  # a mapped file, or a copy of the model

    def _check_open(self) -> None:
        """Raise a `ClosedError` where it is closed, or this is a forked child."""
        if self._is_inherited or not self._world.is_open:
            raise ClosedError(self._closed_message.format(store=self.store))

    @contextlib.contextmanager
    def _publishing(self) -> Iterator[None]:
        """Publish in a ``with`` block, after the publishes of other threads.

        Raises:
            ClosedError: before anything is waited for, and after.
            StoreBusyError: this very thread is in the middle of a publish.
        """
        self._check_open()
        with self._lock:
            if self._publishing_thread is not None:
                raise StoreBusyError("this thread is already publishing with this sender")
            self._publishing_thread = threading.get_ident()
            try:
                self._check_open()
                yield
            finally:
                self._publishing_thread = None
                if self._must_close:
                    self._close()

    def _count(self, publication: Publication) -> Publication:
        """Add a version to the statistics."""
        self._stats["versions"] += 1
        self._stats["bytes"] += publication.num_bytes
        self._stats["publish_s"] += publication.duration_s
        if publication.delta_bytes is not None:
            self._stats["deltas"] += 1
            self._stats["delta_bytes"] += publication.delta_bytes
        return publication

    def _footer_of(self, source: Source) -> Footer:
        """Return the footer of a source's file: the last one, if the tensors are the same."""
        self._footer = Footer.like(self._footer, source.specs, source.aliases)
        return self._footer

    @abstractmethod
    def _make_share(self, footer: Footer | None) -> Share:
        """Return this rank's part of versions with this footer; it holds no version yet."""

    def _lead(self) -> DeltaChain:
        assert self._chain is not None  # noqa: S101 - on rank 0
        return self._chain

    def _publish(self, request: PublishRequest) -> Publication:
        """Publish weights, with a delta if there is a base and few words changed. Collective.

        On a local mount each version is written whole, and the delta is a second file. On a network
        mount a version with a delta mostly has no other file.

        Raises:
            DBufferError: nothing was published, on any rank, unless the message says so; and the
                next version is a full one.
        """
        return self._publish_upon(self._take_base(request.footer), request)

    def _take_base(self, footer: Footer | None) -> Share | None:
        """Take the last version, if the next may come with a delta from it. Collective.

        Until the next version is committed there is none: after an error, the one after the error
        comes without a delta.

        Args:
            footer: footer of the new version's tensors. Default: any tensors.
        """
        base, self._last_share = self._last_share, None
        if base is None:
            self._explain_full(self._why_no_base)
            self._why_no_base = _FAILED
        # By content: a rank may have one object for both footers, and another rank two.
        elif footer is not None and base.footer.layout_xxh3 != footer.layout_xxh3:
            self._explain_full("the last version has other tensors")
            return None
        return base

    def _drop_base(self, why: str) -> None:
        """Publish the next version without a delta."""
        self._last_share, self._why_no_base = None, why

    def _explain_full(self, reason: str) -> None:
        if self._has_deltas and self._chain is not None:
            self._chain.explain_full(reason)

    def _publish_upon(self, base: Share | None, request: PublishRequest) -> Publication:
        """Publish a version, and a delta that leads to it from ``base`` if that is worth it."""
        world = self._world
        share = self._make_share(request.footer) if base is None else base
        changes = None
        try:
            if self._has_deltas and not self._maps_files:
                changes = share.update(request, is_compared=base is not None)
            fields = world.first(
                "claim a buffer", lambda: self._claim(request, base is not None, changes)
            )
            info = ClaimInfo(**fields)
            checksums = share.write(request, info)
            if base is not None and self._maps_files:
                changes = share.compare()
            delta_bytes = world.first(
                "commit the version", lambda: self._commit(request, changes, checksums)
            )
        except BaseException:
            share.unmap()
            self._abandon()
            raise
        share.version = version = VersionId.parse(info.version)
        if self._has_deltas:
            self._last_share = share
        footer = request.footer or self._lead().last.footer
        return Publication.of(version, footer.layout, request.started, delta_bytes)

    def _claim(
        self, request: PublishRequest, has_base: bool, changes: Changes | None
    ) -> dict[str, Any]:
        """Begin a version on rank 0, for all ranks to fill: the fields of a `ClaimInfo`."""
        chain, footer = self._lead(), request.footer
        with_delta = has_base
        if changes is not None and footer is not None:
            with_delta = chain.is_worth(changes, footer.layout)
        return asdict(ClaimInfo.of(chain.begin(request.version, footer, with_delta=with_delta)))

    def _commit(
        self, request: PublishRequest, changes: Changes | None, checksums: list[int] | None
    ) -> int | None:
        """Publish on rank 0 the ranks' writes; return the bytes of the delta to it.

        In a store that is flushed, rank 0's flush is enough: pages that other processes of this
        machine have written are pages of the same file.
        """
        chain = self._lead()
        if changes is not None:
            chain.add_delta(changes, checksums)
        request.source.check()
        return chain.commit(request.metadata, checksums)

    def _abandon(self) -> None:
        """Abandon the version that was begun, if one was."""
        if self._chain is not None:
            self._chain.abandon()
