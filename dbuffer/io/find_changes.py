"""`find_changes`: the differences between a version and tensors of the same layout."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dbuffer.errors import InvalidWeightsError
from dbuffer.format.delta import Integers
from dbuffer.format.layout import BLOCK_BYTES, Layout
from dbuffer.io import devices
from dbuffer.io.changes import (
    INTEGERS,
    WORDS,
    Diff,
    Positions,
    TensorDiff,
    Words,
    bytes_of,
    cut_work,
    join_words,
    narrowed,
    words_of,
)
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import DTYPES, FileTensors, flat_view, is_plain

_WHOLE_SHARE = 0.5
"""A tensor of which more than this changed goes whole: above that share, positions take more
bytes than the zero differences of unchanged words, and finding them takes four times as long."""

_RUN_BYTES = 2 * BLOCK_BYTES
"""Bytes that are compared together. Each call of numpy lets go of the interpreter's lock, and then
waits while another thread has it: few calls, then; and yet a core's cache holds most of a run."""

_SHORT_BYTES = BLOCK_BYTES // 4
"""Shorter tensors are compared many at once, side by side in a buffer: a call of numpy takes as
long as it takes to compare 20 kB."""

_BATCH_BYTES = 64 << 20
"""Limit of the plain memory for copies of tensors that are not plain; one tensor may be larger."""


def find_changes(
    before: FileTensors,
    after: Sequence[torch.Tensor],
    copier: Copier,
    *,
    max_changed: float = math.inf,
) -> Diff:
    """Find the differences from ``before`` in tensors of the same layout, in one pass.

    Tensors that lie in main memory as a file holds them are compared in place; those that lie so on
    a GPU are compared there. All others (of another dtype, not contiguous,
    mostly changed) are first copied as `Copier.write` would.

    Args:
        before: the version to start from.
        after: a tensor for each of the layout's, of its shape.
        copier: its threads do it.
        max_changed: words that may differ. When more do, the comparison ends, and what is returned
            has their number so far and no changes.

    Raises:
        InvalidWeightsError: number or shapes of the tensors are not the layout's.
    """
    layout = before.layout
    _check_shapes(layout, after)
    changes: list[TensorDiff] = []
    num_changed = 0
    plain, on_gpu, others = _sorted_by_place(layout, after)
    if on_gpu:
        num_changed, changes, mostly_changed = _compare_on_gpu(before, on_gpu, copier, max_changed)
        if num_changed > max_changed:
            return Diff(layout, [], num_changed)
        num_changed = sum([len(change.values) for change in changes])
        others = sorted([*others, *mostly_changed])
    for batch in _plain_batches(layout, plain, {i: after[i] for i in others}, copier):
        runs = list(_runs(layout, batch))
        left = max_changed - num_changed
        diffs = _compare(before, batch, runs, copier, left)
        num_changed += sum([diff.num_changed for diff in diffs])
        if num_changed > max_changed:
            return Diff(layout, [], num_changed)
        changes += _changes_of(before, batch, runs, diffs)
    changes.sort(key=lambda change: change.tensor)
    return Diff(layout, changes, num_changed)


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


def _sorted_by_place(
    layout: Layout, after: Sequence[torch.Tensor]
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor], list[int]]:
    """Return tensors compared in place in main memory, those compared on a GPU, and the others."""
    plain: dict[int, torch.Tensor] = {}
    on_gpu: dict[int, torch.Tensor] = {}
    others = []
    for index, (spec, tensor) in enumerate(zip(layout.specs, after, strict=True)):
        dtype = DTYPES[spec.dtype]
        if is_plain(tensor, dtype):
            plain[index] = tensor
        elif is_plain(tensor, dtype, device="cuda"):
            on_gpu[index] = tensor
        else:
            others.append(index)
    return plain, on_gpu, others


def _plain_batches(
    layout: Layout,
    plain: dict[int, torch.Tensor],
    others: Mapping[int, torch.Tensor],
    copier: Copier,
) -> Iterator[dict[int, torch.Tensor]]:
    """Return tensors in plain memory, by index: those that are there, then copies of the others."""
    if plain:
        yield plain
    batch: list[int] = []
    num_bytes = 0
    for index in others:
        if batch and num_bytes + layout.sizes[index] > _BATCH_BYTES:
            yield _copies(layout, batch, others, copier)
            batch, num_bytes = [], 0
        batch.append(index)
        num_bytes += layout.sizes[index]
    if batch:
        yield _copies(layout, batch, others, copier)


