"""Program of `test_async.py`, which says what it shows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import sys
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import dbuffer
from dbuffer.integrations.engine.engine_options import EngineOptions
from dbuffer.integrations.engine.messages import RankRequest, decode_answer
from dbuffer.integrations.vllm import follow
from dbuffer.integrations.vllm.config import CALL
from dbuffer.store.buffer import DoubleBuffer
from tests.support.engines import tiny_models
from tests.support.engines.async_engines import STEP_TIMEOUT_S, Asking, answer_afresh, until
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
    version_of,
)
from tests.support.engines.vllm_engines import engine_arguments, leave
from tests.support.soak import is_soak
from tests.support.waiting import error_of

NUM_STREAMS = 6
PUBLISHES = 200 if is_soak() else 40
MIN_SWITCHES = 200 if is_soak() else 12
MIN_SWITCHES_OF_TWO = 200 if is_soak() else 4
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
KEPT_TOKENS = 80
"""In slow steps they take 8 s, in which a version is published and switched to."""
BIG_LAYER = 65536
"""Size of the hidden layer of a model of 100 MB."""


def versions_seen(responses: list[dict[str, Any]]) -> set[str]:
    return {version for response in responses for version, _, _ in response["spans"]}


class Trainer:
    """The process that publishes, as told."""

    def __init__(self, store: Path, intermediate_size: int) -> None:
        processes = multiprocessing.get_context("spawn")
        self._connection, theirs = processes.Pipe()
        self._process = processes.Process(target=train, args=(theirs, store, intermediate_size))
        self._process.start()

    async def publish(self, what: str, number: int = 1) -> int:
        """The last version, once it is published."""
        self._connection.send((what, number))
        assert await asyncio.to_thread(self._connection.poll, STEP_TIMEOUT_S)
        return int(self._connection.recv())

    def end(self) -> None:
        self._connection.send(None)
        self._process.join()


def train(connection: Connection, store: Path, intermediate_size: int) -> None:
    """Publish what is asked for, as fast as it can; say each time which version is."""
    tiny_models.SHAPE["intermediate_size"] = intermediate_size
    version = 0
    with dbuffer.WeightSender(store) as sender:
        while (asked := connection.recv()) is not None:
            what, number = asked
            for _ in range(number if what == "reveal" else 1):
                if what == "wait":
                    sender.wait_applied(number)
                    continue
                weights: Any = revealing_weights(version + 1)
                if what == "model":
                    weights = make_model("qwen3", number)
                if what == "misfit":
                    weights["lm_head.weight"] = torch.zeros(500, 63)
                version = sender.send(weights).version
            connection.send(version)


class Program(Asking):
    """An engine, its trainer, and requests to it."""

    def __init__(self, engine: Any, store: Path, trainer: Trainer) -> None:
        super().__init__(engine)
        self.store = store
        self.trainer = trainer
        self.pauses: list[str] = []
        self._pause = engine.engine_core.pause_scheduler_async
        engine.engine_core.pause_scheduler_async = self._counted_pause

    async def _counted_pause(self, mode: str, clear_cache: bool) -> None:
        self.pauses.append(mode)
        await self._pause(mode=mode, clear_cache=clear_cache)

    def follow(self, pause: str = "keep", **options: Any) -> Any:
        return follow(self.engine, self.store, pause=pause, **options)

    @contextlib.asynccontextmanager
    async def following(self, pause: str = "keep") -> AsyncIterator[Any]:
        """A follower whose engine has what is there already."""
        async with self.follow(pause) as follower:
            await asyncio.wait_for(follower.wait_started_async(), STEP_TIMEOUT_S)
            yield follower

    async def answers(self) -> list[list[int]]:
        """The tokens that follow each of the prompts."""
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


class Load:
    """Request streams that never end, until they are told to."""

    def __init__(self, program: Program, follower: Any, num_tokens: tuple[int, ...]) -> None:
        self.responses: list[dict[str, Any]] = []
        self._program = program
        self._follower = follower
        self._num_tokens = num_tokens
        self._must_end = False
        self._floor = 0

    @property
    def versions(self) -> set[str]:
        return versions_seen(self.responses)

    async def _stream(self, number: int) -> None:
        while not self._must_end:
            turn = number + len(self.responses)
            floor = max(self._floor, self._follower.applied or 0)
            response = await self._program.respond(
                PROMPTS[turn % len(PROMPTS)], self._num_tokens[turn % len(self._num_tokens)], floor
            )
            self.responses.append(response)
            if response["spans"]:
                self._floor = max(self._floor, version_of(response["spans"][-1][0]))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_STREAMS):
                group.create_task(self._stream(number))
            yield
            self._must_end = True


async def switch_under_load(
    program: Program,
    pause: str,
    num_tokens: tuple[int, ...],
    *,
    publishes: int = PUBLISHES,
    min_switches: int = MIN_SWITCHES,
) -> dict[str, Any]:
    """Publish at full speed while requests run, until enough versions have been seen in them."""
    published = 0
    async with program.following(pause) as follower:
        load = Load(program, follower, num_tokens)
        async with load.running():
            for _ in range(MAX_ROUNDS):
                last = await program.trainer.publish("reveal", publishes)
                published += publishes
                if len(load.versions) > min_switches:
                    break
            reached = await follower.wait_applied_async(last, STEP_TIMEOUT_S)
            await program.trainer.publish("wait", last)
            label = await program.label()
            after = await program.respond(PROMPTS[0], 4)
        return {
            "published": published,
            "last": last,
            "reached": reached,
            "label": label,
            "after": after,
            "responses": load.responses,
            "error": None if follower.error is None else str(follower.error),
        }


async def switch_kept_requests(program: Program) -> dict[str, Any]:
    """Switch between two ordinary models while requests are on their way."""
    seeds = {}
    async with program.following() as follower:

        async def switch_to(seed: int) -> None:
            version = await program.trainer.publish("model", seed)
            await follower.wait_applied_async(version, STEP_TIMEOUT_S)
            seeds[str(version)] = seed

        await switch_to(1)
        repeated = {"before": await program.answers(), "again": await program.answers()}
        await switch_to(2)
        repeated["after"] = await program.answers()
        async with program.answering(PROMPTS, KEPT_TOKENS) as tasks:
            await switch_to(1)
            await switch_to(2)
    return {"seeds": seeds, "repeated": repeated, "responses": [task.result() for task in tasks]}


async def fail_while_answering(program: Program, follower: Any, what: str) -> dict[str, Any]:
    """Publish what the engine does not take, while it answers."""
    label_before = await program.label()
    program.pauses.clear()
    async with program.answering([PROMPTS[2]], 100) as (request,):
        version = await program.trainer.publish(what)
        await until(lambda: follower.error is not None)
    return {
        "error": str(follower.error),
        "during": request.result(),
        "pauses": program.pauses.copy(),
        "label_before": label_before,
        "label": await program.label(),
        "version": version,
    }


async def publish_a_misfit(program: Program) -> dict[str, Any]:
    async with program.following() as follower:
        seen = await fail_while_answering(program, follower, "misfit")
        version = await program.trainer.publish("reveal")
        await follower.wait_applied_async(version, STEP_TIMEOUT_S)
        return seen | {"next": version, "after": await program.respond(PROMPTS[0], 4)}


async def fail_in_a_pause(program: Program, what: str) -> dict[str, Any]:
    async with program.following() as follower:
        await program.engine.collective_rpc(let_fail, args=(what,))
        seen = await fail_while_answering(program, follower, "reveal")
        await program.engine.collective_rpc(let_work, args=(what,))
        reached = await follower.wait_applied_async(seen["version"], STEP_TIMEOUT_S)
        after = await program.respond(PROMPTS[0], 4)
        return seen | {"reached": reached, "after": after}


async def close_in_a_switch(program: Program, directory: Path) -> dict[str, Any]:
    follower = program.follow()
    await asyncio.wait_for(follower.wait_started_async(), STEP_TIMEOUT_S)
    await program.engine.collective_rpc(let_wait, args=("reload", str(directory)))
    version = await program.trainer.publish("reveal")
    await until((directory / "entered").exists)
    closing = asyncio.create_task(follower.aclose())
    await asyncio.sleep(0)
    closed_before = closing.done()
    (directory / "go on").touch()
    await asyncio.wait_for(closing, STEP_TIMEOUT_S)
    return {
        "version": version,
        "closed_before_the_switch": closed_before,
        "is_paused": await program.engine.is_paused(),
        "label": await program.label(),
        "after": await program.respond(PROMPTS[0], 4),
    }


async def pause_as_a_user(program: Program) -> dict[str, Any]:
    async with program.following() as follower:
        label_before = await program.label()
        async with program.answering([PROMPTS[2]], 100) as (request,):
            await program.engine.pause_generation(mode="keep")
            tokens_before = program.tokens_so_far.copy()
            version = await program.trainer.publish("reveal")
            await follower.wait_applied_async(version, STEP_TIMEOUT_S)
            seen = {
                "label_before": label_before,
                "version": version,
                "is_paused": await program.engine.is_paused(),
                "tokens_before": tokens_before,
                "tokens_in_pause": program.tokens_so_far.copy(),
            }
            await program.engine.resume_generation()
        return seen | {"response": request.result()}


async def switch_noting_calls(program: Program) -> list[str]:
    """Note when the engine's core is asked for something in a switch, and when it answers."""
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
        version = await program.trainer.publish("reveal")
        await follower.wait_applied_async(version, STEP_TIMEOUT_S)
        del client._call_utility_async
    return calls


