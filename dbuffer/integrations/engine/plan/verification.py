"""`Mismatch`, and stand-ins for weights: how copies are verified to do all that a reload does.

The engine's own reload loads values that stand in for the version's, so that everything that is
derived from any of them changes, and then the version. From the one to the other every parameter
must become what the copies would have put there, to the byte, and every image what its layer has;
everything else that can be reached from the model must stay as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from dbuffer.integrations.engine.plan.copy_plan import CopyPlan, PreparedSwitch, Tensors
from dbuffer.integrations.engine.plan.fingerprint import ModelFingerprint
from dbuffer.integrations.engine.plan.load_trace import Unwrapped
from dbuffer.integrations.engine.plan.partial_reload import layer_of, layers_at

_RANGE = (0.25, 0.75)
"""Range of the values that stand in for weights: all of them have roots and inverses."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Difference between what a switch and what a reload leaves in a model."""

    layers: Mapping[str, str]
    """Reasons, by the names of the layers that the reload does more with."""


def mismatch_of(
    switch: PreparedSwitch, before: ModelFingerprint, after: ModelFingerprint, unwrapped: Unwrapped
) -> Mismatch | None:
    """Compare a model that was just reloaded with what a switch would have made of it.

    Args:
        switch: to the version that was reloaded.
        before: the model with stand-ins.
        after: the model with the version.
        unwrapped: leads from the live model's names to the trace's.
    """
    all_layers = switch.plan.all_layers
    layers: dict[str, str] = {}
    for place in before.changes_to(after):
        for layer in layers_at(place, all_layers, unwrapped):
            layers.setdefault(layer, f"it changes {place or 'the model'} too")
    for name in switch.mismatches():
        layer = name if name in all_layers else layer_of(name)
        layers.setdefault(layer, f"{name} is not what was published")
    return Mismatch(layers) if layers else None


def stand_ins_for(
    tensors: Tensors, plan: CopyPlan, random: np.random.Generator
) -> dict[str, torch.Tensor]:
    """Return tensors of the same form, without memory, whose elements are all another number."""
    return {
        name: _stand_in(tensor, random, is_copied=name not in plan.partial_reload.sources)
        for name, tensor in tensors.items()
    }


def _stand_in(
    tensor: torch.Tensor, random: np.random.Generator, *, is_copied: bool
) -> torch.Tensor:
    """Return a tensor of one number.

    Integers may be indices or codes, so one of their own stands in for them. A value derived from
    their order would not show, so nothing stands in where a copy could leave it behind.
    """
    if not tensor.numel():
        return tensor
    first, last = tensor[(0,) * tensor.dim()], tensor[(-1,) * tensor.dim()]
    if not _has_numbers(tensor):
        return tensor if is_copied else last.expand(tensor.shape)
    value = torch.tensor(random.uniform(*_RANGE)).to(tensor.dtype)
    if first.float() == value.float():
        value = (2 * value.float()).to(tensor.dtype)
    return value.expand(tensor.shape)


def has_varied(tensor: torch.Tensor, stand_in: torch.Tensor) -> bool:
    """Whether most elements differ from the stand-in's."""
    if stand_in is tensor:
        return False
    if _has_numbers(tensor):
        return True
    if tensor.itemsize == 1:
        tensor, stand_in = tensor.view(torch.uint8), stand_in.view(torch.uint8)
    return 2 * int((tensor == stand_in).sum()) <= tensor.numel()


def _has_numbers(tensor: torch.Tensor) -> bool:
    """Whether its elements are floating-point numbers, and not codes of several."""
    return tensor.is_floating_point() and tensor.dtype is not torch.float4_e2m1fn_x2
