"""dbuffer's options in vLLM's configuration, and facts about an engine from the configuration.

The facts are `EngineFacts`, and the names of caches whose content depends on the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from dbuffer.engine.contract import EngineFacts
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.errors import OptionError, UnsupportedError
from dbuffer.format.manifest import host_in_id
from dbuffer.runtime import options as checks

BACKEND = "dbuffer"

ADAPTERS = "adapters"
"""Key of the option that lists the stores of LoRA adapters, by adapter."""
_OPTIONS_OF_ADAPTERS = {
    *("engine_id", "poll_interval_s", "verify", "num_threads", "allow_shared_store", "forked")
}

CALL = "dbuffer_call"

LOAD_ADAPTER = "dbuffer_load_adapter"
"""Method of vLLM's workers that loads a LoRA adapter."""

EXTENSION = "dbuffer.integrations.vllm.WorkerExtension"

LOADING_WORKER: ContextVar[Any] = ContextVar("worker that loads its models", default=None)
"""Worker of vLLM that is loading its models in this context, or None."""


_MAIN_MEMORY = "CPUOffloadingSpec"


def is_launched(parallel_config: Any) -> bool:
    """Whether torchrun started the ranks of an engine, each with an ``LLM`` in its own process."""
    return bool(parallel_config.distributed_executor_backend == "external_launcher")


def default_engine_id(instance_id: str) -> str:
    """Return the id that an engine has in a store if the option ``engine_id`` is not set."""
    return f"vllm-{host_in_id()}-{instance_id}"


def replica_name(index: int) -> str:
    """Return the end of a data-parallel replica's engine id, which is empty for replica 0."""
    return f".dp-{index}" if index else ""


def options_of(additional_config: Any) -> EngineOptions | None:
    """Read the options of an engine in ``additional_config["dbuffer"]``.

    Return None if the key is missing, or if the options are for LoRA adapters, because workers do
    not follow the stores of adapters.
    """
    settings = engine_settings(additional_config)
    if not settings or ADAPTERS in settings:
        return None
    # The option "pause" is for the follower in the front end. Workers do not need it.
    options = {key: value for key, value in settings.items() if key != "pause"}
    return EngineOptions.parse(options, f"additional_config[{BACKEND!r}]")


def adapters_of(additional_config: Any) -> dict[str, EngineOptions]:
    """Read the options of all LoRA adapters in ``additional_config["dbuffer"]``, by name.

    Raises:
        OptionError: a store is invalid, or an option is for models only.
    """
    options = dict(engine_settings(additional_config))
    if ADAPTERS not in options:
        return {}
    stores = options.pop(ADAPTERS)
    if not isinstance(stores, dict) or not stores or "" in stores:
        checks.refuse(ADAPTERS, stores, "an object with the store of each adapter by its name")
    if for_models := sorted(options.keys() - _OPTIONS_OF_ADAPTERS):
        raise OptionError(
            f"{', '.join(for_models)} cannot be set together with {ADAPTERS}: with it, set only "
            f"{', '.join(sorted(_OPTIONS_OF_ADAPTERS))}"
        )
    return {
        name: EngineOptions.parse({**options, "store": store}, f"the adapter {name!r}")
        for name, store in stores.items()
    }


def engine_settings(additional_config: Any) -> dict[str, Any]:
    """Return dbuffer's options in ``additional_config["dbuffer"]``, or ``{}`` if it has none."""
    is_mapping = isinstance(additional_config, Mapping)
    settings = additional_config.get(BACKEND, {}) if is_mapping else {}
    if not isinstance(settings, dict):
        raise OptionError(
            f"additional_config[{BACKEND!r}] is {settings!r:.200}: it must be a JSON object"
        )
    return settings


