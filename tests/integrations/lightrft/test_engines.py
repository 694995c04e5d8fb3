"""LightRFT's BroadcastManager with a server, and with an engine of one rank of the trainer only.

One program, started by torchrun, does everything: two ranks, of which the first has an engine in a
process of its own, and knows a server by its URL. The tests judge what it saw.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import dbuffer
from dbuffer.integrations.lightrft import BroadcastManager
from tests.support.engines.vllm_engines import (
    EXTENSION,
    NEEDS_VLLM,
    TIMEOUT_S,
    environment,
    observe,
)
from tests.support.lightrft_parts import Trainer, by_rank, run_ranks
from tests.support.soak import IN_SOAKS_ALONE
from tests.support.waiting import error_of

pytestmark = [*NEEDS_VLLM, *IN_SOAKS_ALONE, pytest.mark.timeout(TIMEOUT_S + 10)]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    env = environment(processes=True)
    return observe(__file__, tmp_path_factory.mktemp("engines"), env=env)


@pytest.mark.parametrize("version", ["1", "2"])
def test_all_engines_answer_from_the_version_when_the_call_returns(
    observed: Any, version: str
) -> None:
    from tests.support.engines.tiny_models import token_of

    first, second = observed[version]
    assert first["error"] is second["error"] is None
    assert set(first["server"]) == set(first["llm"]) == {token_of(int(version))}
    assert first["server reports"] == version


def test_no_server_raises_on_all_ranks_and_the_other_engine_has_the_version(observed: Any) -> None:
    from tests.support.engines.tiny_models import token_of

    first, second = observed["3"]
    for seen in (first, second):
        assert seen["error"].startswith("EngineUnreachableError: rank 0 could not switch")
    assert set(first["llm"]) == {token_of(3)}


def test_store_of_the_user_stays(observed: Any) -> None:
    assert observed["newest"] == 3


# From here on, the program that runs in the ranks.


class Program:
    """One rank; the first has to do with engines."""

    def __init__(self, directory: Path) -> None:
        from tests.integrations.vllm.test_server import API_KEY
        from tests.support.engines.tiny_models import make_model, save_revealing

        self.directory = directory
        self.is_first = distributed.get_rank() == 0
        self.trainer = Trainer("fsdp2 bf16", make_model("qwen3", 0))
        save_revealing(0, directory)  # transformers does it on one rank
        distributed.barrier()
        self.llm: Any = None
        self.url = ""
        if self.is_first:
            self.start_engines(directory / "revealing-0", API_KEY)
        [self.url] = set(by_rank(self.url)) - {""}
        self.manager = BroadcastManager(
            self.trainer.actor,
            self.trainer.strategy,
            [self.llm, self.url],
            store=directory / "store",
            api_key=API_KEY,
        )

    def start_engines(self, checkpoint: Path, api_key: str) -> None:
        import vllm

        from tests.support.children import free_port
        from tests.support.engines.vllm_engines import engine_arguments
        from tests.support.engines.vllm_servers import Server

        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name)  # of torchrun's: this engine is not one of those
        flags = ["--worker-extension-cls", EXTENSION, "--api-key", api_key]
        log = self.directory / "server.log"
        self.server = Server(checkpoint, log, *flags, port=free_port(), development=True)
        self.llm = vllm.LLM(**engine_arguments(checkpoint, how="none"))
        self.server.wait_ready()
        self.url = self.server.url

    def broadcast(self, version: int) -> dict[str, Any]:
        from tests.support.engines.tiny_models import revealing_weights

        set_model_state_dict(
            self.trainer.module,
            revealing_weights(version),
            options=StateDictOptions(full_state_dict=True),
        )
        return {"error": error_of(self.manager.broadcast_to_engine)}

    def answers(self) -> dict[str, Any]:
        if not self.is_first:
            return {}
        return {
            "llm": self.answer_of_llm(),
            "server": self.server.answer(),
            "server reports": self.server.version(),
        }

    def answer_of_llm(self) -> list[int]:
        from tests.support.engines.vllm_engines import greedy

        return [token for answer in greedy(self.llm) for token in answer]

    def observe(self) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for version in (1, 2):
            seen[str(version)] = by_rank(self.broadcast(version) | self.answers())
        if self.is_first:
            self.server.kill()
        distributed.barrier()
        last = self.broadcast(3) | ({"llm": self.answer_of_llm()} if self.is_first else {})
        seen["3"] = by_rank(last)
        self.manager.close()
        return seen


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    program = Program(directory)
    seen = program.observe()
    if program.is_first:
        with dbuffer.WeightReceiver(directory / "store") as receiver:
            seen["newest"] = receiver.wait_for_version(timeout_s=0)
        (directory / "observed.json").write_text(json.dumps(seen))
        program.llm.llm_engine.engine_core.shutdown()
    distributed.barrier()


if __name__ == "__main__":
    run_ranks(__file__, main)