async def stay_on_a_version(program: Program) -> dict[str, Any]:
    """Wait for a version, and stay on it while others are published."""
    version = await program.trainer.publish("reveal") + 1
    async with program.follow(version=version) as follower:
        await asyncio.wait_for(follower.wait_started_async(), STEP_TIMEOUT_S)
        before = await program.label()
        await program.trainer.publish("reveal")
        await follower.wait_applied_async(version, STEP_TIMEOUT_S)
        responses = []
        for _ in range(3):
            last = await program.trainer.publish("reveal", 3)
            responses.append(await program.respond(PROMPTS[0], 4, version))
    async with program.following():
        responses.append(await program.respond(PROMPTS[0], 4, last))
    return {"version": version, "last": last, "before": before, "responses": responses}


async def lose_the_weights(program: Program) -> dict[str, Any]:
    """Put it to sleep while a version comes, wake it, and load past dbuffer."""
    seen: dict[str, Any] = {}
    async with program.following() as follower:
        await program.engine.sleep(level=2)
        seen["label"] = await program.label()
        version = await program.trainer.publish("reveal")
        await until(lambda: follower.error is not None)
        seen["error"] = f"{type(follower.error).__name__}: {follower.error}"
        seen["paused"] = await program.engine.is_paused()
        await program.engine.wake_up()
        await follower.wait_applied_async(version, STEP_TIMEOUT_S)
        seen["woken"] = await program.respond(PROMPTS[0], 4, version)
        await program.engine.collective_rpc("reload_weights")
        seen["reloaded"] = []
        async with asyncio.timeout(STEP_TIMEOUT_S):
            while await program.label() != str(version):
                seen["reloaded"].append(await program.respond(PROMPTS[0], 4))
        seen["again"] = await program.respond(PROMPTS[0], 4, version)
    return seen