def _copies(
    layout: Layout, batch: Sequence[int], others: Mapping[int, torch.Tensor], copier: Copier
) -> dict[int, torch.Tensor]:
    copies = {}
    for index in batch:
        spec = layout.specs[index]
        memory = torch.empty(layout.sizes[index], dtype=torch.uint8)
        copies[index] = memory.view(DTYPES[spec.dtype]).view(spec.shape)
    copier.copy_tensors(list(copies.values()), [others[index] for index in batch])
    return copies


class _Run(NamedTuple):
    """Blocks that are compared at once."""

    blocks: Sequence[int]
    """Their indices. The words of all have one size."""
    view: npt.NDArray[np.uint8] | None
    """The new bytes, side by side in a long tensor; None: these are all blocks of short tensors."""


class _RunDiff(NamedTuple):
    """Words that differ in one run."""

    num_changed: int
    positions: Positions | None
    """Positions in the tensor, or in the run's tensors side by side; None: most words differ."""
    values: Words
    """The new words at these positions, or all of the run."""
    replaced: Words


def _compare(
    before: FileTensors,
    after: Mapping[int, torch.Tensor],
    runs: Sequence[_Run],
    copier: Copier,
    max_changed: float,
) -> list[_RunDiff]:
    """Compare plain tensors with those of the same indices in a file, run by run.

    Returns:
        The differences in each run; only of some, if more than ``max_changed`` words differ in
        these.
    """
    layout = before.layout
    diffs: dict[int, _RunDiff] = {}
    num_changed = 0

    def work(first: int, end: int) -> None:
        nonlocal num_changed
        # Used again for each run, so that it stays in the core's cache.
        mask, memory = np.empty(_RUN_BYTES // 8, np.bool_), np.empty(_RUN_BYTES, np.uint8)
        for number in range(first, end):
            if num_changed > max_changed:
                return
            run = runs[number]
            new = run.view
            if new is None:
                new = _side_by_side(layout, after, run.blocks, memory)
            old = _bytes_before(before, run.blocks, len(new))
            diffs[number] = diff = _compare_run(layout, run, old, new, mask)
            num_changed += diff.num_changed  # less, if another thread does so now: no harm

    sizes = [len(run.blocks) * layout.blocks[run.blocks[0]].num_bytes for run in runs]
    copier.in_parallel(work, cut_work(sizes, copier))
    return [diffs[number] for number in sorted(diffs)]


def _runs(layout: Layout, after: Mapping[int, torch.Tensor]) -> Iterator[_Run]:
    """Group the blocks of plain tensors: some of a long one, or all of short ones."""
    short: dict[int, list[int]] = {width: [] for width in WORDS}
    num_bytes = dict.fromkeys(WORDS, 0)
    sizes, widths, firsts = layout.sizes, layout.widths, layout.first_blocks
    num_together = _RUN_BYTES // BLOCK_BYTES
    for tensor in after:
        size, width = sizes[tensor], widths[tensor]
        blocks = range(firsts[tensor], firsts[tensor + 1])
        if size >= _SHORT_BYTES:
            view = bytes_of(after[tensor])
            for at in range(0, len(blocks), num_together):
                some = blocks[at : at + num_together]
                first, last = layout.blocks[some[0]], layout.blocks[some[-1]]
                yield _Run(some, view[first.offset : last.offset + last.num_bytes])
        elif size:
            short[width] += blocks
            num_bytes[width] += size
            if num_bytes[width] >= _RUN_BYTES - _SHORT_BYTES:
                yield _Run(short[width], None)
                short[width], num_bytes[width] = [], 0
    yield from [_Run(blocks, None) for blocks in short.values() if blocks]


def _bytes_before(
    before: FileTensors, blocks: Sequence[int], num_bytes: int
) -> npt.NDArray[np.uint8]:
    """Return the old bytes of blocks: a view if they lie side by side, else a copy."""
    raw = np.frombuffer(before.raw, np.uint8)
    (first, _), (_, end) = (_place_of(before.layout, blocks[at]) for at in (0, -1))
    if end - first == num_bytes:
        return raw[first:end]
    places = (_place_of(before.layout, index) for index in blocks)
    return np.concatenate([raw[start:end] for start, end in places])


def _place_of(layout: Layout, index: int) -> tuple[int, int]:
    """Return the first byte and the end of a block."""
    tensor, offset, num_bytes = layout.blocks[index]
    start = layout.offsets[tensor] + offset
    return start, start + num_bytes


def _side_by_side(
    layout: Layout,
    after: Mapping[int, torch.Tensor],
    blocks: Sequence[int],
    memory: npt.NDArray[np.uint8],
) -> npt.NDArray[np.uint8]:
    """Copy the new bytes of blocks into ``memory``, and return them."""
    start = place = memory.ctypes.data
    for tensor, offset, num_bytes in map(layout.blocks.__getitem__, blocks):
        ctypes.memmove(place, after[tensor].data_ptr() + offset, num_bytes)
        place += num_bytes
    return memory[: place - start]


def _compare_run(
    layout: Layout,
    run: _Run,
    old: npt.NDArray[np.uint8],
    new: npt.NDArray[np.uint8],
    mask: npt.NDArray[np.bool_],
) -> _RunDiff:
    """Return the differences in a run, from its bytes.

    Eight bytes are compared at a time, and single words only where these differ. If most words of a
    long tensor's run differ, they are only counted.
    """
    words = WORDS[layout.widths[layout.blocks[run.blocks[0]].tensor]]
    old_words, new_words = old.view(words), new.view(words)
    end = len(old) // 8 * 8
    old_eights, new_eights = old[:end].view(np.uint64), new[:end].view(np.uint64)
    mask = np.not_equal(old_eights, new_eights, out=mask[: len(old_eights)])
    if np.count_nonzero(mask) * 4 <= len(mask):
        eights = _true_in(mask)
        some_old, some_new = (side.take(eights).view(words) for side in (old_eights, new_eights))
        (hits,) = (some_old != some_new).nonzero()
        values, replaced = some_new.take(hits), some_old.take(hits)
        positions = _positions_in(eights, hits, 8 // words.itemsize)
        if end == len(old):
            return _run_diff(layout, run, positions, values, replaced)
        first = end // words.itemsize
        (rest,) = (old_words[first:] != new_words[first:]).nonzero()
        positions = np.concatenate([positions, rest + first])
    else:
        differs = old_words != new_words
        num_changed = int(np.count_nonzero(differs))
        if run.view is not None and num_changed > len(differs) * _WHOLE_SHARE:
            return _RunDiff(num_changed, None, new_words, old_words)
        (positions,) = differs.nonzero()
    return _run_diff(layout, run, positions, new_words.take(positions), old_words.take(positions))


def _run_diff(
    layout: Layout, run: _Run, positions: Integers, values: Words, replaced: Words
) -> _RunDiff:
    """Return the differences in a run, from their positions in its words."""
    tensor, offset, _ = layout.blocks[run.blocks[0]]  # of short tensors, the first one's beginning
    if offset:
        positions = positions + offset // values.itemsize
    return _RunDiff(len(positions), narrowed(positions, layout.sizes[tensor]), values, replaced)


def _true_in(mask: npt.NDArray[np.bool_]) -> Integers:
    """Return the positions of the few that are true, by looking at eight together."""
    end = len(mask) // 8 * 8
    eights = mask[:end].view(np.uint64)
    (some,) = (eights != 0).nonzero()
    (hits,) = eights.take(some).view(np.bool_).nonzero()
    positions = _positions_in(some, hits, 8)
    if end == len(mask):
        return positions
    (rest,) = mask[end:].nonzero()
    return np.concatenate([positions, rest + end])


def _positions_in(groups: Integers, hits: Integers, size: int) -> Integers:
    """Return the positions of hits, which count in some groups of ``size``, side by side."""
    shift = size.bit_length() - 1  # a division takes several times as long
    positions = groups.take(hits >> shift)
    positions <<= shift
    hits &= size - 1
    positions += hits
    return positions


def _changes_of(
    before: FileTensors,
    after: Mapping[int, torch.Tensor],
    runs: Sequence[_Run],
    diffs: Sequence[_RunDiff],
) -> Iterator[TensorDiff]:
    """Return one change for each tensor that differs, from the differences in runs."""
    layout = before.layout
    by_tensor: dict[int, list[tuple[_Run, _RunDiff]]] = {}
    for run, diff in zip(runs, diffs, strict=True):
        if diff.num_changed and run.view is None:
            yield from _split(before, after, run, diff)
        elif diff.num_changed:
            by_tensor.setdefault(layout.blocks[run.blocks[0]].tensor, []).append((run, diff))
    for tensor, some in by_tensor.items():
        num_words = layout.sizes[tensor] // layout.widths[tensor]
        if sum([diff.num_changed for _, diff in some]) > num_words * _WHOLE_SHARE:
            yield _whole(before, after, tensor)
        else:
            columns = list(zip(*(_gathered(layout, *pair) for pair in some), strict=True))[1:]
            positions, values, replaced = map(join_words, columns)
            yield TensorDiff(tensor, positions, values, replaced)


def _split(
    before: FileTensors, after: Mapping[int, torch.Tensor], run: _Run, diff: _RunDiff
) -> Iterator[TensorDiff]:
    """Return the change in each tensor of a run of short ones."""
    layout, (_, in_run, values, replaced) = before.layout, diff
    assert in_run is not None  # noqa: S101 - words of short tensors are not only counted
    tensors = list(
        dict.fromkeys([block.tensor for block in map(layout.blocks.__getitem__, run.blocks)])
    )
    sizes = np.array([layout.sizes[tensor] for tensor in tensors], in_run.dtype) // values.itemsize
    ends = sizes.cumsum(dtype=in_run.dtype)
    cuts = in_run.searchsorted(ends)
    counts = np.diff(cuts, prepend=0)
    positions = in_run - np.repeat(ends - sizes, counts)
    is_whole = (counts > sizes * _WHOLE_SHARE).tolist()
    end = 0
    for tensor, cut, whole in zip(tensors, cuts.tolist(), is_whole, strict=True):
        start, end = end, cut
        if whole:
            yield _whole(before, after, tensor)
        elif end > start:
            yield TensorDiff(tensor, positions[start:end], values[start:end], replaced[start:end])


def _whole(before: FileTensors, after: Mapping[int, torch.Tensor], tensor: int) -> TensorDiff:
    """Return the change of all words of a tensor."""
    old = words_of(before, tensor)
    return TensorDiff(tensor, None, bytes_of(after[tensor]).view(old.dtype), old)


def _gathered(layout: Layout, run: _Run, diff: _RunDiff) -> _RunDiff:
    """Gather the words that differ in a run, if they were only counted."""
    if diff.positions is not None:
        return diff
    (positions,) = (diff.replaced != diff.values).nonzero()
    values, replaced = diff.values.take(positions), diff.replaced.take(positions)
    return _run_diff(layout, run, positions, values, replaced)


def _compare_on_gpu(
    before: FileTensors,
    after: Mapping[int, torch.Tensor],
    copier: Copier,
    max_changed: float,
) -> tuple[int, list[TensorDiff], list[int]]:
    """Return the number of words that differ, and of which tensors.

    Those of which so much changed that it was only counted come by their indices. If more than
    ``max_changed`` words differ, the comparison ends.
    """
    layout = before.layout
    groups: dict[tuple[torch.device, int], list[int]] = {}
    for index, tensor in after.items():
        groups.setdefault((tensor.device, layout.widths[index]), []).append(index)
    found: dict[int, list[tuple[Positions, Words, Words]]] = {}
    mostly_changed: set[int] = set()
    num_changed = 0
    for (_, width), tensors in groups.items():
        pairs = [
            (flat_view(before.tensor(i), INTEGERS[width]), flat_view(after[i], INTEGERS[width]))
            for i in tensors
        ]
        with torch.inference_mode():
            for piece in devices.compare(pairs, copier.copy_tensors):
                num_changed += piece.num_changed
                if num_changed > max_changed:
                    return num_changed, [], []
                if piece.changed is None:
                    mostly_changed.update(tensors[part.index] for part in piece.parts)
                elif piece.num_changed:
                    _add_changed(layout, found, tensors, piece, WORDS[width])
    for index, parts in found.items():
        num_words = layout.sizes[index] // layout.widths[index]
        if sum([len(values) for _, values, _ in parts]) > num_words * _WHOLE_SHARE:
            mostly_changed.add(index)
    indices = [index for index in found if index not in mostly_changed]
    changes: dict[int, TensorDiff] = {}

    def join(first: int, end: int) -> None:
        for index in indices[first:end]:
            positions, values, replaced = map(join_words, zip(*found[index], strict=True))
            changes[index] = TensorDiff(index, positions, values, replaced)

    copier.in_parallel(join, cut_work([layout.sizes[index] for index in indices], copier))
    return num_changed, list(changes.values()), sorted(mostly_changed)


def _add_changed(
    layout: Layout,
    found: dict[int, list[tuple[Positions, Words, Words]]],
    tensors: Sequence[int],
    piece: devices.PieceDiff,
    words: np.dtype[Any],
) -> None:
    """Add what differs in a piece to that of its tensors."""
    assert piece.changed is not None  # noqa: S101 - not only counted
    positions, values, replaced = (each.numpy() for each in piece.changed)
    values, replaced = values.view(words), replaced.view(words)
    counts = np.array([part.host.numel() for part in piece.parts], positions.dtype)
    ends = counts.cumsum(dtype=positions.dtype)
    cuts = positions.searchsorted(ends).tolist()
    cut = 0
    for part, first, end in zip(piece.parts, ends - counts, cuts, strict=True):
        start, cut = cut, end
        if end > start:
            some, index = slice(start, end), tensors[part.index]
            at = narrowed(positions[some] - first, layout.sizes[index])
            at += part.first
            found.setdefault(index, []).append((at, values[some], replaced[some]))
