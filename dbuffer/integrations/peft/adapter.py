"""An adapter by itself: published from a peft model, and loaded into another process's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer

from dbuffer.errors import InvalidWeightsError, WeightsMismatchError
from dbuffer.integrations.peft.saved import config_of
from dbuffer.publish.publication import Publication
from dbuffer.publish.sender import WeightSender
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.weights.targets import ADAPTER_KEY

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Beginnings of ``init_lora_weights`` that take something out of the base model's weights."""

_FREE = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "init_lora_weights",
        "init_weights",
        "lora_dropout",
        "module_dropout",
        "peft_version",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""Configuration keys that do not change the meaning of an adapter's tensors."""


def adapter_weights(peft_model: PeftModel, adapter: str = "default") -> dict[str, torch.Tensor]:
    """Return an adapter's tensors, in place, by the names that peft saves.

    Raises:
        InvalidWeightsError: there is no such adapter, or it means nothing without its base.
    """
    _config(peft_model, adapter)
    # With "auto" peft asks the hub. The base model's own embeddings are no part of an adapter.
    state = get_peft_model_state_dict(peft_model, adapter_name=adapter, save_embedding_layers=False)
    return {name: tensor.detach() for name, tensor in state.items()}


def adapter_metadata(peft_model: PeftModel, adapter: str = "default") -> dict[str, Any]:
    """Return an adapter's ``adapter_config.json`` under one key, for ``metadata``.

    Raises:
        InvalidWeightsError: there is no such adapter, or it means nothing without its base.
    """
    values = _config(peft_model, adapter).to_dict() | {"inference_mode": True}
    return {ADAPTER_KEY: json.loads(json.dumps(values, default=_as_json, sort_keys=True))}


def send_adapter(
    sender: WeightSender,
    peft_model: PeftModel,
    *,
    adapter: str = "default",
    version: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Publication:
    """Publish an adapter instead of a model. A store holds the one or the other.

    Args:
        sender: a `WeightSender`.
        peft_model: the model that has the adapter; it is not changed.
        adapter: its name in the peft model.
        version: as of :meth:`WeightSender.send`.
        metadata: as of :meth:`WeightSender.send`, without the adapter's own key.

    Raises:
        InvalidWeightsError: there is no such adapter, or it means nothing without its base.
        DBufferError: as :meth:`WeightSender.send`.
    """
    config = adapter_metadata(peft_model, adapter)
    if ADAPTER_KEY in (metadata or {}):
        raise InvalidWeightsError(
            f"the metadata key {ADAPTER_KEY!r} is reserved for the adapter's configuration"
        )
    weights = adapter_weights(peft_model, adapter)
    return sender.send(weights, version=version, metadata={**(metadata or {}), **config})


def load_adapter(
    receiver: WeightReceiver, peft_model: PeftModel, *, adapter: str = "default"
) -> int | None:
    """Load the newest adapter into a peft model that has one of the same kind, in place.

    Its configuration must match that of the model's own (rank, alpha, target modules ...), and so
    must all names, shapes and dtypes; or nothing is touched.

    Args:
        receiver: of a store that `send_adapter` publishes into.
        peft_model: made with the same configuration on the same base model.
        adapter: the name of the adapter to fill.

    Returns:
        The version loaded, or None if there is nothing newer (or nothing at all).

    Raises:
        WeightsMismatchError: the store holds no adapter, or one that does not match.
        InvalidWeightsError: there is no such adapter, or it is merged into the model.
    """
    [config] = adapter_metadata(peft_model, adapter).values()
    for name, module in peft_model.named_modules():
        if isinstance(module, BaseTunerLayer) and adapter in module.merged_adapters:
            raise InvalidWeightsError(
                f"adapter {adapter!r} is merged into {name}, where new values would not show: "
                "unmerge_adapter() first"
            )
    target = adapter_weights(peft_model, adapter)
    places = {tensor.untyped_storage().data_ptr() for tensor in peft_model.state_dict().values()}
    for name, tensor in target.items():
        if tensor.untyped_storage().data_ptr() not in places:
            raise InvalidWeightsError(f"{name!r} cannot be loaded: peft returns a copy of it")
    return receiver.load_into(target, check=lambda metadata: _require_match(metadata, config))


def _require_match(metadata: Mapping[str, Any], config: dict[str, Any]) -> None:
    published = config_of(metadata)
    differences = [
        f"{key} is {published.get(key)!r:.200} in the store and {config.get(key)!r:.200} here"
        for key in sorted((published.keys() | config.keys()) - _FREE)
        if published.get(key) != config.get(key)
    ]
    if differences:
        raise WeightsMismatchError(
            "the published adapter does not fit the target: " + "; ".join(differences)
        )


def _config(peft_model: Any, adapter: str) -> Any:
    configs = peft_model.peft_config if isinstance(peft_model, PeftModel) else {}
    if adapter not in configs:
        known = ", ".join(map(repr, configs)) or "none"
        raise InvalidWeightsError(
            f"a {type(peft_model).__name__} has no adapter {adapter!r}; it has {known}"
        )
    config = configs[adapter]
    way = str(getattr(config, "init_lora_weights", "")).lower()
    if way.startswith(_CHANGES_BASE):
        raise InvalidWeightsError(
            f"init_lora_weights={way!r} changes the base model's weights, which the adapter needs "
            "as well: publish the merged model (merged_weights)"
        )
    return config


def _as_json(value: Any) -> Any:
    """Return a set, which JSON lacks, as a sorted list."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise InvalidWeightsError(f"{value!r:.200} in an adapter's configuration cannot be published")
