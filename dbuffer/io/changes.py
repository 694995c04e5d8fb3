"""Differences between two versions of one layout: find them, and write them.

Bits are compared, not numbers: -0.0 is not 0.0, and a NaN is itself. Positions count a tensor's
*words*, which are its elements; one of 16 bytes (complex128) is two words of 8.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from dbuffer.errors import InvalidWeightsError
from dbuffer.format.delta import Integers
from dbuffer.format.layout import BLOCK_BYTES, Block, Layout
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import DTYPES, FileTensors, copy_one, is_plain, join_digests, split_evenly

Words = npt.NDArray[Any]
"""Unsigned numbers of one size."""

WORDS = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}

_WHOLE_SHARE = 0.5
"""A tensor of which more than this changed goes whole: at that share, telling where takes as many
bytes as the zeros do that stand for unchanged words, and finding it takes four times as long."""

_GATHER_BYTES = BLOCK_BYTES // 4
"""Shorter tensors are compared many at once, side by side in a buffer: a call of numpy takes as
long as it takes to compare 20 kB."""

_GROUP_CHANGES = 1 << 16
"""Changed words of small tensors that are handled together."""

_BATCH_BYTES = 64 << 20
"""Limit of the plain memory for copies of tensors that are not plain; one tensor may be larger."""

_SHARES_A_THREAD = 8
"""Threads take pieces of work one by one; more of them, and the last one is waited for less."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorDiff:
    """Words that differ in one tensor."""

    tensor: int
    """Index of the tensor in the layout."""
    positions: npt.NDArray[np.integer[Any]] | None
    """Ascending positions of the changed words in the flat tensor; None: the whole tensor."""
    values: Words
    """The new words: one a position, or all. Those of a whole tensor may be the very memory that
    was compared: encode or write them before it changes."""
    replaced: Words | None = None
    """The words that were at these positions, if whoever found the change kept them. Those of a
    whole tensor may be the very memory of the version before: encode them before it changes."""


@dataclass(frozen=True, slots=True, eq=False)
class Diff:
    """Words that differ in all tensors of a layout."""

    layout: Layout
    changes: list[TensorDiff]
    """One for each tensor that differs, in the order of the tensors."""
    checksums: dict[int, int] | None
    """Checksum of each changed tensor after the change, by index; None if not asked for."""
    num_changed: int
    """Words that differ, also of tensors that go whole."""


def find_changes(
    before: FileTensors, after: Sequence[torch.Tensor], copier: Copier, *, hashed: bool
) -> Diff:
    """Find the differences from ``before`` in tensors of the same layout, in one pass.

    Tensors that lie in main memory as a file holds them are compared in place. All others
    (another dtype, another device, not contiguous) are first copied as `Copier.write` would.

    Args:
        before: the version to start from.
        after: a tensor for each of the layout's, of its shape.
        copier: its threads do it.
        hashed: take the checksums of the changed tensors as well.

    Raises:
        InvalidWeightsError: number or shapes of the tensors are not the layout's.
    """
    layout = before.layout
    _check_shapes(layout, after)
    changes: list[TensorDiff] = []
    checksums: dict[int, int] = {}
    num_changed = 0
    for batch in _plain_batches(layout, after):
        search = _Search(before, batch, hashed=hashed)
        pieces = cut_work([run.num_bytes for run in search.runs], copier)
        copier.in_parallel(search.compare, pieces)
        changes += search.changes()
        checksums |= search.checksums(changes)
        num_changed += search.num_changed
    changes.sort(key=lambda change: change.tensor)
    return Diff(layout, changes, checksums if hashed else None, num_changed)


def _check_shapes(layout: Layout, after: Sequence[torch.Tensor]) -> None:
    if len(after) != len(layout.specs):
        raise InvalidWeightsError(
            f"{len(after)} tensors to compare with {len(layout.specs)}; give one for each"
        )
    for spec, tensor in zip(layout.specs, after, strict=True):
        if tensor.shape != spec.shape:
            raise InvalidWeightsError(
                f"{spec.name!r:.200} has the shape {list(tensor.shape)}, and "
                f"{list(spec.shape)} in the version to compare with"
            )
    for piece in layout.pieces:
        width = layout.widths[piece.tensor]
        if piece.offset % width or piece.num_bytes % width:
            raise InvalidWeightsError(
                f"{layout.specs[piece.tensor].name!r:.200} is cut inside an element"
            )


