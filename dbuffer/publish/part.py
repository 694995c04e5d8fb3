"""`Part`: the rectangular parts ("boxes") of tensors that one rank writes into each version.

`assign_writes` assigns the boxes to ranks. If the boxes of all ranks cover a tensor, each box is
written by one of the ranks that hold it. Otherwise the ranks that hold parts of the tensor gather
it, and one of these ranks writes the whole tensor.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from dbuffer.errors import InvalidWeightsError
from dbuffer.format.layout import ITEM_BYTES, Layout, Piece, TensorSpec, align
from dbuffer.weights.lazy_tensor import HeldRows, LazyTensor, View
from dbuffer.weights.sources import Source, fetch

if TYPE_CHECKING:  # importing it takes half as long as importing torch
    from torch.distributed.tensor import DTensor

SPREAD_FROM_BYTES = 1 << 20
"""Smallest size in bytes of a large part of a tensor ("box"). If several ranks hold a large box,
the least busy of them writes it. If several ranks hold a small box, the first of them writes it:
small tensors, such as a batch norm's statistics, may differ between ranks, so one rank must write
all of them."""


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
    """Assignment of each tensor, or of its parts, to writing ranks. It is equal on all ranks."""

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
"""Rectangular parts ("boxes") of tensors that a rank holds, keyed by the tensor's index. The value
is None if the rank's part is not rectangular, or is a partial sum."""


def assign_writes(
    specs: tuple[TensorSpec, ...],
    aliases: dict[str, str],
    boxes: Sequence[Boxes],
    *,
    rows_only: bool,
) -> Assignment:
    """Assign a writing rank to each rectangular part ("box") of a tensor that any rank holds.

    ``rows_only``: a rank's file can hold only contiguous boxes. So if a tensor has a box that is
    not contiguous, the ranks gather the tensor, and one rank writes it whole.
    """
    written: list[list[Box]] = [[] for _ in boxes]
    gathered: list[int] = []
    busy_bytes = [0] * len(boxes)
    shared: list[tuple[int, Box, list[int]]] = []
    for index, spec in enumerate(specs):
        if not spec.num_bytes:  # no rank writes an empty tensor: a layout has no empty pieces
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

    torch describes a shard of a dimension only by its first index and its length, even if the
    shard's indices have gaps. Shards with gaps fail this check. Proof: all shards together hold
    every index of the dimension. Suppose that the ranges from first index to first index plus
    length tile the dimension. Only the first shard can hold the indices of its range, because all
    other shards begin after it. The shard has as many indices as its range, so it holds no others,
    and has no gap. Without the first shard, this also proves it for the second, and so on.
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


class HeldParts:
    """Parts of tensors that this rank holds. All views of one tensor use the same result."""

    def __init__(self) -> None:
        self._boxes: dict[int, tuple[Box | None, bool]] = {}
        """Held part ("box") of each sharded tensor, and whether its shards are strided, keyed by
        the tensor's ``id()``."""
        self._local: dict[int, torch.Tensor] = {}

    def box(self, index: int, tensor: torch.Tensor | LazyTensor) -> Box | None:
        if not isinstance(tensor, LazyTensor) or tensor.sharded is None:
            return whole_box(index, tensor.shape)
        box, is_strided = self._box_of(tensor.sharded)
        # The boxes of strided shards overlap, so the tensor must be gathered. `_covers` detects the
        # overlap only between boxes of a whole tensor. Return None for a view, to gather it, too.
        if box is None or (tensor.view is not None and is_strided):
            return None
        box = box._replace(tensor=index)
        return box if tensor.view is None else _overlap(box, tensor.view)[0]

    def elements(self, tensor: torch.Tensor | LazyTensor, name: str) -> torch.Tensor:
        if not isinstance(tensor, LazyTensor):
            return tensor
        if tensor.sharded is None:
            return fetch(tensor)
        box, _ = self._box_of(tensor.sharded)
        assert box is not None  # noqa: S101 - else it is gathered
        if (local := self._local.get(id(tensor.sharded))) is None:
            with torch.no_grad():
                local = self._local[id(tensor.sharded)] = tensor.sharded.to_local()
        if tuple(local.shape) != box.shape:
            raise InvalidWeightsError(
                f"this rank's shard of {name!r} has shape {list(local.shape)}, but the placements "
                f"{tensor.sharded.placements} give it shape {list(box.shape)}"
            )
        return local if tensor.view is None else _overlap(box, tensor.view)[1].of(local)

    def _box_of(self, sharded: Any) -> tuple[Box | None, bool]:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.placement_types import _StridedShard

        if (box := self._boxes.get(id(sharded))) is None:
            box = None, False
            if isinstance(sharded, HeldRows):
                start = (sharded.first, *[0] * (sharded.local.ndim - 1))
                box = Box(0, start, tuple(sharded.local.shape)), False
            if isinstance(sharded, DTensor):
                is_strided = any(isinstance(way, _StridedShard) for way in sharded.placements)
                box = _box_of_dtensor(sharded), is_strided
            self._boxes[id(sharded)] = box
        return box


