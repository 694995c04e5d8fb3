"""`HeldParts`: the parts of sharded tensors that one rank holds; `gathered` gathers a tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from dbuffer.errors import InvalidWeightsError
from dbuffer.publish.assignment import Box, whole_box
from dbuffer.weights.lazy_tensor import HeldRows, LazyTensor, View
from dbuffer.weights.sources import fetch

if TYPE_CHECKING:  # importing it takes half as long as importing torch
    from torch.distributed.tensor import DTensor


class HeldParts:
    """Parts of tensors that this rank holds. Views of a sharded tensor share the tensor's part."""

    def __init__(self) -> None:
        self._boxes: dict[int, tuple[Box | None, bool]] = {}
        """Held part ("box") of each sharded tensor, and whether its shards are strided, keyed by
        the tensor's ``id()``."""
        self._local: dict[int, torch.Tensor] = {}

    def box(self, index: int, tensor: torch.Tensor | LazyTensor) -> Box | None:
        if not isinstance(tensor, LazyTensor) or tensor.sharded is None:
            return whole_box(index, tensor.shape)
        box, is_strided = self._box_of(tensor.sharded)
        # Boxes of strided shards overlap, which only shows in the whole tensor, not in a view.
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
    """Intersect a held part ("box") of a tensor with a view of the tensor.

    Return the intersection as a part of the view, and its place in the box.
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
    """Return the sharded tensor that a lazy tensor or its view reads, or None for other tensors."""
    return tensor.sharded if isinstance(tensor, LazyTensor) else None


def viewed(tensor: torch.Tensor | LazyTensor, gathered: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, LazyTensor) and tensor.view is not None:
        return tensor.view.of(gathered)
    return gathered
