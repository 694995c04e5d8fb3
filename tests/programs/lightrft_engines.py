"""Program of `test_engines.py`: LightRFT's trainer on two ranks, started by torchrun.

The first rank has an engine in a process of its own, and knows a server by its URL.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import dbuffer
from dbuffer.integrations.lightrft import BroadcastManager
from tests.support.engines.tiny_models import (
    make_model,
    revealing_weights,
    save_revealing,
    token_of,
)
from tests.support.engines.vllm_engines import EXTENSION, engine_arguments, greedy
from tests.support.engines.vllm_servers import Server
from tests.support.lightrft_parts import Trainer, by_rank, run_ranks
from tests.support.ports import free_port

API_KEY = "secret"


class Program:
    """One rank; the first has to do with engines."""

    def __init__(self, directory: Path) -> None:
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

        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name)  # of torchrun's: this engine is not one of those
        flags = ["--worker-extension-cls", EXTENSION, "--api-key", API_KEY]
        log = self.directory / "server.log"
        self.server = Server(checkpoint, log, *flags, port=free_port(), development=True)
        self.llm = vllm.LLM(**engine_arguments(checkpoint, how="none"))
        self.server.wait_ready()
        self.url = self.server.url

    def broadcast(self, version: int) -> None:
        set_model_state_dict(
            self.trainer.module,
            revealing_weights(version),
            options=StateDictOptions(full_state_dict=True),
        )
        self.manager.broadcast_to_engine()

    def require_llm(self, version: int) -> None:
        assert {token for answer in greedy(self.llm) for token in answer} == {token_of(version)}

    def run(self) -> None:
        """All engines answer from the version when the call returns on all ranks.

        Without the server the call raises on all ranks, and the other engine has the version.
        """
        for version in (1, 2):
            self.broadcast(version)
            if self.is_first:
                self.require_llm(version)
                assert set(self.server.answer()) == {token_of(version)}
                assert self.server.version() == str(version)
            distributed.barrier()
        if self.is_first:
            self.server.kill()
        distributed.barrier()
        with pytest.raises(dbuffer.EngineUnreachableError, match=r"^rank 0 could not switch"):
            self.broadcast(3)
        if self.is_first:
            self.require_llm(3)
        self.manager.close()


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    program = Program(directory)
    program.run()
    if program.is_first:
        with dbuffer.WeightReceiver(directory / "store") as receiver:  # it is the user's, and stays
            assert receiver.wait_for_version(timeout_s=0) == 3
        (directory / "observed.json").write_text("null")
        program.llm.llm_engine.engine_core.shutdown()
    distributed.barrier()


if __name__ == "__main__":
    run_ranks(__file__, main)
