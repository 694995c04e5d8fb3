"""`ShardedWeightSender`: all ranks of a trainer publish together, each what it holds.

Nothing is gathered, nothing is copied twice: see `shard_writer` for where it goes, and `shards` for
who writes what. Rank 0 is the store's writer; it commits when every rank has said that all that
it was to write is written, and on a network mount flushed.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import distributed

from dbuffer.errors import (
    ClosedError,
    DBufferError,
    InvalidWeightsError,
    OptionError,
    StoreAccessError,
)
from dbuffer.format.delta import require_compression
from dbuffer.format.layout import ITEM_BYTES, Layout, digest
from dbuffer.io.copier import MAX_DEFAULT_THREADS, Copier
from dbuffer.io.footer import Footer
from dbuffer.io.tensors import split_evenly
from dbuffer.publish import shards
from dbuffer.publish.delta_chain import DeltaChain
from dbuffer.publish.draft import Draft, Drafts, checked_metadata
from dbuffer.publish.publication import Publication
from dbuffer.publish.publisher import Publisher
from dbuffer.publish.shard_writer import (
    ClaimInfo,
    PartFileWriter,
    ShardWriter,
    SharedFileWriter,
    check_parts,
)
from dbuffer.publish.sharded_deltas import NOT_YET, Asked, ShardedDeltas
from dbuffer.publish.shards import Boxes, WriteAssignment
from dbuffer.ranks.agreement import Agreement
from dbuffer.runtime import options
from dbuffer.runtime.translated import TranslatedErrors
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.liveness import Process
from dbuffer.store.medium import Medium
from dbuffer.store.writer import BufferWriter
from dbuffer.weights.checkpoint import LazyTensor
from dbuffer.weights.names import Rename
from dbuffer.weights.sources import Describer, Source, Weights, is_stream

DEFAULT_RANK_TIMEOUT_S = 600.0


class ShardedWeightSender(Publisher):
    """The one writer of a store, for a trainer of many ranks: FSDP2, HSDP, TP, ZeRO-3.

    Every rank makes one, and every rank makes each call, with its own model: all of them are
    collective. Where one fails on one rank, it raises on all.

    Args:
        store: the store's directory; made (mode 0700) if it is not there.
        group: the ranks that hold the weights; None: all ranks of torch.distributed, which must
            be initialised. Rank 0 of the group is the store's writer.
        rank_timeout_s: how long the ranks wait for one that hangs. One that dies is noticed at
            once.
        durable: as for :class:`WeightSender`.
        checksum: as for :class:`WeightSender`.
        delta: publish what changed since the version before, where that is worth it; needs
            ``dbuffer[delta]``, and on each rank memory for a copy of what it writes.
        dtype: publish floating-point tensors in this dtype, cast while copying.
        rename: a :class:`NameMap`, a mapping of names, or a function from name to name.
        num_threads: threads of each rank that copy. Default: its share of the machine's cores, at
            most 8.
        reader_timeout_s: how long to wait for readers that still hold the buffer to be written,
            before they are evicted.
        allow_shared_store: accept a directory that belongs to someone else, or that others can
            write to.
        move_torchrl_aside: as for :class:`WeightSender`.

    Raises:
        OptionError: an option is not what it may be, or torch.distributed is not initialised.
        RankFailedError: a rank was lost, or failed for a reason that is none of ours.
        StoreBusyError, StoreAccessError, OptionError: as for
            :class:`WeightSender`.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        *,
        group: distributed.ProcessGroup | None = None,
        rank_timeout_s: float = DEFAULT_RANK_TIMEOUT_S,
        durable: bool = False,
        checksum: bool | Literal["auto"] = "auto",
        delta: bool = False,
        dtype: torch.dtype | None = None,
        rename: Rename | None = None,
        num_threads: int | None = None,
        reader_timeout_s: float = 60.0,
        allow_shared_store: bool = False,
        move_torchrl_aside: bool = False,
    ) -> None:
        found, wait_s, wrong = _find_place(store, rank_timeout_s, reader_timeout_s)
        self.store = found
        """The store's directory."""
        super().__init__()
        self._agreement = Agreement(group, timeout_s=wait_s)
        self._drafts: Drafts | None = None
        """What rank 0 has, and no other."""
        self._draft: Draft | None = None
        self._metadata: dict[str, Any] = {}
        self._copier = Copier(1)
        self._footer: Footer | None = None
        self._held: list[Boxes] = []
        self._planned: str | None = None
        self._plan = WriteAssignment((), ())
        self._deltas: ShardedDeltas | None = None
        self._output: ShardWriter = SharedFileWriter(self.store, owner_only=not allow_shared_store)

        def take_options() -> None:
            if wrong is not None:
                raise wrong
            options.choice("checksum", checksum, (True, False, "auto"))
            if options.flag("delta", delta):
                require_compression()
            self._buffers = DoubleBuffer(store, allow_shared_store=allow_shared_store)
            self._describer = Describer(dtype=dtype, rename=rename, sharded=True)
            threads = self._share_of_cores() if num_threads is None else num_threads
            self._copier = Copier(threads)

        def open_store() -> list[bool]:
            writer = BufferWriter(
                store,
                durable=durable,
                reader_timeout_s=reader_timeout_s,
                allow_shared_store=allow_shared_store,
                move_torchrl_aside=move_torchrl_aside,
            )
            self._drafts = Drafts(writer)
            medium = writer.medium
            self._check_reach(medium)
            checked = medium.has_checksums if checksum == "auto" else checksum
            return [medium.maps_files, checked]

        try:
            self._agreement.each("take its options", take_options)
            is_shared, self._checksum = self._agreement.first("open the store", open_store)
            if not is_shared:
                self._output = PartFileWriter(self.store, rank=self._agreement.rank)
            if delta:
                self._deltas = self._make_deltas()
        except BaseException:
            self.close()
            raise

    def send(
        self,
        weights: Weights,
        *,
        version: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Publication:
        """Publish weights of which each rank holds a part. Every rank makes this call.

        What the ranks describe must be the same: names, shapes, dtypes, the order. DTensors are
        written by the ranks that hold them; plain tensors are taken to be the same everywhere,
        and written by one rank. What can be written by rows, columns or other boxes is; the rest
        (strided shards, sums that are not added up, ZeRO-3) is gathered tensor by tensor.

        Args:
            weights: as for `WeightSender.send`, but no iterator. Of a ZeRO-3 model, the module.
            version: the same on all ranks; above all versions before. Default: the last plus one.
            metadata: anything JSON can hold. Rank 0's is published.

        Returns:
            The same on all ranks.

        Raises:
            InvalidWeightsError: something in the weights or the metadata cannot be published, or
                the ranks describe different weights. Nothing was written.
            RankFailedError: a rank was lost, or failed for a reason that is none of ours.
            VersionError, StoreFullError, StoreAccessError, WriterSupersededError, ClosedError:
                as `WeightSender.send`.
        """
        with self._closing_if_interrupted(), self._publishing(), self._agreement.call():
            started = time.monotonic()
            try:
                published = self._send(weights, version, metadata)
            except BaseException:
                self._output.drop()
                if self._deltas is not None:
                    self._deltas.abandon()
                if self._draft is not None:
                    self._draft.abandon()
                raise
        return self._note(started, *published)

    def wait_applied(
        self, version: int, *, receivers: int | str | Collection[str] = 1, timeout_s: float = 60.0
    ) -> None:
        """Wait until receivers have applied ``version`` or a later one. Every rank makes this call.

        See `WeightSender.wait_applied`. ``timeout_s`` is to be below ``rank_timeout_s``.

        Raises:
            OptionError, WaitTimeoutError, ReceiverFailedError, StoreNotFoundError,
                WriterSupersededError: on all ranks.
            RankFailedError: a rank was lost.
        """
        with self._closing_if_interrupted():
            self._check_open()
            self._agreement.first(
                "wait for receivers",
                lambda: self._lead().writer.wait_applied(version, receivers, timeout_s),
            )

    def _closing_if_interrupted(self) -> TranslatedErrors:
        """Make a collective call in a ``with`` block; one interrupted before it begins counts.

        Else this rank would make the next call together with ranks that still make this one.
        """

        def lose(error: BaseException) -> None:
            if not isinstance(error, DBufferError):
                self._agreement.close()

        return TranslatedErrors(lose)

    def _close(self) -> None:
        self._output.close()
        self._agreement.close()
        if self._drafts is not None:
            self._drafts.close()
        self._copier.close()

    def _check_open(self) -> None:
        if not self._agreement.is_open or self._pid != os.getpid():
            raise ClosedError(
                f"this sender of {self.store} is closed, has lost a rank, or was made before a "
                "fork; make a new one"
            )

    def _lead(self) -> Drafts:
        if self._drafts is None:
            raise ClosedError(f"rank {self._agreement.rank} is not the writer of {self.store}")
        return self._drafts

    def _check_reach(self, medium: Medium) -> None:
        hosts = {peer.machine: peer.host for peer in self._agreement.peers}
        if len(hosts) > 1 and not medium.reaches_other_hosts:
            raise StoreAccessError(
                f"the ranks run on {', '.join(sorted(hosts.values()))}, and {self.store} is on "
                f"{medium.filesystem}, which other hosts do not see: use a network mount"
            )

    def _share_of_cores(self) -> int:
        here = Process.here().machine
        ranks_here = sum(peer.machine == here for peer in self._agreement.peers)
        return max(1, min(MAX_DEFAULT_THREADS, (os.cpu_count() or 1) // ranks_here))

    def _send(
        self, weights: Weights, version: int | None, metadata: Mapping[str, Any] | None
    ) -> tuple[int, Layout, int | None]:
        ranks = self._agreement
        source, base = self._describe(weights, version)
        footer = self._output.footer_of(self._footer_of(source), self._plan)
        if self._deltas is not None:
            to_claim = functools.partial(self._asked, version, metadata)
            asked = Asked(source, footer, self._plan, base, to_claim)
            published, delta_bytes = self._deltas.publish(asked)
            return published, footer.layout, delta_bytes
        claim = ranks.first("claim a buffer", lambda: self._claim(footer, version, metadata))
        claimed = ClaimInfo(**claim)
        ranks.each("write what it holds", lambda: self._write_held(claimed, source, footer))
        if self._plan.gathered:
            ranks.each("gather and write", lambda: self._write_gathered(source))
        checksums = self._output.finish(ranks, hashed=self._checksum)
        ranks.first("commit the version", lambda: self._commit(checksums))
        return claimed.version, footer.layout, None

    def _make_deltas(self) -> ShardedDeltas:
        chaining = None
        if self._drafts is not None:
            chaining = DeltaChain(self._drafts)
        return ShardedDeltas(
            self._agreement,
            self._output,
            self._copier,
            self._buffers,
            chaining,
            hashed=self._checksum,
        )

    def _asked(
        self, version: int | None, metadata: Mapping[str, Any] | None
    ) -> tuple[int, dict[str, Any]]:
        return self._lead().writer.next_version(version), checked_metadata(metadata)

    def _describe(self, weights: Weights, version: int | None) -> tuple[Source, int | None]:
        """Describe the weights, alike on all ranks; and the base of the next version's delta."""
        ranks, deltas = self._agreement, self._deltas
        sources: list[Source] = []

        def describe() -> dict[str, Any]:
            source = _describe(self._describer, weights)
            sources.append(source)
            footer = self._footer_of(source)
            self._output.keep_only(footer.layout)
            boxes = shards.held_boxes(source.tensors)
            is_known = self._planned == footer.layout_xxh3 and self._held[ranks.rank] == boxes
            return {
                "weights_xxh3": _digest_of(source, footer, version),
                "boxes": None if is_known else boxes,  # what this rank held the last time
                "base": None if deltas is None else deltas.base,
            }

        described = ranks.each("describe its weights", describe)
        [source] = sources
        if len({one["weights_xxh3"] for one in described}) > 1:
            self._refuse_difference(source, version)
        bases = {one["base"] for one in described}
        base = bases.pop() if len(bases) == 1 else None
        boxes = [one["boxes"] for one in described]
        if boxes != [None] * ranks.size:
            self._assign_writes(source, boxes)
            base = base if base == NOT_YET else None
        return source, base

    def _assign_writes(self, source: Source, by_rank: list[list[Any] | None]) -> None:
        """Assign anew who writes what; ``by_rank``: boxes as JSON has them, None: as before.

        All ranks know the boxes of all, and come to the same plan.
        """
        last = self._held or [[]] * len(by_rank)
        self._held = [
            known if boxes is None else shards.boxes_of(boxes)
            for boxes, known in zip(by_rank, last, strict=True)
        ]
        self._plan = shards.assign_writes(
            source.specs, self._held, rows_only=self._output.rows_only
        )
        self._planned = self._footer_of(source).layout_xxh3

    def _claim(
        self, footer: Footer, version: int | None, metadata: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Begin a version, on rank 0, for all ranks to fill: the fields of a `ClaimInfo`."""
        drafts = self._lead()
        version, self._metadata = self._asked(version, metadata)
        self._draft = draft = drafts.begin(version, footer, hashed=False)
        return asdict(ClaimInfo.of(version, draft))

    def _commit(self, checksums: list[int] | None) -> None:
        """Publish what was begun, on rank 0, now that every rank has written its part.

        Where the store is to be flushed, one flush is enough: pages that other processes of this
        machine have written are pages of the same file.
        """
        draft = self._draft
        if draft is None:
            raise ClosedError("no version was begun, so there is nothing to commit")
        check_parts(draft)
        draft.checksums = checksums
        draft.commit(self._metadata)

    def _refuse_difference(self, source: Source, version: int | None) -> NoReturn:
        """Raise on all ranks what the first one that differs is to publish instead."""
        ranks, mine = self._agreement, [f"version {version}", *_rows_of(source)]
        rows = ranks.first("list its weights", lambda: mine)

        def compare() -> None:
            for row, other in itertools.zip_longest(rows, mine, fillvalue="nothing more"):
                if row != other:
                    raise InvalidWeightsError(
                        f"rank {ranks.rank} is to publish {other}, where rank 0 is to publish "
                        f"{row}; every rank must call send with the same weights and version"
                    )

        ranks.each("publish what rank 0 does", compare)
        raise InvalidWeightsError("the ranks describe different weights")

    def _footer_of(self, source: Source) -> Footer:
        self._footer = Footer.like(self._footer, source.specs, source.aliases)
        return self._footer

    def _write_held(self, claimed: ClaimInfo, source: Source, footer: Footer) -> None:
        self._output.begin(claimed, footer)
        boxes = self._plan.boxes[self._agreement.rank]
        if not boxes:
            return
        specs = source.specs
        sizes = [math.prod(box.shape) * ITEM_BYTES[specs[box.tensor].dtype] for box in boxes]

        def work(first: int, end: int) -> None:
            for box in boxes[first:end]:
                tensor, name = source.tensors[box.tensor], specs[box.tensor].name
                self._output.write(box, shards.held_elements(tensor, box, name))

        self._copier.in_parallel(work, split_evenly(sizes, self._copier.num_threads))

    def _write_gathered(self, source: Source) -> None:
        def write(index: int, whole: torch.Tensor) -> None:
            self._output.write(shards.whole_box(index, source.specs[index].shape), whole)

        shards.each_gathered(source.tensors, self._plan, self._agreement.rank, write)


def _find_place(store: Any, rank_s: Any, reader_s: Any) -> tuple[Path, float, OptionError | None]:
    """The store; how long a step may take; and what is wrong with these options, if anything is.

    That is for all ranks to hear, which takes an `Agreement`, which takes a time.
    """
    try:
        place = options.directory("store", store)
        rank_s = options.positive_seconds("rank_timeout_s", rank_s)
        # Rank 0 may wait for readers while the others wait for it.
        return place, rank_s + options.seconds("reader_timeout_s", reader_s), None
    except OptionError as error:
        return Path(os.devnull), DEFAULT_RANK_TIMEOUT_S, error


def _describe(describer: Describer, weights: Weights) -> Source:
    if is_stream(weights):
        raise InvalidWeightsError(
            "an iterator is not supported here, where all ranks publish: give the module, or a dict"
        )
    return describer.describe(weights)


def _rows_of(source: Source) -> list[str]:
    """All that must be the same on all ranks, for people."""
    pairs = zip(source.specs, source.tensors, strict=True)
    aliases = [f"{alias} tied to {name}" for alias, name in source.aliases.items()]
    return [f"{spec}{', sharded' * _is_sharded(tensor)}" for spec, tensor in pairs] + aliases


def _digest_of(source: Source, footer: Footer, version: int | None) -> str:
    """A digest of the same."""
    kinds = bytes(map(_is_sharded, source.tensors))
    return digest(f"{version} {footer.layout_xxh3} ".encode() + kinds)


def _is_sharded(tensor: torch.Tensor | LazyTensor) -> bool:
    return isinstance(tensor, LazyTensor) and tensor.sharded is not None
