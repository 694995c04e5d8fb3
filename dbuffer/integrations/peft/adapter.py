"""`send_adapter`: publishes an adapter of a peft model without the base model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from peft import PeftModel, get_peft_model_state_dict

from dbuffer.errors import InvalidWeightsError
from dbuffer.publish.publisher import Publication
from dbuffer.publish.sender import WeightSender
from dbuffer.weights.targets import ADAPTER_KEY

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Prefixes of the ``init_lora_weights`` values that change the base model's weights."""


def send_adapter(
    sender: WeightSender,
    peft_model: PeftModel,
    *,
    adapter: str = "default",
    version: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Publication:
    """Publish an adapter instead of a model. Use a store either for adapters or for models.

    Args:
        sender: the store's sender.
        peft_model: the model that has the adapter. It is not changed.
        adapter: name of the adapter in the peft model.
        version: see :meth:`WeightSender.send`.
        metadata: see :meth:`WeightSender.send`. The key ``adapter_config`` is reserved.

    Raises:
        InvalidWeightsError: the model does not have the adapter, or the adapter's initialization
            changed the base model's weights.
        DBufferError: see :meth:`WeightSender.send`.
    """
    values = _config(peft_model, adapter).to_dict() | {"inference_mode": True}
    if ADAPTER_KEY in (metadata or {}):
        raise InvalidWeightsError(
            f"the metadata key {ADAPTER_KEY!r} is reserved for the adapter's configuration"
        )
    config = json.loads(json.dumps(values, default=_as_json, sort_keys=True))
    # The default "auto" makes peft send requests to the hub. Embeddings belong to the base model.
    state = get_peft_model_state_dict(peft_model, adapter_name=adapter, save_embedding_layers=False)
    weights = {name: tensor.detach() for name, tensor in state.items()}
    return sender.send(weights, version=version, metadata={**(metadata or {}), ADAPTER_KEY: config})


def _config(peft_model: Any, adapter: str) -> Any:
    configs = peft_model.peft_config if isinstance(peft_model, PeftModel) else {}
    if adapter not in configs:
        names = ", ".join(map(repr, configs)) or "none"
        raise InvalidWeightsError(
            f"a {type(peft_model).__name__} has no adapter {adapter!r}; it has {names}"
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
    """Return a set as a sorted list, since JSON has no sets."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise InvalidWeightsError(f"{value!r:.200} in an adapter's configuration cannot be published")
