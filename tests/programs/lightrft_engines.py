"""LightRFT's trainer on two ranks, started by torchrun.

The first rank has an engine in a process of its own, and knows a server by its URL.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import dbuffer
from dbuffer.integrations.lightrft import BroadcastManager
from tests.support.engines.vllm_engines import (
    EXTENSION,
)
from tests.support.lightrft_parts import Trainer, by_rank, run_ranks
from tests.support.waiting import error_of

API_KEY = "secret"


class Program:
    """One rank; the first has to do with engines."""

    def __init__(self, directory: Path) -> None:
        from tests.support.engines.tiny_models import make_model, save_revealing

        self.directory = directory
        self.is_first = distributed.get_rank() == 0
        self.trainer = Trainer("fsdp2 bf16", make_model("qwen3", 0))
        save_revealing(0, directory)  # transformers does it on one rank
        distributed.barrier()
        self.llm: Any = None
        self.url = ""
        if self.is_first:
            self.start_engines(directory / "revealing-0")
        [self.url] = set(by_rank(self.url)) - {""}
        self.manager = BroadcastManager(
            self.trainer.actor,
            self.trainer.strategy,
            [self.llm, self.url],
            store=directory / "store",
            api_key=API_KEY,
        )

    def start_engines(self, checkpoint: Path) -> None:
        import vllm

        from tests.support.engines.vllm_engines import engine_arguments
        from tests.support.engines.vllm_servers import Server
        from tests.support.ports import free_port

        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name)  # of torchrun's: this engine is not one of those
        flags = ["--worker-extension-cls", EXTENSION, "--api-key", API_KEY]
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
