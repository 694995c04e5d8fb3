"""`Tracer`: finds this rank's parts of exported tensors, as views of the rank's parameters.

A tensor that mbridge exports under a Hugging Face name is the concatenation of parts from several
ranks, along one dimension. This rank's part is a strided view of one of its parameters: for
instance, the rows of q in a fused projection, or one half of a gated layer's weight.

mbridge exports the model three times. In the first export, each element of a parameter is replaced
by the parameter's number. In the second export, each element is replaced by its position in the
parameter. The third export has the real weights: each rank compares its parts with them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dbuffer.errors import RankFailedError, UnsupportedError
from dbuffer.io.tensors import flat_view
from dbuffer.weights.lazy_tensor import HeldRows, LazyTensor

Numbers: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

Exported: TypeAlias = Iterator[tuple[str, torch.Tensor]]

OWNERS_PER_RANK = 1 << 16
"""Size of each rank's range of numbers. A rank must have fewer parameters and buffers than this."""


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
        different parameter, and this rank has only one part. Along any dimension but the first, the
        parts must also have equal sizes, and their ranks must be one of ``groups``. ``owners`` is
        the tensor with each element replaced by the number of the parameter that mbridge copied
        the element from. ``parameters`` maps the numbers of this rank's parameters to names.
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
    while len(starts) > 1:  # finds one dimension of the view per turn, from the last to the first
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

        If this rank has the whole tensor, return an ordinary tensor. ``meshes`` has a device mesh
        for each group of ranks that share the parts of a tensor.
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
        "the option rename cuts or transposes a tensor whose rows are on several Megatron ranks, "
        "which is not supported if the store is on a network mount: use a rename that only changes "
        "names"
    )


def _first_line(tensor: torch.Tensor, dimension: int) -> torch.Tensor:
    return tensor[tuple(slice(None) if d == dimension else 0 for d in range(tensor.ndim))]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return flat_view(tensor.contiguous())


def tensors_of(models: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a rank's models. Names begin with the model's index."""
    return {
        f"{stage}.{name}": tensor
        for stage, model in enumerate(models)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


class Tracer:
    """Search for the parts of exported tensors that are in this rank's parameters.

    All ranks must search together, because an export gathers tensors. ``models`` are this rank's
    models, without wrappers. ``bridge`` is mbridge's bridge of these models. ``groups`` are the
    groups of ranks over which a tensor can be cut.
    """

    def __init__(
        self, bridge: Any, models: Sequence[nn.Module], groups: Collection[tuple[int, ...]]
    ) -> None:
        self._bridge = bridge
        self._models = models
        self._groups = groups
        self._tensors = tensors_of(models)
        if len(self._tensors) >= OWNERS_PER_RANK:
            raise UnsupportedError(
                f"this rank has {len(self._tensors)} parameters and buffers, more than the limit "
                f"of {OWNERS_PER_RANK - 1}: publish mbridge's export itself, as a weight source"
            )
        self._first = distributed.get_rank() * OWNERS_PER_RANK + 1  # 0 is no parameter
        self._names = dict(enumerate(self._tensors, self._first))
        self._device = next(models[0].parameters()).device
        self._error: Exception | None = None
        self.refused: dict[str, None] = {}

    @torch.no_grad()
    def find_parts(self) -> dict[str, Part]:
        """Return this rank's parts by exported name. Raise an error if any rank failed."""
        at_place = self._find_parts(self._find_cuts())
        parts = {part.name: part for part in at_place.values()}
        names: dict[str, None] = {}

        def compare(place: int, name: str, tensor: torch.Tensor) -> None:
            part = at_place.get(place)
            if part is not None and not part.is_in(tensor, self._tensors[part.cut.parameter]):
                self.refused[name] = None

        def noted() -> Exported:
            for name, tensor in self._bridge.export_weights(self._models):
                names[name] = None
                yield name, tensor

        self._for_each(noted(), compare)
        # Count the ranks that have a part of each tensor. If no rank has a part, refuse the tensor:
        # the bridge computes its values, instead of copying them from parameters.
        flags = [*(name in parts for name in names), self._error is not None]
        counts = torch.tensor(flags, dtype=torch.int32, device=self._device)
        distributed.all_reduce(counts)
        *num_ranks, num_failed = counts.tolist()
        if self._error is not None:
            raise self._error
        if num_failed:  # raise on every rank, so that all trace again at the next publish
            raise RankFailedError("another rank could not trace mbridge's export: see its error")
        self.refused |= {name: None for name, n in zip(names, num_ranks, strict=True) if not n}
        return parts

    def _for_each(self, export: Exported, work: Callable[[int, str, torch.Tensor], None]) -> None:
        """Call ``work`` with the index, name and value of each exported tensor.

        If ``work`` raises an error, this rank still exports the other tensors, without ``work``:
        otherwise the other ranks would hang in the next gather.
        """
        for place, (name, tensor) in enumerate(export):
            if self._error is None:
                try:
                    work(place, name, tensor)
                except Exception as error:  # noqa: BLE001 - raised when the export has ended
                    self._error = error

    def _find_cuts(self) -> dict[int, Cut]:
        """Return this rank's range of each exported tensor, keyed by the tensor's export number."""
        owner_of = {id(self._tensors[name]): owner for owner, name in self._names.items()}
        end, cuts = self._first + len(self._names), dict[int, Cut]()

        def owners_in(tensor: torch.Tensor) -> torch.Tensor:
            return torch.full_like(tensor, owner_of[id(tensor)], dtype=torch.int32)

        def find(place: int, name: str, owners: torch.Tensor) -> None:
            if not bool(((owners >= self._first) & (owners < end)).any()):
                return
            cut = Cut.find(owners, self._names, self._groups)
            if cut is None:
                self.refused[name] = None
            else:
                cuts[place] = cut

        self._for_each(self._export(owners_in), find)
        return cuts

    def _find_parts(self, cuts: Mapping[int, Cut]) -> dict[int, Part]:
        parts: dict[int, Part] = {}

        def find(place: int, name: str, positions: torch.Tensor) -> None:
            cut = cuts.get(place)
            if cut is None:
                return
            local = cut.part_of(positions)
            elements = strides_of(local, self._tensors[cut.parameter].numel())
            if elements is None:
                self.refused[name] = None
            else:
                shapes = tuple(local.shape), tuple(positions.shape)
                parts[place] = Part(name, *shapes, cut, elements)

        self._for_each(self._export(_positions_in), find)
        return parts

    def _export(self, numbers: Numbers) -> Exported:
        models = [_NumberedModel(model, numbers) for model in self._models]
        yield from self._bridge.export_weights(models)


class _NumberedModel:
    """Model that mbridge exports, with numbered elements in place of parameters."""

    def __init__(self, model: nn.Module, numbers: Numbers) -> None:
        self._model = model
        self._numbers = numbers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._model.named_parameters():
            yield name, self._numbered(parameter)

    def state_dict(self) -> dict[str, Any]:
        state = self._model.state_dict()
        for name, buffer in self._model.named_buffers():
            if name in state:
                state[name] = self._numbered(buffer)
        return state

    def _numbered(self, tensor: torch.Tensor) -> torch.Tensor:
        numbered = self._numbers(tensor)
        vars(numbered).update(vars(tensor))  # Megatron's attributes, such as `partition_dim`
        return numbered


def _positions_in(tensor: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(tensor.numel(), dtype=torch.int32, device=tensor.device)
    return numbers.view(tensor.shape)
