"""Extraction of a model's weights to publish: named tensors, and the modules' extra state.

The results of the modules' ``get_extra_state`` methods are packed into one tensor of bytes with the
name ``__extra_state__``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

from dbuffer.errors import InvalidWeightsError, StoreCorruptError
from dbuffer.io.tensors import DTYPE_NAMES, DTYPES
from dbuffer.runtime.messages import listed
from dbuffer.weights.conversion import as_checkpoint
from dbuffer.weights.lazy_tensor import LazyTensor
from dbuffer.weights.named_tensors import (
    is_extra_state,
    is_module,
    own_tensors,
    tensordict_tensors,
    without_wrappers,
)

EXTRA_STATE = "__extra_state__"  # also TorchRL's key in a TensorDict of weights

Extracted: TypeAlias = dict[str, torch.Tensor | LazyTensor]


def extract(weights: Any, extract_weights: Callable[[nn.Module], Any]) -> Extracted:
    """Return the tensors and extra state, by name, of a module, TensorDict or state dict."""
    tensors, states = _collect(weights, extract_weights)
    return tensors | ({EXTRA_STATE: _packed(states)} if states else {})


def extract_for_vllm(weights: Any, extract_weights: Callable[[nn.Module], Any]) -> Extracted:
    """Return the tensors of ``weights`` with checkpoint names, and without extra state."""
    weights = without_torchrl_wrapper(weights)
    tensors, _ = _collect(weights, extract_weights)
    if not isinstance(weights, nn.Module):
        return tensors
    never_saved = dict(weights.named_buffers()).keys() - weights.state_dict(keep_vars=True).keys()
    kept = {name: tensor for name, tensor in tensors.items() if name not in never_saved}
    return dict(as_checkpoint(weights, kept))


def _collect(
    weights: Any, extract_weights: Callable[[nn.Module], Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    named = _named_values(extract_weights(weights) if is_module(weights) else weights)
    states = {key.rpartition(".")[0]: named.pop(key) for key in list(named) if _is_extra_state(key)}
    if is_module(weights):
        _check_complete(weights, named)
        states = _extra_states_of(weights)
    return named, states


def without_torchrl_wrapper(model: Any) -> Any:
    """Return the model inside TorchRL's ``TransformersWrapper``, or another model unchanged."""
    is_wrapper = type(model).__module__.startswith("torchrl.modules.llm.")
    inner = getattr(model, "model", None) if is_wrapper else None
    return inner if isinstance(inner, nn.Module) else model


def get_model_metadata(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return the dtype and shape of each tensor of a published model, by tensor name.

    LoRA adapters are merged first, as in TorchRL's function with this name.
    """
    model = without_torchrl_wrapper(model)
    strategy = "state_dict" if hasattr(model, "merge_and_unload") else "tensordict"
    extract = WeightStrategy(extract_as=strategy).extract_weights
    tensors = extract_for_vllm(model, extract)
    return {name: (tensor.dtype, torch.Size(tensor.shape)) for name, tensor in tensors.items()}


def clean_path(path: str) -> str:
    """Return a module path without the parts that torch.compile, FSDP, etc. insert."""
    return without_wrappers(f"{path}.").removesuffix(".")


def _check_complete(model: nn.Module, named: Mapping[str, Any]) -> None:
    tensors = set(map(id, own_tensors(model)))
    lost = [
        f"{name!r} ({type(value).__name__})"
        for name, value in model.state_dict(keep_vars=True).items()
        if id(value) not in tensors and not _is_extra_state(name)
        if not isinstance(named.get(name), torch.Tensor)
    ]
    if lost:
        raise InvalidWeightsError(
            "the module's state has values that are neither parameters nor buffers, and would be "
            f"lost: {listed(lost)}; return them from get_extra_state, or register them as buffers"
        )


def unpacked(packed: torch.Tensor) -> Any:
    """Return the extra states in a packed tensor, by module path."""
    try:
        return json.loads(packed.numpy().tobytes(), object_hook=_from_plain)
    # If another program wrote the bytes, decoding them can raise any of these errors.
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise StoreCorruptError(f"invalid extra state of modules: {error}") from error


def _packed(states: Mapping[str, Any]) -> torch.Tensor:
    """Return modules' extra states as the bytes of a JSON text. Reading JSON executes no code."""
    plain = {
        # Flatten a TensorDict, because TorchRL's own receivers also pass a flat dictionary to a
        # module's set_extra_state.
        clean_path(path): state.flatten_keys(".").to_dict()
        if isinstance(state, TensorDictBase)
        else state
        for path, state in states.items()
    }
    try:
        text = json.dumps(_plain(plain))
    except (InvalidWeightsError, KeyError, ValueError, RecursionError) as error:
        owners = ", ".join(path or "the model" for path in states)
        raise InvalidWeightsError(
            f"the extra state of {owners} cannot be published: {error}. Use only tensors, numbers, "
            "strings, and lists and dictionaries of these"
        ) from error
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        data = base64.b64encode(flat.numpy().tobytes()).decode()
        return {"tensor": [DTYPE_NAMES[value.dtype], list(value.shape), data]}
    if type(value) is dict:
        return {"items": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if type(value) is list:
        return [_plain(item) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise InvalidWeightsError(f"it contains a {type(value).__name__}")


def _from_plain(marked: dict[str, Any]) -> Any:
    match marked:
        case {"tensor": [str(dtype), list(shape), str(data)], **rest} if not rest:
            # `torch.frombuffer` refuses an empty buffer, so append a byte, and leave it out.
            decoded = bytearray(base64.b64decode(data)) + b"\0"
            flat = torch.frombuffer(decoded, dtype=torch.uint8)[:-1]
            return flat.view(DTYPES[dtype]).view(shape)
        case {"items": list(items), **rest} if not rest:
            return dict(items)
    return marked


def _named_values(weights: Any) -> dict[str, Any]:
    if isinstance(weights, TensorDictBase):
        extra = weights.get(EXTRA_STATE, None)
        if extra is None:
            return dict(tensordict_tensors(weights))
        return {**tensordict_tensors(weights.exclude(EXTRA_STATE)), EXTRA_STATE: extra}
    if isinstance(weights, Mapping):
        return dict(weights)
    if callable(weights):
        return {}  # a policy without weights, such as a random one
    raise InvalidWeightsError(
        f"cannot send a {type(weights).__name__}: pass a module, a TensorDict or a state dict"
    )


def _is_extra_state(key: str) -> bool:
    return key.rpartition(".")[2] == EXTRA_STATE or is_extra_state(key)


def _extra_states_of(model: nn.Module) -> dict[str, Any]:
    states = {}
    for path, module in model.named_modules():
        # nn.Module's get_extra_state raises an error; only overrides return extra state.
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            state = module.get_extra_state()
            if state is not None and not (isinstance(state, Mapping) and not state):
                states[path] = state
    return states
