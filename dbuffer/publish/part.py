"""`Part`: the boxes of tensors that one rank writes of each version.

An `Assignment` gives each rank of a sharded trainer its boxes: most of them it has, others are
whole tensors that all ranks gather first. A sender alone has all tensors.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dbuffer.errors import InvalidWeightsError
from dbuffer.format.layout import Layout
from dbuffer.publish.assignment import Assignment, Box, file_offset, whole_box
from dbuffer.weights.lazy_tensor import HeldRows, LazyTensor, View
from dbuffer.weights.sources import Source, fetch

if TYPE_CHECKING:  # its import takes half as long as torch's
    from torch.distributed.tensor import DTensor


class Part:
    """Boxes that one rank writes of each version of a layout, numbered in the tensors' order.

    Without an assignment, of a sender alone, they are all tensors, whole.
    """

    def __init__(self, layout: Layout, assignment: Assignment | None = None, rank: int = 0) -> None:
        self.whole = layout
        """Layout of the versions."""
        self.rank = rank
        self.has_all = assignment is None
        self.layout = layout
        """Layout of the boxes, each as a tensor: of a rank's own file, or copy."""
        self.file_starts: Sequence[int] = layout.offsets
        """First byte of each box in the data of all ranks, if boxes are rows of their tensors."""
        self.gathered: tuple[tuple[int, int], ...] = ()
        """Tensors that all ranks gather, each with the rank that writes it."""
        specs = layout.specs
        if assignment is None:
            self.boxes = [whole_box(index, spec.shape) for index, spec in enumerate(specs)]
            return
        self.boxes, self.gathered = assignment.boxes_of(rank), assignment.gathered
        self.layout = Layout.of(specs[box.tensor]._replace(shape=box.shape) for box in self.boxes)
        self.file_starts = [
            layout.offsets[box.tensor] + file_offset(box, specs[box.tensor]) for box in self.boxes
        ]

    def views_in(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the views of some boxes in all of the layout's tensors."""
        boxes = [self.boxes[number] for number in numbers]
        return [box.of(tensors[box.tensor]) for box in boxes]

    def local_boxes(self, source: Source) -> Iterator[tuple[Sequence[int], list[torch.Tensor]]]:
        """Yield the numbers of boxes that this rank has, with their elements.

        All boxes in memory come together, then each lazy tensor's box by itself.
        """
        if self.has_all and not source.is_lazy:  # checked before the version was begun
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
        if numbers or not lazy:  # once, also on a rank that writes nothing: it maps the file
            source.refuse_values([specs[number] for number in numbers], elements)
            yield numbers, elements
        for number, tensor in lazy:
            fetched = fetch(tensor)
            source.refuse_values([specs[number]], [fetched])
            yield [number], [fetched]

    def gather(self, source: Source) -> Iterator[tuple[int, torch.Tensor]]:
        """Gather tensors one after another; yield the tensors that this rank writes, by box.

        All ranks go through all tensors, to the end: the others wait in the next gather.
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
                    continue  # on other ranks, or whole without them
                with _gathered(tensor) as gathered:
                    for index in written:
                        yield number_of[index], _viewed(tensors[index], gathered)
                del gathered  # before the next is gathered
        except Exception:
            source.finish()
            raise
        source.finish()


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


def _box_of_dtensor(tensor: DTensor) -> Box | None:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        return None
    shape, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return Box(0, tuple(start), tuple(shape))


@contextlib.contextmanager
def _gathered(tensor: torch.Tensor | LazyTensor) -> Iterator[torch.Tensor]:
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


def sharded_in(tensor: torch.Tensor | LazyTensor) -> Any:
    """Return the sharded tensor behind a lazy one or its view, or None if there is none."""
    return tensor.sharded if isinstance(tensor, LazyTensor) else None


def _viewed(tensor: torch.Tensor | LazyTensor, gathered: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, LazyTensor) and tensor.view is not None:
        return tensor.view.of(gathered)
    return gathered
