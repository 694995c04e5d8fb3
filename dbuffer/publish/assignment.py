"""`Assignment`: the rectangular parts ("boxes") of tensors that each trainer rank writes.

If the boxes of all ranks cover a tensor, each box is written by one of the ranks that hold it.
Otherwise the ranks that hold parts of the tensor gather it, and one of these ranks writes the whole
tensor.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import torch

from dbuffer.format.layout import ITEM_BYTES, Layout, Piece, TensorSpec, align

SPREAD_FROM_BYTES = 1 << 20
"""Least size in bytes of a part of a tensor ("box") that the least busy of its ranks writes. The
first rank that holds it writes a smaller box. Small tensors may differ between ranks, as a batch
norm's statistics do, so one rank must write all of them."""


class Box(NamedTuple):
    tensor: int
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        for dimension, (start, extent) in enumerate(zip(self.start, self.shape, strict=True)):
            tensor = tensor.narrow(dimension, start, extent)
        return tensor


@dataclass(frozen=True, slots=True)
class Assignment:
    """Assignment of all tensors to the ranks that write them. All ranks compute an equal one."""

    specs: tuple[TensorSpec, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    boxes: tuple[tuple[Box, ...], ...] = ()
    gathered: tuple[tuple[int, int], ...] = ()
    """Index of each tensor to gather, in order, with the rank that writes the tensor."""

    def boxes_of(self, rank: int) -> list[Box]:
        to_gather = [index for index, writer in self.gathered if writer == rank]
        gathered = [whole_box(index, self.specs[index].shape) for index in to_gather]
        return sorted((*self.boxes[rank], *gathered))


Boxes: TypeAlias = dict[int, Box | None]
"""Rectangular parts ("boxes") of tensors that a rank holds, keyed by the tensor's index. None if
the rank's part is no box, or is a partial sum."""


def assign_writes(
    specs: tuple[TensorSpec, ...],
    aliases: dict[str, str],
    boxes: Sequence[Boxes],
    *,
    rows_only: bool,
) -> Assignment:
    """Assign a writing rank to each rectangular part ("box") of a tensor that any rank holds.

    ``rows_only``: gather each tensor that has a box which is not contiguous in the whole tensor.
    """
    written: list[list[Box]] = [[] for _ in boxes]
    gathered: list[int] = []
    busy_bytes = [0] * len(boxes)
    shared: list[tuple[int, Box, list[int]]] = []
    for index, spec in enumerate(specs):
        if not spec.num_bytes:  # empty tensors are not gathered either: a piece of a part has bytes
            continue
        owners = _owners(index, boxes)
        if (
            owners is None
            or not _covers(list(owners), spec.shape)
            or (rows_only and not all(_is_contiguous(box, spec.shape) for box in owners))
        ):
            gathered.append(index)
            continue
        for box, ranks in owners.items():
            num_bytes = _num_bytes(box, spec)
            if len(ranks) > 1 and num_bytes >= SPREAD_FROM_BYTES:
                shared.append((num_bytes, box, ranks))
                continue
            written[ranks[0]].append(box)
            busy_bytes[ranks[0]] += num_bytes
    # Large boxes first: small boxes then even out the ranks' loads.
    for num_bytes, box, ranks in sorted(shared, key=lambda row: -row[0]):
        writer = min(ranks, key=busy_bytes.__getitem__)
        written[writer].append(box)
        busy_bytes[writer] += num_bytes
    spread = []
    for index in gathered:
        holders = [rank for rank, of_rank in enumerate(boxes) if index in of_rank]
        writer = min(holders, key=busy_bytes.__getitem__)
        busy_bytes[writer] += specs[index].num_bytes
        spread.append((index, writer))
    return Assignment(
        specs,
        aliases,
        boxes=tuple(tuple(sorted(of_rank)) for of_rank in written),
        gathered=tuple(spread),
    )


def _num_bytes(box: Box, spec: TensorSpec) -> int:
    return math.prod(box.shape) * ITEM_BYTES[spec.dtype]


def _is_contiguous(box: Box, shape: tuple[int, ...]) -> bool:
    pairs = itertools.dropwhile(lambda pair: pair[0] == 1, zip(box.shape, shape, strict=True))
    return all(extent == full for extent, full in itertools.islice(pairs, 1, None))


def layout_in_parts(layout: Layout, assignment: Assignment) -> Layout:
    part_bytes, pieces = [], []
    for rank in range(len(assignment.boxes)):
        end = 0
        for box in assignment.boxes_of(rank):
            spec, place = layout.specs[box.tensor], align(end)
            num_bytes = _num_bytes(box, spec)
            pieces.append(Piece(box.tensor, file_offset(box, spec), num_bytes, rank, place))
            end = place + num_bytes
        part_bytes.append(end)
    return replace(layout, part_bytes=tuple(part_bytes), pieces=tuple(sorted(pieces)))


def whole_box(index: int, shape: tuple[int, ...]) -> Box:
    return Box(index, (0,) * len(shape), tuple(shape))


def file_offset(box: Box, spec: TensorSpec) -> int:
    """Return the offset in bytes, within its tensor, of the first element of a part ("box")."""
    flat = 0
    for position, extent in zip(box.start, spec.shape, strict=True):
        flat = flat * extent + position
    return flat * ITEM_BYTES[spec.dtype]


def _owners(index: int, boxes: Sequence[Boxes]) -> dict[Box, list[int]] | None:
    owners: dict[Box, list[int]] = defaultdict(list)
    for rank, of_rank in enumerate(boxes):
        if index not in of_rank:
            continue
        if (box := of_rank[index]) is None:
            return None
        if math.prod(box.shape):
            owners[box].append(rank)
    return owners


def _covers(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Whether rectangular parts ("boxes") cover a tensor and do not overlap.

    torch describes a shard of a dimension by its first index and its length, also if the shard is
    strided. If these ranges tile the dimension, no shard is strided: from the front, the indices
    before the next shard's first index can only belong to the shard before it.
    """
    num_boxes = 1
    for dimension, extent in enumerate(shape):
        runs = sorted({(box.start[dimension], box.shape[dimension]) for box in boxes})
        end = 0
        for start, length in runs:
            if start != end:
                return False
            end += length
        if end != extent:
            return False
        num_boxes *= len(runs)
    return len(boxes) == num_boxes
