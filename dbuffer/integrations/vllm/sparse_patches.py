"""Publish sparse patches of vLLM: changed elements of tensors, with their positions.

Releases of vLLM have two classes named ``SparseWeightPatch``, in two modules. This module imports
neither class, and reads the fields of a patch by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dbuffer.errors import InvalidWeightsError, OptionError, WeightsMismatchError
from dbuffer.publish.patches import SparsePatch, require_form
from dbuffer.publish.sender import WeightSender


def publish_patches(sender: WeightSender, patches: Iterable[Any] | None) -> int | None:
    """Publish the sender's last version with patches applied. Return the version's number.

    Return None if there are no patches. :func:`patches_of` describes patches. The sender must have
    ``delta=True``.
    """
    merged = patches_of(patches or ())
    return sender.send_patches(merged).version if merged else None


def patches_of(patches: Iterable[Any]) -> list[SparsePatch]:
    """Convert patches of vLLM into one `SparsePatch` for each tensor.

    A patch of vLLM has these fields:

    * ``name`` of a published tensor;
    * ``indices``, flat positions in the tensor (integers, one dimension, on any device);
    * ``values``, the new elements (one dimension, on any device);
    * ``full_shape`` of the tensor, in most releases of vLLM.

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
        name, indices, values = patch.name, patch.indices, patch.values
        shape = tuple(patch.full_shape) if hasattr(patch, "full_shape") else None
    except (AttributeError, TypeError) as error:
        raise InvalidWeightsError(
            f"patch {position} is no SparseWeightPatch of vLLM: {error}"
        ) from error
    require_form(SparsePatch(name, indices, values, shape))
    subject = f"the patch of {name!r:.200}"
    if indices.dim() != 1 or indices.shape != values.shape:
        raise InvalidWeightsError(
            f"{subject} has indices of shape {list(indices.shape)} and values of shape "
            f"{list(values.shape)}: both must be flat, with one value for each index"
        )
    indices, values = indices.detach().cpu(), values.detach().cpu()
    # torch has no isnan() for dtypes with one byte.
    numbers = values.float() if values.itemsize == 1 else values
    if bool(numbers.isnan().any()):
        raise InvalidWeightsError(
            f"{subject} has a NaN among its values: in vLLM it stands for an unchanged element"
        )
    return SparsePatch(name, indices, values, shape)


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


def trainer_send_weights(
    iterator: Iterable[tuple[str, torch.Tensor]], trainer_args: Mapping[str, Any] | Any
) -> int:
    """Publish weights, and return the number of the version. For trainers of vLLM before 0.26.

    This function does not update an engine: call ``update_weights`` with ``{"version": number}``
    afterwards. ``trainer_args`` is ``{"sender": WeightSender(store)}``, or an object with a
    ``sender`` attribute. If the trainer also sends patches, the sender needs ``delta=True``.
    """
    sender = _sender_in(trainer_args)
    # A sender with delta=True needs all tensors together. They are copied, because the iterator can
    # reuse the memory of a tensor for the next tensor.
    weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in iterator}
    return sender.send(weights).version


def trainer_send_sparse_weights(
    _iterator: Iterable[Any] = (),
    _trainer_args: Mapping[str, Any] | Any = None,
    *,
    iterator: Iterable[Any] = (),
    trainer_args: Mapping[str, Any] | Any = None,
) -> int | None:
    """Publish patches, and return the number of the version, or None if there are no patches.

    Afterwards call ``update_weights`` with this number and vLLM's two fields of a sparse update.
    :func:`patches_of` describes patches, and :func:`trainer_send_weights` describes
    ``trainer_args``. Each argument has two names, because vLLM's base class and vLLM's NCCL engine
    use different names.
    """
    sender = _sender_in(trainer_args if _trainer_args is None else _trainer_args)
    return publish_patches(sender, _iterator or iterator)


def _sender_in(trainer_args: Any) -> WeightSender:
    is_mapping = isinstance(trainer_args, Mapping)
    sender = trainer_args.get("sender") if is_mapping else getattr(trainer_args, "sender", None)
    if not isinstance(sender, WeightSender):
        raise OptionError(
            f"trainer_args is {trainer_args!r:.200}, and must have a WeightSender as 'sender'. To "
            "send patches, this sender needs delta=True"
        )
    return sender
