"""Publish sparse patches of vLLM: changed elements of tensors, with their positions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from dbuffer.errors import InvalidWeightsError, VersionError, WeightsMismatchError
from dbuffer.publish.patches import SparsePatch, require_form
from dbuffer.publish.sender import WeightSender


def publish_patches(
    sender: WeightSender, patches: Iterable[Any] | None, *, is_behind: bool = False
) -> int | None:
    """Publish the sender's last version with patches applied. Return the version's number.

    Return None if there are no patches. :func:`patches_of` describes patches. The sender must have
    ``delta=True``. ``is_behind``: whether publishing the trainer's last weights has failed. Patches
    then raise :class:`VersionError`, because they change weights that the store does not have.
    """
    merged = patches_of(patches or ())
    if not merged:
        return None
    if is_behind or not sender.stats["versions"]:
        raise VersionError(
            f"patches apply to the last weights, which this sender has not published in "
            f"{sender.store}: send all weights once"
        )
    return sender.send_patches(merged).version


def patches_of(patches: Iterable[Any]) -> list[SparsePatch]:
    """Convert patches of vLLM into one `SparsePatch` for each tensor.

    A patch, a ``SparseWeightPatch``, has these fields:

    * ``name`` of a published tensor;
    * ``indices``, flat positions in the tensor (int32 or int64, one dimension, on any device);
    * ``values``, the new elements (one dimension, on any device);
    * ``full_shape`` of the tensor.

    If several patches change one position, the last patch wins.
    """
    by_name: dict[str, SparsePatch] = {}
    for position, patch in enumerate(patches):
        checked = _checked(patch, position)
        before = by_name.get(checked.name)
        by_name[checked.name] = checked if before is None else _merged(before, checked)
    return list(by_name.values())


def _checked(patch: Any, position: int) -> SparsePatch:
    try:
        given = SparsePatch(patch.name, patch.indices, patch.values, tuple(patch.full_shape))
    except (AttributeError, TypeError) as error:
        raise InvalidWeightsError(
            f"patch {position} is no SparseWeightPatch of vLLM: {error}"
        ) from error
    require_form(given)
    subject, indices, values = f"the patch of {given.name!r:.200}", given.indices, given.values
    if indices.dtype not in (torch.int32, torch.int64):
        raise InvalidWeightsError(f"{subject} has indices of {indices.dtype}, not int32 or int64")
    if not indices.dim() == values.dim() == 1:
        raise InvalidWeightsError(f"{subject} has indices or values that are not flat")
    if len(indices) != len(values):
        raise InvalidWeightsError(f"{subject} has {len(indices)} indices and {len(values)} values")
    indices, values = indices.detach().cpu(), values.detach().cpu()
    # torch has no isnan() for dtypes with one byte.
    numbers = values.float() if values.itemsize == 1 else values
    if bool(numbers.isnan().any()):
        raise InvalidWeightsError(
            f"{subject} has a NaN among its values: in vLLM it stands for an unchanged element"
        )
    return replace(given, indices=indices, values=values)


def _merged(before: SparsePatch, after: SparsePatch) -> SparsePatch:
    if (before.shape, before.values.dtype) != (after.shape, after.values.dtype):
        raise WeightsMismatchError(
            f"two patches of {after.name!r} differ: {before.values.dtype} and shape "
            f"{before.shape}, {after.values.dtype} and shape {after.shape}"
        )
    stays = ~torch.isin(before.indices, after.indices)
    indices = torch.cat([before.indices[stays], after.indices])
    values = torch.cat([before.values[stays], after.values])
    return SparsePatch(after.name, indices, values, after.shape)
