"""Checks of tensors' values before a publish, for senders with ``dtype`` or ``require_finite``."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator

import torch

from dbuffer.errors import InvalidWeightsError
from dbuffer.format.layout import TensorSpec
from dbuffer.io.tensors import DTYPES


def refuse_overflow(specs: Iterable[TensorSpec], tensors: Iterable[torch.Tensor]) -> None:
    """Refuse tensors with values that the dtype of their spec cannot represent.

    torch casts such values without an error. NaNs are accepted. Infinities are accepted if the
    dtype has infinities. Each tensor that is cast to a dtype with a smaller range is read once.
    """
    pairs = []
    for spec, tensor in zip(specs, tensors, strict=True):
        if tensor.dtype is (target := DTYPES[spec.dtype]) or not tensor.numel():
            continue
        if torch.finfo(tensor.dtype).max > _largest_cast_to(target):
            pairs.append((spec, tensor.detach()))
    for spec, tensor, low, high in _with_extremes(pairs):
        limit = _largest_cast_to(DTYPES[spec.dtype])
        if not -limit <= low <= high <= limit:  # or NaN
            _refuse_values_beyond(limit, spec, tensor)


def refuse_not_finite(specs: Iterable[TensorSpec], tensors: Iterable[torch.Tensor]) -> None:
    """Refuse tensors with a NaN or an infinity. Each floating-point tensor is read once."""
    pairs = []
    for spec, tensor in zip(specs, tensors, strict=True):
        if tensor.numel() and _may_be_infinite(tensor):
            plain = tensor.detach().resolve_conj()
            pairs.append((spec, torch.view_as_real(plain) if plain.is_complex() else plain))
    for spec, tensor, low, high in _with_extremes(pairs):
        if not (math.isfinite(low) and math.isfinite(high)):
            wide = tensor if tensor.itemsize > 1 else tensor.float()
            count = int((~wide.isfinite()).sum())
            raise InvalidWeightsError(
                f"{count} of {tensor.numel()} values of {spec.name!r} are NaN or infinite; "
                "nothing was published. To publish such values, set require_finite=False"
            )


def _with_extremes(
    pairs: Iterable[tuple[TensorSpec, torch.Tensor]],
) -> Iterator[tuple[TensorSpec, torch.Tensor, float, float]]:
    """Yield each tensor with its smallest and largest value, which are NaN if it has a NaN."""
    by_device: dict[torch.device, list[tuple[TensorSpec, torch.Tensor]]] = {}
    for spec, tensor in pairs:
        by_device.setdefault(tensor.device, []).append((spec, tensor))
    for on_device in by_device.values():
        with torch.inference_mode():
            # Read the results for all tensors together, because each read waits for the device.
            extremes = torch.stack([_extremes_of(tensor) for _, tensor in on_device]).tolist()
        for (spec, tensor), (low, high) in zip(on_device, extremes, strict=True):
            yield spec, tensor, low, high


def _may_be_infinite(tensor: torch.Tensor) -> bool:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return is_number and tensor.dtype is not torch.float4_e2m1fn_x2


@functools.cache
def _largest_cast_to(dtype: torch.dtype) -> float:
    """Return the largest number that a cast to ``dtype`` rounds without an overflow."""
    limits = torch.finfo(dtype)
    return limits.max * (1 + limits.eps / 4)


def _extremes_of(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.itemsize == 1:  # torch has no aminmax for 8-bit dtypes
        tensor = tensor.float()
    return torch.stack(torch.aminmax(tensor)).double()


def _refuse_values_beyond(limit: float, spec: TensorSpec, tensor: torch.Tensor) -> None:
    dtype = DTYPES[spec.dtype]
    wide = tensor if tensor.itemsize > 2 else tensor.float()  # can represent the limit exactly
    beyond = wide[wide.abs() > limit]
    if bool(torch.tensor(math.inf).to(dtype).float().isinf()):
        beyond = beyond[beyond.isfinite()]
    if len(beyond):
        raise InvalidWeightsError(
            f"{spec.name!r} cannot be cast to {spec.dtype}: {len(beyond)} of {tensor.numel()} "
            f"values are beyond the dtype's largest, {torch.finfo(dtype).max:g}, for instance "
            f"{float(beyond[0]):g}. Publish in another dtype, or scale or clamp the weights first"
        )
