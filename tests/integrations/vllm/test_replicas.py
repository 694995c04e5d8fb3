"""Data-parallel replicas of a real vLLM: dense ones switch each by itself, others as one engine.

Two programs (this file, run with a role) drive an `AsyncLLM` of two replicas, and leave what they
saw; a third a server of two replicas and two API servers, a fourth two such servers that have four
replicas between them. The dense model reveals its version: an
answer's tokens say from which weights each of them came. Replicas of a model with experts make each
step together; their tokens are compared with those of fresh engines of one replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from tests.support.children import free_port
from tests.support.engines.tiny_models import (
    make_model,
    revealing_weights,
    save_model,
    save_revealing,
    token_of,
    wrong_tokens,
)
from tests.support.engines.vllm_engines import (
    ANSWERS_TELL_VERSIONS,
    NEEDS_VLLM,
    PROMPTS,
    engine_arguments,
    environment,
    greedy_parameters,
    leave,
    observe,
)
from tests.support.engines.vllm_servers import (
    ANSWER_TOKENS,
    BACKEND_FLAGS,
    START_EVERY_S,
    WAIT_S,
    Server,
    wait_for,
)
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = [*NEEDS_VLLM, *IN_SOAKS_ALONE, ANSWERS_TELL_VERSIONS]

STEP_TIMEOUT_S = 120.0
REPLICAS = (0, 1)
ENGINE = "policy"
NAMES = [ENGINE, f"{ENGINE}.dp-1"]
HYBRID_NAMES = [*NAMES, f"{ENGINE}.dp-2", f"{ENGINE}.dp-3"]
DENSE_VERSIONS = 40
MIN_VERSIONS_SEEN = 5
LOCKSTEP_VERSIONS = 5
NUM_TOKENS = 16
LATE_S = 0.2


@pytest.fixture(scope="module")
def dense(directory: Path) -> dict[str, Any]:
    return run("dense", directory)


@pytest.fixture(scope="module")
def lockstep(directory: Path) -> dict[str, Any]:
    return run("lockstep", directory)


@pytest.fixture(scope="module")
def served(directory: Path) -> dict[str, Any]:
    return run("served", directory)


@pytest.fixture(scope="module")
def hybrid(directory: Path) -> dict[str, Any]:
    return run("hybrid", directory)


def run(role: str, directory: Path) -> dict[str, Any]:
    # Functions are sent to workers; the fresh engines are in the program itself.
    env = environment(processes=False, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    place = directory / role
    place.mkdir()
    seen: dict[str, Any] = observe(__file__, place, role, env=env)
    return seen


def versions_of(response: dict[str, Any]) -> list[int]:
    return [int(version) for version, _, _ in response["spans"]]


# Dense replicas.


def test_each_dense_replica_answers_from_the_version_that_it_reports(
    dense: dict[str, Any],
) -> None:
    for replica in REPLICAS:
        responses = [one for one in dense["responses"] if one["replica"] == replica]
        assert len({v for one in responses for v in versions_of(one)}) >= MIN_VERSIONS_SEEN
        for response in responses:
            assert wrong_tokens(response) == []
            assert versions_of(response) == sorted(versions_of(response))
            assert min(versions_of(response)) >= response["floor"]


def test_a_version_is_applied_when_all_replicas_have_it(dense: dict[str, Any]) -> None:
    assert dense["reached"] == dense["last"]
    for response in dense["after"]:
        assert versions_of(response) == [dense["last"]]
        assert wrong_tokens(response) == []


def test_each_replica_acknowledges_by_itself(dense: dict[str, Any]) -> None:
    assert dense["records"] == dict.fromkeys(NAMES, dense["last"])


def test_replica_that_cannot_switch_serves_on_and_says_so(dense: dict[str, Any]) -> None:
    seen = dense["one fails"]
    assert seen["applied"] == seen["before"]
    assert seen["applied by replica"] == [seen["version"], seen["before"]]
    assert f"{NAMES[1]} " in seen["error"]
    assert "this take fails" in seen["error"]
    assert [versions_of(response) for response in seen["during"]] == [
        [seen["version"]],
        [seen["before"]],
    ]
    assert [wrong_tokens(response) for response in seen["during"]] == [[], []]
    assert NAMES[1] in seen["not in time"]
    assert NAMES[0] not in seen["not in time"].replace(NAMES[1], "")


def test_replica_that_could_not_switch_is_tried_again(dense: dict[str, Any]) -> None:
    seen = dense["one fails"]
    assert seen["reached"] == seen["version"]
    assert [versions_of(response) for response in seen["after"]] == [[seen["version"]]] * 2


def test_one_replica_pauses_while_the_other_serves(dense: dict[str, Any]) -> None:
    """While a load of one is held up, the other answers, from the new version already."""
    seen = dense["one is held"]
    assert versions_of(seen["other"]) == [seen["version"]]
    assert not seen["held one had answered"]
    assert versions_of(seen["held"]) == [seen["version"]]


# Replicas that step together.


def test_replicas_that_step_together_switch_as_one(lockstep: dict[str, Any]) -> None:
    """No token is of a mix: with experts of one version and attention of another it would be."""
    assert lockstep["reached"] == lockstep["last"]
    assert lockstep["tokens"] == lockstep["fresh engines"]
    for replica in REPLICAS:
        versions = {
            version
            for response in lockstep["responses"]
            if response["replica"] == replica
            for version, _, _ in response["spans"]
        }
        assert len(versions) >= 3
    assert any(len(response["spans"]) > 1 for response in lockstep["responses"])


def test_replicas_that_step_together_are_one_receiver(lockstep: dict[str, Any]) -> None:
    assert lockstep["records"] == {ENGINE: lockstep["last"]}
    assert lockstep["ranks"] == [f"{ENGINE}.rank-{rank}" for rank in REPLICAS]


def test_models_differ_in_their_tokens(lockstep: dict[str, Any]) -> None:
    first, second = lockstep["fresh starts"]
    assert all(one != other for one, other in zip(first, second, strict=True))


# A server, with as many API servers as replicas, as is vLLM's default.


def test_no_api_server_is_ready_before_there_is_a_version(served: dict[str, Any]) -> None:
    assert served["ready with an empty store"] is False


def test_each_replica_behind_each_api_server_follows(served: dict[str, Any]) -> None:
    for version, answers in served["answers"].items():
        assert answers == [[token_of(int(version))] * ANSWER_TOKENS] * len(answers)
    assert set(served["answers"]) == {"1", "2", "3"}


def test_one_api_server_follows_each_replica_and_the_others_stand_by(
    served: dict[str, Any],
) -> None:
    began = [line for line in served["log"] if "and serves weights that are no version" in line]
    assert len(began) == len(REPLICAS)
    switched = [re.search(r"(\S+) serves version (\d+): ", line) for line in served["log"]]
    assert sorted(match.groups() for match in switched if match) == [
        (name, str(version)) for name in NAMES for version in (1, 2, 3)
    ]


def test_metrics_of_all_replicas_are_on_all_api_servers(served: dict[str, Any]) -> None:
    for metrics in served["metrics"]:
        for name in NAMES:
            assert metrics[f"dbuffer_version_applied of {name}"] == 3
            assert metrics[f"dbuffer_following of {name}"] == 1
            assert metrics[f"dbuffer_pause_seconds_count of {name}"] == 3


def test_server_of_replicas_ends_cleanly(served: dict[str, Any]) -> None:
    assert served["exit code"] == 0
    assert served["left over"] == []


def test_replicas_of_a_server_cannot_be_driven_from_outside(served: dict[str, Any]) -> None:
    assert "replicas step each by itself" in served["driven from outside"]
    assert "--middleware dbuffer.integrations.vllm.FollowStore" in served["driven from outside"]


# Two front ends that balance their own replicas each (--data-parallel-hybrid-lb).


def test_each_front_end_follows_with_its_own_replicas(hybrid: dict[str, Any]) -> None:
    for version, of_servers in hybrid["answers"].items():
        for answers in of_servers:
            assert answers == [[token_of(int(version))] * ANSWER_TOKENS] * len(answers)
    assert set(hybrid["answers"]) == {"1", "2", "3"}
    for names, log in zip((HYBRID_NAMES[:2], HYBRID_NAMES[2:]), hybrid["logs"], strict=True):
        switched = [re.search(r"(\S+) serves version (\d+): ", line) for line in log]
        # They start with version 1.
        assert sorted(match.groups() for match in switched if match) == [
            (name, str(version)) for name in names for version in (2, 3)
        ]


def test_front_ends_end_cleanly(hybrid: dict[str, Any]) -> None:
    assert hybrid["ends"] == [[0, []], [0, []]]


# The programs from here on; each runs in a process of its own.


class Program:
    """An engine of two replicas, its trainer, and requests to each replica."""

    def __init__(self, engine: Any, store: Path) -> None:
        self.engine = engine
        self.store = store
        self.sender = dbuffer.WeightSender(store)
        self.responses: list[dict[str, Any]] = []
        self._num_requests = 0

    async def send(self, weights: Any) -> int:
        publication = await asyncio.to_thread(self.sender.send, weights)
        return publication.version

    async def respond(
        self, replica: int, prompt: list[int], num_tokens: int = NUM_TOKENS, floor: int = 0
    ) -> dict[str, Any]:
        self._num_requests += 1
        async for output in self.engine.generate(
            {"prompt_token_ids": prompt},
            greedy_parameters(num_tokens),
            f"r{self._num_requests}",
            data_parallel_rank=replica,
        ):
            answer = output.outputs[0]
        return {
            "replica": replica,
            "prompt": prompt,
            "tokens": list(answer.token_ids),
            "spans": [(s.version, s.start, s.end) for s in answer.weight_versions or []],
            "floor": floor,
        }

    async def of_each(self) -> list[dict[str, Any]]:
        return [await self.respond(replica, PROMPTS[0], 4) for replica in REPLICAS]

    @contextlib.asynccontextmanager
    async def load(self, follower: Any) -> AsyncIterator[None]:
        """Requests to both replicas, without a break."""
        is_over = False

        async def stream(replica: int, number: int) -> None:
            while not is_over:
                number += 1
                floor = follower.applied or 0
                prompt = PROMPTS[number % len(PROMPTS)]
                self.responses.append(await self.respond(replica, prompt, floor=floor))

        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(stream(number % 2, number))
            yield
            is_over = True

    async def in_worker(self, replica: int, function: Callable[..., Any], *arguments: Any) -> Any:
        core = self.engine.engine_core
        identity = core.core_engines[replica]
        call = "collective_rpc", function, None, arguments, None
        return await core._call_utility_async(*call, engine=identity)

    def applied_records(self) -> dict[str, int | None]:
        """What each engine in the store says that it serves."""
        from dbuffer.store.buffer import DoubleBuffer

        records = DoubleBuffer(self.store).receivers()
        return {one.receiver: one.applied_version for one in records if one.part_of is None}

    def rank_records(self) -> list[str]:
        from dbuffer.store.buffer import DoubleBuffer

        records = DoubleBuffer(self.store).receivers()
        return sorted(one.receiver for one in records if one.part_of is not None)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(STEP_TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.002)


def stager_of(worker: Any) -> Any:
    from dbuffer.integrations.engine.endpoint import RankEndpoint

    return RankEndpoint.of(worker.get_model()).receiver._stager


def let_take_fail(worker: Any) -> None:
    """In the worker: let every preparation of an update fail."""

    def fail(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("this take fails")

    stager_of(worker).take = fail


def let_take_wait(worker: Any, directory: str) -> None:
    """In the worker: let the next preparation wait until it is told to go on."""
    stager = stager_of(worker)
    take = stager.take

    def wait_and_take(*arguments: Any, **options: Any) -> Any:
        import pathlib
        import time

        del stager.take
        pathlib.Path(directory, "entered").touch()
        deadline = time.monotonic() + 60
        while not pathlib.Path(directory, "go on").exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        return take(*arguments, **options)

    stager.take = wait_and_take


def let_take_work(worker: Any) -> None:
    del stager_of(worker).take  # the method itself is there again


async def fail_on_one(program: Program, follower: Any, before: int) -> dict[str, Any]:
    await program.in_worker(1, let_take_fail)
    version = await program.send(revealing_weights(before + 1))
    await until(lambda: follower.replicas[0].applied == version)
    await until(lambda: follower.error is not None)
    try:
        not_in_time = str(await follower.wait_applied_async(version, 0.1))
    except dbuffer.WaitTimeoutError as error:
        not_in_time = str(error)
    seen = {
        "before": before,
        "version": version,
        "applied": follower.applied,
        "applied by replica": [one.applied for one in follower.replicas],
        "error": str(follower.error),
        "not in time": not_in_time,
        "during": await program.of_each(),
    }
    await program.in_worker(1, let_take_work)
    reached = await follower.wait_applied_async(version, STEP_TIMEOUT_S)
    return seen | {"reached": reached, "after": await program.of_each()}


async def hold_one(program: Program, follower: Any, directory: Path) -> dict[str, Any]:
    await program.in_worker(1, let_take_wait, str(directory))
    version = await program.send(revealing_weights(follower.applied + 1))
    await until((directory / "entered").exists)
    await until(lambda: follower.replicas[0].applied == version)
    held = asyncio.create_task(program.respond(1, PROMPTS[0], 4))
    other = await program.respond(0, PROMPTS[0], 4)
    held_had_answered = held.done()
    (directory / "go on").touch()
    return {
        "version": version,
        "other": other,
        "held one had answered": held_had_answered,
        "held": await asyncio.wait_for(held, STEP_TIMEOUT_S),
    }


async def observe_dense(directory: Path) -> dict[str, Any]:
    checkpoint = save_revealing(0, directory / "checkpoint")
    program = Program(start_engine(checkpoint), directory / "store")
    from dbuffer.integrations.vllm import follow

    await program.send(revealing_weights(1))
    async with follow(program.engine, program.store, engine_id=ENGINE) as follower:
        await asyncio.wait_for(follower.wait_started_async(), STEP_TIMEOUT_S)
        async with program.load(follower):
            for version in range(2, DENSE_VERSIONS + 1):
                last = await program.send(revealing_weights(version))
                await asyncio.sleep(0.05)
            reached = await follower.wait_applied_async(last, STEP_TIMEOUT_S)
        await asyncio.to_thread(
            program.sender.wait_applied, last, receivers=NAMES, timeout_s=STEP_TIMEOUT_S
        )
        seen = {
            "last": last,
            "reached": reached,
            "after": await program.of_each(),
            "records": program.applied_records(),
            "responses": program.responses,
            "one is held": await hold_one(program, follower, directory),
        }
        seen["one fails"] = await fail_on_one(program, follower, follower.applied)
    return seen


async def observe_lockstep(directory: Path) -> dict[str, Any]:
    family = "qwen3-moe"
    checkpoint = save_model(family, 1, directory)
    # Each replica has a part of every expert. (With whole experts, this build's kernel crashes.)
    engine = start_engine(
        checkpoint, worker_extension_cls="tests.support.engines.cpu_experts.WithExperts"
    )
    program = Program(engine, directory / "store")
    from dbuffer.integrations.vllm import follow

    reach_late(engine, REPLICAS[1])
    await program.send(make_model(family, 2))
    seeds = {"default": 1, "1": 2}

    class NotYet:
        applied = None

    async with program.load(NotYet):
        # Begun under load: ranks that meet in a step must not wait for each other apart from it.
        await until(lambda: len(program.responses) >= 4)
        follower = follow(program.engine, program.store, engine_id=ENGINE)
        await asyncio.wait_for(follower.wait_started_async(), STEP_TIMEOUT_S)
        for version in range(2, LOCKSTEP_VERSIONS + 1):
            seeds[str(version)] = 1 + version % 2
            last = await program.send(make_model(family, seeds[str(version)]))
            await follower.wait_applied_async(last, STEP_TIMEOUT_S)
    seen = {
        "last": last,
        "reached": follower.applied,
        "records": program.applied_records(),
        "ranks": program.rank_records(),
    }
    await follower.aclose()
    program.engine.shutdown()
    return seen | answer_afresh(directory, family, program.responses, seeds)


def reach_late(engine: Any, replica: int) -> None:
    """Let what a replica is asked reach it late: the other one is in a later step then."""
    core = engine.engine_core
    send = core._send_input_message

    async def send_late(message: Any, identity: bytes) -> Any:
        if identity == core.core_engines[replica]:
            await asyncio.sleep(LATE_S)
        return await send(message, identity)

    core._send_input_message = send_late


async def observe_served(directory: Path) -> dict[str, Any]:
    store = directory / "store"
    server = start_server(directory, store, "--data-parallel-size", len(REPLICAS))
    seen: dict[str, Any] = {"answers": {}}
    with dbuffer.WeightSender(store) as sender:
        wait_for(
            "it waits",
            lambda: "for a version" in server.log() or server.is_ready(),
            every_s=START_EVERY_S,
        )
        seen["ready with an empty store"] = server.is_ready()
        for version in (1, 2, 3):
            sender.send(revealing_weights(version), version=version)
            server.wait_ready()
            sender.wait_applied(version, receivers=NAMES, timeout_s=WAIT_S)
            # A connection is of one API server; which, the kernel chooses.
            seen["answers"][version] = [
                fresh.answer(replica=replica)
                for fresh in (server.connected_anew() for _ in range(6))
                for replica in REPLICAS
            ]
        seen["driven from outside"] = why_not_followed(server.url, store)
        wait_for("all is counted", lambda: all(counts_three(one) for one in metrics_of(server)))
        seen["metrics"] = metrics_of(server)
        seen["exit code"], seen["left over"] = server.terminate()
    return seen | {"log": server.log().splitlines()}


async def observe_hybrid(directory: Path) -> dict[str, Any]:
    """Two front ends, as on two hosts, each with two of four replicas."""
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
    seen: dict[str, Any] = {"answers": {}}
    with dbuffer.WeightSender(store) as sender:
        for version in (1, 2, 3):
            sender.send(revealing_weights(version), version=version)
            sender.wait_applied(version, receivers=HYBRID_NAMES, timeout_s=WAIT_S)
            for server in servers:
                server.wait_ready()
            seen["answers"][version] = [
                [server.connected_anew().answer() for _ in range(8)] for server in servers
            ]
    seen["ends"] = [server.terminate() for server in servers]
    return seen | {"logs": [server.log().splitlines() for server in servers]}


def start_server(directory: Path, store: Path, *flags: str | int) -> Server:
    """Two replicas and two API servers, as is vLLM's default, that wait for a store."""
    settings = {"dbuffer": {"store": str(store), "engine_id": ENGINE, "timeout_s": WAIT_S}}
    return Server(
        save_revealing(0, directory),
        directory / "server.log",
        *BACKEND_FLAGS,
        *("--additional-config", json.dumps(settings)),
        *("--middleware", "dbuffer.integrations.vllm.FollowStore"),
        *("--load-format", "dummy"),
        *map(str, flags),
        port=free_port(),
        api_servers=len(REPLICAS),
        development=True,
    )


