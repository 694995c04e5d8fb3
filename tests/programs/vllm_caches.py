"""KV connectors of a real engine are reset in a switch, or the engine does not follow.

In the role ``served``, clients ask a server with a connector while a trainer publishes and is
killed, and the server too. All tokens equal those of fresh engines.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dbuffer
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.integrations.vllm import follow
from dbuffer.integrations.vllm.config import require_droppable
from dbuffer.testing.waiting import until
from tests.support.engines import preforked
from tests.support.engines.tiny_models import make_model, save_model
from tests.support.engines.vllm_engines import PROMPTS, greedy, judge, start_llm
from tests.support.engines.vllm_servers import (
    BACKEND_FLAGS,
    WAIT_S,
    Clients,
    Server,
    following,
    question,
)
from tests.support.ports import free_port
from tests.support.stores import newest_version

BOTH = "kv_both"
NO_RESET, SHARED = "ExampleConnector", "MooncakeStoreConnector"
OFFLOADS = {"kv_connector": "OffloadingConnector", "kv_role": BOTH}
TIERS = {"spec_name": "TieringOffloadingSpec"}


def run(directory: Path, role: str = "offline") -> None:
    match role:
        case "offline":
            follow_offline(directory)
        case "served":
            follow_under_load(directory)
        case "train":
            train(directory)


def follow_offline(directory: Path) -> None:
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


# A server under load.

SEEDS = (1, 2)
EVERY_S = 0.5
"""Time between two versions."""
NUM_VERSIONS = 8
"""Versions until the trainer is killed."""
NUM_TOKENS = 8
RESETTING = {
    "kv_connector": "ResettingConnector",
    "kv_connector_module_path": "tests.support.engines.resetting_connector",
}


def train(directory: Path) -> None:
    """Publish models of each seed in turn until killed."""
    models = [(seed, make_model("qwen3", seed)) for seed in SEEDS]
    with dbuffer.WeightSender(directory / "store") as sender:
        for seed, model in itertools.cycle(models):
            sender.send(model, metadata={"seed": seed})
            time.sleep(EVERY_S)


def start_server(directory: Path, number: int, connector: dict[str, str]) -> Server:
    kept = directory / "kept"
    kept.mkdir(exist_ok=True)
    transfer = {"kv_role": BOTH, "kv_connector_extra_config": {"shared_storage_path": str(kept)}}
    options = following(directory / "store", pause="wait", poll_interval_s=0.05)
    flags = (*BACKEND_FLAGS, "--kv-transfer-config", json.dumps(transfer | connector), *options)
    log = directory / f"server-{number}.log"
    return Server(directory / "qwen3-1", log, *flags, port=free_port())


def follow_under_load(directory: Path) -> None:
    paths = {seed: save_model("qwen3", seed, directory) for seed in SEEDS}
    refused = start_server(directory, 0, {"kv_connector": NO_RESET})
    assert refused.wait_end() > 0
    assert f"this engine loads caches through {NO_RESET}" in refused.log()
    expected = {seed: greedy(start_llm(path), NUM_TOKENS) for seed, path in paths.items()}
    goal = 0
    answers: list[Any] = []
    for number in SEEDS:
        trainer = preforked.start(
            [__file__, str(directory), "train"], env=dict(os.environ), output=directory / "t.log"
        )
        server = start_server(directory, number, RESETTING)
        server.wait_ready()
        clients = Clients(len(PROMPTS), lambda prompt: ask(server, prompt))  # noqa: B023
        goal = newest_version(directory / "store") + NUM_VERSIONS
        path = f"/ready?min_version={goal}"
        until(path, lambda: server.status_of("GET", path) == 200, WAIT_S)  # noqa: B023
        trainer.kill()
        trainer.wait(WAIT_S)
        assert any((directory / "kept").iterdir())
        answers += [answer for of_one in clients.stop() for answer in of_one]
        server.kill()
    assert len({version for version, *_ in answers}) >= NUM_VERSIONS
    for _, seed, prompt, tokens in answers:
        assert tokens == expected[seed][prompt], (seed, prompt)


def ask(server: Server, prompt: int) -> tuple[int, int, int, list[int]]:
    """Return an answer's version, the seed of its weights, the prompt's number and the tokens."""
    body = question(0) | {"prompt": PROMPTS[prompt], "max_tokens": NUM_TOKENS}
    response = server.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    version = int(response.headers["x-weight-version"])
    seed = json.loads(response.headers["x-weight-metadata"])["seed"]
    return version, seed, prompt, response.json()["choices"][0]["token_ids"]


if __name__ == "__main__":
    judge(run)
