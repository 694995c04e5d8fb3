"""dbuffer's part of vLLM's configuration, its names in vLLM, and the `EngineFacts` of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dbuffer.engine.contract import EngineFacts
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.errors import OptionError, UnsupportedError
from dbuffer.format.manifest import host_in_id

BACKEND = "dbuffer"
"""The name in vLLM's registries, and the key in ``additional_config``."""

CALL = "dbuffer_call"
"""The method of :class:`WorkerExtension` that followers call, by ``collective_rpc``."""

EXTENSION = "dbuffer.integrations.vllm.WorkerExtension"


def is_launched(parallel_config: Any) -> bool:
    """Whether each rank of an engine is an ``LLM`` of its own, in a process that torchrun started.

    All of them then make the same calls, and none of them can reach another's worker.
    """
    return bool(parallel_config.distributed_executor_backend == "external_launcher")


def default_engine_id(instance_id: str) -> str:
    """Make an engine's name among a store's receivers, from vLLM's own id of the engine."""
    return f"vllm-{host_in_id()}-{instance_id}"


def replica_name(index: int) -> str:
    """Return the suffix of the name of a data-parallel replica."""
    return f".dp-{index}" if index else ""


def options_of(additional_config: Any) -> EngineOptions | None:
    """Read the options in ``additional_config["dbuffer"]``, or return None if there are none."""
    settings = engine_settings(additional_config)
    if not settings:
        return None
    # The follower reads "pause", in the front end.
    options = {key: value for key, value in settings.items() if key != "pause"}
    return EngineOptions.parse(options, f"additional_config[{BACKEND!r}]")


def engine_settings(additional_config: Any) -> dict[str, Any]:
    """Return ``additional_config["dbuffer"]``, for workers and followers alike."""
    is_mapping = isinstance(additional_config, Mapping)
    settings = additional_config.get(BACKEND, {}) if is_mapping else {}
    if not isinstance(settings, dict):
        raise OptionError(
            f"additional_config[{BACKEND!r}] is {settings!r:.200}: it must be an object"
        )
    return settings


def facts_of(config: Any, replica: int | None = None) -> EngineFacts:
    """Read the facts about an engine from the ``VllmConfig`` of its front end, or from its JSON.

    ``replica``: one of several that are followed independently.
    """
    parallel = _get(config, "parallel_config")
    replicas = replicas_of(config)
    if replica is None and len(replicas) > 1:
        raise UnsupportedError(
            f"{len(replicas)} replicas are followed independently: by "
            "dbuffer.integrations.vllm.follow with an AsyncLLM, or by the server itself with "
            "--middleware dbuffer.integrations.vllm.FollowStore"
        )
    in_step = _num_in_step(parallel)
    instance_id = _get(config, "instance_id")
    return EngineFacts(
        instance_id=instance_id,
        name=default_engine_id(instance_id),
        num_ranks=_get(parallel, "world_size") * in_step,
        configured=options_of(_get(config, "additional_config")),
        replica=replica_name(replicas[0] if replica is None else replica),
        begins_paused=in_step > 1,
    )


def replicas_of(config: Any) -> list[int]:
    """List the data-parallel replicas of a front end that step independently.

    Replicas of a dense model do. Replicas of a model with experts step together, and are one
    engine.
    """
    parallel = _get(config, "parallel_config")
    size = _get(parallel, "data_parallel_size")
    if size == 1 or _num_in_step(parallel) > 1:
        return [0]
    first = _get(parallel, "data_parallel_rank")
    return list(range(first, first + (_num_local(parallel) or size)))


def _num_in_step(parallel: Any) -> int:
    """Return the number of replicas that make each step together."""
    size: int = _get(parallel, "data_parallel_size")
    if size == 1 or not _get(parallel, "is_moe_model"):
        return 1
    if _num_local(parallel) not in (None, size):
        raise UnsupportedError(
            f"{size} replicas step together, and this front end has only some of them: it cannot "
            "switch the others. Use one front end for all, without "
            "--data-parallel-hybrid-lb and --data-parallel-external-lb"
        )
    return size


def _num_local(parallel: Any) -> int | None:
    """Return the number of replicas of this front end, or None if it has all."""
    if _get(parallel, "data_parallel_rank_local") is not None:  # an LLM for each replica
        return 1
    kinds = ("data_parallel_hybrid_lb", "data_parallel_external_lb")
    if any(_get(parallel, kind) for kind in kinds):
        return int(_get(parallel, "data_parallel_size_local"))
    return None


def has_backend(config: Any) -> bool:
    """Whether an engine's weight transfer is dbuffer's."""
    transfer = _get(config, "weight_transfer_config")
    return transfer is not None and _get(transfer, "backend") == BACKEND


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name)


def facts_here(config: Any, replica: int | None = None) -> EngineFacts:
    """Read the facts about an engine that this process, or one of its children, runs.

    Raises:
        UnsupportedError: vLLM has not loaded dbuffer's plugin in them.
    """
    from vllm.plugins import load_general_plugins
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    # A front end whose configuration was made in another process has loaded no plugins yet.
    load_general_plugins()
    if CALL not in vars(WorkerWrapperBase):
        raise UnsupportedError(
            "vLLM has not loaded dbuffer's plugin: install dbuffer in vLLM's environment, and name "
            "it in VLLM_PLUGINS if you set that"
        )
    return facts_of(config, replica)


def facts_of_server(config: Mapping[str, Any]) -> EngineFacts:
    """Read the facts about a server's engine from the JSON of its ``VllmConfig``.

    Raises:
        UnsupportedError: its workers may lack the methods that a follower calls.
    """
    extension = config["parallel_config"]["worker_extension_cls"]
    if not has_backend(config) and extension != EXTENSION:
        raise UnsupportedError(
            "this server was not started for dbuffer: start it with --weight-transfer-config "
            f'\'{{"backend": "{BACKEND}"}}\', or with --worker-extension-cls {EXTENSION}'
        )
    return facts_of(config)
