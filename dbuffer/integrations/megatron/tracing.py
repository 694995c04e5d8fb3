"""`Tracer`: finds the parts of exported tensors that are in a rank's parameters.

mbridge exports models that have numbers in place of weights: first the number of each parameter,
then the positions of its elements. Last, it exports the weights, and each rank compares its parts
with them. Two exports of four bytes per element need less memory than one of eight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import distributed, nn

from dbuffer.errors import RankFailedError, UnsupportedError
from dbuffer.integrations.megatron.parts import OWNERS_PER_RANK, Cut, Part, strides_of

Numbers: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Function that returns numbers in place of a parameter's elements."""

Exported: TypeAlias = Iterator[tuple[str, torch.Tensor]]
"""Names and values that a bridge exports, one after the other."""


def tensors_of(models: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a rank's models, by virtual stage and name."""
    return {
        f"{stage}.{name}": tensor
        for stage, model in enumerate(models)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


class Tracer:
    """Search for this rank's parts. Collective: no rank leaves an export before its end.

    Args:
        bridge: mbridge's bridge of the models.
        models: this rank's, without wrappers.
        groups: ranks that a parameter may be cut over.
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
                f"this rank has {len(self._tensors)} parameters and buffers, and may have at most "
                f"{OWNERS_PER_RANK - 1}: publish mbridge's export, as a weight source"
            )
        self._first = distributed.get_rank() * OWNERS_PER_RANK + 1  # 0 is no owner
        self._names = dict(enumerate(self._tensors, self._first))
        """Names of this rank's parameters by their numbers as owners."""
        self._device = next(models[0].parameters()).device
        self._error: Exception | None = None
        """Error that ended this rank's search."""
        self.refused: dict[str, None] = {}
        """Exported tensors that are not made of one part per rank."""

    @torch.no_grad()
    def find_parts(self) -> dict[str, Part]:
        """Return this rank's parts by exported name; raise if any rank could not find its own."""
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
        # Every rank may take a tensor that a bridge computes for another rank's.
        flags = [*(name in parts for name in names), self._error is not None]
        counts = torch.tensor(flags, dtype=torch.int32, device=self._device)
        distributed.all_reduce(counts)
        *num_ranks, num_failed = counts.tolist()
        if self._error is not None:
            raise self._error
        if num_failed:  # or this rank would not trace again with the failed ones
            raise RankFailedError("another rank could not trace the export")
        self.refused |= {name: None for name, n in zip(names, num_ranks, strict=True) if not n}
        return parts

    def _for_each(self, export: Exported, work: Callable[[int, str, torch.Tensor], None]) -> None:
        """Do ``work`` with the place, name and value of each exported tensor, until it fails.

        Then the export goes on without, as the other ranks wait in the next gather.
        """
        for place, (name, tensor) in enumerate(export):
            if self._error is None:
                try:
                    work(place, name, tensor)
                except Exception as error:  # noqa: BLE001 - raised when all are through
                    self._error = error

    def _find_cuts(self) -> dict[int, Cut]:
        """Return the cuts of tensors that this rank has parts of, by their places in an export.

        A tied embedding has two places, one from each end of the pipeline.
        """
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
        """Return this rank's parts of the tensors that are cut, by their places in an export."""
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
    """Model with numbers in place of parameters and buffers, made as mbridge reads them."""

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
        vars(numbered).update(vars(tensor))  # Megatron's own, as `partition_dim`
        return numbered


def _positions_in(tensor: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(tensor.numel(), dtype=torch.int32, device=tensor.device)
    return numbers.view(tensor.shape)
