"""`Tracer`: finds the parts of exported tensors that are in a rank's parameters.

mbridge exports the model three times. In the first export, each element of a parameter is replaced
by the parameter's number. In the second export, each element is replaced by its position in the
parameter. The third export has the real weights: each rank compares its parts with them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import distributed, nn

from dbuffer.errors import RankFailedError, UnsupportedError
from dbuffer.integrations.megatron.parts import OWNERS_PER_RANK, Cut, Part, strides_of

Numbers: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

Exported: TypeAlias = Iterator[tuple[str, torch.Tensor]]


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
        """Return the ranges of this rank's parts, by the exported tensor's index in the export."""
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
    """Wrapper that shows mbridge a model whose parameters and buffers are tensors of numbers."""

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
