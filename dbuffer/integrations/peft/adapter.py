"""`send_adapter`: publishes a LoRA adapter of a peft model, without the base model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from peft import PeftModel, get_peft_model_state_dict

from dbuffer.errors import InvalidWeightsError
from dbuffer.publish.publisher import Publication
from dbuffer.publish.sender import WeightSender
from dbuffer.publish.sharded import ShardedWeightSender
from dbuffer.weights.targets import ADAPTER_KEY

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of the ``init_lora_weights`` values that change the base model's weights."""


def send_adapter(
    sender: WeightSender | ShardedWeightSender,
    peft_model: PeftModel,
    *,
    adapter: str = "default",
    version: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Publication:
    """Publish an adapter of a peft model into a store, instead of the whole model.

    Publish either adapters or models into a store, not both. With a `ShardedWeightSender`, every
    rank makes this call, with its part of a model that FSDP2 or ZeRO-3 has sharded. Tensors of the
    base model are not gathered.

    Args:
        sender: the store's sender.
        peft_model: the peft model with the adapter, which is not changed. If a wrapper such as
            DeepSpeed's engine contains the model, pass the wrapper's ``module``.
        adapter: name of the adapter in the peft model.
        version: see :meth:`WeightSender.send`.
        metadata: see :meth:`WeightSender.send`. The key ``adapter_config`` is reserved.

    Raises:
        InvalidWeightsError: the model does not have the adapter, or the adapter's initialization
            changed the base model's weights.
    """
    values = _config(peft_model, adapter).to_dict() | {"inference_mode": True}
    if ADAPTER_KEY in (metadata or {}):
        raise InvalidWeightsError(
            f"the metadata key {ADAPTER_KEY!r} is reserved for the adapter's configuration"
        )
    config = json.loads(json.dumps(values, default=_as_json, sort_keys=True))
    weights = get_peft_model_state_dict(
        peft_model,
        peft_model.state_dict(keep_vars=True),  # detached ZeRO-3 parameters have no shape
        adapter,
        # Leave out embeddings, which belong to the base model. With the default "auto", peft would
        # also send requests to the Hugging Face hub.
        save_embedding_layers=False,
    )
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
            f"init_lora_weights={way!r} has changed the base model's weights, and the adapter "
            "works only with these changes: publish the merged model (merged_weights)"
        )
    return config


def _as_json(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise InvalidWeightsError(
        f"the adapter's configuration has a value that JSON cannot represent: {value!r:.200}"
    )
