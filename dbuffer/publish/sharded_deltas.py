"""`ShardedDeltas`: deltas of a trainer of many ranks; each finds what changed in what it writes.

Every rank keeps a copy of that, as it was published last, and tells rank 0 what differs, which
writes the delta. Whatever fails, on whichever rank, the next version is published whole. A sender
that has just begun takes up what the one before it has left, where every rank can read what it
writes of that. What a version is built upon is decided by what all ranks say, and never by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from dbuffer.errors import ClosedError
from dbuffer.format.delta import words_per_element
from dbuffer.format.layout import Layout, TensorSpec
from dbuffer.format.manifest import Manifest, decode, encode
from dbuffer.io.changes import (
    Change,
    Found,
    cut_work,
    find_changes,
    narrowed,
    words_of,
    write_changes,
)
from dbuffer.io.copier import Copier
from dbuffer.io.footer import Footer
from dbuffer.io.tensors import FileTensors
from dbuffer.publish import shards
from dbuffer.publish.delta_chain import UNREADABLE, ChainHead, DeltaChain, Step, is_worth_a_delta
from dbuffer.publish.delta_publisher import detached_copy
from dbuffer.publish.shard_writer import ClaimInfo, ShardWriter, check_parts, join_shares
from dbuffer.publish.shards import Box, WriteAssignment
from dbuffer.ranks.agreement import Agreement, Arrays
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.weights.sources import Source

Positions: TypeAlias = npt.NDArray[np.integer[Any]]

NOT_YET = 0
"""Base of a sender that has published nothing: it takes up the last version of an earlier one."""


class Asked(NamedTuple):
    """What is to be published."""

    source: Source
    footer: Footer
    plan: WriteAssignment
    base: int | None
    """As :attr:`ShardedDeltas.base`, agreed by all ranks."""
    claim: Callable[[], tuple[int, dict[str, Any]]]
    """On rank 0: which version it is to be, and its metadata."""


class ShardedDeltas:
    """Publishes versions by what changed since the one before, where that is worth it.

    Args:
        chaining: on rank 0, and on no other.
    """

    def __init__(
        self,
        ranks: Agreement,
        output: ShardWriter,
        copier: Copier,
        store: DoubleBuffer,
        chaining: DeltaChain | None,
        *,
        hashed: bool,
    ) -> None:
        self._ranks = ranks
        self._output = output
        self._copier = copier
        self._store = store
        self._chaining = chaining
        self._hashed = hashed
        self.base: int | None = NOT_YET
        """Version that the next one can be built upon, as far as this rank knows; None: none."""
        self._share: _Share | None = None
        self._tip: ChainHead | None = None
        """The version that was published last; on rank 0."""
        self._step: Step | None = None
        """The one that is being published; on rank 0."""
        self._metadata: dict[str, Any] = {}

    def publish(self, asked: Asked) -> tuple[int, int | None]:
        """Publish it. Collective.

        Returns:
            The version, and the bytes of the delta that leads to it; None: there is none.

        Raises:
            DBufferError: what went wrong on any rank, on all of them.
        """
        ranks, share = self._ranks, self._begin(asked)
        if share is not None and not self._find(share, asked):
            share = None
        is_upon = share is not None
        claim = ranks.first("claim a buffer", lambda: asdict(self._claim(asked, upon=is_upon)))
        claimed = ClaimInfo(**claim)
        told: list[list[Change]] | None = None
        if share is None:
            share = self._taken(asked)
        else:
            arrays = ranks.collect("tell what changed", functools.partial(self._tell, share))
            told = [_changes_in(of_rank) for of_rank in arrays]
        checksums = self._fill(share, claimed, asked)
        delta_bytes = ranks.first("commit the version", lambda: self._commit(told, checksums))
        share.keep_found()
        self._share, self.base = share, claimed.version
        return claimed.version, delta_bytes

    def abandon(self) -> None:
        """Give up what was begun, if anything was."""
        if self._step is not None:
            self._step.draft.abandon()
            self._step = None

    def _begin(self, asked: Asked) -> _Share | None:
        """Return what to build upon. Until the version is committed, there is nothing for the next.

        None: the version is to be whole.
        """
        share = self._share
        self._share, self.base = None, None
        if asked.base == NOT_YET:
            return self._taken_up(asked)
        return None if asked.base is None else share

    def _taken_up(self, asked: Asked) -> _Share | None:
        """What the sender before this one has left; None: one rank at least cannot build upon it.

        As it is with `DeltaPublisher`: compared with its checksums, and once.
        """
        ranks, footer = self._ranks, asked.footer
        encoded = ranks.first("look at the last version", lambda: self._look(footer))
        if encoded is None:
            return None
        manifest = decode(Manifest, encoded.encode())
        shares: list[_Share] = []

        def read_back() -> str | None:
            shares.append(_Share(footer, asked.plan, ranks.rank))
            return self._read_back(manifest, shares[0], footer)

        hindered = ranks.each("read it back", read_back)
        [share] = shares
        checksums = None
        if self._hashed and not any(hindered):
            digests = functools.partial(share.digests, self._copier)
            checksums = self._output.checksums_read(ranks, footer.layout, digests)
        self._output.drop()
        is_right = ranks.first("compare it", lambda: self._is_right(hindered, checksums))
        return share if is_right else None

    def _look(self, footer: Footer) -> str | None:
        """On rank 0: the manifest of the version that can be built upon, encoded."""
        found = self._lead().resume_from_store(
            footer, lambda _held, _chain, tip: tip, hashed=self._hashed
        )
        self._tip = found
        return None if found is None else encode(found.manifest).decode()

    def _read_back(self, manifest: Manifest, share: _Share, footer: Footer) -> str | None:
        """Read what this rank writes of a version; what hinders that, if anything does."""
        try:
            held = self._store.hold_version(manifest.version, manifest.history)
            if held is not None:
                with held:
                    if held.manifest == manifest:
                        boxes, copy = share.boxes, share.copy
                        self._output.read_back(held, footer, boxes, copy, self._copier)
                        return None
        except UNREADABLE as error:
            return str(error)
        return f"it does not see version {manifest.version} as rank 0 does"

    def _is_right(self, hindered: Sequence[str | None], checksums: list[int] | None) -> bool:
        """On rank 0: whether all ranks have what was published; else why not, in the log."""
        tip = self._tip
        for rank, hindrance in enumerate(hindered):
            if hindrance is not None:
                self._lead().log_full_publish(f"rank {rank}: {hindrance}")
                return False
        if tip is None or tip.checksums != checksums:
            self._lead().log_full_publish("it was damaged after it was published")
            return False
        return True

    def _find(self, share: _Share, asked: Asked) -> bool:
        """Find what changed, on all ranks; whether it is little enough for a delta."""
        source, rank = asked.source, self._ranks.rank

        def find() -> int:
            return share.held.find(share.held.elements_of(source), self._copier)

        num_changed = sum(self._ranks.each("find what changed in what it holds", find))
        if asked.plan.gathered:

            def find_in(index: int, whole: torch.Tensor) -> int:
                return share.gathered[index].find([whole], self._copier, is_kept=False)

            def find_gathered() -> int:
                return sum(shards.each_gathered(source.tensors, asked.plan, rank, find_in))

            what = "gather and find what changed"
            num_changed += sum(self._ranks.each(what, find_gathered))
        return is_worth_a_delta(num_changed, asked.footer.layout)

    def _tell(self, share: _Share) -> Arrays:
        """Bring the copy up to date, and return the arrays of what changed, out of it.

        A trainer that writes into its weights meanwhile must not leave a copy that differs from
        what was published.
        """
        share.apply(self._copier)
        return list(_flat(share.found))

    def _taken(self, asked: Asked) -> _Share:
        """A copy of what is there now."""
        ranks, source = self._ranks, asked.source
        shares: list[_Share] = []

        def take() -> None:
            share = _Share(asked.footer, asked.plan, ranks.rank)
            self._copier.write(share.held.copy, share.held.elements_of(source))
            shares.append(share)

        ranks.each("copy what it holds", take)
        [share] = shares
        if asked.plan.gathered:

            def take_one(index: int, whole: torch.Tensor) -> None:
                self._copier.write(share.gathered[index].copy, [whole])

            ranks.each(
                "gather and copy",
                lambda: shards.each_gathered(source.tensors, asked.plan, ranks.rank, take_one),
            )
        return share

    def _claim(self, asked: Asked, *, upon: bool) -> ClaimInfo:
        """Begin a version, on rank 0, for all ranks to fill."""
        chaining, tip = self._lead(), self._tip
        version, self._metadata = asked.claim()
        if upon and tip is not None:
            self._step = step = chaining.begin_delta(tip, version)
        else:
            self._step = step = chaining.begin(version, asked.footer)
        # Not where there are checksums: those of a file's bytes are taken as they lie there, and
        # what is not written now may have been damaged since it was.
        before = step.draft.claim.held_before
        is_patched = upon and not self._hashed and tip is not None and tip.follows(before)
        return ClaimInfo.of(version, step.draft, is_patched=is_patched)

    def _fill(self, share: _Share, claimed: ClaimInfo, asked: Asked) -> list[int] | None:
        """Write the version's file, if it is to have one; the checksums of all tensors."""
        ranks, output = self._ranks, self._output
        if claimed.identity is None:
            if not self._hashed:
                return None
            shares = ranks.each("hash what changed", lambda: share.digests(self._copier))
            return join_shares(asked.footer.layout, shares)

        def write() -> None:
            output.begin(claimed, asked.footer)
            if share.found_before is None or not claimed.is_patched:
                share.write(output, self._copier)
                return
            for changes in (share.found_before, share.found):
                output.patch(changes, self._copier)

        ranks.each("write what it holds", write)
        return output.finish(ranks, hashed=self._hashed)

    def _commit(self, told: list[list[Change]] | None, checksums: list[int] | None) -> int | None:
        step = self._step
        if step is None:
            raise ClosedError("nothing was begun that could be committed")
        draft = step.draft
        if told is not None:
            changes = _joined(told)
            changed = None
            if checksums is not None:
                changed = {change.tensor: checksums[change.tensor] for change in changes}
            num_changed = sum(len(change.values) for change in changes)
            found = Found(draft.layout, changes, changed, num_changed)
            step.add_delta(found, None, self._copier)
        check_parts(draft)
        self._tip = step.commit(self._metadata, checksums)
        self._step = None
        return step.delta_bytes

    def _lead(self) -> DeltaChain:
        if self._chaining is None:
            raise ClosedError(f"rank {self._ranks.rank} is not the store's writer")
        return self._chaining


