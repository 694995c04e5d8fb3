"""What vLLM's configuration says of dbuffer, and what vLLM knows it by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dbuffer.errors import OptionError
from dbuffer.format.manifest import host_in_id
from dbuffer.integrations.engine.engine_options import EngineOptions

BACKEND = "dbuffer"
"""The name in vLLM's registries, and the key in ``additional_config``."""

CALL = "dbuffer_call"
"""The method of :class:`WorkerExtension` that followers call, by ``collective_rpc``."""

WRAPPER = "base_layer"
"""The name of a layer in the one that wraps it, in an engine that takes LoRA requests."""

FOLLOWER_KEYS = ("pause",)
"""Keys of ``additional_config["dbuffer"]`` that are read by who follows, in the front end."""


def is_launched(parallel_config: Any) -> bool:
    """Whether each rank of an engine is an ``LLM`` of its own, in a process that torchrun started.

    All of them then make the same calls, and none of them can reach another's worker.
    """
    return bool(parallel_config.distributed_executor_backend == "external_launcher")


def shares_engine(vllm_config: Any) -> bool:
    """Whether this is one of several API servers that have an engine together."""
    return int(getattr(vllm_config.parallel_config, "_api_process_count", 1)) > 1


def default_engine_id(instance_id: str) -> str:
    """An engine's name among a store's receivers, from what vLLM calls the engine itself."""
    return f"vllm-{host_in_id()}-{instance_id}"


def replica_name(index: int) -> str:
    """What follows an engine's name in that of one of its data-parallel replicas."""
    return f".dp-{index}" if index else ""


def options_of(additional_config: Any) -> EngineOptions | None:
    """Those in ``additional_config["dbuffer"]`` of an engine; None if there are none."""
    values = engine_settings(additional_config)
    if not values:
        return None
    options = {key: value for key, value in values.items() if key not in FOLLOWER_KEYS}
    return EngineOptions.parse(options, f"additional_config[{BACKEND!r}]")


def engine_settings(additional_config: Any) -> dict[str, Any]:
    """All of ``additional_config["dbuffer"]``, for workers and followers alike."""
    is_mapping = isinstance(additional_config, Mapping)
    settings = additional_config.get(BACKEND, {}) if is_mapping else {}
    if not isinstance(settings, dict):
        raise OptionError(
            f"additional_config[{BACKEND!r}] is {settings!r:.200}: it must be an object"
        )
    return settings