async def lose_the_engine(program: Program) -> dict[str, Any]:
    """Kill the engine's core, while nothing is asked of it."""
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = heard.append  # type: ignore[method-assign]
    async with program.following() as follower:
        logging.getLogger("dbuffer.integrations.engine").addHandler(handler)
        [core] = program.engine.engine_core.resources.engine_manager.processes
        core.kill()
        await until(lambda: follower.error is not None)
        error = f"{type(follower.error).__name__}: {follower.error}"
    return {"error": error, "log": [r.getMessage() for r in heard if r.levelno > logging.INFO]}


def memory_of(process_id: int) -> int:
    """Bytes of its own: what it maps of a store is the store's."""
    lines = Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("Anonymous:")]
    return int(line.split()[1]) << 10


def process_id(_: Any) -> int:
    import os

    return os.getpid()


async def ask(program: Program, request: RankRequest) -> None:
    for reply in await program.engine.collective_rpc(CALL, args=(request.as_json(),)):
        assert decode_answer(reply) is None


async def measure_staging(program: Program) -> dict[str, Any]:
    """The memory of each worker before and after versions are staged, which nobody applies."""
    workers = await program.engine.collective_rpc(process_id)
    seen: dict[str, Any] = {"staged": {}, "version": {}}
    kinds = {
        "map": {"staging": "map", "images": False},
        "copy": {"staging": "copy", "images": False},
        "images": {"staging": "map"},
    }
    for staging, how in kinds.items():
        options = {"store": str(program.store), "engine_id": staging, **how}
        ranks = [f"{staging}.rank-{rank}" for rank in (0, 1)]

        def staged(ranks: list[str] = ranks) -> list[int | None]:
            records = [DoubleBuffer(program.store).receiver(rank) for rank in ranks]
            return [record and record.staged_version for record in records]

        await ask(program, RankRequest("end"))
        seen[staging] = [[memory_of(worker) for worker in workers]]
        await ask(program, RankRequest("begin", options=EngineOptions(**options)))
        for _ in range(3):
            version = await program.trainer.publish("reveal")
            await until(lambda version=version, staged=staged: staged() == [version] * 2)
            seen[staging].append([memory_of(worker) for worker in workers])
        seen["version"][staging] = version
        seen["staged"][staging] = staged()
    seen["num_bytes"] = sum(tensor.nbytes for tensor in revealing_weights(1).values())
    return seen


