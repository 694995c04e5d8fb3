"""dbuffer's part of vLLM's configuration, and its names in vLLM."""

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

FOLLOWER_KEYS = ("pause",)
"""Keys of ``additional_config["dbuffer"]`` that the follower reads, in the front end."""


def is_launched(parallel_config: Any) -> bool:
    """Whether each rank of an engine is an ``LLM`` of its own, in a process that torchrun started.

    All of them then make the same calls, and none of them can reach another's worker.
    """
    return bool(parallel_config.distributed_executor_backend == "external_launcher")


def shares_engine(vllm_config: Any) -> bool:
    """Whether this is one of several API servers of one engine."""
    return int(getattr(vllm_config.parallel_config, "_api_process_count", 1)) > 1


def default_engine_id(instance_id: str) -> str:
    """Make an engine's name among a store's receivers, from vLLM's own id of the engine."""
    return f"vllm-{host_in_id()}-{instance_id}"


def replica_name(index: int) -> str:
    """Return the suffix of the name of a data-parallel replica."""
    return f".dp-{index}" if index else ""


def options_of(additional_config: Any) -> EngineOptions | None:
    """Read the options in ``additional_config["dbuffer"]`` of an engine; None: there are none."""
    values = engine_settings(additional_config)
    if not values:
        return None
    options = {key: value for key, value in values.items() if key not in FOLLOWER_KEYS}
    return EngineOptions.parse(options, f"additional_config[{BACKEND!r}]")


def engine_settings(additional_config: Any) -> dict[str, Any]:
    """Return all of ``additional_config["dbuffer"]``, for workers and followers alike."""
    is_mapping = isinstance(additional_config, Mapping)
    settings = additional_config.get(BACKEND, {}) if is_mapping else {}
    if not isinstance(settings, dict):
        raise OptionError(
            f"additional_config[{BACKEND!r}] is {settings!r:.200}: it must be an object"
        )
    return settings
