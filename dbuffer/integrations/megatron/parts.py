"""`Part`: this rank's part of a tensor that mbridge exports, as a view of a parameter.

A tensor that mbridge exports under a Hugging Face name is the concatenation of parts from several
ranks, along one dimension. This rank's part is a strided view of one of its parameters: for
instance, the rows of q in a fused projection, or one half of a gated layer's weight.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dbuffer.errors import UnsupportedError
from dbuffer.io.tensors import flat_view
from dbuffer.weights.lazy_tensor import HeldRows, LazyTensor

OWNERS_PER_RANK = 1 << 16
"""Size of each rank's range of numbers. A rank must have fewer parameters and buffers."""


Strided: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]
"""Strided view of a contiguous tensor: sizes, strides and index of the first element."""


class Cut(NamedTuple):
    """Range of this rank's part in an exported tensor, along the dimension that is cut."""

    parameter: str
    dimension: int
    first: int
    """First index of this rank's part along `dimension`."""
    extent: int
    ranks: tuple[int, ...]
    """Ranks that have the tensor's parts, in the order of the parts."""

    @classmethod
    def find(
        cls,
        owners: torch.Tensor,
        parameters: Mapping[int, str],
        groups: Collection[tuple[int, ...]],
    ) -> Self | None:
        """Return the range of this rank's part in an exported tensor, or None if it has no range.

        The part has a range if the tensor consists of parts along one dimension, each from a
        different parameter, and this rank has only one part. If this is not the first dimension,
        the parts must also have equal sizes, and their ranks must be one of ``groups``. mbridge
        copies each element of the tensor from one parameter; ``owners`` has the number of this
        parameter at the element's place. ``parameters`` maps the numbers of this rank's parameters
        to names.
        """
        if not owners.ndim:
            return None
        lines = [_first_line(owners, dimension) for dimension in range(owners.ndim)]
        runs = [torch.unique_consecutive(line, return_counts=True) for line in lines]
        dimension = max(range(owners.ndim), key=lambda dimension: len(runs[dimension][0]))
        numbers, extents = (tuple(column.tolist()) for column in runs[dimension])
        line = lines[dimension].view(-1, *[1] * (owners.ndim - dimension - 1))
        places = [place for place, number in enumerate(numbers) if number in parameters]
        is_cut = len({*numbers}) == len(numbers) and bool((owners == line).all())
        if not is_cut or len(places) != 1:
            return None
        ranks = tuple(number // OWNERS_PER_RANK for number in numbers)
        if dimension and (len({*extents}) > 1 or ranks not in groups):
            return None
        [place] = places
        return cls(
            parameters[numbers[place]], dimension, sum(extents[:place]), extents[place], ranks
        )

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.narrow(self.dimension, self.first, self.extent)


def strides_of(positions: torch.Tensor, num_elements: int) -> Strided | None:
    """Return the view with the elements at ``positions`` of a flat tensor with ``num_elements``.

    Return None if these elements are no strided view of the flat tensor.
    """
    sizes: list[int] = []
    strides: list[int] = []
    starts = positions = positions.flatten()
    while len(starts) > 1:  # finds one dimension of the view, the last first
        steps = starts.diff()
        ends = (steps != steps[0]).nonzero()
        size = int(ends[0]) + 1 if len(ends) else len(starts)
        if len(starts) % size:
            return None
        sizes.insert(0, size)
        strides.insert(0, int(steps[0]))
        starts = starts[::size]
    first = int(starts[0])
    last = first + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    if min(strides, default=0) < 0 or last >= num_elements:
        return None
    numbers = torch.arange(num_elements, dtype=positions.dtype, device=positions.device)
    is_found = torch.equal(numbers.as_strided(sizes, strides, first).reshape(-1), positions)
    return (tuple(sizes), tuple(strides), first) if is_found else None


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of an exported tensor, as a strided view of one of its parameters."""

    name: str
    shape: tuple[int, ...]
    whole_shape: tuple[int, ...]
    cut: Cut
    elements: Strided

    def is_in(self, tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
        """Whether this part of the exported tensor is in ``parameter``, bit for bit."""
        exported, local = self.cut.part_of(tensor), self.of(parameter)
        return exported.dtype == local.dtype and torch.equal(_bytes_of(exported), _bytes_of(local))

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        flat = parameter.detach().view(-1)
        sizes, strides, first = self.elements
        return flat.as_strided(sizes, strides, flat.storage_offset() + first).reshape(self.shape)

    def in_whole(
        self, parameter: torch.Tensor, meshes: Mapping[tuple[int, ...], DeviceMesh]
    ) -> torch.Tensor | LazyTensor:
        """Return this rank's part as a sharded tensor that has the exported tensor's full shape.

        If this rank has the whole tensor, return an ordinary tensor. ``meshes`` maps each group of
        ranks over which tensors are cut to its device mesh.
        """
        local, ranks = self.of(parameter), self.cut.ranks
        if len(ranks) == 1:
            return local
        if self.cut.dimension:
            return DTensor.from_local(local, meshes[ranks], [Shard(self.cut.dimension)])
        rows = HeldRows(local, self.cut.first, ranks)
        return LazyTensor(local.dtype, self.whole_shape, _refuse_gather, sharded=rows)


def _refuse_gather() -> torch.Tensor:
    raise UnsupportedError(
        "the store is on a network mount, where rename cannot cut or transpose a tensor whose rows "
        "are on several Megatron ranks: use a rename that only changes names"
    )


def _first_line(tensor: torch.Tensor, dimension: int) -> torch.Tensor:
    return tensor[tuple(slice(None) if d == dimension else 0 for d in range(tensor.ndim))]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return flat_view(tensor.contiguous())