class _Share:
    """What one rank writes of each version, and a copy of it as it was published last."""

    def __init__(self, footer: Footer, plan: WriteAssignment, rank: int) -> None:
        specs, held = footer.layout.specs, plan.boxes[rank]
        gathered = [index for index, writer in plan.gathered if writer == rank]
        self.boxes = [*held, *(shards.whole_box(index, specs[index].shape) for index in gathered)]
        self.copy = FileTensors.in_memory(_layout_of(self.boxes, specs))
        """Of all of them."""
        data = self.copy.data
        self.held = _Boxes(specs, held, data)
        starts = self.copy.layout.offsets
        self.gathered = {
            self.boxes[number].tensor: _Boxes(specs, [self.boxes[number]], data[starts[number] :])
            for number in range(len(held), len(self.boxes))
        }
        """By the tensor's index."""
        self.found_before: list[Change] | None = None
        """As :attr:`found`, of the version before; None: it is not known."""

    @property
    def all_boxes(self) -> list[_Boxes]:
        return [self.held, *self.gathered.values()]

    @property
    def found(self) -> list[Change]:
        """What changed in this rank's boxes, each as a change of its whole tensor."""
        return [change for boxes in self.all_boxes for change in boxes.found]

    def apply(self, copier: Copier) -> None:
        """Bring the copy up to date with what was found, which is told out of it from then on."""
        for boxes in self.all_boxes:
            boxes.apply(copier)

    def keep_found(self) -> None:
        """Remember what was found, for the next version but one."""
        self.found_before = [change for boxes in self.all_boxes for change in boxes.take_found()]

    def digests(self, copier: Copier) -> list[int]:
        """Those of the blocks of all that this rank writes, in the layout's order."""
        of_tensors = {
            tensor: digests
            for boxes in self.all_boxes
            for tensor, digests in boxes.digests(copier).items()
        }
        return [digest for tensor in sorted(of_tensors) for digest in of_tensors[tensor]]

    def write(self, output: ShardWriter, copier: Copier) -> None:
        """Write all of it."""
        pairs = [
            pair
            for boxes in self.all_boxes
            for pair in zip(boxes.boxes, boxes.copy.views, strict=True)
        ]

        def work(first: int, end: int) -> None:
            for box, elements in pairs[first:end]:
                output.write(box, elements)

        sizes = [elements.nbytes for _, elements in pairs]
        copier.in_parallel(work, cut_work(sizes, copier))