def _overlap(box: Box, view: View) -> tuple[Box, View]:
    """Intersect a held part ("box") of a tensor with a view of the tensor.

    Return the intersection twice: as a box in the view, and as a view of the held box.
    """
    index: list[int | slice] = []
    starts, shape = [], []
    for start, extent, place in zip(box.start, box.shape, view.index, strict=True):
        first, end = (place.start, place.stop) if isinstance(place, slice) else (place, place + 1)
        begin, stop = max(start, first), min(start + extent, end)
        if begin >= stop:
            none = (0,) * len(view.shape)
            return Box(box.tensor, none, none), view
        if isinstance(place, slice):
            index.append(slice(begin - start, stop - start))
            starts.append(begin - first)
            shape.append(stop - begin)
        else:
            index.append(begin - start)
    long = iter(view.order)
    dimensions = [None if size == 1 else next(long) for size in view.shape]
    part = Box(
        box.tensor,
        tuple(0 if dimension is None else starts[dimension] for dimension in dimensions),
        tuple(1 if dimension is None else shape[dimension] for dimension in dimensions),
    )
    return part, View(tuple(index), view.order, part.shape)


def _box_of_dtensor(tensor: DTensor) -> Box | None:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        return None
    shape, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return Box(0, tuple(start), tuple(shape))


@contextlib.contextmanager
def gathered(tensor: torch.Tensor | LazyTensor) -> Iterator[torch.Tensor]:
    if isinstance(tensor, LazyTensor) and hasattr(tensor.sharded, "ds_shape"):
        import deepspeed  # the parameter whose shard this is, now gathered

        with deepspeed.zero.GatheredParameters([tensor.sharded]):
            yield tensor.sharded.data
        return
    if isinstance(tensor, LazyTensor) and not isinstance(tensor.sharded, HeldRows | None):
        yield tensor.sharded.detach().full_tensor()
        return
    yield fetch(tensor)


def sharded_in(tensor: torch.Tensor | LazyTensor) -> Any:
    """Return the sharded tensor that a lazy tensor reads; for any other tensor, return None."""
    return tensor.sharded if isinstance(tensor, LazyTensor) else None


