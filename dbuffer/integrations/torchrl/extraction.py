"""A model as what a store holds: named tensors, and JSON for the rest of its extra state.

Extra state is what modules return from ``get_extra_state``: normalisation statistics and the like.
Its tensors travel as tensors, named ``__extra_state__.0``, ``.1`` and so on; the structure they
stood in, and plain values, travel in the version's metadata (:class:`VersionInfo`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from dbuffer.errors import InvalidWeightsError, StoreCorruptError
from dbuffer.receive.snapshot import Snapshot
from dbuffer.runtime.messages import listed
from dbuffer.weights.checkpoint import LazyTensor
from dbuffer.weights.names import without_wrappers
from dbuffer.weights.sources import is_extra_state, own_tensors, tensordict_tensors
from dbuffer.weights.transformers_modules import as_checkpoint

EXTRA_STATE = "__extra_state__"
"""TorchRL's key for it in a TensorDict of weights, and the beginning of our tensors' names."""

_KEY = "torchrl"
"""Metadata key of a version's `VersionInfo`."""

Structure = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Extracted:
    """One model's weights, ready to be published."""

    tensors: dict[str, torch.Tensor | LazyTensor]
    extra_state: dict[str, Structure] = field(default_factory=dict)
    """Structure by the module's path in the model; the model itself is ``""``."""

    def __bool__(self) -> bool:
        """Whether there is anything to publish: a store holds at least one tensor."""
        return bool(self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionInfo:
    """Metadata of a version for the workers of a collector."""

    extra_state: dict[str, Structure] = field(default_factory=dict)
    """The structure of the extra state, by the path of the module that it is of."""
    is_initial: bool = False
    """Whether a run begins with it: then it does not count as a version of the policy."""
    after_version: int = 0
    """Newest version for all workers when this one was published for one worker."""

    def to_metadata(self) -> dict[str, Any]:
        return {_KEY: asdict(self)}

    @classmethod
    def of(cls, snapshot: Snapshot) -> Self:
        """Read it from metadata; a version of another sender gets the defaults."""
        values = snapshot.metadata.get(_KEY, {})
        try:
            info = cls(**values)
        except TypeError as error:
            raise StoreCorruptError(f"{snapshot.path}: {_KEY!r} in its metadata: {error}") from None
        types = (type(info.extra_state), type(info.is_initial), type(info.after_version))
        if types != (dict, bool, int):
            raise StoreCorruptError(
                f"{snapshot.path}: invalid {_KEY!r} in its metadata: {values!r:.200}"
            )
        return info


def extract(weights: Any, extract_weights: Callable[[nn.Module], Any]) -> Extracted:
    """Bring a module, a TensorDict (nested or flat) or a state dict into one form.

    ``extract_weights`` is TorchRL's strategy for modules.

    Raises:
        InvalidWeightsError: it is nothing of that kind, or holds what cannot be published.
    """
    collected: dict[str, Any] = {}
    if isinstance(weights, nn.Module) and not isinstance(weights, TensorDictBase):
        named = _named_values(extract_weights(weights))
        named = {key: value for key, value in named.items() if not _is_extra_state(key)}
        _check_complete(weights, named)
        collected = _extra_states_of(weights)
    else:
        named = _named_values(weights)
        for key in [key for key in named if _is_extra_state(key)]:
            collected[key.rpartition(".")[0]] = named.pop(key)
    tensors: dict[str, torch.Tensor] = {}
    extra_state = {
        clean_path(path): _encode_state(state, path or "the model", tensors)
        for path, state in collected.items()
    }
    return Extracted(named | tensors, extra_state)


def extract_for_vllm(weights: Any, extract_weights: Callable[[nn.Module], Any]) -> Extracted:
    """Extract the tensors that a checkpoint would have."""
    weights = without_torchrl_wrapper(weights)
    extracted = extract(weights, extract_weights)
    if not isinstance(weights, nn.Module):
        return extracted
    never_saved = dict(weights.named_buffers()).keys() - weights.state_dict(keep_vars=True).keys()
    kept = {name: t for name, t in extracted.tensors.items() if name not in never_saved}
    return Extracted(dict(as_checkpoint(weights, kept)), extracted.extra_state)


def without_torchrl_wrapper(model: Any) -> Any:
    """Return the model in a ``TransformersWrapper``, whose names an engine knows."""
    is_wrapper = type(model).__module__.startswith("torchrl.modules.llm.")
    inner = getattr(model, "model", None) if is_wrapper else None
    return inner if isinstance(inner, nn.Module) else model


def clean_path(path: str) -> str:
    """A module's path in the model, without the parts that wrappers insert."""
    return without_wrappers(f"{path}.").removesuffix(".")


def _check_complete(model: nn.Module, named: Mapping[str, Any]) -> None:
    """Refuse a module whose state has more than what was extracted: parameters and buffers."""
    own = set(map(id, own_tensors(model)))
    lost = [
        f"{name!r} ({type(value).__name__})"
        for name, value in model.state_dict(keep_vars=True).items()
        if id(value) not in own and not _is_extra_state(name)
        if not isinstance(named.get(name), torch.Tensor)
    ]
    if lost:
        raise InvalidWeightsError(
            "the module's state has more than parameters and buffers, which would be lost: "
            f"{listed(lost)}; return it from get_extra_state, or make buffers of it"
        )


def decode_state(structure: Structure, get_tensor: Callable[[str], Any]) -> Any:
    """Rebuild encoded extra state; ``get_tensor`` fetches tensors by name."""
    match structure:
        case {"tensor": str(name)}:
            return get_tensor(name)
        case {"value": value}:
            return value
        case {"list": list(items)}:
            return [decode_state(item, get_tensor) for item in items]
        case {"tuple": list(items)}:
            return tuple(decode_state(item, get_tensor) for item in items)
        case {"dict": dict(items)}:
            return {key: decode_state(item, get_tensor) for key, item in items.items()}
        case {"tensordict": dict(items), "batch_size": list(batch_size)}:
            decoded = {key: decode_state(item, get_tensor) for key, item in items.items()}
            return TensorDict(decoded, batch_size=batch_size)
    raise StoreCorruptError(f"invalid extra state in the metadata: {structure!r:.200}")


def _encode_state(state: Any, owner: str, tensors: dict[str, torch.Tensor]) -> Structure:
    """Return a state as JSON values; add its tensors to ``tensors``, numbered in their order."""
    encode = functools.partial(_encode_state, owner=owner, tensors=tensors)
    if isinstance(state, torch.Tensor):
        name = f"{EXTRA_STATE}.{len(tensors)}"
        tensors[name] = state
        return {"tensor": name}
    if isinstance(state, TensorDictBase):
        items = {str(key): encode(value) for key, value in state.items()}
        return {"tensordict": items, "batch_size": list(state.batch_size)}
    if isinstance(state, Mapping) and all(isinstance(key, str) for key in state):
        return {"dict": {key: encode(value) for key, value in state.items()}}
    if isinstance(state, list | tuple):
        return {"list" if isinstance(state, list) else "tuple": [encode(value) for value in state]}
    if state is None or isinstance(state, bool | int | float | str):
        return {"value": state}
    raise InvalidWeightsError(
        f"the extra state of {owner} holds a {type(state).__name__}: tensors, numbers, strings, "
        "and lists and dictionaries of them can be published"
    )


def _named_values(weights: Any) -> dict[str, Any]:
    """Return tensors by dotted name, and extra state under its own keys."""
    if isinstance(weights, TensorDictBase):
        extra = weights.get(EXTRA_STATE, None)
        if extra is None:
            return dict(tensordict_tensors(weights))
        # TorchRL's own receivers hand it to set_extra_state flat, too.
        flat = extra.flatten_keys(".").to_dict() if isinstance(extra, TensorDictBase) else extra
        return {**tensordict_tensors(weights.exclude(EXTRA_STATE)), EXTRA_STATE: flat}
    if isinstance(weights, Mapping):
        return _flattened(weights)
    if callable(weights):
        return {}  # a policy without weights, such as a random one
    raise InvalidWeightsError(
        f"cannot send a {type(weights).__name__}: give a module, a TensorDict or a state dict"
    )


def _flattened(weights: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    named: dict[str, Any] = {}
    for key, value in weights.items():
        name = f"{prefix}{key}"
        if isinstance(value, TensorDictBase) and not _is_extra_state(name):
            named.update(_flattened(dict(value.items()), f"{name}."))
        elif isinstance(value, Mapping) and not _is_extra_state(name):
            named.update(_flattened(value, f"{name}."))
        else:
            named[name] = value
    return named


def _is_extra_state(key: str) -> bool:
    return key.rpartition(".")[2] == EXTRA_STATE or is_extra_state(key)


def _extra_states_of(model: nn.Module) -> dict[str, Any]:
    states = {}
    for path, module in model.named_modules():
        # The one of nn.Module raises, to say that there is none.
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            state = module.get_extra_state()
            if state is not None and not (isinstance(state, Mapping) and not state):
                states[path] = state
    return states
