"""A following `AsyncLLM`, under load: whose tokens a response carries, and what it says of them.

A trainer in a process of its own publishes models whose every token reveals their version, at full
speed, while requests run. The engine core is a process too, and with two ranks each worker is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.integrations.engine.engine_options import EngineOptions
from dbuffer.integrations.engine.messages import (
    RankRequest,
    decode_answer,
)
from dbuffer.integrations.vllm.config import CALL
from dbuffer.store.buffer import DoubleBuffer
from tests.support.engines import tiny_models
from tests.support.engines.tiny_models import (
    make_model,
    revealing_weights,
    save_model,
    save_revealing,
    version_of,
    wrong_tokens,
)
from tests.support.engines.vllm_engines import (
    ANSWERS_TELL_VERSIONS,
    NEEDS_VLLM,
    engine_arguments,
    environment,
    greedy_parameters,
    leave,
    observe,
)
from tests.support.soak import Record, in_soaks_alone, is_soak

pytestmark = [*NEEDS_VLLM, ANSWERS_TELL_VERSIONS]

STEP_TIMEOUT_S = 60.0
NUM_STREAMS = 6
PUBLISHES = 200
MIN_SWITCHES = 200 if is_soak() else 20
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
SLOW_STEP_S = 0.1
"""So that a request of 80 tokens takes 8 s, in which a version is published and switched to."""
BIG_LAYER = 65536
"""Size of the hidden layer of a model of 100 MB."""


@pytest.fixture(scope="module")
def observed(directory: Path) -> dict[str, Any]:
    """What the program below saw of an engine of one rank, which takes the backend's way."""
    # Functions are sent to workers, to make them fail. The fresh engines, which an `LLM` is, run
    # in the program itself; an `AsyncLLM` has its processes in any case.
    env = environment(processes=False, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    place = directory / "one"
    place.mkdir()
    seen: dict[str, Any] = observe(__file__, place, "one-rank", env=env)
    return seen


@pytest.fixture(scope="module")
def observed_two(directory: Path) -> dict[str, Any]:
    """The same of two ranks with a model of 100 MB, which take the extension's way."""
    env = environment(processes=True, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    place = directory / "two"
    place.mkdir()
    seen: dict[str, Any] = observe(__file__, place, "two-ranks", env=env)
    return seen


def check_attribution(responses: list[dict[str, Any]]) -> None:
    """Every token is of the version reported for it, and versions never go back.

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
        versions = [version_of(version) for version, _, _ in spans]
        assert versions == sorted(set(versions))
        assert all(version >= response["floor"] for version in versions)


def versions_seen(responses: list[dict[str, Any]]) -> set[str]:
    return {version for response in responses for version, _, _ in response["spans"]}


def check_end(seen: dict[str, Any]) -> None:
    """After the last publish, everyone says that the engine is on it, and its tokens are."""
    assert seen["reached"] == seen["last"]
    assert seen["label"] == str(seen["last"])
    assert [version for version, _, _ in seen["after"]["spans"]] == [str(seen["last"])]
    assert wrong_tokens(seen["after"]) == []
    assert seen["error"] is None


def check_run(seen: dict[str, Any], record: Record) -> None:
    """Much was published and much of it used, no response says what is not so, and the end."""
    record(
        "versions in answers that an engine under load gave", len(versions_seen(seen["responses"]))
    )
    assert seen["published"] >= PUBLISHES
    assert len(versions_seen(seen["responses"])) >= MIN_SWITCHES
    check_attribution(seen["responses"])
    check_end(seen)


def test_an_engine_that_follows_nothing_reports_its_starting_weights(
    observed: dict[str, Any],
) -> None:
    (span,) = observed["start"]["spans"]
    assert span[0] == "default"
    assert wrong_tokens(observed["start"]) == []


def test_with_pauses_that_wait_each_response_is_of_the_one_version_it_reports(
    observed: dict[str, Any], record_property: Record
) -> None:
    seen = observed["wait"]
    check_run(seen, record_property)
    for response in seen["responses"]:
        assert response["reason"] == "length"
        assert len(response["spans"]) == 1


@pytest.mark.soak
def test_with_pauses_that_keep_tokens_change_version_only_where_it_is_said(
    observed: dict[str, Any], record_property: Record
) -> None:
    seen = observed["keep"]
    check_run(seen, record_property)
    switched_on_the_way = [r for r in seen["responses"] if len(r["spans"]) > 1]
    assert len(switched_on_the_way) >= NUM_STREAMS
    assert {response["reason"] for response in seen["responses"]} == {"length"}


@pytest.mark.soak
def test_with_pauses_that_abort_requests_say_so_and_no_token_is_wrong(
    observed: dict[str, Any], record_property: Record
) -> None:
    seen = observed["abort"]
    check_run(seen, record_property)
    for response in seen["responses"]:
        is_whole = len(response["tokens"]) == response["wanted"]
        assert response["reason"] == ("length" if is_whole else "abort")
        assert len(response["spans"]) <= 1
    assert {response["reason"] for response in seen["responses"]} == {"length", "abort"}


def test_nothing_computed_with_old_weights_is_used_for_new_ones(
    observed: dict[str, Any],
) -> None:
    seen = observed["caches"]
    # Each request was switched on its way: what came before is the prompt of what comes after.
    assert min(seen["spans a response"]) >= 2
    assert seen["tokens"] == seen["fresh engines"]


def test_prompts_longer_than_a_cache_block_are_right_at_once_after_a_switch(
    observed: dict[str, Any],
) -> None:
    seen = observed["repeated prompts"]
    assert seen["before"] == seen["again"] == seen["fresh before"]
    assert seen["after"] == seen["fresh after"] != seen["fresh before"]


def test_weights_that_do_not_fit_pause_nothing(observed: dict[str, Any]) -> None:
    seen = observed["misfit"]
    assert seen["pauses"] == []
    assert "lm_head.weight" in seen["error"]
    assert seen["label"] == str(seen["label_before"])
    assert wrong_tokens(seen["during"]) == wrong_tokens(seen["after"]) == []
    assert seen["after"]["spans"][0][0] == str(seen["next"])


@pytest.mark.parametrize("what", ["load", "prepare"])
def test_an_update_that_fails_in_the_pause_is_followed_by_the_next_one(
    observed: dict[str, Any], what: str
) -> None:
    seen = observed[f"failing {what}"]
    assert set(seen["pauses"]) == {"keep"}
    assert f"this {what} fails" in seen["error"]
    # The engine goes on, on the version before, and says so.
    assert seen["label"] == str(seen["label_before"])
    assert [span[0] for span in seen["during"]["spans"]] == [seen["label"]]
    assert seen["during"]["reason"] == "length"
    check_attribution([seen["during"]])
    # Once nothing fails any more, it is switched without anyone's help.
    assert seen["reached"] == seen["version"]
    assert [span[0] for span in seen["after"]["spans"]] == [str(seen["version"])]
    check_attribution([seen["after"]])


def test_a_follower_closed_in_the_middle_of_a_switch_ends_it_first(
    observed: dict[str, Any],
) -> None:
    seen = observed["closed"]
    assert not seen["closed_before_the_switch"]
    assert not seen["is_paused"]
    assert seen["label"] == str(seen["version"])
    check_attribution([seen["after"]])


def test_a_pause_that_somebody_else_began_is_theirs_to_end(observed: dict[str, Any]) -> None:
    seen = observed["paused by the user"]
    assert seen["is_paused"]
    assert seen["tokens_in_pause"] == seen["tokens_before"]
    check_attribution([seen["response"]])
    assert [span[0] for span in seen["response"]["spans"]] == [
        str(seen["label_before"]),
        str(seen["version"]),
    ]


def test_sleeping_engine_is_left_asleep_and_gets_its_version_when_it_wakes(
    observed: dict[str, Any],
) -> None:
    seen = observed["lost weights"]
    assert seen["label"] == "unknown"
    assert seen["error"].startswith("EngineBusyError: the engine's weights are asleep")
    assert seen["paused"]
    check_attribution([seen["woken"]])


def test_weights_that_vllm_loaded_are_unknown_until_the_version_is_there_again(
    observed: dict[str, Any],
) -> None:
    seen = observed["lost weights"]
    for response in seen["reloaded"]:
        known = [span for span in response["spans"] if span[0] != "unknown"]
        assert wrong_tokens(response | {"spans": known}) == []
    check_attribution([seen["again"]])


def test_engine_that_dies_ends_following_which_is_told_once(observed: dict[str, Any]) -> None:
    assert observed["dead"]["error"].startswith("EngineEndedError")
    [line] = observed["dead"]["log"]
    assert "is followed no longer: " in line


def test_engine_that_can_never_be_followed_is_refused_at_once(observed: dict[str, Any]) -> None:
    assert observed["no store"].startswith("OptionError: no store given")


@in_soaks_alone
@pytest.mark.soak
def test_two_ranks_switch_as_one(observed_two: dict[str, Any], record_property: Record) -> None:
    seen = observed_two["keep"]
    versions = versions_seen(seen["responses"])
    record_property("versions in answers that an engine of two ranks gave", len(versions))
    assert len(versions) >= MIN_SWITCHES_OF_TWO
    assert any(len(response["spans"]) > 1 for response in seen["responses"])
    check_attribution(seen["responses"])
    check_end(seen)


@in_soaks_alone
def test_staging_by_mapping_costs_a_worker_no_memory(observed_two: dict[str, Any]) -> None:
    seen = observed_two["memory"]
    assert seen["staged"]["map"] == [seen["version"]["map"]] * 2
    for before, *later in zip(*seen["map"], strict=True):
        assert all(after - before < seen["num_bytes"] / 10 for after in later)


@in_soaks_alone
def test_staging_by_copying_costs_a_worker_one_version(observed_two: dict[str, Any]) -> None:
    seen = observed_two["memory"]
    assert seen["staged"]["copy"] == [seen["version"]["copy"]] * 2
    for before, *later in zip(*seen["copy"], strict=True):
        versions = [(after - before) / seen["num_bytes"] for after in later]
        assert all(0.9 < number < 1.1 for number in versions)


@in_soaks_alone
def test_images_are_of_the_newest_version_alone(observed_two: dict[str, Any]) -> None:
    """A version is less than a megabyte here, so that kernels show beside the weights in them."""
    seen = observed_two["memory"]
    assert seen["staged"]["images"] == [seen["version"]["images"]] * 2
    for before, first, *later in zip(*seen["images"], strict=True):
        assert first - before < 2 * seen["num_bytes"]
        assert all(after - first < 0.5 * seen["num_bytes"] for after in later)


# The program from here on; it runs in a process of its own.


class Trainer:
    """The process that publishes, as told."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, directory: Path, *arguments: str) -> Trainer:
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, __file__, str(directory), "trainer", *arguments]
        return cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))

    async def publish(self, what: str, number: int = 1) -> int:
        """The last version, once it is published."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what} {number}\n".encode())
        answer = await asyncio.wait_for(self._process.stdout.readline(), STEP_TIMEOUT_S)
        return int(answer)

    async def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


def train(store: Path) -> None:
    """Publish what standard input asks for, as fast as it can; say each time which version is."""
    version = 0
    with dbuffer.WeightSender(store) as sender:
        for line in sys.stdin:
            what, number = line.split()
            for _ in range(int(number) if what == "reveal" else 1):
                if what == "wait":
                    sender.wait_applied(int(number))
                    continue
                weights: Any = revealing_weights(version + 1)
                if what == "model":
                    weights = make_model("qwen3", int(number))
                if what == "misfit":
                    weights["lm_head.weight"] = torch.zeros(500, 63)
                version = sender.send(weights).version
            print(version, flush=True)


class Program:
    """An engine, its trainer, and requests to it."""

    def __init__(self, engine: Any, store: Path, trainer: Trainer) -> None:
        self.engine = engine
        self.store = store
        self.trainer = trainer
        self.pauses: list[str] = []
        self.tokens_so_far: dict[str, int] = {}
        self._num_requests = 0
        self._pause = engine.engine_core.pause_scheduler_async
        engine.engine_core.pause_scheduler_async = self._counted_pause

    async def _counted_pause(self, mode: str, clear_cache: bool) -> None:
        self.pauses.append(mode)
        await self._pause(mode=mode, clear_cache=clear_cache)

    def follow(self, pause: str = "keep") -> Any:
        from dbuffer.integrations.vllm import follow

        return follow(self.engine, self.store, pause=pause)

    @contextlib.asynccontextmanager
    async def following(self, pause: str = "keep") -> AsyncIterator[Any]:
        """A follower whose engine has what is there already."""
        async with self.follow(pause) as follower:
            await asyncio.wait_for(follower.wait_started_async(), STEP_TIMEOUT_S)
            yield follower

    async def respond(self, prompt: list[int], num_tokens: int, floor: int = 0) -> dict[str, Any]:
        """One response; ``floor`` is a version that the engine is known to have by now."""
        self._num_requests += 1
        name = f"r{self._num_requests}"
        parameters = greedy_parameters(num_tokens)
        inputs = {"prompt_token_ids": prompt}
        async for output in self.engine.generate(inputs, parameters, name):
            answer = output.outputs[0]
            self.tokens_so_far[name] = len(answer.token_ids)
        spans = [(s.version, s.start, s.end) for s in answer.weight_versions or []]
        return {
            "tokens": list(answer.token_ids),
            "spans": spans,
            "reason": answer.finish_reason,
            "wanted": num_tokens,
            "floor": floor,
        }

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


async def until(condition: Callable[[], Any]) -> None:
    """Wait for a state."""
    async with asyncio.timeout(STEP_TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.002)


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
                PROMPTS[turn % len(PROMPTS)],
                self._num_tokens[turn % len(self._num_tokens)],
                floor,
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


async def publish_a_misfit(program: Program) -> dict[str, Any]:
    async with program.following() as follower:
        label_before = await program.label()
        program.pauses.clear()
        async with program.answering([PROMPTS[2]], 100) as (request,):
            await program.trainer.publish("misfit")
            await until(lambda: follower.error is not None)
        seen = {
            "error": str(follower.error),
            "during": request.result(),
            "pauses": program.pauses.copy(),
            "label_before": label_before,
            "label": await program.label(),
        }
        version = await program.trainer.publish("reveal")
        await follower.wait_applied_async(version, STEP_TIMEOUT_S)
        return seen | {"next": version, "after": await program.respond(PROMPTS[0], 4)}


def step_slowly(worker: Any, marker: str) -> None:
    """In the worker: let each step take long while there is a file, however fast the machine."""
    step = worker.execute_model

    def step_when_waited(*arguments: Any, **options: Any) -> Any:
        import pathlib
        import time

        if pathlib.Path(marker).exists():
            time.sleep(SLOW_STEP_S)
        return step(*arguments, **options)

    worker.execute_model = step_when_waited


def step_as_ever(worker: Any) -> None:
    del worker.execute_model


def receiver_of(worker: Any) -> Any:
    from dbuffer.integrations.engine.endpoint import RankEndpoint

    return RankEndpoint.of(worker.get_model()).receiver


def places_to_fail(worker: Any) -> dict[str, tuple[Any, str]]:
    receiver = receiver_of(worker)
    return {"load": (receiver._model, "load"), "prepare": (receiver._stager, "take")}


def let_fail(worker: Any, what: str) -> None:
    """In the worker: let every load fail, or every preparation of an update."""
    owner, name = places_to_fail(worker)[what]
    whole = getattr(owner, name)
    tries = []

    def fail(*arguments: Any, **options: Any) -> Any:
        tries.append(what)
        if what == "load" and len(tries) % 2 == 0:  # the way back to the version before
            return whole(*arguments, **options)
        raise RuntimeError(f"this {what} fails")

    setattr(owner, name, fail)


def let_work(worker: Any, what: str) -> None:
    delattr(*places_to_fail(worker)[what])  # the method itself is there again


async def fail_in_a_pause(program: Program, what: str) -> dict[str, Any]:
    async with program.following() as follower:
        label_before = await program.label()
        await program.engine.collective_rpc(let_fail, args=(what,))
        program.pauses.clear()
        async with program.answering([PROMPTS[2]], 100) as (request,):
            version = await program.trainer.publish("reveal")
            await until(lambda: follower.error is not None)
        seen = {
            "error": str(follower.error),
            "during": request.result(),
            "pauses": program.pauses.copy(),
            "label_before": label_before,
            "label": await program.label(),
            "version": version,
        }
        await program.engine.collective_rpc(let_work, args=(what,))
        reached = await follower.wait_applied_async(version, STEP_TIMEOUT_S)
        after = await program.respond(PROMPTS[0], 4)
        return seen | {"reached": reached, "after": after}


def hold_load(worker: Any, directory: str) -> None:
    """In the worker: let the next load wait until it is told to go on."""
    model: Any = receiver_of(worker)._model.serving

    def wait_and_load(tensors: Any, **options: Any) -> None:
        import pathlib
        import time

        del model.load
        pathlib.Path(directory, "entered").touch()
        deadline = time.monotonic() + 60
        while not pathlib.Path(directory, "go on").exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        model.load(tensors, **options)

    model.load = wait_and_load


async def close_in_a_switch(program: Program, directory: Path) -> dict[str, Any]:
    follower = program.follow()
    await asyncio.wait_for(follower.wait_started_async(), STEP_TIMEOUT_S)
    await program.engine.collective_rpc(hold_load, args=(str(directory),))
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


def follow_nothing(program: Program) -> str:
    from dbuffer.integrations.vllm import follow

    try:
        follow(program.engine)
    except dbuffer.DBufferError as error:
        return f"{type(error).__name__}: {error}"
    return "is followed"


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


def fresh_tokens(directory: Path, seed: int, asked: list[tuple[list[int], int]]) -> list[list[int]]:
    """The tokens of an engine that was started on a model, for prompts and numbers of tokens."""
    import vllm

    checkpoint = save_model("qwen3", seed, directory)
    llm = vllm.LLM(**engine_arguments(checkpoint, how="none"))
    inputs = [{"prompt_token_ids": prompt} for prompt, _ in asked]
    parameters = [greedy_parameters(num_tokens) for _, num_tokens in asked]
    outputs = llm.generate(inputs, parameters, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def answer_afresh(directory: Path, kept: dict[str, Any]) -> dict[str, Any]:
    """What fresh engines answer to what was answered across switches."""
    # To begin with, the prompts; then whatever a span of each response continues.
    asked = {seed: [(prompt, 16) for prompt in PROMPTS] for seed in (1, 2)}
    spans = []
    for prompt, response in zip(PROMPTS, kept["responses"], strict=True):
        for version, start, end in response["spans"]:
            seed = kept["seeds"][version]
            asked[seed].append((prompt + response["tokens"][:start], end - start))
            spans.append((seed, response["tokens"][start:end]))
    answers = {seed: fresh_tokens(directory, seed, asked[seed]) for seed in asked}
    first = {seed: answers[seed][: len(PROMPTS)] for seed in answers}
    rest = {seed: iter(answers[seed][len(PROMPTS) :]) for seed in answers}
    return {
        "caches": {
            "spans a response": [len(response["spans"]) for response in kept["responses"]],
            "tokens": [tokens for _, tokens in spans],
            "fresh engines": [next(rest[seed]) for seed, _ in spans],
        },
        "repeated prompts": kept["repeated"] | {"fresh before": first[1], "fresh after": first[2]},
    }


@contextlib.asynccontextmanager
async def started(directory: Path, *trainer_arguments: str, **more: Any) -> AsyncIterator[Program]:
    """An engine that runs, and its trainer."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    trainer = await Trainer.start(directory, *trainer_arguments)
    arguments = AsyncEngineArgs(**engine_arguments(save_revealing(0, directory), **more))
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        yield Program(engine, directory / "store", trainer)
    finally:
        engine.shutdown()
        await trainer.end()


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
        seen["lost weights"] = await lose_the_weights(program)
        kept = await switch_kept_requests(program)
        seen["no store"] = follow_nothing(program)
        seen["dead"] = await lose_the_engine(program)
    return seen | answer_afresh(directory, kept)


async def run_two_ranks(directory: Path) -> dict[str, Any]:
    async with started(directory, "big", tp=2, how="extension") as program:
        keep = await switch_under_load(
            program, "keep", (10, 20, 30), publishes=8, min_switches=MIN_SWITCHES_OF_TWO
        )
        return {"keep": keep, "memory": await measure_staging(program)}


def main(directory: Path, role: str, *more: str) -> None:
    if role == "two-ranks" or "big" in more:
        tiny_models.SHAPE["intermediate_size"] = BIG_LAYER
    if role == "trainer":
        train(directory / "store")
        return
    run = {"one-rank": run_one_rank, "two-ranks": run_two_ranks}[role]
    leave(directory, asyncio.run(run(directory)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
