"""Data-parallel replicas of a real vLLM: dense ones switch each by itself, others as one engine.

Two roles drive an `AsyncLLM` of two replicas; a third one, two servers that have four replicas
between them. (`vllm_versions.py` has a server of two replicas and two API servers.)
The dense model reveals its version: an answer's tokens say from which weights each of them came.
Replicas of a model with experts make each step together; their tokens are compared with those of
fresh engines of one replica.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dbuffer
from dbuffer.integrations.vllm import follow
from dbuffer.integrations.vllm.core import HOLD
from tests.support.engines.async_engines import (
    STEP_TIMEOUT_S,
    Asking,
    Load,
    answer_afresh,
    require_attributed,
    start_async_llm,
    versions_of,
    versions_seen,
)
from tests.support.engines.async_engines import until as until_async
from tests.support.engines.in_workers import let_wait
from tests.support.engines.tiny_models import (
    make_model,
    revealing_weights,
    save_model,
    save_revealing,
    wrong_tokens,
)
from tests.support.engines.vllm_engines import (
    PROMPTS,
    judge,
)
from tests.support.engines.vllm_servers import (
    BACKEND_FLAGS,
    WAIT_S,
    Server,
    tokens_of,
)
from tests.support.ports import free_port

REPLICAS = (0, 1)
ENGINE = "policy"
NAMES = [ENGINE, f"{ENGINE}.dp-1"]
HYBRID_NAMES = [*NAMES, f"{ENGINE}.dp-2", f"{ENGINE}.dp-3"]
DENSE_VERSIONS = 40
LOCKSTEP_VERSIONS = 5
NUM_TOKENS = 16
MIN_VERSIONS_SEEN = 5
LATE_S = 0.2


class Program(Asking):
    def __init__(self, engine: Any, store: Path) -> None:
        super().__init__(engine, store)
        streams = [{"data_parallel_rank": number % 2} for number in range(4)]
        self.load = Load(self, PROMPTS, [NUM_TOKENS], streams)

    async def of(self, replica: int) -> dict[str, Any]:
        return await self.respond(PROMPTS[0], 4, data_parallel_rank=replica)

    async def of_each(self) -> list[dict[str, Any]]:
        return [await self.of(replica) for replica in REPLICAS]

    def responses_of(self, replica: int) -> list[dict[str, Any]]:
        return [one for one in self.load.responses if one["data_parallel_rank"] == replica]

    async def add_one_of_each(self) -> None:
        self.load.responses += await asyncio.wait_for(self.of_each(), STEP_TIMEOUT_S)

    async def require_served(self, *versions: int) -> None:
        responses = await self.of_each()
        assert [versions_of(response) for response in responses] == [[one] for one in versions]
        assert [wrong_tokens(response) for response in responses] == [[], []]

    async def in_worker(self, replica: int, function: Callable[..., Any], *arguments: Any) -> Any:
        core = self.engine.engine_core
        identity = core.core_engines[replica]
        call = "collective_rpc", function, None, arguments, None
        return await core._call_utility_async(*call, engine=identity)

    def applied_records(self) -> dict[str, int | None]:
        from dbuffer.store.buffer import DoubleBuffer

        records = DoubleBuffer(self.store).receivers()
        return {one.receiver: one.applied_version for one in records if one.part_of is None}

    def rank_records(self) -> list[str]:
        from dbuffer.store.buffer import DoubleBuffer

        records = DoubleBuffer(self.store).receivers()
        return sorted(one.receiver for one in records if one.part_of is not None)


async def hold_one(program: Program, follower: Any, directory: Path) -> None:
    """While a load of one is held up, the other answers, from the new version already."""
    await program.in_worker(1, let_wait, "prepare", str(directory))
    version = await program.reveal()
    await until_async((directory / "entered").exists)
    await until_async(lambda: follower.replicas[0].applied == version)
    held = asyncio.create_task(program.of(1))
    assert versions_of(await program.of(0)) == [version]
    assert not held.done()
    (directory / "go on").touch()
    assert versions_of(await asyncio.wait_for(held, STEP_TIMEOUT_S)) == [version]


async def run_dense(directory: Path) -> None:
    """Each switches, answers and acknowledges by itself; a version is applied when all have it."""
    checkpoint = save_revealing(0, directory / "checkpoint")
    program = Program(start_engine(checkpoint), directory / "store")
    await program.reveal()
    async with follow(program.engine, program.store, engine_id=ENGINE) as follower:
        await asyncio.wait_for(follower.wait_started_async(), STEP_TIMEOUT_S)
        async with program.load.running(lambda: follower.applied):
            for _ in range(DENSE_VERSIONS):
                last = await program.reveal()
                await asyncio.sleep(0.05)
            assert await follower.wait_applied_async(last, STEP_TIMEOUT_S) == last
        await asyncio.to_thread(
            program.sender.wait_applied, last, receivers=NAMES, timeout_s=STEP_TIMEOUT_S
        )
        await program.require_served(last, last)
        assert program.applied_records() == dict.fromkeys(NAMES, last)
        require_attributed(*program.load.responses)
        for replica in REPLICAS:
            assert len(versions_seen(program.responses_of(replica))) >= MIN_VERSIONS_SEEN
        await hold_one(program, follower, directory)


async def run_lockstep(directory: Path) -> None:
    """No token is of a mix: with experts of one version and attention of another it would be.

    The last two switches are begun in a pause of another program, and while one replica refuses to
    be paused: neither may let a replica wait for a step that the other one does not make.
    """
    family = "qwen3-moe"
    checkpoint = save_model(family, 1, directory)
    # Each replica has a part of every expert. (With whole experts, this build's kernel crashes.)
    engine = start_engine(
        checkpoint, worker_extension_cls="tests.support.engines.cpu_experts.WithExperts"
    )
    program = Program(engine, directory / "store")

    reach_late(engine, REPLICAS[1])
    await program.send(make_model(family, 2))
    seeds = {"default": 1, "1": 2}

    async with program.load.running():
        # Begun under load: ranks that meet in a step must not wait for each other apart from it.
        await until_async(lambda: len(program.load.responses) >= 4)
        follower = follow(program.engine, program.store, engine_id=ENGINE)
        await asyncio.wait_for(follower.wait_started_async(), STEP_TIMEOUT_S)
        for version in range(2, LOCKSTEP_VERSIONS + 1):
            seeds[str(version)] = 1 + version % 2
            last = await program.send(make_model(family, seeds[str(version)]))
            await follower.wait_applied_async(last, STEP_TIMEOUT_S)
    seeds[str(last + 1)], seeds[str(last + 2)] = 2, 1
    await switch_in_a_pause_that_begins(program, follower, make_model(family, 2))
    last = await switch_after_a_session(program, follower, make_model(family, 1))
    await asyncio.to_thread(
        program.sender.wait_applied, last, receivers=1, timeout_s=STEP_TIMEOUT_S
    )
    assert follower.applied == last
    assert program.applied_records() == {ENGINE: last}, "they are one receiver"
    assert program.rank_records() == [f"{ENGINE}.rank-{rank}" for rank in REPLICAS]
    await follower.aclose()
    program.engine.shutdown()
    at_first = [(prompt, 4) for prompt in PROMPTS]
    fresh = answer_afresh(directory, family, program.load.responses, seeds, at_first)
    assert fresh["tokens"] == fresh["fresh engines"]
    assert all(one != other for one, other in zip(*fresh["fresh starts"], strict=True))
    for replica in REPLICAS:
        assert len(versions_seen(program.responses_of(replica))) >= 3
    assert any(len(response["spans"]) > 1 for response in program.load.responses)


async def switch_in_a_pause_that_begins(program: Program, follower: Any, weights: Any) -> None:
    """Publish; let another program pause the engine when the switch begins to.

    One replica then has both pauses in flight when the other has ended the first.
    """
    client = program.engine.engine_core
    call, pausing = client.call_utility_async, []

    async def call_after_a_pause(method: str, *arguments: Any) -> Any:
        if method == HOLD and not pausing:
            pausing.append(asyncio.create_task(program.engine.pause_generation(mode="keep")))
            await asyncio.sleep(LATE_S / 2)
        return await call(method, *arguments)

    client.call_utility_async = call_after_a_pause
    await follower.wait_applied_async(await program.send(weights), STEP_TIMEOUT_S)
    client.call_utility_async = call
    await asyncio.wait_for(pausing[0], STEP_TIMEOUT_S)
    assert await program.engine.is_paused()
    await asyncio.wait_for(program.engine.resume_generation(), STEP_TIMEOUT_S)
    await program.add_one_of_each()


async def switch_after_a_session(program: Program, follower: Any, weights: Any) -> int:
    """Publish while a session with streamed input waits on one replica, and holds up the switch."""
    async with program.session(PROMPTS[0], data_parallel_rank=REPLICAS[0]):
        version = await program.send(weights)
        await until_async(lambda: isinstance(follower.error, dbuffer.EngineBusyError))
        await program.add_one_of_each()
    await follower.wait_applied_async(version, STEP_TIMEOUT_S)
    await program.add_one_of_each()
    return version


def reach_late(engine: Any, replica: int) -> None:
    """Let what a replica is asked reach it late: the other one is in a later step then."""
    core = engine.engine_core
    send = core._send_input_message

    async def send_late(message: Any, identity: bytes) -> Any:
        if identity == core.core_engines[replica]:
            await asyncio.sleep(LATE_S)
        return await send(message, identity)

    core._send_input_message = send_late


async def run_hybrid(directory: Path) -> None:
    """Two front ends, as on two hosts, each with two of four replicas, which it balances itself."""
    store = directory / "store"
    meeting_port = free_port()
    servers = []
    for first in (0, len(REPLICAS)):
        place = directory / f"from-{first}"
        place.mkdir()
        servers.append(
            start_server(
                place,
                store,
                *("--data-parallel-size", 2 * len(REPLICAS)),
                *("--data-parallel-size-local", len(REPLICAS)),
                *("--data-parallel-start-rank", first),
                *("--data-parallel-address", "127.0.0.1"),
                *("--data-parallel-rpc-port", meeting_port),
                "--data-parallel-hybrid-lb",
            )
        )
    with dbuffer.WeightSender(store) as sender:
        for version in (1, 2, 3):
            sender.send(revealing_weights(version), version=version)
            sender.wait_applied(version, receivers=HYBRID_NAMES, timeout_s=WAIT_S)
            for server in servers:
                server.wait_ready()
                for _ in range(8):
                    assert server.connected_anew().answer() == tokens_of(version)
    assert [server.terminate() for server in servers] == [(0, [])] * 2
    for names, server in zip((HYBRID_NAMES[:2], HYBRID_NAMES[2:]), servers, strict=True):
        # They start with version 1.
        assert switches_of(server) == [(name, version) for name in names for version in (2, 3)]


def switches_of(server: Server) -> list[tuple[str, int]]:
    found = re.findall(r"(\S+) serves version (\d+): ", server.log())
    return sorted((name, int(version)) for name, version in found)


def start_server(directory: Path, store: Path, *flags: str | int) -> Server:
    """Two replicas and two API servers, as is vLLM's default, that wait for a store."""
    return Server(
        save_revealing(0, directory),
        directory,
        *BACKEND_FLAGS,
        *("--load-format", "dummy"),
        *map(str, flags),
        api_servers=len(REPLICAS),
        development=True,
        store=store,
        engine_id=ENGINE,
        timeout_s=WAIT_S,
    )


def start_engine(checkpoint: Path, **more: Any) -> Any:
    return start_async_llm(checkpoint, data_parallel_size=len(REPLICAS), **more)


if __name__ == "__main__":
    run = {
        "dense": run_dense,
        "lockstep": run_lockstep,
        "hybrid": run_hybrid,
    }
    judge(lambda directory, role: asyncio.run(run[role](directory)))
