"""KV connectors of a real engine are reset in a switch, or the engine does not follow."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dbuffer
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.integrations.vllm import follow
from dbuffer.integrations.vllm.config import require_droppable
from tests.support.engines.tiny_models import make_model, save_model
from tests.support.engines.vllm_engines import greedy, judge, start_llm

BOTH = "kv_both"
NO_RESET, SHARED = "ExampleConnector", "MooncakeStoreConnector"
OFFLOADS = {"kv_connector": "OffloadingConnector", "kv_role": BOTH}
TIERS = {"spec_name": "TieringOffloadingSpec"}


def run(directory: Path) -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    kept = directory / "kept"
    transfer = KVTransferConfig(
        kv_connector=NO_RESET,
        kv_role=BOTH,
        kv_connector_extra_config={"shared_storage_path": str(kept)},
    )
    llm = start_llm(save_model("qwen3", 1, directory), kv_transfer_config=transfer)
    tell_which_are_refused(llm.llm_engine.vllm_config)
    first, store = greedy(llm), directory / "store"
    assert any(kept.iterdir())
    with dbuffer.WeightSender(store) as sender:
        with pytest.raises(dbuffer.UnsupportedError, match=NO_RESET):
            follow(llm, store)
        sender.send(make_model("qwen3", 2))
        with follow(llm, store, allow_stale_kv=True) as follower:
            assert follower.sync() is not None
            stale = greedy(llm)

        def reset_cache(_: Any) -> bool:
            shutil.rmtree(kept)
            kept.mkdir()
            return True

        ExampleConnector.reset_cache = reset_cache  # type: ignore[method-assign]
        sender.send(make_model("qwen3", 2))
        with follow(llm, store) as follower:
            follower.sync()
            switched = greedy(llm)
    reset_cache(None)
    assert llm.reset_prefix_cache()
    assert switched == greedy(llm) != first
    assert switched != stale, "the connector had kept results of older weights"


def tell_which_are_refused(config: Any) -> None:
    """Judge connectors that no engine here can have, by an engine's configuration."""
    from vllm.config import KVTransferConfig

    config, options = copy.copy(config), EngineOptions(store="store")
    reads = {"kv_connector": NO_RESET, "kv_role": "kv_consumer"}
    for refused, transfer in (
        (None, OFFLOADS),
        (None, {"kv_connector": NO_RESET, "kv_role": "kv_producer"}),
        (NO_RESET, reads),
        (SHARED, {"kv_connector": SHARED, "kv_role": BOTH}),
        ("OffloadingConnector", OFFLOADS | {"kv_connector_extra_config": TIERS}),
        (
            NO_RESET,
            {
                "kv_connector": "MultiConnector",
                "kv_role": BOTH,
                "kv_connector_extra_config": {"connectors": [OFFLOADS, reads]},
            },
        ),
    ):
        config.kv_transfer_config = KVTransferConfig(**transfer)
        if refused is None:
            require_droppable(config, options)
            continue
        with pytest.raises(dbuffer.UnsupportedError, match=f"through {refused}, "):
            require_droppable(config, options)
    config.kv_transfer_config = None
    config.ec_transfer_config = SimpleNamespace(is_ec_consumer=True, ec_connector="Encoders")
    with pytest.raises(dbuffer.UnsupportedError, match="through Encoders, "):
        require_droppable(config, options)


if __name__ == "__main__":
    judge(run)
