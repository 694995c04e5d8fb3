"""What a vLLM engine's configuration says about following a store."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Mapping
from typing import Any

from dbuffer.errors import EngineUnsupportedError
from dbuffer.integrations.engine.protocol import EngineFacts
from dbuffer.integrations.vllm.config import BACKEND, options_of
from dbuffer.integrations.vllm.plugin import serves_every_worker

EXTENSION = "dbuffer.integrations.vllm.WorkerExtension"

_EXTENSION_CLASS = "dbuffer.integrations.vllm.extension.WorkerExtension"


def facts_of(config: Any) -> EngineFacts:
    """From a ``VllmConfig``, or from what one looks like in JSON."""
    parallel = _get(config, "parallel_config")
    if not (has_backend(config) or has_extension(config)):
        raise EngineUnsupportedError(
            "this engine was not started for dbuffer: start it with weight_transfer_config="
            f"WeightTransferConfig(backend={BACKEND!r}), or with worker_extension_cls="
            f'{EXTENSION!r}; a server: --weight-transfer-config \'{{"backend": '
            f'"{BACKEND}"}}\', or --worker-extension-cls {EXTENSION}'
        )
    if _get(parallel, "data_parallel_size") > 1:
        raise EngineUnsupportedError(
            "an engine with data_parallel_size above 1 cannot be followed as one: start one "
            "engine for each replica, and let each follow the store"
        )
    return EngineFacts(
        instance_id=_get(config, "instance_id"),
        num_ranks=_get(parallel, "world_size"),
        configured=options_of(_get(config, "additional_config")),
    )


def has_backend(config: Any) -> bool:
    """Whether its workers take weights over vLLM's weight transfer, out of a store."""
    transfer = _get(config, "weight_transfer_config")
    return transfer is not None and _get(transfer, "backend") == BACKEND


def has_extension(config: Any) -> bool:
    """Whether its workers have the methods of `WorkerExtension`, by an option or by our plugin."""
    # An engine in this process, or started from it, has loaded the plugins that this one has.
    is_here = not isinstance(config, Mapping)
    name = _get(_get(config, "parallel_config"), "worker_extension_cls")
    # What a server says must not decide what is imported here.
    return (is_here and serves_every_worker()) or _is_extension(name, may_import=is_here)


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name)


def _is_extension(qualified_name: str | None, *, may_import: bool) -> bool:
    """Whether it is ours, or has ours among its bases."""
    if not qualified_name or qualified_name == EXTENSION:
        return qualified_name == EXTENSION
    module, _, name = qualified_name.rpartition(".")
    if may_import and module:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    found = getattr(sys.modules.get(module), name, None)
    return isinstance(found, type) and any(
        f"{base.__module__}.{base.__qualname__}" == _EXTENSION_CLASS for base in found.__mro__
    )


def facts_here(config: Any) -> EngineFacts:
    """Those of an engine that this process, or one of its children, runs; see :func:`facts_of`."""
    from vllm.plugins import load_general_plugins

    # A front end whose configuration was made in another process has loaded none; its workers have.
    load_general_plugins()
    return facts_of(config)
