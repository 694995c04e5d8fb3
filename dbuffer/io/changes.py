"""What differs between two versions of one layout: found, and written.

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
from dbuffer.format.delta import Integers, word_bytes
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
"""Shorter blocks are compared many at once, side by side in a buffer: a call of numpy takes as long
as it takes to compare 20 kB."""

_BATCH_BYTES = 64 << 20
"""Of tensors that are not plain, in plain memory at a time; or of one, if it is larger."""

_SHARES_A_THREAD = 8
"""Threads take pieces of work one by one; more of them, and the last one is waited for less."""


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """What differs in one tensor."""

    tensor: int
    """Its index in the layout."""
    positions: npt.NDArray[np.integer[Any]] | None
    """Ascending positions of the changed words in the flat tensor; None: the whole tensor."""
    values: Words
    """The new words: one a position, or all. Those of a whole tensor may be the very memory that
    was compared: encode or write them before it changes."""
    replaced: Words | None = None
    """The words that were at these positions, if whoever found the change kept them: they need not
    be gathered from all over the version before once more."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What differs in all tensors of a layout."""

    layout: Layout
    changes: list[Change]
    """In the order of the tensors."""
    checksums: dict[int, int] | None
    """Of each changed tensor after the change, by its index; None if they were not asked for."""
    num_changed: int
    """Words that differ, also of tensors that go whole."""


