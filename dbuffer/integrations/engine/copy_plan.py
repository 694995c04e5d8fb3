"""`CopyPlan`: a switch as copies of bytes alone, once it is proven that a reload does no more.

Which part of which published tensor goes to which part of which parameter was recorded while the
engine served. The first switch of a layout goes through the engine's own reload, and is compared
with that: every parameter to the byte, and all else that can be reached from the model must be as
it was. What passed is copied from then on; a model of which anything else is true stays with the
reload.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import torch

from dbuffer.integrations.engine.reachable import State
from dbuffer.integrations.engine.recording import Place, Recording, Step

logger = logging.getLogger(__name__)

Tensors = Mapping[str, torch.Tensor]

_MAX_TOLD = 3

_MAX_PROOFS = 3
"""Of a layout. A first reload may change what no later one does: an attribute that it adds."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_NOT_READ = frozenset({"weight_loader", "_weight_loader", "load_weights"})
"""Attributes that load, and that no computation reads."""


class _NotPlannableError(Exception):
    """Why a layout's switches stay with the reload."""


class _Write(NamedTuple):
    """A step, and where in the live model it writes."""

    step: Step
    target: torch.Tensor


class CopyPlan:
    """The copies that switch a model to a version of one layout.

    Args:
        model: the model, as it serves.
        recording: what its loaders do with such a version.
        partial: it may hold a part of the model.

    Raises:
        _NotPlannableError: they do something else than to copy, or the live model is not as they
            left it.
    """

    def __init__(self, model: torch.nn.Module, recording: Recording, *, partial: bool) -> None:
        self.recording = recording
        if recording.refused:
            raise _NotPlannableError(_told(f"{n}: {why}" for n, why in recording.refused.items()))
        live: dict[str, torch.Tensor] = {}
        live |= dict(model.named_parameters(remove_duplicate=False))
        live |= dict(model.named_buffers(remove_duplicate=False))
        strange = [
            name
            for name, place in recording.places.items()
            if name not in live or Place.of(live[name]) != place
        ]
        if strange:
            raise _NotPlannableError(_told(f"{n} is stored in another form" for n in strange))
        self._tensors = {name: live[name] for name in recording.places}
        self.addresses = {_address(tensor) for tensor in self._tensors.values()}
        """Of the storages that it writes into."""
        if not partial:
            # A reload would give it something: what it had when the engine was started, say.
            left_out = [
                name
                for name, parameter in model.named_parameters()
                if parameter.nbytes and _address(parameter) not in self.addresses
            ]
            if left_out:
                raise _NotPlannableError(_told(f"{n} was not published" for n in left_out))
        shared = [n for n, t in self._tensors.items() if t.untyped_storage().nbytes() != t.nbytes]
        if shared:
            raise _NotPlannableError(_told(f"{n} shares its memory with others" for n in shared))
        self._places = self._find_places()
        with torch.no_grad():
            self._writes = {
                name: [_Write(step, step.to.in_(live[name].detach())) for step in steps]
                for name, steps in recording.steps.items()
            }
        self._unproven = set(self._writes)

    @property
    def num_bytes(self) -> int:
        """What it writes in a switch."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def holds(self, tensors: Tensors, names: Collection[str]) -> set[str]:
        """Which of these parameters have the bytes that a version brings."""
        return {
            name
            for name in names
            if all(_same_bytes(w.target, _value(w, tensors)) for w in self._writes[name])
        }

    def note_proven(self, changed: Collection[str]) -> None:
        """These parameters were changed by a reload, which did nothing else."""
        self._unproven -= set(changed)

    def is_good_for(self, tensors: Tensors) -> bool:
        """Whether it is proven for what this version changes.

        What never changed yet may be the origin of something that would have changed with it.
        """
        if self._find_places() != self._places:
            return False
        return self.holds(tensors, self._unproven) == self._unproven

    def apply(self, tensors: Tensors) -> None:
        """Switch. A failure leaves a mix, to be repaired at once."""
        targets, sources = [], []
        for writes in self._writes.values():
            for write in writes:
                if write.step.source is None:
                    write.target.fill_(write.step.value)
                else:
                    targets.append(write.target)
                    sources.append(_value(write, tensors))
        torch._foreach_copy_(targets, sources)
        # The next step reads what was copied, and staging may write anew where it came from.
        device = targets[0].device if targets else torch.device("cpu")
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def _find_places(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors.values()]


class PlannedLoads:
    """Loads versions by a plan where there is a proven one, else by the engine's reload.

    Args:
        model: the model, as it serves.
        partial: versions may hold a part of it.
        without: attributes in it that hold caches.
    """

    def __init__(
        self, model: torch.nn.Module, *, partial: bool = False, without: Collection[str] = ()
    ) -> None:
        self._model = model
        self._partial = partial
        self._without = _NOT_READ | frozenset(without)
        self._recording: Recording | None = None
        self._plan: CopyPlan | None = None
        self._num_proofs = 0
        self._is_told = False

    @torch.no_grad()
    def load(
        self, tensors: Tensors, recording: Recording | None, reload: Callable[[], None]
    ) -> None:
        """Switch to a version. A failure leaves a mix, to be repaired at once.

        Args:
            tensors: the version's, under their published names.
            recording: of its layout; None: it is not to be planned.
            reload: the way without a plan.
        """
        if recording is None:
            reload()
            return
        if recording is not self._recording:
            self._begin(recording)
        if self._plan is None:
            reload()
        elif self._plan.is_good_for(tensors):
            self._plan.apply(tensors)
        else:
            self._reload_and_prove(self._plan, tensors, reload)

    def _begin(self, recording: Recording) -> None:
        self._recording, self._plan = recording, None
        self._num_proofs, self._is_told = 0, False
        try:
            self._plan = CopyPlan(self._model, recording, partial=self._partial)
        except _NotPlannableError as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        self._plan = None
        logger.info("switches go through the engine's reload, and not by copies alone: %s", why)

    def _reload_and_prove(
        self, plan: CopyPlan, tensors: Tensors, reload: Callable[[], None]
    ) -> None:
        started = time.monotonic()
        had = plan.holds(tensors, plan.recording.steps)
        before = self._look(plan)
        looking_s = time.monotonic() - started
        reload()
        started = time.monotonic()
        after = self._look(plan)
        if before is None or after is None:
            return
        changes = before.changes_to(after)
        has = plan.holds(tensors, plan.recording.steps)
        looking_s += time.monotonic() - started
        self._num_proofs += 1
        if changes:
            if self._num_proofs >= _MAX_PROOFS:
                self._give_up(_told(f"it changes {name or 'the model'} too" for name in changes))
        elif has != set(plan.recording.steps):
            lacking = sorted(set(plan.recording.steps) - has)
            self._give_up(_told(f"{name} is not what was published" for name in lacking))
        else:
            plan.note_proven(has - had)
            if not self._is_told:
                self._is_told = True
                logger.info(
                    "switches are copies of %.3f GB into %d parameters from now on, as the reload "
                    "was found to do no more (looking took %.0f ms)",
                    plan.num_bytes / 1e9,
                    len(plan.recording.steps),
                    1e3 * looking_s,
                )

    def _look(self, plan: CopyPlan) -> State | None:
        try:
            return State(self._model, without=self._without, undigested=plan.addresses)
        # Anything may be in a model, and a switch must not fail because one cannot look at it.
        except Exception as error:  # noqa: BLE001
            self._give_up(f"the model cannot be looked at: {type(error).__name__} {error!s:.300}")
            return None


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _value(write: _Write, tensors: Tensors) -> torch.Tensor:
    step = write.step
    if step.source is None or step.part is None:
        return torch.full_like(write.target, step.value)
    return step.part.in_(tensors[step.source])


def _same_bytes(target: torch.Tensor, value: torch.Tensor) -> bool:
    integers = _INTEGERS[target.itemsize]
    found = value.to(device=target.device, dtype=target.dtype)
    return torch.equal(target.view(integers), found.view(integers))


def _told(reasons: Iterable[str]) -> str:
    """The first few of many reasons."""
    told = list(reasons)
    more = f", and {len(told) - _MAX_TOLD} more" if len(told) > _MAX_TOLD else ""
    return "; ".join(told[:_MAX_TOLD]) + more