def metrics_of(server: Server) -> list[dict[str, float]]:
    return [server.connected_anew().metrics_by_engine() for _ in range(6)]


def counts_three(metrics: dict[str, float]) -> bool:
    return all(metrics.get(f"dbuffer_pause_seconds_count of {name}") == 3 for name in NAMES)


def why_not_followed(url: str, store: Path) -> str:
    from dbuffer.integrations.vllm import follow

    try:
        follow(url, store).close()
    except dbuffer.UnsupportedError as error:
        return str(error)
    return "it is followed"


def start_engine(checkpoint: Path, **more: Any) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_arguments(checkpoint, **more)
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, data_parallel_size=len(REPLICAS)))


def answer_afresh(
    directory: Path, family: str, responses: list[dict[str, Any]], seeds: dict[str, int]
) -> dict[str, Any]:
    """What fresh engines of one replica say to what was answered, span by span."""
    import vllm

    spans = [
        (seeds[version], one["prompt"] + one["tokens"][:start], one["tokens"][start:end])
        for one in responses
        for version, start, end in one["spans"]
    ]
    engines = {}
    for seed in (1, 2):
        checkpoint = save_model(family, seed, directory)
        engines[seed] = vllm.LLM(**engine_arguments(checkpoint, how="none"))

    def ask(seed: int, asked: list[tuple[list[int], int]]) -> list[list[int]]:
        inputs = [{"prompt_token_ids": prompt} for prompt, _ in asked]
        parameters = [greedy_parameters(num_tokens) for _, num_tokens in asked]
        outputs = engines[seed].generate(inputs, parameters, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    answers = {
        seed: iter(ask(seed, [(prompt, len(tokens)) for s, prompt, tokens in spans if s == seed]))
        for seed in engines
    }
    return {
        "responses": responses,
        "tokens": [tokens for _, _, tokens in spans],
        "fresh engines": [next(answers[seed]) for seed, _, _ in spans],
        "fresh starts": [ask(seed, [(prompt, 4) for prompt in PROMPTS]) for seed in (1, 2)],
    }


def main() -> None:
    directory, role = Path(sys.argv[1]), sys.argv[2]
    programs = {
        "dense": observe_dense,
        "lockstep": observe_lockstep,
        "served": observe_served,
        "hybrid": observe_hybrid,
    }
    leave(directory, asyncio.run(programs[role](directory)))


if __name__ == "__main__":
    main()
