"""Boxes of tensors that the ranks of a sharded trainer hold, and the rank that writes each.

A box has a first index and an extent in every dimension. Where the boxes of all ranks cover a
tensor, one of the ranks that hold a box writes it. Otherwise the ranks that hold parts of a tensor
gather it, and one of them writes and drops it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from dbuffer.errors import InvalidWeightsError
from dbuffer.format.layout import ITEM_BYTES, Layout, Piece, TensorSpec, align
from dbuffer.weights.checkpoint import HeldRows, LazyTensor, View
from dbuffer.weights.sources import Source, fetch

if TYPE_CHECKING:  # its import takes half as long as torch's
    from torch.distributed.tensor import DTensor

SPREAD_FROM_BYTES = 1 << 20
"""If several ranks hold a box of this size or larger, the least busy of them writes it; below, the
first. Tensors that drift apart between ranks are small (the statistics of a batch norm), and must
all come from one rank."""


class Box(NamedTuple):
    """A region of a tensor."""

    tensor: int
    """Index of the tensor in the layout."""
    start: tuple[int, ...]
    """First index in each dimension."""
    shape: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        for dimension, (start, extent) in enumerate(zip(self.start, self.shape, strict=True)):
            tensor = tensor.narrow(dimension, start, extent)
        return tensor


@dataclass(frozen=True, slots=True)
class WriteAssignment:
    """Assignment of all tensors to the ranks that write them, the same on all ranks."""

    boxes: tuple[tuple[Box, ...], ...] = ()
    """Boxes that each rank holds and writes, by rank."""
    gathered: tuple[tuple[int, int], ...] = ()
    """Tensors that are gathered, in this order, each with the rank that writes it."""


Boxes: TypeAlias = dict[int, Box | None]
"""Boxes that a rank holds, by the tensor's index; None without a box, or for a partial sum."""


class HeldParts:
    """Parts of tensors that this rank holds; a sharded one is looked up once for all its views."""

    def __init__(self) -> None:
        self._boxes: dict[int, tuple[Box | None, bool]] = {}
        """Box of each sharded tensor, by its id, and whether its shares are strided."""
        self._local: dict[int, torch.Tensor] = {}

    def box(self, index: int, tensor: torch.Tensor | LazyTensor) -> Box | None:
        """Return the box of a tensor, or of a view of a sharded one; ``index``: in the layout."""
        if not isinstance(tensor, LazyTensor) or tensor.sharded is None:
            return whole_box(index, tensor.shape)
        box, is_strided = self._box_of(tensor.sharded)
        # Boxes of strided shares overlap, which shows in the whole tensor, and not in a part of it.
        if box is None or (tensor.view is not None and is_strided):
            return None
        box = box._replace(tensor=index)
        return box if tensor.view is None else _overlap(box, tensor.view)[0]

    def elements(self, tensor: torch.Tensor | LazyTensor, name: str) -> torch.Tensor:
        """Return the elements in a tensor's box."""
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
                f"of {name!r} this rank holds {list(local.shape)}, and its placements "
                f"{tensor.sharded.placements} give it {list(box.shape)}"
            )
        return local if tensor.view is None else _overlap(box, tensor.view)[1].of(local)

    def _box_of(self, sharded: Any) -> tuple[Box | None, bool]:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.placement_types import _StridedShard

        if (known := self._boxes.get(id(sharded))) is None:
            known = None, False
            if isinstance(sharded, HeldRows):
                known = _box_of_rows(sharded), False
            if isinstance(sharded, DTensor):
                is_strided = any(isinstance(way, _StridedShard) for way in sharded.placements)
                known = _box_of_dtensor(sharded), is_strided
            self._boxes[id(sharded)] = known
        return known


def _overlap(box: Box, view: View) -> tuple[Box, View]:
    """Return the part of a view that a box of the same tensor has, and its place in the box."""
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


def _box_of_rows(rows: HeldRows) -> Box:
    start = (rows.first, *[0] * (rows.local.ndim - 1))
    return Box(0, start, tuple(rows.local.shape))


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
    """The whole of a sharded tensor, for the length of a block that all ranks enter together."""
    if isinstance(tensor, LazyTensor) and hasattr(tensor.sharded, "ds_shape"):
        import deepspeed  # whose parameter this is, so that it is there

        with deepspeed.zero.GatheredParameters([tensor.sharded]):
            yield tensor.sharded.data
        return
    if isinstance(tensor, LazyTensor) and not isinstance(tensor.sharded, HeldRows | None):
        yield tensor.sharded.detach().full_tensor()
        return
    yield fetch(tensor)