class Part:
    """One rank's part of each version: the pieces ("boxes") of tensors that this rank writes.

    Boxes are numbered in tensor order. If the sender has one rank, each tensor is one box.
    """

    def __init__(self, layout: Layout, assignment: Assignment | None = None, rank: int = 0) -> None:
        self.whole = layout
        self.rank = rank
        self.has_all = assignment is None
        self.layout = layout
        """Layout of this rank's file or copy. Each part ("box") of a tensor is one tensor there."""
        self.file_starts: Sequence[int] = layout.offsets
        """Offset of each box in the version's weights file. Valid only if each box is contiguous in
        its tensor."""
        self.gathered: tuple[tuple[int, int], ...] = ()
        specs = layout.specs
        if assignment is None:
            self.boxes = [whole_box(index, spec.shape) for index, spec in enumerate(specs)]
            return
        self.boxes, self.gathered = assignment.boxes_of(rank), assignment.gathered
        self.layout = Layout.of(specs[box.tensor]._replace(shape=box.shape) for box in self.boxes)
        self.file_starts = [
            layout.offsets[box.tensor] + file_offset(box, specs[box.tensor]) for box in self.boxes
        ]

    def batches(
        self, numbers: Sequence[int], max_bytes: float = math.inf
    ) -> Iterator[tuple[slice, int, Layout]]:
        """Cut ascending numbers of boxes into batches of consecutive boxes.

        A batch has at most ``max_bytes``, or one box. Yield its slice of ``numbers``, the number of
        its first box, and its layout.
        """
        layout, first, num_bytes = self.layout, 0, 0
        for at, number in enumerate([*numbers, -1]):
            size = layout.sizes[number] if number >= 0 else 0
            is_next = at == 0 or number == numbers[at - 1] + 1
            if at > first and not (is_next and num_bytes + size <= max_bytes):
                specs = layout.specs[numbers[first] : numbers[at - 1] + 1]
                is_whole = len(specs) == len(layout.specs)
                yield slice(first, at), numbers[first], layout if is_whole else Layout.of(specs)
                first, num_bytes = at, 0
            num_bytes += size

    def local_boxes(self, source: Source) -> Iterator[tuple[Sequence[int], list[torch.Tensor]]]:
        """Yield numbers and elements of the parts ("boxes") that this rank writes without a gather.

        All boxes in memory come first, together. After them comes the box of each lazy tensor.
        """
        if self.has_all and not source.is_lazy:  # the sender has already checked the values
            yield range(len(source.specs)), source.eager
            return
        parts, specs = HeldParts(), self.layout.specs
        numbers, elements = list[int](), list[torch.Tensor]()
        lazy: list[tuple[int, LazyTensor]] = []
        to_gather = {index for index, _ in self.gathered}
        for number, box in enumerate(self.boxes):
            tensor = source.tensors[box.tensor]
            if box.tensor in to_gather:
                continue
            if isinstance(tensor, LazyTensor) and (self.has_all or tensor.sharded is None):
                lazy.append((number, tensor))
            else:
                numbers.append(number)
                elements.append(parts.elements(tensor, specs[number].name))
        if numbers or not lazy:  # also if this rank has no boxes: it still must map the file
            source.refuse_values([specs[number] for number in numbers], elements)
            yield numbers, elements
        for number, tensor in lazy:
            fetched = fetch(tensor)
            source.refuse_values([specs[number]], [fetched])
            yield [number], [fetched]

    def gather(self, source: Source) -> Iterator[tuple[int, torch.Tensor]]:
        """Gather tensors one by one; yield number and elements of each part that this rank writes.

        Every rank must consume the iterator to its end, since the other ranks wait in the next
        gather.
        """
        tensors = source.tensors
        number_of = {box.tensor: number for number, box in enumerate(self.boxes)}

        def whole_of(pair: tuple[int, int]) -> int:
            tensor = tensors[pair[0]]
            sharded = sharded_in(tensor)
            return id(tensor if sharded is None else sharded)

        try:
            # If several views of a tensor are published, it is gathered once.
            for _, pairs in itertools.groupby(self.gathered, whole_of):
                views = list(pairs)
                tensor = tensors[views[0][0]]
                written = [index for index, writer in views if writer == self.rank]
                if sharded_in(tensor) is None and not written:
                    continue  # other ranks hold it, or each rank holds all of it
                with gathered(tensor) as whole_tensor:
                    for index in written:
                        part = tensors[index]
                        view = part.view if isinstance(part, LazyTensor) else None
                        yield number_of[index], view.of(whole_tensor) if view else whole_tensor
                del whole_tensor  # so that its memory is free before the next gather
        except Exception:
            source.finish()
            raise
        source.finish()