def facts_of(config: Any, replica: int | None = None) -> EngineFacts:
    """Read the facts about an engine from its ``VllmConfig``, or from JSON of a ``VllmConfig``.

    ``replica`` is the index of the data-parallel replica. It is required if the engine has several
    replicas that switch independently.
    """
    parallel = _get(config, "parallel_config")
    replicas = replicas_of(config)
    if replica is None and len(replicas) > 1:
        raise UnsupportedError(
            f"this engine has {len(replicas)} replicas that switch independently: call "
            "dbuffer.integrations.vllm.follow with an AsyncLLM, or start the server with "
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
    """Return the indices of a front end's data-parallel replicas that switch independently.

    Replicas of a mixture-of-experts model step together: they count as one engine, with index 0.
    """
    parallel = _get(config, "parallel_config")
    size = _get(parallel, "data_parallel_size")
    if size == 1 or _num_in_step(parallel) > 1:
        return [0]
    first = _get(parallel, "data_parallel_rank")
    return list(range(first, first + (_num_local(parallel) or size)))


def cores_of(config: Any) -> list[int | None]:
    """Return the index of each independent replica, or ``[None]`` if there is only one.

    With None, `ask_core` calls all of the engine's cores.
    """
    replicas = replicas_of(config)
    return [*replicas] if len(replicas) > 1 else [None]


def _num_in_step(parallel: Any) -> int:
    size: int = _get(parallel, "data_parallel_size")
    if size == 1 or not _get(parallel, "is_moe_model"):
        return 1
    if _num_local(parallel) not in (None, size):
        raise UnsupportedError(
            f"{size} replicas step together, but this front end drives only some of them, and "
            "cannot switch the others. Use one front end for all replicas, without "
            "--data-parallel-hybrid-lb and --data-parallel-external-lb"
        )
    return size


def _num_local(parallel: Any) -> int | None:
    if _get(parallel, "data_parallel_rank_local") is not None:  # an LLM drives one replica
        return 1
    kinds = ("data_parallel_hybrid_lb", "data_parallel_external_lb")
    if any(_get(parallel, kind) for kind in kinds):
        return int(_get(parallel, "data_parallel_size_local"))
    return None


def has_backend(config: Any) -> bool:
    """Whether an engine was started with the weight transfer ``backend="dbuffer"``."""
    transfer = _get(config, "weight_transfer_config")
    return transfer is not None and _get(transfer, "backend") == BACKEND


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name)


def facts_here(config: Any, replica: int | None = None) -> EngineFacts:
    """Read the facts about an ``LLM`` or ``AsyncLLM`` in this process.

    Raise :class:`UnsupportedError` if vLLM does not load dbuffer's plugin.
    """
    from vllm.plugins import load_general_plugins
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    # If another process made the configuration, vLLM has loaded no plugins in this process yet.
    load_general_plugins()
    if CALL not in vars(WorkerWrapperBase):
        raise UnsupportedError(
            "vLLM has not loaded dbuffer's plugin: install dbuffer in vLLM's environment. If you "
            "set VLLM_PLUGINS, add dbuffer to it"
        )
    return facts_of(config, replica)


def facts_of_server(config: Mapping[str, Any]) -> EngineFacts:
    """Read the facts about a server's engine from JSON of the engine's ``VllmConfig``."""
    extension = config["parallel_config"]["worker_extension_cls"]
    if not has_backend(config) and extension != EXTENSION:
        raise UnsupportedError(
            "this server was not started for dbuffer: start it with --weight-transfer-config "
            f'\'{{"backend": "{BACKEND}"}}\', or with --worker-extension-cls {EXTENSION}'
        )
    return facts_of(config)


def require_droppable(config: Any, options: EngineOptions) -> None:
    """Raise :class:`UnsupportedError` if an engine loads caches that a switch cannot drop.

    Such a cache may contain results of older weights, or of another engine with other weights.
    """
    if options.allow_stale_kv:
        return
    kept = [name for name, is_reset in _connectors_of(config.kv_transfer_config) if not is_reset]
    encoders = config.ec_transfer_config
    if encoders is not None and encoders.is_ec_consumer:
        kept.append(encoders.ec_connector)
    if kept:
        raise UnsupportedError(
            f"this engine loads caches through {' and '.join(kept)}, and a switch cannot drop "
            "these caches, so the engine would use results of older weights. Start the engine "
            f"without {' and '.join(kept)}, or with a KV connector whose reset_cache() drops "
            "everything, such as OffloadingConnector. To accept old results, pass "
            "allow_stale_kv=True"
        )


def _connectors_of(transfer: Any) -> Iterator[tuple[str, bool]]:
    """Yield the name of each KV connector, and whether resetting the connector drops all its KV."""
    if transfer is None or not transfer.is_kv_consumer:
        return
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    options = transfer.kv_connector_extra_config
    # Check each connector of a MultiConnector: a reset of the MultiConnector reports success even
    # if one of its connectors has no reset_cache().
    if transfer.kv_connector == "MultiConnector":
        for connector in options["connectors"]:
            yield from _connectors_of(KVTransferConfig(**connector))
        return
    kind = KVConnectorFactory.get_connector_class(transfer)
    has_reset = kind.reset_cache is not KVConnectorBase_V1.reset_cache
    # A reset drops only KV in main memory, not in other tiers. Mooncake's store counts as not
    # dropped, because other engines share the store and can fill it again after a reset.
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
