"""An ``AsyncLLM`` as programs ask it, and fresh engines on the weights that it answered from."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import dbuffer
from tests.support.engines.tiny_models import (
    revealing_weights,
    save_model,
    version_of,
    wrong_tokens,
)
from tests.support.engines.vllm_engines import engine_arguments, greedy_parameters, start_llm

STEP_TIMEOUT_S = 120.0

Asked = list[tuple[list[int], int]]
"""Prompts, and numbers of tokens."""


async def until(condition: Callable[[], Any]) -> None:
    """Wait for a state."""
    async with asyncio.timeout(STEP_TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


class Asking:
    """An engine, requests to it, and a sender to a store."""

    def __init__(self, engine: Any, store: Path) -> None:
        self.engine, self.store = engine, store
        self.sender = dbuffer.WeightSender(store)
        self._published = 0
        self.tokens_so_far: dict[str, int] = {}
        self._numbers = itertools.count(1)

    async def send(self, weights: Any) -> int:
        """Publish the next version in another thread, and return its number."""
        publication = await asyncio.to_thread(self.sender.send, weights)
        self._published = publication.version
        return self._published

    async def reveal(self, count: int = 1) -> int:
        """Publish the next versions, each of which reveals itself; return the last one."""
        for _ in range(count):
            await self.send(revealing_weights(self._published + 1))
        return self._published

    async def respond(
        self, prompt: list[int], num_tokens: int, floor: int = 0, **more: Any
    ) -> dict[str, Any]:
        """Return one response; ``floor`` is a version that the engine is known to have by now.

        ``more``: arguments of ``generate``, which the response has, too.
        """
        name = f"r{next(self._numbers)}"
        asked = {"prompt_token_ids": prompt}, greedy_parameters(num_tokens), name
        async for output in self.engine.generate(*asked, **more):
            answer = output.outputs[0]
            self.tokens_so_far[name] = len(answer.token_ids)
        spans = getattr(answer, "weight_versions", None) or []  # before 0.32, answers have none
        return {
            "prompt": prompt,
            "tokens": list(answer.token_ids),
            "spans": [(span.version, span.start, span.end) for span in spans],
            "reason": answer.finish_reason,
            "wanted": num_tokens,
            "floor": floor,
            **more,
        }

    @contextlib.asynccontextmanager
    async def session(self, prompt: list[int], **more: Any) -> AsyncIterator[None]:
        """Let a session with streamed input wait for more until the block ends."""
        from vllm.engine.protocol import StreamingInput

        may_end = asyncio.Event()
        tokens: list[int] = []

        async def inputs() -> AsyncIterator[StreamingInput]:
            yield StreamingInput({"prompt_token_ids": prompt}, greedy_parameters(4))
            await may_end.wait()

        async def converse() -> None:
            asked = inputs(), greedy_parameters(4), "session"
            async for output in self.engine.generate(*asked, **more):
                answer = output.outputs[0]
                assert answer.finish_reason != "abort"
                tokens[:] = answer.token_ids

        async with asyncio.TaskGroup() as group:
            group.create_task(converse())
            await until(lambda: len(tokens) == 4)
            yield
            may_end.set()


class Load:
    """Streams of requests to an engine. Each stream has arguments of its own for ``generate``."""

    def __init__(
        self,
        asking: Asking,
        prompts: Sequence[list[int]],
        num_tokens: Sequence[int],
        streams: Sequence[dict[str, Any]],
    ) -> None:
        self.responses: list[dict[str, Any]] = []
        self._asking, self._streams = asking, streams
        self._prompts, self._num_tokens = prompts, num_tokens
        self._must_end = False
        self._floors: Counter[Any] = Counter()

    async def _stream(self, number: int, applied: Callable[[], int | None]) -> None:
        more = self._streams[number]
        replica = more.get("data_parallel_rank")
        while not self._must_end:
            turn = number + len(self.responses)
            response = await self._asking.respond(
                self._prompts[turn % len(self._prompts)],
                self._num_tokens[turn % len(self._num_tokens)],
                max(self._floors[replica], applied() or 0),
                **more,
            )
            self.responses.append(response)
            self._floors[replica] = max([self._floors[replica], *versions_of(response)])

    @contextlib.asynccontextmanager
    async def running(
        self, applied: Callable[[], int | None] = lambda: None
    ) -> AsyncIterator[None]:
        """Run until the block ends. ``applied`` returns a version that the engine has."""
        async with asyncio.TaskGroup() as group:
            for number in range(len(self._streams)):
                group.create_task(self._stream(number, applied))
            yield
            self._must_end = True


def versions_of(response: dict[str, Any]) -> list[int]:
    return [version_of(version) for version, _, _ in response["spans"]]


def versions_seen(responses: list[dict[str, Any]]) -> set[int]:
    return {version for response in responses for version in versions_of(response)}


def require_attributed(*responses: dict[str, Any]) -> None:
    """Require that every token is of the version reported for it, and versions never go back.

    Between responses only this is sure: what is sent after another response came, or after the
    follower said that the engine has a version, is not answered by older weights. Two responses
    that run side by side may reach their readers in any order.
    """
    for response in responses:
        spans = response["spans"]
        assert wrong_tokens(response) == []
        # All tokens have a version, and those of a mix are 0, which no version's are.
        ends = [0] + [end for _, _, end in spans]
        assert [start for _, start, _ in spans] == ends[:-1]
        assert ends[-1] == len(response["tokens"])
        versions = versions_of(response)
        assert versions == sorted(set(versions))
        assert all(version >= response["floor"] for version in versions)


def start_async_llm(checkpoint: Path, **more: Any) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(checkpoint, **more)))


def answer_afresh(
    directory: Path,
    family: str,
    responses: list[dict[str, Any]],
    seeds: dict[str, int],
    at_first: Asked,
) -> dict[str, Any]:
    """Let fresh engines continue what was answered where each span of it began.

    Args:
        seeds: of the weights of each version.
        at_first: what each of the engines is asked besides.
    """
    spans = [
        (seeds[version], one["prompt"] + one["tokens"][:start], one["tokens"][start:end])
        for one in responses
        for version, start, end in one["spans"]
    ]
    starts, rest = {}, {}
    for seed in sorted(set(seeds.values())):
        asked = [(prompt, len(tokens)) for one, prompt, tokens in spans if one == seed]
        answers = _fresh_tokens(save_model(family, seed, directory), [*at_first, *asked])
        starts[seed], rest[seed] = answers[: len(at_first)], iter(answers[len(at_first) :])
    return {
        "spans a response": [len(response["spans"]) for response in responses],
        "tokens": [tokens for _, _, tokens in spans],
        "fresh engines": [next(rest[seed]) for seed, _, _ in spans],
        "fresh starts": list(starts.values()),
    }


def _fresh_tokens(checkpoint: Path, asked: Asked) -> list[list[int]]:
    inputs = [{"prompt_token_ids": prompt} for prompt, _ in asked]
    parameters = [greedy_parameters(num_tokens) for _, num_tokens in asked]
    outputs = start_llm(checkpoint, how="none").generate(inputs, parameters, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
