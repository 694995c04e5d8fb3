"""A following `AsyncLLM`, under load: whose tokens a response carries, and what it says of them.

A thread publishes models whose every token reveals their version, at full speed, while requests
run. The engine core is a process too, and with two ranks each worker is one.
The program goes through what befalls such an engine, the last of it being its death.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.integrations.vllm import follow
from dbuffer.integrations.vllm.core import HOLD
from tests.support.engines import preforked
from tests.support.engines.async_engines import (
    STEP_TIMEOUT_S,
    Asking,
    Load,
    answer_afresh,
    require_attributed,
    start_async_llm,
    until,
    versions_of,
    versions_seen,
)
from tests.support.engines.in_workers import (
    let_fail,
    let_wait,
    let_work,
    step_as_ever,
    step_slowly,
)
from tests.support.engines.tiny_models import (
    make_model,
    revealing_weights,
    save_revealing,
    wrong_tokens,
)
from tests.support.engines.vllm_engines import judge
from tests.support.soak import is_soak
from tests.support.stores import newest_version, number_in, receiver_records

TRAINER = str(Path(__file__).with_name("vllm_server.py"))
NUM_STREAMS = 6
PUBLISHES = 200 if is_soak() else 24
MIN_SWITCHES = 200 if is_soak() else 6
MAX_ROUNDS = 1000 if is_soak() else 10
# Short, so that drained engines switch often; long, so that kept ones are switched on the way.
NUM_TOKENS = {"wait": (3, 6, 9), "keep": (40, 70, 100), "abort": (3, 12, 60)}
# Two longer than a cache block, two with a block in common.
PROMPTS = [
    list(range(1, 6)),
    list(range(100, 140)),
    list(range(200, 300)),
    [*range(200, 232), *range(7)],
]
SESSIONS = {
    "keep": "drop the caches of 1 waiting session",
    "abort": "abort 1 session",
}
"""Refusals for a session with streamed input, by the mode of the pause."""
KEPT_TOKENS = 80
"""In slow steps they take 8 s, in which a version is published and switched to."""
CACHE_FOR_TWO_BYTES = 11 * 32 * 1024
"""Room for two of the longest requests, of the four that run together."""


class Program(Asking):
    def __init__(self, engine: Any, store: Path) -> None:
        super().__init__(engine, store)
        self.options: dict[str, str] = {}
        """Further options of each follower."""
        self.pauses: list[str] = []
        self.in_next_pause: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Called once the engine is paused for the next switch."""
        self.before_next_label: Callable[[], Coroutine[Any, Any, Any]] | None = None
        self._call = engine.engine_core.call_utility_async
        engine.engine_core.call_utility_async = self._call_noting_pauses

    async def _call_noting_pauses(self, method: str, *arguments: Any) -> Any:
        if method == "set_weight_version" and self.before_next_label is not None:
            action, self.before_next_label = self.before_next_label, None
            await action()
        result = await self._call(method, *arguments)
        if method == HOLD:
            self.pauses.append(arguments[0])
            action, self.in_next_pause = self.in_next_pause, None
            if action is not None:
                await action()
        return result

    def follow(self, pause: str = "keep", **options: Any) -> Any:
        return follow(self.engine, self.store, pause=pause, **self.options, **options)

    @contextlib.asynccontextmanager
    async def following(self, pause: str = "keep") -> AsyncIterator[Any]:
        """A follower whose engine has what is there already."""
        async with self.follow(pause) as follower:
            await asyncio.wait_for(follower.wait_started_async(), STEP_TIMEOUT_S)
            yield follower

    async def answers(self) -> list[list[int]]:
        responses = await asyncio.gather(*(self.respond(prompt, 16) for prompt in PROMPTS))
        return [response["tokens"] for response in responses]

    @contextlib.asynccontextmanager
    async def answering(
        self, prompts: list[list[int]], num_tokens: int
    ) -> AsyncIterator[list[asyncio.Task[dict[str, Any]]]]:
        """Requests that have begun to answer, and do not end before what is in the block."""
        slow = self.store.parent / "slow"
        slow.touch()
        await self.engine.collective_rpc(step_slowly, args=(str(slow),))
        self.tokens_so_far.clear()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.respond(prompt, num_tokens)) for prompt in prompts]
            await until(lambda: len(self.tokens_so_far) == len(prompts))
            yield tasks
            slow.unlink()
        await self.engine.collective_rpc(step_as_ever)

    async def label(self) -> str:
        label: str = await self.engine.get_weight_version()
        return label

    async def require_served(self, version: int) -> None:
        assert await self.label() == str(version)
        response = await self.respond(PROMPTS[0], 4, version)
        assert versions_of(response) == [version]
        require_attributed(response)