class _Boxes:
    """Some boxes that a rank writes, and a copy of what is in them, in ``data``."""

    def __init__(
        self, specs: Sequence[TensorSpec], boxes: Sequence[Box], data: torch.Tensor
    ) -> None:
        self.boxes = list(boxes)
        self._specs = specs
        self.copy = FileTensors(data, _layout_of(boxes, specs))
        self._changes: list[Change] = []
        self.found: list[Change] = []
        """The same changes, each as one of its whole tensor."""
        self._digests: dict[int, list[int]] = {}

    def elements_of(self, source: Source) -> list[torch.Tensor]:
        """What is in them now, where it is on this rank."""
        return [
            shards.held_elements(source.tensors[box.tensor], box, self._specs[box.tensor].name)
            for box in self.boxes
        ]

    def find(
        self, elements: Sequence[torch.Tensor], copier: Copier, *, is_kept: bool = True
    ) -> int:
        """Compare what is in them now with the copy; how many words differ.

        ``is_kept``: the memory of ``elements`` stays as it is until the version is published.
        """
        found = find_changes(self.copy, elements, copier, hashed=False)
        self._changes = found.changes
        if not is_kept:
            self._changes = [
                replace(one, values=one.values.copy()) if one.positions is None else one
                for one in found.changes
            ]
        self.found = list(map(self._in_whole, self._changes))
        return found.num_changed

    def apply(self, copier: Copier) -> None:
        """Bring the copy up to date with what was found; none of that is borrowed memory then."""
        write_changes(self._changes, self.copy, copier)
        for change in self._changes:
            self._digests.pop(change.tensor, None)
        kept = detached_copy(self._changes, self.copy)
        self.found = [
            replace(whole, values=change.values)
            for whole, change in zip(self.found, kept, strict=True)
        ]

    def take_found(self) -> list[Change]:
        """Return what was found, which is over then."""
        found, self._changes, self.found = self.found, [], []
        return found

    def digests(self, copier: Copier) -> dict[int, list[int]]:
        """Those of each tensor's blocks in the copy; hashed if they changed since the last time."""
        missing = [block for block in self.copy.layout.blocks if block.tensor not in self._digests]
        found = [0] * len(missing)

        def work(first: int, end: int) -> None:
            found[first:end] = map(self.copy.hash_block, missing[first:end])

        copier.in_parallel(work, cut_work([block.num_bytes for block in missing], copier))
        for block, digest in zip(missing, found, strict=True):
            self._digests.setdefault(block.tensor, []).append(digest)
        return {self.boxes[index].tensor: of_one for index, of_one in self._digests.items()}

    def _in_whole(self, change: Change) -> Change:
        """A change of a box as one of its tensor; before it is applied to the copy."""
        box = self.boxes[change.tensor]
        spec = self._specs[box.tensor]
        if box.shape == spec.shape:
            return replace(change, tensor=box.tensor)
        positions: Positions | None = change.positions
        replaced = change.replaced
        if positions is None:
            positions = np.arange(len(change.values))
            replaced = words_of(self.copy, change.tensor).copy()
        return Change(box.tensor, _in_whole(positions, box, spec), change.values, replaced)


