"""Model metadata, as TorchRL's collective classes exchange it: dtype and shape of each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import nn
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

from dbuffer.errors import WaitTimeoutError, WeightsMismatchError
from dbuffer.format.layout import TensorSpec
from dbuffer.integrations.torchrl.extraction import extract_for_vllm, without_torchrl_wrapper
from dbuffer.io.tensors import DTYPE_NAMES, DTYPES
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime.messages import listed
from dbuffer.weights.checkpoint import LazyTensor
from dbuffer.weights.names import clean_names

ModelMetadata: TypeAlias = Mapping[str, tuple[torch.dtype, torch.Size]]
"""Dtype and shape by name, as :func:`get_model_metadata` returns them."""


def get_model_metadata(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return dtype and shape of each tensor that a sender publishes of this model.

    LoRA adapters are merged, as TorchRL's function of this name does.
    """
    model = without_torchrl_wrapper(model)
    strategy = "state_dict" if hasattr(model, "merge_and_unload") else "tensordict"
    extract = WeightStrategy(extract_as=strategy).extract_weights
    return metadata_of(extract_for_vllm(model, extract).tensors)


def metadata_of(
    tensors: Mapping[str, torch.Tensor | LazyTensor],
) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return dtype and shape of each tensor."""
    return {name: (tensor.dtype, torch.Size(tensor.shape)) for name, tensor in tensors.items()}


def published_metadata(receiver: WeightReceiver) -> ModelMetadata | None:
    """Return dtypes and shapes of the store's newest version; None if there is none."""
    try:
        with receiver.open(timeout_s=0.0, acknowledge=False) as snapshot:
            specs = {spec.name: spec for spec in snapshot.specs}
            specs |= {alias: specs[name] for alias, name in snapshot.aliases.items()}
    except WaitTimeoutError:
        return None
    return {name: (DTYPES[spec.dtype], torch.Size(spec.shape)) for name, spec in specs.items()}


def require_same(expected: ModelMetadata, actual: ModelMetadata, what: str) -> None:
    """Refuse ``actual``, which is the metadata of ``what``, if it differs from the expected.

    Raises:
        WeightsMismatchError: the message lists every difference.
    """
    expected = dict(zip(clean_names(expected), expected.values(), strict=True))
    actual = dict(zip(clean_names(actual), actual.values(), strict=True))
    differences = [f"{name!r} is missing" for name in expected if name not in actual]
    differences += [f"{name!r} is not expected" for name in actual if name not in expected]
    for name in expected.keys() & actual.keys():
        ours, theirs = _spec(name, *expected[name]), _spec(name, *actual[name])
        if ours != theirs:
            differences.append(f"{theirs}, expected {ours}")
    if differences:
        raise WeightsMismatchError(
            f"{what} differs from the model's metadata: {listed(sorted(differences), '; ')}"
        )


def _spec(name: str, dtype: torch.dtype, shape: torch.Size) -> TensorSpec:
    return TensorSpec(name, DTYPE_NAMES.get(dtype, str(dtype)), tuple(shape))