def each_gathered(
    source: Source,
    assignment: WriteAssignment,
    rank: int,
    action: Callable[[int, torch.Tensor], None],
) -> None:
    """Gather the assigned tensors one after another; do ``action`` with those this rank writes.

    ``action`` gets the tensor's index and the whole of it. All ranks go through all tensors even if
    it fails: the others wait in the next gather.
    """
    tensors = source.tensors
    problem: Exception | None = None

    def whole_of(pair: tuple[int, int]) -> int:
        tensor = tensors[pair[0]]
        sharded = sharded_in(tensor)
        return id(tensor if sharded is None else sharded)

    try:
        # If several views of a tensor are published, it is gathered once.
        for _, pairs in itertools.groupby(assignment.gathered, whole_of):
            views = list(pairs)
            tensor = tensors[views[0][0]]
            if sharded_in(tensor) is None and rank not in {writer for _, writer in views}:
                continue  # held by other ranks, or whole without them
            with gathered(tensor) as whole:
                for index, writer in views:
                    if writer != rank or problem is not None:
                        continue
                    try:
                        action(index, _viewed(tensors[index], whole))
                    except Exception as error:  # noqa: BLE001 - raised when all are through
                        problem = error
            del whole  # before the next is gathered
    except Exception as error:  # noqa: BLE001 - likewise
        problem = error
    source.finish()
    if problem is not None:
        raise problem


def sharded_in(tensor: torch.Tensor | LazyTensor) -> Any:
    """Return the sharded tensor behind a lazy one or its view, or None if there is none."""
    return tensor.sharded if isinstance(tensor, LazyTensor) else None


def _viewed(tensor: torch.Tensor | LazyTensor, whole: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, LazyTensor) and tensor.view is not None:
        return tensor.view.of(whole)
    return whole


def assign_writes(
    specs: Sequence[TensorSpec], held: Sequence[Boxes], *, rows_only: bool
) -> WriteAssignment:
    """Assign a writer to each box that ranks have ``held``.

    ``rows_only``: gather boxes that are not one row of bytes in the whole tensor.
    """
    written: list[list[Box]] = [[] for _ in held]
    gathered: list[int] = []
    busy_bytes = [0] * len(held)
    shared: list[tuple[int, Box, list[int]]] = []
    for index, spec in enumerate(specs):
        if not spec.num_bytes:  # also of what would be gathered: a piece of a part has bytes
            continue
        owners = _owners(index, held)
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
    # Large ones first: the small ones even out what those leave.
    for num_bytes, box, ranks in sorted(shared, key=lambda row: -row[0]):
        writer = min(ranks, key=busy_bytes.__getitem__)
        written[writer].append(box)
        busy_bytes[writer] += num_bytes
    spread = []
    for index in gathered:
        holders = [rank for rank, boxes in enumerate(held) if index in boxes]
        writer = min(holders, key=busy_bytes.__getitem__)
        busy_bytes[writer] += specs[index].num_bytes
        spread.append((index, writer))
    return WriteAssignment(
        boxes=tuple(tuple(sorted(of_rank)) for of_rank in written),
        gathered=tuple(spread),
    )


def _num_bytes(box: Box, spec: TensorSpec) -> int:
    return math.prod(box.shape) * ITEM_BYTES[spec.dtype]


def _is_contiguous(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether the elements of a box lie one behind the other in the whole: as rows do."""
    pairs = itertools.dropwhile(lambda pair: pair[0] == 1, zip(box.shape, shape, strict=True))
    return all(extent == full for extent, full in itertools.islice(pairs, 1, None))


def layout_in_parts(layout: Layout, assignment: WriteAssignment) -> Layout:
    """Return a layout of the same tensors with a part for each rank."""
    part_bytes = [0] * len(assignment.boxes)
    pieces = []
    whole: list[list[Box]] = [[] for _ in assignment.boxes]
    for index, writer in assignment.gathered:
        whole[writer].append(whole_box(index, layout.specs[index].shape))
    for rank, boxes in enumerate(assignment.boxes):
        for box in sorted((*boxes, *whole[rank])):
            spec = layout.specs[box.tensor]
            offset = flat_index(box.start, spec.shape) * ITEM_BYTES[spec.dtype]
            num_bytes, place = _num_bytes(box, spec), align(part_bytes[rank])
            pieces.append(Piece(box.tensor, offset, num_bytes, rank, place))
            part_bytes[rank] = place + num_bytes
    return replace(layout, part_bytes=tuple(part_bytes), pieces=tuple(sorted(pieces)))


def whole_box(index: int, shape: tuple[int, ...]) -> Box:
    """All of a tensor."""
    return Box(index, (0,) * len(shape), tuple(shape))


def flat_index(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Return the place of an element in the flat tensor."""
    flat = 0
    for position, extent in zip(index, shape, strict=True):
        flat = flat * extent + position
    return flat


def _owners(index: int, held: Sequence[Boxes]) -> dict[Box, list[int]] | None:
    """The ranks that hold each box of a tensor; None if one of them holds no box."""
    owners: dict[Box, list[int]] = defaultdict(list)
    for rank, boxes in enumerate(held):
        if index not in boxes:
            continue
        if (box := boxes[index]) is None:
            return None
        if math.prod(box.shape):
            owners[box].append(rank)
    return owners


def _covers(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Whether boxes cover a tensor, and none lies on another.

    A DTensor cuts each dimension by itself. A rank's share of one is said by its first index and
    its length alone, as torch computes them; a strided share is no run of indices. But shares
    that divide a dimension, and whose runs so described do too, are those runs: from the front,
    whatever lies before the next share's first index can belong to this share only.
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
