"""vLLM's sparse patches, published by a sender.

vLLM's releases have had two classes of the name ``SparseWeightPatch``, in two modules. This backend
needs neither: it reads a patch by its fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dbuffer.errors import InvalidWeightsError, OptionError, VersionError, WeightsMismatchError
from dbuffer.publish.patches import SparsePatch, require_form
from dbuffer.publish.sender import WeightSender


def publish_patches(
    sender: WeightSender, patches: Iterable[Any] | None, *, is_behind: bool = False
) -> int | None:
    """Publish the sender's last version with vLLM's patches.

    Return the version's number, or None if there are no patches, and so no version.

    Args:
        sender: made with ``delta=True``.
        patches: see :func:`patches_of`.
        is_behind: the weights that they follow did not reach the sender.

    Raises:
        VersionError: the sender has not published the weights that they follow. A version of an
            earlier sender may be of another run.
        DBufferError: as of `patches_of` and :meth:`WeightSender.send_patches`.
    """
    merged = patches_of(patches or ())
    if not merged:
        return None
    if is_behind or not sender.stats["versions"]:
        raise VersionError(
            f"these patches follow weights that their sender has not published in {sender.store}: "
            "send all weights once"
        )
    return sender.send_patches(merged).version


def patches_of(patches: Iterable[Any]) -> list[SparsePatch]:
    """Return vLLM's patches as a sender takes them, one for each tensor.

    Args:
        patches: each with a ``name`` (of a published tensor), ``indices`` (int32 or int64, flat
            positions in it), ``values`` (what will stand there) and, in most releases,
            ``full_shape``. Tensors are of one dimension, on any device. If two patches of one
            tensor name one position, the later wins.

    Raises:
        InvalidWeightsError: a patch is not of that form, or brings a NaN.
        WeightsMismatchError: patches of one tensor disagree about its shape or dtype.
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
        raise InvalidWeightsError(f"patch {position} is none of vLLM's: {error}") from error
    require_form(SparsePatch(name, indices, values, shape))
    subject = f"the patch of {name!r:.200}"
    if indices.dtype not in (torch.int32, torch.int64):
        raise InvalidWeightsError(f"{subject} has indices of {indices.dtype}, not int32 or int64")
    if not indices.dim() == values.dim() == 1:
        raise InvalidWeightsError(f"{subject} has indices or values that are not flat")
    if len(indices) != len(values):
        raise InvalidWeightsError(f"{subject} has {len(indices)} indices and {len(values)} values")
    indices, values = indices.detach().cpu(), values.detach().cpu()
    # Dtypes of eight bits have no isnan of their own.
    numbers = values.float() if values.itemsize == 1 else values
    if bool(numbers.isnan().any()):
        raise InvalidWeightsError(
            f"{subject} brings a NaN, which in vLLM stands for an unchanged element"
        )
    return SparsePatch(name, indices, values, shape)


def _merged(before: SparsePatch, after: SparsePatch) -> SparsePatch:
    if (before.shape, before.values.dtype) != (after.shape, after.values.dtype):
        raise WeightsMismatchError(
            f"two patches of {after.name!r} are of {before.values.dtype} and shape {before.shape}, "
            f"and of {after.values.dtype} and shape {after.shape}"
        )
    stays = ~torch.isin(before.indices, after.indices)
    indices = torch.cat([before.indices[stays], after.indices])
    values = torch.cat([before.values[stays], after.values])
    return SparsePatch(after.name, indices, values, after.shape)


def trainer_send_weights(
    iterator: Iterable[tuple[str, torch.Tensor]], trainer_args: Mapping[str, Any] | Any
) -> int:
    """Publish weights, as trainers of vLLM before 0.26 do; return the version's number.

    No engine receives meanwhile: call ``update_weights`` with ``{"version": number}`` then.

    Args:
        iterator: name and tensor of each, as ``model.named_parameters()`` gives them.
        trainer_args: ``{"sender": WeightSender(store)}``, or an object with that attribute. The
            sender is of ``delta=True`` for a trainer that sends patches, too.

    Raises:
        OptionError: ``trainer_args`` has no sender.
        DBufferError: as of `WeightSender.send`.
    """
    sender = _sender_in(trainer_args)
    # A sender of patches needs all at once, and an iterator may use a tensor's memory again.
    weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in iterator}
    return sender.send(weights).version


def trainer_send_sparse_weights(
    _iterator: Iterable[Any] = (),
    _trainer_args: Mapping[str, Any] | Any = None,
    *,
    iterator: Iterable[Any] = (),
    trainer_args: Mapping[str, Any] | Any = None,
) -> int | None:
    """Publish patches, as :func:`trainer_send_weights` does weights.

    Return the version's number, for an ``update_info`` with ``"update_kind": "sparse_flat"`` and
    ``"num_updates_list"``, or None if there are no patches. vLLM's base class and its NCCL engine
    differ in the names of the arguments.

    Raises:
        OptionError: ``trainer_args`` has no sender.
        DBufferError: as of :func:`publish_patches`.
    """
    sender = _sender_in(trainer_args if _trainer_args is None else _trainer_args)
    return publish_patches(sender, _iterator or iterator)


def _sender_in(trainer_args: Any) -> WeightSender:
    is_mapping = isinstance(trainer_args, Mapping)
    sender = trainer_args.get("sender") if is_mapping else getattr(trainer_args, "sender", None)
    if not isinstance(sender, WeightSender):
        raise OptionError(
            f"trainer_args is {trainer_args!r:.200}: it must be an object with 'sender', a "
            "WeightSender (of delta=True to send patches)"
        )
    return sender