async def switch_under_load(
    program: Program,
    pause: str,
    num_tokens: tuple[int, ...],
    *,
    publishes: int = PUBLISHES,
    min_switches: int = MIN_SWITCHES,
) -> list[dict[str, Any]]:
    """Publish at full speed while requests run, until enough versions have been seen in them."""
    async with program.following(pause) as follower:
        load = Load(program, PROMPTS, num_tokens, [{}] * NUM_STREAMS)
        async with load.running(lambda: follower.applied):
            for _ in range(MAX_ROUNDS):
                last = await program.reveal(publishes)
                if len(versions_seen(load.responses)) > min_switches:
                    break
            assert await follower.wait_applied_async(last, STEP_TIMEOUT_S) == last
            await asyncio.to_thread(program.sender.wait_applied, last)
            await program.require_served(last)
        assert follower.error is None
    assert len(versions_seen(load.responses)) >= min_switches
    require_attributed(*load.responses)
    return load.responses


async def switch_with_each_pause(program: Program) -> int:
    wait, keep, abort = [
        await switch_under_load(program, pause, num_tokens)
        for pause, num_tokens in NUM_TOKENS.items()
    ]
    for response in wait:
        assert response["reason"] == "length"
        assert len(response["spans"]) == 1
    assert sum(len(response["spans"]) > 1 for response in keep) >= NUM_STREAMS
    assert {response["reason"] for response in keep} == {"length"}
    for response in abort:
        is_whole = len(response["tokens"]) == response["wanted"]
        assert response["reason"] == ("length" if is_whole else "abort")
        assert len(response["spans"]) <= 1
    assert {response["reason"] for response in abort} == {"length", "abort"}
    return sum(len(versions_seen(responses)) for responses in (wait, keep, abort))


async def switch_kept_requests(program: Program) -> Callable[[Path], None]:
    """Switch between two ordinary models while requests are on their way.

    Returns:
        The comparison with fresh engines, for when this one has ended.
    """
    seeds = {}
    async with program.following() as follower:

        async def switch_to(seed: int) -> None:
            version = await program.send(await asyncio.to_thread(make_model, "qwen3", seed))
            await follower.wait_applied_async(version, STEP_TIMEOUT_S)
            seeds[str(version)] = seed

        await switch_to(1)
        before, again = await program.answers(), await program.answers()
        await switch_to(2)
        after = await program.answers()
        async with program.answering(PROMPTS, KEPT_TOKENS) as tasks:
            await switch_to(1)
            await switch_to(2)
    responses = [task.result() for task in tasks]

    def compare(directory: Path) -> None:
        at_first = [(prompt, 16) for prompt in PROMPTS]
        fresh = answer_afresh(directory, "qwen3", responses, seeds, at_first)
        # Each request was switched on its way: what came before is the prompt of what comes after.
        assert min(fresh["spans a response"]) >= 2
        assert fresh["tokens"] == fresh["fresh engines"]
        # Prompts longer than a cache block are right at once after a switch.
        first, second = fresh["fresh starts"]
        assert before == again == first
        assert after == second != first

    return compare


