"""Caches of a vLLM engine whose content depends on the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dbuffer.engine.engine_options import EngineOptions
from dbuffer.errors import UnsupportedError

_MAIN_MEMORY = "CPUOffloadingSpec"


def require_droppable(config: Any, options: EngineOptions) -> None:
    """Raise :class:`UnsupportedError` if an engine loads caches that a switch cannot drop.

    Such a cache may contain results of older weights, or of another engine with other weights.
    """
    if options.allow_stale_kv:
        return
    kept = [name for name, is_reset in _connectors_of(config.kv_transfer_config) if not is_reset]
    encoders = getattr(config, "ec_transfer_config", None)
    if encoders is not None and encoders.is_ec_consumer:
        kept.append(encoders.ec_connector)
    if kept:
        raise UnsupportedError(
            f"this engine loads caches through {' and '.join(kept)}, and a switch cannot drop "
            "them: it would answer from what older weights computed. Start the engine without "
            "them, or with a KV connector whose reset_cache() drops everything, such as "
            "OffloadingConnector. To accept such answers, pass allow_stale_kv=True"
        )


def _connectors_of(transfer: Any) -> Iterator[tuple[str, bool]]:
    """Yield the name of each KV connector, and whether resetting the connector drops all its KV."""
    if transfer is None or not transfer.is_kv_consumer:
        return
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    options = transfer.kv_connector_extra_config
    # MultiConnector reports success even if one of its connectors has no reset_cache().
    if transfer.kv_connector == "MultiConnector":
        for connector in options["connectors"]:
            yield from _connectors_of(KVTransferConfig(**connector))
        return
    kind = KVConnectorFactory.get_connector_class(transfer)
    has_reset = kind.reset_cache is not KVConnectorBase_V1.reset_cache
    # A reset drops KV in main memory only. Mooncake's store is shared with other engines, which can
    # fill it again after a reset.
    tiers = options.get("spec_name", _MAIN_MEMORY)
    is_private = tiers == _MAIN_MEMORY and transfer.kv_connector != "MooncakeStoreConnector"
    yield transfer.kv_connector, has_reset and is_private


def shared_caches(config: Any) -> list[str]:
    """Return the names of caches that requests share, from the ``VllmConfig`` of an engine."""
    is_shared = {
        "a prefix cache (start it with enable_prefix_caching=False)": (
            config.cache_config.enable_prefix_caching
        ),
        "a cache of its encoders' outputs": config.model_config.is_multimodal_model,
        "a connector to other caches": config.kv_transfer_config is not None,
    }
    return [cache for cache in is_shared if is_shared[cache]]