def _layout_of(boxes: Iterable[Box], specs: Sequence[TensorSpec]) -> Layout:
    """Of boxes as tensors of their own."""
    return Layout.of(specs[box.tensor]._replace(shape=box.shape) for box in boxes)


def _in_whole(positions: Positions, box: Box, spec: TensorSpec) -> Positions:
    """Where words at these positions in a box are in the tensor: in the same order."""
    words = words_per_element(spec)
    elements, rest = np.divmod(positions.astype(np.int64), words)
    inside = np.unravel_index(elements, box.shape)
    index = tuple(one + start for one, start in zip(inside, box.start, strict=True))
    return narrowed(np.ravel_multi_index(index, spec.shape) * words + rest, spec.num_bytes)


def _flat(changes: Iterable[Change]) -> Iterator[npt.NDArray[Any] | None]:
    """Yield the arrays of changes, four for each; `_changes_in` puts them together."""
    for change in changes:
        yield from (np.array([change.tensor]), change.positions, change.values, change.replaced)


def _changes_in(arrays: Arrays) -> list[Change]:
    """Return the changes whose arrays `_flat` has given."""
    rows = zip(*(arrays[first::4] for first in range(4)), strict=True)
    return [
        Change(int(tensor[0]), positions, values, replaced)
        for tensor, positions, values, replaced in rows
    ]


def _joined(told: Iterable[list[Change]]) -> list[Change]:
    """The changes of all ranks, one a tensor."""
    by_tensor: dict[int, list[Change]] = {}
    for change in (change for of_rank in told for change in of_rank):
        by_tensor.setdefault(change.tensor, []).append(change)
    return [_joined_one(parts) for _, parts in sorted(by_tensor.items())]


def _joined_one(parts: list[Change]) -> Change:
    if len(parts) == 1:
        return parts[0]
    positions, values, replaced = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("positions", "values", "replaced")
    )
    order = np.argsort(positions, kind="stable")
    return Change(parts[0].tensor, positions[order], values[order], replaced[order])