def _plain_batches(
    layout: Layout, after: Sequence[torch.Tensor]
) -> Iterator[dict[int, torch.Tensor]]:
    """The tensors as plain memory, by index: those that are plain, then copies of the others."""
    batch: dict[int, torch.Tensor] = {}
    others = []
    for index, (spec, tensor) in enumerate(zip(layout.specs, after, strict=True)):
        if is_plain(tensor, DTYPES[spec.dtype]):
            batch[index] = tensor
        else:
            others.append(index)
    if batch:
        yield batch
    batch, num_bytes = {}, 0
    for index in others:
        if batch and num_bytes + layout.sizes[index] > _BATCH_BYTES:
            yield batch
            batch, num_bytes = {}, 0
        spec = layout.specs[index]
        plain = torch.empty(layout.sizes[index], dtype=torch.uint8)
        batch[index] = plain.view(DTYPES[spec.dtype]).view(spec.shape)
        copy_one(batch[index], after[index])
        num_bytes += layout.sizes[index]
    if batch:
        yield batch


class _Run(NamedTuple):
    """Unit of comparison: a long tensor's block, or short tensors with words of one size."""

    tensors: list[int]
    num_bytes: int
    block: int | None = None
    """The long tensor's."""


class _BlockDiff(NamedTuple):
    """Words that differ in one block."""

    num_changed: int
    positions: npt.NDArray[np.integer[Any]] | None
    """Positions in the tensor; None: more than a delta holds."""
    values: Words | None
    replaced: Words | None


