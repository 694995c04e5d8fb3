"""`SparsePatch`: a trainer's new values for some elements of a published tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dbuffer.errors import InvalidWeightsError, WeightsMismatchError
from dbuffer.format.layout import Layout, TensorSpec
from dbuffer.format.ranges import Integers
from dbuffer.io.changes import Patch
from dbuffer.io.delta import WORDS
from dbuffer.io.tensors import DTYPES, flat_view
from dbuffer.weights.named_tensors import problem_of_memory
from dbuffer.weights.values import refuse_not_finite, refuse_overflow

_INTEGERS = frozenset(
    {torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.uint8, torch.uint16, torch.uint32, torch.uint64}
)


@dataclass(frozen=True, slots=True, eq=False)
class SparsePatch:
    """New values at some positions of one tensor.

    Args:
        name: published name of the tensor.
        indices: flat positions in the tensor, as integers in any order. No position may repeat.
        values: new value at each position, which replaces the old value. Floating-point values of
            another dtype are cast to the tensor's dtype, unless one of the dtypes has eight bits.
        shape: published shape of the tensor. If given, it is checked.
    """

    name: str
    indices: torch.Tensor
    values: torch.Tensor
    shape: tuple[int, ...] | None = None


def patch_of(patches: Iterable[SparsePatch], layout: Layout, *, must_be_finite: bool) -> Patch:
    """Check patches of a layout's tensors, and merge them into one patch of the weights file.

    The merged patch replaces words of one size: the size of the smallest patched element, at most 8
    bytes. A larger element consists of several words. `WeightSender.send_patches` lists the errors.
    """
    if not isinstance(patches, Iterable):
        raise InvalidWeightsError(f"patches are a list of SparsePatch, not {patches!r:.80}")
    by_tensor: dict[int, tuple[Integers, torch.Tensor]] = {}
    for patch in patches:
        require_form(patch)
        name = layout.aliases.get(patch.name, patch.name)
        index = layout.indices.get(name)
        if index is None:
            raise WeightsMismatchError(
                f"there is a patch of {patch.name!r:.200}, but no tensor of this name was published"
            )
        if index in by_tensor:
            raise InvalidWeightsError(
                f"two patches change {patch.name!r} or a tensor tied to it: pass one patch for both"
            )
        spec = layout.specs[index]
        patch = _cast(patch, spec)
        if must_be_finite:
            refuse_not_finite([spec], [patch.values])
        by_tensor[index] = _checked(patch, spec)
    in_order = sorted(by_tensor.items())
    width = min((min(values.itemsize, 8) for _, (_, values) in in_order), default=1)
    places, words = [np.empty(0, np.int64)], [np.empty(0, WORDS[width])]
    for index, (positions, values) in in_order:
        per_element = values.itemsize // width
        first = layout.offsets[index] // width
        within = np.arange(first, first + per_element)
        places.append((positions[:, None] * per_element + within).reshape(-1))
        words.append(flat_view(values).numpy().view(WORDS[width]))
    return Patch(np.concatenate(places), np.concatenate(words))


def require_form(patch: Any) -> None:
    if not isinstance(patch, SparsePatch):
        raise InvalidWeightsError(f"a patch must be a SparsePatch, not {patch!r:.80}")
    if not isinstance(patch.name, str):
        raise InvalidWeightsError(f"the name of a patch must be a string, not {patch.name!r:.80}")
    for field in ("indices", "values"):
        value = getattr(patch, field)
        if not isinstance(value, torch.Tensor) or problem_of_memory(value):
            raise InvalidWeightsError(
                f"the patch of {patch.name!r:.200}: {field} must be a dense torch.Tensor with data "
                f"(not sparse, not on the meta device, no DTensor), not this {type(value).__name__}"
            )
    if not isinstance(patch.shape, Sequence | None):
        raise InvalidWeightsError(
            f"the patch of {patch.name!r:.200}: its shape must be a tuple, not {patch.shape!r:.80}"
        )


def _cast(patch: SparsePatch, spec: TensorSpec) -> SparsePatch:
    # Don't cast from or to eight bits: FP8 values need scales, which the patch does not have.
    pair = (patch.values.dtype, dtype := DTYPES[spec.dtype])
    if pair[0] is dtype or not all(kind.is_floating_point and kind.itemsize > 1 for kind in pair):
        return patch
    refuse_overflow([spec], [patch.values])
    return replace(patch, values=patch.values.detach().to(dtype))


def _checked(patch: SparsePatch, spec: TensorSpec) -> tuple[Integers, torch.Tensor]:
    label, dtype, count = f"the patch of {patch.name!r}", DTYPES[spec.dtype], math.prod(spec.shape)
    if patch.shape is not None and tuple(patch.shape) != spec.shape:
        raise WeightsMismatchError(
            f"{label} is for the shape {list(patch.shape)}, and {list(spec.shape)} was published"
        )
    if patch.indices.dtype not in _INTEGERS:
        raise InvalidWeightsError(f"{label}: indices are integers, not {patch.indices.dtype}")
    if patch.indices.numel() != patch.values.numel():
        raise InvalidWeightsError(
            f"{label} has {patch.indices.numel()} indices and {patch.values.numel()} values"
        )
    if patch.values.dtype is not dtype:
        raise WeightsMismatchError(f"{label} holds {patch.values.dtype}, and the tensor {dtype}")
    places: Integers = patch.indices.detach().reshape(-1).to("cpu", torch.int64).numpy()
    # Clone, so that the trainer cannot change the values. This also resolves lazy conjugation.
    values = patch.values.detach().reshape(-1).cpu().clone(memory_format=torch.contiguous_format)
    if not (places[1:] > places[:-1]).all():  # the check is faster than a sort
        places, values = _in_order(label, places, values)
    if len(places) and not 0 <= int(places[0]) <= int(places[-1]) < count:
        raise WeightsMismatchError(f"{label} has indices outside of 0 to {count - 1}")
    return places, values


def _in_order(label: str, places: Integers, values: torch.Tensor) -> tuple[Integers, torch.Tensor]:
    order = np.argsort(places)
    places = places[order]
    if (places[1:] == places[:-1]).any():
        raise InvalidWeightsError(f"{label} names one index twice")
    # Reorder the values as bytes: neither torch nor numpy can index tensors of all dtypes.
    rows = values.view(torch.uint8).reshape(len(places), values.dtype.itemsize)
    return places, rows[torch.from_numpy(order)].reshape(-1).view(values.dtype)