async def fail_while_answering(
    program: Program, follower: Any, publish: Callable[[], Awaitable[int]], problem: str
) -> tuple[int, list[str]]:
    """Publish what the engine does not take, while it answers: it goes on, and says so.

    Returns:
        The version, and the modes of the pauses meanwhile.
    """
    before = await program.label()
    program.pauses.clear()
    async with program.answering([PROMPTS[2]], 100) as (request,):
        version = await publish()
        await until(lambda: follower.error is not None)
    pauses = program.pauses.copy()
    assert problem in str(follower.error)
    assert await program.label() == before
    response = request.result()
    assert [span[0] for span in response["spans"]] == [before]
    assert response["reason"] == "length"
    require_attributed(response)
    return version, pauses


async def publish_a_misfit(program: Program) -> None:
    misfit = revealing_weights(1) | {"lm_head.weight": torch.zeros(500, 63)}
    async with program.following() as follower:
        _, pauses = await fail_while_answering(
            program, follower, lambda: program.send(misfit), "lm_head.weight"
        )
        assert pauses == []
        version = await program.reveal()
        await follower.wait_applied_async(version, STEP_TIMEOUT_S)
        await program.require_served(version)


async def fail_in_a_pause(program: Program, what: str) -> None:
    async with program.following() as follower:
        await program.engine.collective_rpc(let_fail, args=(what,))
        problem = f"this {what} fails"
        version, pauses = await fail_while_answering(program, follower, program.reveal, problem)
        assert set(pauses) == {"keep"}
        # Once nothing fails any more, it is switched without anyone's help.
        await program.engine.collective_rpc(let_work, args=(what,))
        assert await follower.wait_applied_async(version, STEP_TIMEOUT_S) == version
        await program.require_served(version)


async def close_in_a_switch(program: Program, directory: Path) -> None:
    """A follower that is closed in the middle of a switch ends it first."""
    follower = program.follow()
    await asyncio.wait_for(follower.wait_started_async(), STEP_TIMEOUT_S)
    await program.engine.collective_rpc(let_wait, args=("load", str(directory)))
    version = await program.reveal()
    await until((directory / "entered").exists)
    closing = asyncio.create_task(follower.aclose())
    await asyncio.sleep(0)
    assert not closing.done()
    (directory / "go on").touch()
    await asyncio.wait_for(closing, STEP_TIMEOUT_S)
    assert not await program.engine.is_paused()
    await program.require_served(version)


async def pause_as_a_user(program: Program) -> None:
    async with program.following() as follower:
        before = await program.label()
        async with program.answering([PROMPTS[2]], 100) as (request,):
            await program.engine.pause_generation(mode="keep")
            tokens_before = program.tokens_so_far.copy()
            version = await program.reveal()
            await follower.wait_applied_async(version, STEP_TIMEOUT_S)
            assert await program.engine.is_paused()
            assert program.tokens_so_far == tokens_before
            await program.engine.resume_generation()
        require_attributed(request.result())
        assert [span[0] for span in request.result()["spans"]] == [before, str(version)]


async def pause_requests_that_are_waited_for(program: Program) -> None:
    """Requests that a user has paused can finish before a switch only when they are resumed."""
    async with program.following("wait") as follower:
        before = await program.label()
        async with program.answering([PROMPTS[2]], 40) as (request,):
            await program.engine.pause_generation(mode="keep")
            version = await program.reveal()
            await until(lambda: follower.error is not None)
            assert isinstance(follower.error, dbuffer.EngineBusyError)
            assert "has paused 1 request in flight" in str(follower.error)
            await program.engine.resume_generation()
        assert [span[0] for span in request.result()["spans"]] == [before]
        await follower.wait_applied_async(version, STEP_TIMEOUT_S)
        await program.require_served(version)


async def sleep_with_requests(program: Program) -> None:
    """A version that comes while the engine sleeps ends no request before it can be loaded."""
    async with program.following("abort") as follower:
        async with program.answering([PROMPTS[2]], 100) as (request,):
            await program.engine.sleep(level=1, mode="keep")
            waiting = asyncio.create_task(program.respond(PROMPTS[0], 4))
            version = await program.reveal()
            await until(lambda: follower.error is not None)
            assert isinstance(follower.error, dbuffer.EngineBusyError)
            assert not request.done()
            assert not waiting.done()
            await program.engine.wake_up()
            await follower.wait_applied_async(version, STEP_TIMEOUT_S)
        require_attributed(await waiting)
        await program.require_served(version)