@contextlib.asynccontextmanager
async def started(directory: Path, **more: Any) -> AsyncIterator[Program]:
    """An engine that runs, and its trainer."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    trainer = Trainer(directory / "store", tiny_models.SHAPE["intermediate_size"])
    arguments = AsyncEngineArgs(**engine_arguments(save_revealing(0, directory), **more))
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        yield Program(engine, directory / "store", trainer)
    finally:
        engine.shutdown()
        trainer.end()


async def run_one_rank(directory: Path) -> dict[str, Any]:
    async with started(directory) as program:
        seen = {"start": await program.respond(PROMPTS[0], 8)}
        for pause, num_tokens in NUM_TOKENS.items():
            seen[pause] = await switch_under_load(program, pause, num_tokens)
        seen["misfit"] = await publish_a_misfit(program)
        for what in ("load", "prepare"):
            seen[f"failing {what}"] = await fail_in_a_pause(program, what)
        seen["closed"] = await close_in_a_switch(program, directory)
        seen["paused by the user"] = await pause_as_a_user(program)
        seen["calls of a switch"] = await switch_noting_calls(program)
        seen["stays"] = await stay_on_a_version(program)
        seen["lost weights"] = await lose_the_weights(program)
        kept = await switch_kept_requests(program)
        seen["no store"] = error_of(lambda: follow(program.engine))
        seen["dead"] = await lose_the_engine(program)
    at_first = [(prompt, 16) for prompt in PROMPTS]
    fresh = answer_afresh(directory, "qwen3", kept["responses"], kept["seeds"], at_first)
    return seen | {"caches": fresh, "repeated prompts": kept["repeated"]}


async def run_two_ranks(directory: Path) -> dict[str, Any]:
    async with started(directory, tp=2, how="extension") as program:
        keep = await switch_under_load(
            program, "keep", (10, 20, 30), publishes=8, min_switches=MIN_SWITCHES_OF_TWO
        )
        return {"keep": keep, "memory": await measure_staging(program)}


if __name__ == "__main__":
    target, role = Path(sys.argv[1]), sys.argv[2]
    if role == "two-ranks":
        tiny_models.SHAPE["intermediate_size"] = BIG_LAYER
    run = {"one-rank": run_one_rank, "two-ranks": run_two_ranks}[role]
    leave(target, asyncio.run(run(target)))