class _Search:
    """Tensors in plain memory, compared with those of the same indices in a file."""

    def __init__(
        self, before: FileTensors, after: Mapping[int, torch.Tensor], *, hashed: bool
    ) -> None:
        self._before = np.frombuffer(before.raw, np.uint8)
        self._after, self._hashed = after, hashed
        self._layout = before.layout
        self._seen: dict[int, _BlockDiff] = {}
        self._digests: dict[int, int] = {}
        self.runs = list(self._cut_runs())
        self._short: list[TensorDiff] = []
        self._num_changed: list[int] = []

    def _blocks_of(self, tensor: int) -> range:
        return range(*self._layout.first_blocks[tensor : tensor + 2])

    @property
    def num_changed(self) -> int:
        """Words that differ, once `changes` has been called."""
        return sum(self._num_changed)

    def _cut_runs(self) -> Iterator[_Run]:
        layout = self._layout
        short: dict[int, list[int]] = {width: [] for width in WORDS}
        num_bytes = dict.fromkeys(WORDS, 0)
        for tensor in self._after:
            size, width = layout.sizes[tensor], layout.widths[tensor]
            if size >= _GATHER_BYTES:
                for index in self._blocks_of(tensor):
                    yield _Run([tensor], layout.blocks[index].num_bytes, index)
            elif size:
                short[width].append(tensor)
                num_bytes[width] += size
                if num_bytes[width] >= BLOCK_BYTES - _GATHER_BYTES:
                    yield _Run(short[width], num_bytes[width])
                    short[width], num_bytes[width] = [], 0
        for width, tensors in short.items():
            if tensors:
                yield _Run(tensors, num_bytes[width])

    def compare(self, first: int, end: int) -> None:
        """Compare some of the runs."""
        scratch = _Scratch()
        for run in self.runs[first:end]:
            if run.block is None:
                self._compare_short(run, scratch)
            else:
                self._compare_block(run.block, scratch)

    def _compare_block(self, index: int, scratch: _Scratch) -> None:
        block = self._layout.blocks[index]
        after = self._bytes_after(block)
        if self._hashed:
            self._digests[index] = xxhash.xxh3_64_intdigest(after.data)
        words = WORDS[self._layout.widths[block.tensor]]
        old, new = self._bytes_before(block).view(words), after.view(words)
        found = _find_differing(old, new, scratch, most=int(len(new) * _WHOLE_SHARE))
        if isinstance(found, int):
            self._seen[index] = _BlockDiff(found, None, None, None)
        elif len(found.positions):
            self._keep(index, found)

    def _compare_short(self, run: _Run, scratch: _Scratch) -> None:
        """Side by side in a buffer, at once."""
        words, after = WORDS[self._layout.widths[run.tensors[0]]], scratch.buffer(run.num_bytes)
        sizes = [self._layout.sizes[tensor] for tensor in run.tensors]
        place = after.ctypes.data
        for tensor, size in zip(run.tensors, sizes, strict=True):
            ctypes.memmove(place, self._after[tensor].data_ptr(), size)
            place += size
        if self._hashed:
            self._hash_many(run, after)
        old, new = self._bytes_before_of(run).view(words), after.view(words)
        found = _find_differing(old, new, scratch, most=len(new))
        if not isinstance(found, int) and len(found.positions):
            self._num_changed.append(len(found.positions))
            self._short += self._changes_in(run.tensors, np.array(sizes) // words.itemsize, found)

    def _changes_in(
        self, tensors: Sequence[int], sizes: Integers, found: _WordDiff
    ) -> Iterator[TensorDiff]:
        """Split the differences of short tensors that lie side by side into one change a tensor."""
        starts = np.cumsum(sizes) - sizes
        cuts = found.positions.searchsorted(starts + sizes)
        counts = cuts - found.positions.searchsorted(starts)
        positions = narrowed(found.positions - np.repeat(starts, counts), BLOCK_BYTES)
        is_mostly = counts > _WHOLE_SHARE * sizes
        first = 0
        for tensor, end, mostly in zip(tensors, cuts.tolist(), is_mostly.tolist(), strict=True):
            if mostly:
                yield self._whole(tensor)
            elif end > first:
                part = slice(first, end)
                yield TensorDiff(tensor, positions[part], found.new[part], found.old[part])
            first = end

    def _hash_many(self, run: _Run, data: npt.NDArray[np.uint8]) -> None:
        view, end = data.data, 0
        for index in (index for tensor in run.tensors for index in self._blocks_of(tensor)):
            start, end = end, end + self._layout.blocks[index].num_bytes
            self._digests[index] = xxhash.xxh3_64_intdigest(view[start:end])

    def _whole(self, tensor: int) -> TensorDiff:
        words = WORDS[self._layout.widths[tensor]]
        start, size = self._layout.offsets[tensor], self._layout.sizes[tensor]
        before = self._before[start : start + size].view(words)
        return TensorDiff(tensor, None, _bytes_of(self._after[tensor]).view(words), before)

    def _keep(self, index: int, found: _WordDiff) -> None:
        """Keep what differs in a long tensor's block."""
        block = self._layout.blocks[index]
        shift = block.offset // self._layout.widths[block.tensor]
        positions = narrowed(found.positions + shift, self._layout.sizes[block.tensor])
        self._seen[index] = _BlockDiff(len(positions), positions, found.new, found.old)

    def changes(self) -> list[TensorDiff]:
        """Return one change for each tensor that differs."""
        found = list(self._short)
        blocks = self._layout.blocks
        for tensor in dict.fromkeys(blocks[index].tensor for index in sorted(self._seen)):
            changed = [index for index in self._blocks_of(tensor) if index in self._seen]
            num_changed = sum([self._seen[index].num_changed for index in changed])
            self._num_changed.append(num_changed)
            num_words = self._layout.sizes[tensor] // self._layout.widths[tensor]
            is_mostly = num_changed > _WHOLE_SHARE * num_words
            found.append(self._whole(tensor) if is_mostly else self._joined(tensor, changed))
        return found

    def _joined(self, tensor: int, blocks: list[int]) -> TensorDiff:
        for index in blocks:
            if self._seen[index].positions is None:
                self._compare_in_full(index)
        _, *columns = zip(*(self._seen[index] for index in blocks), strict=True)
        if len(blocks) == 1:
            return TensorDiff(tensor, *(column[0] for column in columns))
        return TensorDiff(tensor, *map(np.concatenate, columns))

    def _compare_in_full(self, index: int) -> None:
        """Find what differs in a block that alone would go whole, in a tensor that does not."""
        block = self._layout.blocks[index]
        words = WORDS[self._layout.widths[block.tensor]]
        old, new = self._bytes_before(block).view(words), self._bytes_after(block).view(words)
        self._keep(index, _gather_differing(old, new, old != new))

    def checksums(self, changes: Sequence[TensorDiff]) -> dict[int, int]:
        """Return the checksums of the changed tensors that were compared here."""
        if not self._hashed:
            return {}
        return {
            tensor: join_digests([self._digests[index] for index in self._blocks_of(tensor)])
            for tensor in (change.tensor for change in changes)
            if tensor in self._after
        }

    def _bytes_before(self, block: Block) -> npt.NDArray[np.uint8]:
        start = self._layout.offsets[block.tensor] + block.offset
        return self._before[start : start + block.num_bytes]

    def _bytes_before_of(self, run: _Run) -> npt.NDArray[np.uint8]:
        """Return the old bytes of a run: a view if its tensors lie side by side, else a copy."""
        offsets, sizes = self._layout.offsets, self._layout.sizes
        first, last = run.tensors[0], run.tensors[-1]
        start, end = offsets[first], offsets[last] + sizes[last]
        if end - start == run.num_bytes:
            return self._before[start:end]
        pairs = [(offsets[tensor], sizes[tensor]) for tensor in run.tensors]
        return np.concatenate([self._before[start : start + size] for start, size in pairs])

    def _bytes_after(self, block: Block) -> npt.NDArray[np.uint8]:
        data = _bytes_of(self._after[block.tensor])
        return data[block.offset : block.offset + block.num_bytes]


class _Scratch:
    """Memory that one thread uses again for each run, so that it stays in its core's cache."""

    def __init__(self) -> None:
        self._mask = np.empty(0, np.bool_)
        self._buffer = np.empty(0, np.uint8)

    def mask(self, size: int) -> npt.NDArray[np.bool_]:
        if len(self._mask) < size:
            self._mask = np.empty(max(size, BLOCK_BYTES // 8), np.bool_)
        return self._mask[:size]

    def buffer(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        if len(self._buffer) < num_bytes:
            self._buffer = np.empty(max(num_bytes, BLOCK_BYTES), np.uint8)
        return self._buffer[:num_bytes]


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The memory of a plain tensor."""
    found: npt.NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return found


class _WordDiff(NamedTuple):
    """Positions at which two arrays of words differ, and the words there."""

    positions: Integers
    old: Words
    new: Words


def _find_differing(
    before: Words, after: Words, scratch: _Scratch, *, most: int
) -> _WordDiff | int:
    """The words that differ; or only their number, if it is above ``most``.

    Eight bytes are compared at a time, and only where they differ one looks closer.
    """
    each = 8 // before.dtype.itemsize
    num_long = len(before) // each
    rest = num_long * each
    long_before, long_after = before[:rest].view(np.uint64), after[:rest].view(np.uint64)
    mask = np.not_equal(long_before, long_after, out=scratch.mask(num_long))
    if np.count_nonzero(mask) * 4 > num_long:
        return _find_many_differing(before, after, most)
    found = _true_in(mask)
    old = long_before.take(found).view(before.dtype)
    new = long_after.take(found).view(before.dtype)
    if each > 1:
        hits = (old != new).nonzero()[0]
        shift = each.bit_length() - 1
        found = (found.take(hits >> shift) << shift) + (hits & (each - 1))
        old, new = old.take(hits), new.take(hits)
    if rest < len(before):
        tail = np.flatnonzero(before[rest:] != after[rest:]) + rest
        found = np.concatenate([found, tail])
        old = np.concatenate([old, before.take(tail)])
        new = np.concatenate([new, after.take(tail)])
    return _WordDiff(found, old, new)


def _find_many_differing(before: Words, after: Words, most: int) -> _WordDiff | int:
    mask = before != after
    num_changed = int(np.count_nonzero(mask))
    return num_changed if num_changed > most else _gather_differing(before, after, mask)


def _gather_differing(before: Words, after: Words, mask: npt.NDArray[np.bool_]) -> _WordDiff:
    (found,) = mask.nonzero()
    return _WordDiff(found, before.take(found), after.take(found))


def _true_in(mask: npt.NDArray[np.bool_]) -> Integers:
    """Positions of the few that are true: eight are looked at together, which is quicker."""
    rest = len(mask) // 8 * 8
    eights = mask[:rest].view(np.uint64)
    some = (eights != 0).nonzero()[0]
    hits = eights.take(some).view(np.bool_).nonzero()[0]
    found = (some.take(hits >> 3) << 3) + (hits & 7)
    if rest < len(mask):
        found = np.concatenate([found, mask[rest:].nonzero()[0] + rest])
    return np.asarray(found)


def narrowed(positions: Integers, num_bytes: int) -> npt.NDArray[np.integer[Any]]:
    """Positions in a tensor of so many bytes, half as long wherever they can be.

    They may take more memory than the weights.
    """
    return positions.astype(np.uint32 if num_bytes < 1 << 32 else np.int64)


def cut_work(sizes: Sequence[int], copier: Copier) -> list[tuple[int, int]]:
    """Slices of such work for a copier's threads, which take them one by one."""
    return split_evenly(sizes, copier.num_threads * _SHARES_A_THREAD)


def write_changes(changes: Sequence[TensorDiff], contents: FileTensors, copier: Copier) -> None:
    """Put changes into memory that holds the version before; doing so twice is as good as once.

    They are such as were found, or as `check_changes` lets pass: they are not looked at again.
    """
    groups = list(_groups(contents.layout, changes))

    def work(first: int, end: int) -> None:
        for group in groups[first:end]:
            _write_group(group, contents)

    sizes = [sum([len(change.values) for change in group]) for group in groups]
    copier.in_parallel(work, cut_work(sizes, copier))


def _write_group(group: Sequence[TensorDiff], contents: FileTensors) -> None:
    change, layout = group[0], contents.layout
    if change.positions is None:
        words_of(contents, change.tensor)[:] = change.values
        return
    width = change.values.itemsize
    words = np.frombuffer(contents.raw, WORDS[width], len(contents.raw) // width)
    places, counts = _joined_positions(group)
    places += np.repeat([layout.offsets[change.tensor] // width for change in group], counts)
    words[places] = np.concatenate([change.values for change in group])


def _groups(layout: Layout, changes: Sequence[TensorDiff]) -> Iterator[list[TensorDiff]]:
    """Neighbours with words of one size, so few that one call of numpy for all is quicker."""
    group: list[TensorDiff] = []
    key, num_changed = None, 0
    for change in changes:
        count = len(change.values)
        own = None if change.positions is None else layout.widths[change.tensor]
        if group and (own is None or own != key or num_changed + count > _GROUP_CHANGES):
            yield group
            group, num_changed = [], 0
        group.append(change)
        key, num_changed = own, num_changed + count
    if group:
        yield group


def _joined_positions(group: Sequence[TensorDiff]) -> tuple[Integers, Integers]:
    """Concatenate the positions of all changes; also return the number of each."""
    parts = [change.positions for change in group if change.positions is not None]
    counts = np.array([len(part) for part in parts], np.int64)
    return np.concatenate(parts, dtype=np.int64), counts


def check_changes(layout: Layout, changes: Sequence[TensorDiff]) -> None:
    """Refuse, with an InvalidWeightsError, what does not fit the layout."""
    tensors = {change.tensor for change in changes}
    if len(tensors) != len(changes):
        raise InvalidWeightsError("two changes are of one tensor; join them")
    for tensor in tensors.difference(range(len(layout.specs))):
        raise InvalidWeightsError(f"a change of tensor {tensor}, which is not there")
    for group in _groups(layout, changes):
        if _fit(layout, group):
            continue
        change = next(change for change in group if not _fit(layout, [change]))
        raise InvalidWeightsError(
            f"a change does not fit {layout.specs[change.tensor]!s:.200}: {len(change.values)} "
            f"values of {change.values.dtype}, at positions that are not ascending, not as many, "
            "or not in the tensor"
        )


def _fit(layout: Layout, group: Sequence[TensorDiff]) -> bool:
    """Whether these have values of the right dtype, one a position, which ascend in the tensor."""
    dtype = WORDS[layout.widths[group[0].tensor]]
    sizes = [layout.sizes[change.tensor] // dtype.itemsize for change in group]
    is_whole = group[0].positions is None
    wanted = sizes if is_whole else [len(change.positions) for change in group]  # type: ignore[arg-type]
    for change, count in zip(group, wanted, strict=True):
        if not len(change.values) == count > 0 or change.values.dtype != dtype:
            return False
    if is_whole:
        return True
    positions, counts = _joined_positions(group)
    ends = np.cumsum(counts)
    rises = positions[1:] > positions[:-1]
    rises[ends[:-1] - 1] = True  # from one tensor to the next
    in_range = (positions[ends - counts] >= 0) & (positions[ends - 1] < sizes)
    return bool(rises.all() and in_range.all())


def change_at(
    tensor: int, positions: npt.NDArray[np.integer[Any]], values: torch.Tensor
) -> TensorDiff:
    """A change that is known: ``values``, plain and flat, stand at ``positions``, ascending.

    Positions and values count elements.
    """
    item_bytes = values.dtype.itemsize
    words = _bytes_of(values).view(WORDS[min(item_bytes, 8)])
    if (times := item_bytes // 8) > 1:
        positions = (positions[:, None] * times + np.arange(times)).reshape(-1)
    return TensorDiff(tensor, positions, words)


def words_of(contents: FileTensors, tensor: int) -> Words:
    """The words of a tensor, where they lie."""
    start, size = contents.layout.offsets[tensor], contents.layout.sizes[tensor]
    width = contents.layout.widths[tensor]
    return np.frombuffer(contents.raw, np.uint8, size, start).view(WORDS[width])
