"""Answers of a pooling model whose requests meet a switch: each is of one version, or an error.

An `AsyncLLM` computes long prompts in chunks, and a switch comes between two of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.integrations.vllm import follow
from tests.support.engines.async_engines import STEP_TIMEOUT_S
from tests.support.engines.in_workers import num_pooled_chunks, step_as_ever, step_slowly
from tests.support.engines.tiny_models import make_model, save_model
from tests.support.engines.vllm_engines import engine_arguments, judge

FAMILY, CHUNK_TOKENS = "llama", 16
PROMPT = [(7 * index) % 480 + 4 for index in range(200)]
QUERY, DOCUMENT = PROMPT[:6], PROMPT[50:100]


class Program:
    """An engine that pools by token, a follower's store, and requests to it."""

    def __init__(self, engine: Any, directory: Path) -> None:
        self.engine = engine
        self.store = directory / "store"
        self._slow = directory / "slow"
        self._numbers = itertools.count(1)

    async def encode(self, prompt: list[int], late: Any = None) -> Any:
        """Return an output; ``late`` is for vLLM's scores of late interaction."""
        from vllm import PoolingParams

        params = PoolingParams(
            task="token_embed", use_activation=False, late_interaction_params=late
        )
        name = f"r{next(self._numbers)}"
        async for output in self.engine.encode({"prompt_token_ids": prompt}, params, name):
            last = output
        return last

    @contextlib.asynccontextmanager
    async def encoding(self, prompt: list[int], late: Any = None) -> AsyncIterator[Any]:
        """A request that has rows of its first chunks, and is slow until the block ends."""
        self._slow.touch()
        await self.engine.collective_rpc(step_slowly, args=(str(self._slow),))
        task = asyncio.create_task(self.encode(prompt, late))
        while not any(await self.engine.collective_rpc(num_pooled_chunks)):
            assert not task.done()
        yield task
        self._slow.unlink()
        await self.engine.collective_rpc(step_as_ever)

    @contextlib.asynccontextmanager
    async def following(self, pause: str) -> AsyncIterator[Any]:
        """Give a function that switches the engine to weights of a seed."""
        with dbuffer.WeightSender(self.store) as sender:
            async with follow(self.engine, self.store, pause=pause) as follower:

                async def switch(seed: int) -> None:
                    sent = await asyncio.to_thread(sender.send, make_model(FAMILY, seed).model)
                    await follower.wait_applied_async(sent.version, STEP_TIMEOUT_S)

                yield switch


def rows_of(seed: int, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return make_model(FAMILY, seed).model(torch.tensor([prompt])).last_hidden_state[0]


def require_rows(output: Any, seed: int, prompt: list[int]) -> None:
    rows, expected = output.outputs.data, rows_of(seed, prompt)
    assert rows.shape == expected.shape
    torch.testing.assert_close(rows, expected, atol=1e-2, rtol=1e-2)


def require_ended(output: Any) -> None:
    assert output.finished
    assert output.error.retryable
    assert "send it again" in output.error.message


async def begin_prompts_anew(program: Program) -> None:
    async with program.following("keep") as switch:
        await switch(1)
        require_rows(await program.encode(PROMPT), 1, PROMPT)
        async with program.encoding(PROMPT) as task:
            await switch(2)
            assert not task.done()
        require_rows(await task, 2, PROMPT)


async def abort_prompts(program: Program) -> None:
    async with program.following("abort") as switch:
        async with program.encoding(PROMPT) as task:
            await switch(1)
            require_ended(await asyncio.wait_for(task, STEP_TIMEOUT_S))
        require_rows(await program.encode(PROMPT), 1, PROMPT)


async def end_documents_whose_query_is_gone(program: Program) -> None:
    """One that came before the switch, and one that comes after it."""
    from vllm.v1.pool.late_interaction import (
        build_late_interaction_doc_params,
        build_late_interaction_query_params,
    )

    async def score(key: str, document: list[int]) -> Any:
        return await program.encode(document, build_late_interaction_doc_params(key))

    async with program.following("keep") as switch:
        await program.encode(QUERY, build_late_interaction_query_params("old", 3))
        assert (await score("old", DOCUMENT)).error is None
        async with program.encoding(PROMPT, build_late_interaction_doc_params("old")) as task:
            await switch(2)
            assert not task.done()
        require_ended(await task)
        late, _ = await asyncio.gather(score("old", DOCUMENT), program.encode(PROMPT))
        require_ended(late)
        await program.encode(QUERY, build_late_interaction_query_params("new", 1))
        output = await score("new", DOCUMENT)
        query, document = rows_of(2, QUERY), rows_of(2, DOCUMENT)
        expected = (query @ document.T).amax(dim=1).sum()
        torch.testing.assert_close(output.outputs.data.flatten()[0], expected, atol=0.1, rtol=1e-2)


async def run(directory: Path) -> None:
    from vllm.config import PoolerConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_arguments(
        save_model(FAMILY, 0, directory),
        runner="pooling",
        convert="embed",
        enable_chunked_prefill=True,
        enable_prefix_caching=False,
        max_num_batched_tokens=CHUNK_TOKENS,
        pooler_config=PoolerConfig(task="token_embed", use_activation=False),
    )
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    program = Program(engine, directory)
    try:
        with pytest.raises(dbuffer.UnsupportedError, match="pooling model"):
            follow(engine, program.store, pause="in_place")
        await begin_prompts_anew(program)
        await abort_prompts(program)
        await end_documents_whose_query_is_gone(program)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    judge(lambda directory: asyncio.run(run(directory)))