async def interfere_in_a_switch(program: Program) -> None:
    """Nothing runs before the switch ends, and then it does what was called meanwhile."""
    tasks: list[asyncio.Task[Any]] = []

    async def resume() -> None:
        await program.engine.resume_generation()
        tasks.append(asyncio.create_task(program.answers()))
        await asyncio.sleep(0.1)

    async def pause() -> None:
        tasks.append(asyncio.create_task(program.engine.pause_generation(mode="keep")))
        await asyncio.sleep(0.1)

    async def pause_and_resume() -> None:
        await pause()
        await program.engine.resume_generation()

    async with program.following() as follower:
        for action in (resume, pause_and_resume, pause):
            program.in_next_pause = action
            version = await program.reveal()
            await follower.wait_applied_async(version, STEP_TIMEOUT_S)
            [outcome] = await asyncio.gather(tasks.pop(), return_exceptions=True)
            assert isinstance(outcome, Exception) == (action is pause_and_resume)
            assert await program.engine.is_paused() == (action is pause)
            if action is pause:
                # A switch in their pause leaves it as it is.
                version = await program.reveal()
                await follower.wait_applied_async(version, STEP_TIMEOUT_S)
                assert await program.engine.is_paused()
                await program.engine.resume_generation()
            await program.require_served(version)


async def switch_after_a_session_only(program: Program, pause: str, problem: str) -> None:
    """A session with streamed input keeps its cache while it waits for more, and its context."""
    async with program.following(pause) as follower:
        async with program.session(PROMPTS[1]):
            program.pauses.clear()
            version = await program.reveal()
            await until(lambda: follower.error is not None)
            assert isinstance(follower.error, dbuffer.EngineBusyError)
            assert str(follower.error).startswith(f"vLLM cannot {problem} with streamed input")
            assert program.pauses == []
        await follower.wait_applied_async(version, STEP_TIMEOUT_S)
        await program.require_served(version)


async def wait_for_the_end_of_one_step_only(program: Program) -> None:
    """The core answers between two steps: asked one after the other, each would wait for a step."""
    calls: list[str] = []
    client = program.engine.engine_core
    call = client._call_utility_async

    async def noted(method: str, *args: Any, **options: Any) -> Any:
        calls.append(f"{method} asked")
        try:
            return await call(method, *args, **options)
        finally:
            calls.append(f"{method} answered")

    async with program.following() as follower, program.answering([PROMPTS[2]], 100):
        client._call_utility_async = noted
        version = await program.reveal()
        await follower.wait_applied_async(version, STEP_TIMEOUT_S)
        del client._call_utility_async
    assert f"{HOLD} asked" in calls
    assert "is_scheduler_paused asked" not in calls


async def lose_the_weights(program: Program) -> None:
    """Load past dbuffer, and take the store away."""
    async with program.following() as follower:
        version = await program.reveal()
        await follower.wait_applied_async(version, STEP_TIMEOUT_S)
        await program.require_served(version)
        await program.engine.collective_rpc("reload_weights")
        await require_none_mislabeled_until(program, version)
        # When a switch has loaded, and the engine is not labeled yet.
        program.before_next_label = lambda: program.engine.collective_rpc("reload_weights")
        version = await program.reveal()
        await until(lambda: program.before_next_label is None)
        await require_none_mislabeled_until(program, version)
        # What a trainer of vLLM's own weight transfer calls when it ends.
        await program.engine.shutdown_weight_transfer_engine()
        await follower.wait_applied_async(await program.reveal(), STEP_TIMEOUT_S)


async def require_none_mislabeled_until(program: Program, version: int) -> None:
    async with asyncio.timeout(STEP_TIMEOUT_S):
        while await program.label() != str(version):
            response = await program.respond(PROMPTS[0], 4)
            known = [span for span in response["spans"] if span[0] != "unknown"]
            assert wrong_tokens(response | {"spans": known}) == []
    await program.require_served(version)


