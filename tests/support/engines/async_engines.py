"""An ``AsyncLLM`` as programs ask it, and fresh engines on the weights that it answered from."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.engines.tiny_models import save_model
from tests.support.engines.vllm_engines import greedy_parameters, start_llm

STEP_TIMEOUT_S = 120.0

Asked = list[tuple[list[int], int]]
"""Prompts, and numbers of tokens."""


async def until(condition: Callable[[], Any]) -> None:
    """Wait for a state."""
    async with asyncio.timeout(STEP_TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


class Asking:
    """An engine, and requests to it."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.tokens_so_far: dict[str, int] = {}
        self._numbers = itertools.count(1)

    async def respond(
        self, prompt: list[int], num_tokens: int, floor: int = 0, **more: Any
    ) -> dict[str, Any]:
        """Return one response; ``floor`` is a version that the engine is known to have by now."""
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
        }


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