def find_changes(
    before: FileTensors, after: Sequence[torch.Tensor], copier: Copier, *, hashed: bool
) -> Found:
    """What differs from ``before`` in tensors of the same layout, in one pass.

    Those that lie in main memory as a file holds them are compared where they are. All others
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
    changes: list[Change] = []
    checksums: dict[int, int] = {}
    num_changed = 0
    for batch in _plain_batches(layout, after):
        search = _Search(before, batch, hashed=hashed)
        pieces = cut_work([run.num_bytes for run in search.runs], copier)
        copier.in_parallel(search.look, pieces)
        changes += search.changes()
        checksums |= search.checksums(changes)
        num_changed += search.num_changed
    changes.sort(key=lambda change: change.tensor)
    return Found(layout, changes, checksums if hashed else None, num_changed)


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
        width = word_bytes(layout.specs[piece.tensor])
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
    yield batch


class _Run(NamedTuple):
    """Blocks that one call compares: a long one, or many short ones with words of one size."""

    blocks: list[int]
    word_bytes: int
    num_bytes: int


class _Seen(NamedTuple):
    """What differs in one block."""

    num_changed: int
    positions: npt.NDArray[np.integer[Any]] | None
    """In the tensor; None: more than goes into a delta."""
    values: Words | None
    replaced: Words | None


class _Search:
    """Tensors in plain memory, compared with those of the same indices in a file."""

    def __init__(
        self, before: FileTensors, after: Mapping[int, torch.Tensor], *, hashed: bool
    ) -> None:
        self._before, self._after, self._hashed = before, after, hashed
        self._layout = before.layout
        self._addresses = {index: tensor.data_ptr() for index, tensor in after.items()}
        self._seen: dict[int, _Seen] = {}
        self._digests: dict[int, int] = {}
        self._blocks_of: dict[int, list[int]] = {}
        self.runs = list(self._cut_runs())
        self.num_changed = 0

    def _cut_runs(self) -> Iterator[_Run]:
        widths = [word_bytes(spec) for spec in self._layout.specs]
        short: dict[int, tuple[list[int], int]] = {}
        for index, block in enumerate(self._layout.blocks):
            if not block.num_bytes or block.tensor not in self._after:
                continue
            self._blocks_of.setdefault(block.tensor, []).append(index)
            width = widths[block.tensor]
            if block.num_bytes >= _GATHER_BYTES:
                yield _Run([index], width, block.num_bytes)
                continue
            blocks, num_bytes = short.pop(width, ([], 0))
            blocks.append(index)
            num_bytes += block.num_bytes
            if num_bytes >= BLOCK_BYTES - _GATHER_BYTES:
                yield _Run(blocks, width, num_bytes)
            else:
                short[width] = blocks, num_bytes
        for width, (blocks, num_bytes) in short.items():
            yield _Run(blocks, width, num_bytes)

    def look(self, first: int, end: int) -> None:
        """Compare some of the runs."""
        scratch = _Scratch()
        for run in self.runs[first:end]:
            if len(run.blocks) == 1:
                self._look_at_one(run, scratch)
            else:
                self._look_at_many(run, scratch)

    def _look_at_one(self, run: _Run, scratch: _Scratch) -> None:
        (index,) = run.blocks
        block = self._layout.blocks[index]
        before, after = self._bytes_before(block), self._bytes_after(block)
        if self._hashed:
            self._digests[index] = xxhash.xxh3_64_intdigest(after.data)
        width = run.word_bytes
        before, after = before.view(WORDS[width]), after.view(WORDS[width])
        most = int(len(after) * _WHOLE_SHARE)
        found = _differing(before, after, scratch, most=most)
        if isinstance(found, int):
            self._seen[index] = _Seen(found, None, None, None)
        elif len(found.positions):
            self._note(index, found, block.offset // width)

    def _look_at_many(self, run: _Run, scratch: _Scratch) -> None:
        blocks = [self._layout.blocks[index] for index in run.blocks]
        before, after = scratch.pair(run.num_bytes)
        inside, outside = before.ctypes.data, after.ctypes.data
        base, offsets = self._before.address, self._layout.offsets
        end = 0
        starts = []
        for block in blocks:
            tensor, offset, num_bytes = block
            starts.append(end)
            ctypes.memmove(inside + end, base + offsets[tensor] + offset, num_bytes)
            ctypes.memmove(outside + end, self._addresses[tensor] + offset, num_bytes)
            end += num_bytes
        if self._hashed:
            for index, start, block in zip(run.blocks, starts, blocks, strict=True):
                part = after[start : start + block.num_bytes]
                self._digests[index] = xxhash.xxh3_64_intdigest(part.data)
        self._note_many(run, starts, before, after, scratch)

    def _note_many(
        self,
        run: _Run,
        starts: list[int],
        before: npt.NDArray[np.uint8],
        after: npt.NDArray[np.uint8],
        scratch: _Scratch,
    ) -> None:
        width = run.word_bytes
        old, new = before.view(WORDS[width]), after.view(WORDS[width])
        found = _differing(old, new, scratch, most=len(new))
        if isinstance(found, int) or not len(found.positions):
            return
        firsts = [start // width for start in starts]
        cuts = [*found.positions.searchsorted(firsts).tolist(), len(found.positions)]
        for number, index in enumerate(run.blocks):
            if cuts[number] < cuts[number + 1]:
                inside = self._layout.blocks[index].offset // width
                part = _Differing(*(column[cuts[number] : cuts[number + 1]] for column in found))
                self._note(index, part, inside - firsts[number])

    def _note(self, index: int, found: _Differing, shift: int) -> None:
        """Keep what differs in a block, whose first word is so much further in its tensor."""
        size = self._layout.sizes[self._layout.blocks[index].tensor]
        positions = narrowed(found.positions + shift, size)
        self._seen[index] = _Seen(len(positions), positions, found.new, found.old)

    def changes(self) -> list[Change]:
        """What was found, of each tensor that changed."""
        found = []
        for tensor, blocks in self._blocks_of.items():
            changed = [index for index in blocks if index in self._seen]
            if not changed:
                continue
            num_changed = sum([self._seen[index].num_changed for index in changed])
            self.num_changed += num_changed
            width = word_bytes(self._layout.specs[tensor])
            if num_changed * width > _WHOLE_SHARE * self._layout.sizes[tensor]:
                words = _bytes_of(self._after[tensor]).view(WORDS[width])
                found.append(Change(tensor, None, words))
            else:
                found.append(self._joined(tensor, changed))
        return found

    def _joined(self, tensor: int, blocks: list[int]) -> Change:
        for index in blocks:
            if self._seen[index].positions is None:
                self._look_in_full(index)
        _, *columns = zip(*(self._seen[index] for index in blocks), strict=True)
        if len(blocks) == 1:
            return Change(tensor, *(column[0] for column in columns))
        return Change(tensor, *map(np.concatenate, columns))

    def _look_in_full(self, index: int) -> None:
        """Find what differs in a block that alone would go whole, in a tensor that does not."""
        block = self._layout.blocks[index]
        width = word_bytes(self._layout.specs[block.tensor])
        before = self._bytes_before(block).view(WORDS[width])
        after = self._bytes_after(block).view(WORDS[width])
        found = np.flatnonzero(before != after)
        differing = _Differing(found, before.take(found), after.take(found))
        self._note(index, differing, block.offset // width)

    def checksums(self, changes: Sequence[Change]) -> dict[int, int]:
        """Those of the changed tensors that are here."""
        if not self._hashed:
            return {}
        return {
            tensor: join_digests([self._digests[index] for index in self._blocks_of[tensor]])
            for tensor in (change.tensor for change in changes)
            if tensor in self._after
        }

    def _bytes_before(self, block: Block) -> npt.NDArray[np.uint8]:
        start = self._layout.offsets[block.tensor] + block.offset
        return np.frombuffer(self._before.raw, np.uint8, block.num_bytes, start)

    def _bytes_after(self, block: Block) -> npt.NDArray[np.uint8]:
        data = _bytes_of(self._after[block.tensor])
        return data[block.offset : block.offset + block.num_bytes]


class _Scratch:
    """Memory that one thread uses again for each run, so that it stays in its core's cache."""

    def __init__(self) -> None:
        self._mask = np.empty(0, np.bool_)
        self._pair = np.empty((2, 0), np.uint8)

    def mask(self, size: int) -> npt.NDArray[np.bool_]:
        if len(self._mask) < size:
            self._mask = np.empty(max(size, BLOCK_BYTES // 8), np.bool_)
        return self._mask[:size]

    def pair(self, num_bytes: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        if self._pair.shape[1] < num_bytes:
            self._pair = np.empty((2, max(num_bytes, BLOCK_BYTES)), np.uint8)
        return self._pair[0, :num_bytes], self._pair[1, :num_bytes]


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The memory of a plain tensor."""
    found: npt.NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return found


class _Differing(NamedTuple):
    """Where two arrays of words differ, and the words there."""

    positions: Integers
    old: Words
    new: Words


def _differing(before: Words, after: Words, scratch: _Scratch, *, most: int) -> _Differing | int:
    """The words that differ; or only their number, if it is above ``most``.

    Eight bytes are compared at a time, and only where they differ one looks closer.
    """
    each = 8 // before.dtype.itemsize
    num_long = len(before) // each
    rest = num_long * each
    long_before, long_after = before[:rest].view(np.uint64), after[:rest].view(np.uint64)
    mask = np.not_equal(long_before, long_after, out=scratch.mask(num_long))
    if np.count_nonzero(mask) * 4 > num_long:
        return _many_differing(before, after, most)
    found = _true_in(mask)
    old = long_before.take(found).view(before.dtype)
    new = long_after.take(found).view(before.dtype)
    if each > 1:
        hits = np.flatnonzero(old != new)
        shift = each.bit_length() - 1
        found = (found.take(hits >> shift) << shift) + (hits & (each - 1))
        old, new = old.take(hits), new.take(hits)
    if rest < len(before):
        tail = np.flatnonzero(before[rest:] != after[rest:]) + rest
        found = np.concatenate([found, tail])
        old = np.concatenate([old, before.take(tail)])
        new = np.concatenate([new, after.take(tail)])
    return _Differing(found, old, new)


def _many_differing(before: Words, after: Words, most: int) -> _Differing | int:
    mask = before != after
    num_changed = int(np.count_nonzero(mask))
    if num_changed > most:
        return num_changed
    found = np.flatnonzero(mask)
    return _Differing(found, before.take(found), after.take(found))


def _true_in(mask: npt.NDArray[np.bool_]) -> Integers:
    """Positions of the few that are true: eight are looked at together, which is quicker."""
    rest = len(mask) // 8 * 8
    eights = mask[:rest].view(np.uint64)
    some = np.flatnonzero(eights != 0)
    hits = np.flatnonzero(eights.take(some).view(np.bool_))
    found = (some.take(hits >> 3) << 3) + (hits & 7)
    if rest < len(mask):
        found = np.concatenate([found, np.flatnonzero(mask[rest:]) + rest])
    return found


def narrowed(positions: Integers, num_bytes: int) -> npt.NDArray[np.integer[Any]]:
    """Positions in a tensor of so many bytes, half as long wherever they can be.

    They may take more memory than the weights.
    """
    return positions.astype(np.uint32 if num_bytes < 1 << 32 else np.int64)


def cut_work(sizes: Sequence[int], copier: Copier) -> list[tuple[int, int]]:
    """Slices of such work for a copier's threads, which take them one by one."""
    return split_evenly(sizes, copier.num_threads * _SHARES_A_THREAD)


def write_changes(changes: Sequence[Change], contents: FileTensors, copier: Copier) -> None:
    """Put changes into memory that holds the version before; doing so twice is as good as once.

    Raises:
        InvalidWeightsError: a change does not fit the layout. Nothing was written.
    """
    check_changes(contents.layout, changes)

    def work(first: int, end: int) -> None:
        for change in changes[first:end]:
            words = words_of(contents, change.tensor)
            words[slice(None) if change.positions is None else change.positions] = change.values

    copier.in_parallel(work, cut_work([change.values.nbytes for change in changes], copier))


def check_changes(layout: Layout, changes: Sequence[Change]) -> None:
    """Refuse, with an InvalidWeightsError, what does not fit the layout."""
    if len({change.tensor for change in changes}) != len(changes):
        raise InvalidWeightsError("two changes are of one tensor; join them")
    for change in changes:
        if not 0 <= change.tensor < len(layout.specs):
            raise InvalidWeightsError(f"a change of tensor {change.tensor}, which is not there")
        spec = layout.specs[change.tensor]
        num_words = spec.num_bytes // word_bytes(spec)
        positions, values = change.positions, change.values
        wanted = num_words if positions is None else len(positions)
        fits = len(values) == wanted > 0 and values.dtype == WORDS[word_bytes(spec)]
        if positions is not None and fits:
            fits = int(positions[0]) >= 0 and int(positions[-1]) < num_words
            fits = fits and bool((positions[1:] > positions[:-1]).all())
        if not fits:
            raise InvalidWeightsError(
                f"a change does not fit {spec!s:.200}: {len(values)} values of {values.dtype}, at "
                "positions that are not ascending, not as many, or not in the tensor"
            )


def change_at(tensor: int, positions: Integers, values: torch.Tensor) -> Change:
    """A change that is known: ``values``, plain and flat, stand at ``positions``, ascending.

    Positions and values count elements.
    """
    item_bytes = values.dtype.itemsize
    words = _bytes_of(values).view(WORDS[min(item_bytes, 8)])
    if (times := item_bytes // 8) > 1:
        positions = (positions[:, None] * times + np.arange(times)).reshape(-1)
    return Change(tensor, positions, words)


def words_of(contents: FileTensors, tensor: int) -> Words:
    """The words of a tensor, where they lie."""
    start, size = contents.layout.offsets[tensor], contents.layout.sizes[tensor]
    width = word_bytes(contents.layout.specs[tensor])
    return np.frombuffer(contents.raw, np.uint8, size, start).view(WORDS[width])