async def lose_the_engine(program: Program) -> None:
    """Kill the engine's core, while nothing is asked of it: following ends, which is told once."""
    heard: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = heard.append  # type: ignore[method-assign]
    async with program.following() as follower:
        logging.getLogger("dbuffer.engine").addHandler(handler)
        [core] = program.engine.engine_core.resources.engine_manager.processes
        core.kill()
        await until(lambda: follower.error is not None)
        assert isinstance(follower.error, dbuffer.EngineEndedError)
    [record] = heard
    assert "gets no more versions: " in record.getMessage()


@contextlib.asynccontextmanager
async def started(directory: Path, **more: Any) -> AsyncIterator[Program]:
    engine = start_async_llm(save_revealing(0, directory), **more)
    try:
        yield Program(engine, directory / "store")
    finally:
        engine.shutdown()


async def run_one_rank(directory: Path) -> dict[str, int]:
    async with started(directory) as program:
        response = await program.respond(PROMPTS[0], 8)
        assert [span[0] for span in response["spans"]] == ["default"]
        assert wrong_tokens(response) == []
        num_versions = await switch_with_each_pause(program)
        await publish_a_misfit(program)
        for what in ("load", "prepare"):
            await fail_in_a_pause(program, what)
        await close_in_a_switch(program, directory)
        await pause_as_a_user(program)
        await pause_requests_that_are_waited_for(program)
        await sleep_with_requests(program)
        await interfere_in_a_switch(program)
        for pause, problem in SESSIONS.items():
            await switch_after_a_session_only(program, pause, problem)
        await wait_for_the_end_of_one_step_only(program)
        await lose_the_weights(program)
        compare = await switch_kept_requests(program)
        with pytest.raises(dbuffer.OptionError, match="no store given"):
            follow(program.engine)
        with pytest.raises(dbuffer.UnsupportedError, match="enable_prefix_caching=False"):
            program.follow("in_place")
        await lose_the_engine(program)
    compare(directory)
    return {"versions in answers that an engine under load gave": num_versions}


async def run_short_of_cache(directory: Path) -> dict[str, int]:
    """Let requests preempt each other: vLLM does not wait for those that have lost their cache."""
    async with started(directory, kv_cache_memory_bytes=CACHE_FOR_TWO_BYTES) as program:
        responses = await switch_under_load(program, "wait", (150, 120, 140), min_switches=4)
    num_mixed = sum(len(response["spans"]) > 1 for response in responses)
    return {"answers of two versions of an engine short of cache": num_mixed}


async def run_drafted(directory: Path) -> dict[str, int]:
    """Let a draft model of two ranks follow a store of its own; its trainer is killed."""
    draft = {"method": "draft_model", "model": str(save_revealing(0, directory))}
    speculates = draft | {"num_speculative_tokens": 2}
    drafts = directory / "draft"
    async with started(directory, speculative_config=speculates, tp=2) as program:
        publishes = [TRAINER, str(directory), "publish", str(drafts), "240"]
        trainer = preforked.start(publishes, env=dict(os.environ))
        program.options = {"draft_store": str(drafts), "engine_id": "e"}
        responses = await switch_under_load(
            program, "keep", (10, 20, 30), publishes=8, min_switches=12
        )
        trainer.kill()
        trainer.wait()
        last = newest_version(drafts)
        assert (number_in(receiver_records(drafts)["e.draft"], "applied") or 0) > 3
        async with program.following():
            with dbuffer.WeightSender(drafts) as sender:
                sender.send(revealing_weights(1))
                await asyncio.to_thread(sender.wait_applied, last + 1, receivers=["e.draft"])
    return {"versions in answers of an engine whose draft followed": len(versions_seen(responses))}


if __name__ == "__main__":
    run = {
        "one-rank": run_one_rank,
        "drafted": run_drafted,
        "short-of-cache": run_short_of_cache,
    }
    judge(lambda directory, role: asyncio.run(run[role](directory)))
