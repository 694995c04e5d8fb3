"""Versions over HTTP: responses tell which weights they came from, requests which they need.

The model reveals its version: each token says from which weights it came, so what a response tells
is compared, span by span, with what really computed it. Last come twenty streams of requests of
all kinds, and a version every 0.3 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import httpx

import dbuffer
from dbuffer.integrations.vllm import VersionSpan, follow, versions_of
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing.waiting import until
from tests.support.engines.tiny_models import (
    revealing_weights,
    save_revealing,
    save_tokenizer,
    token_of,
)
from tests.support.engines.vllm_engines import judge
from tests.support.engines.vllm_servers import (
    BACKEND_FLAGS,
    MODEL,
    WAIT_S,
    Server,
    question,
)
from tests.support.soak import is_soak
from tests.support.waiting import error_of

OK, BAD_REQUEST, NOT_FOUND, CONFLICT, INTERNAL, UNAVAILABLE = 200, 400, 404, 409, 500, 503
STREAMS = 20
REQUESTS = 2000 if is_soak() else 100
NUM_SEEN = 3
EVERY_S = 0.3
STEPS_PER_VERSION = 10
LONG_TOKENS = 900
ASKED = {"X-Weight-Versions": "true"}
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


class Program:
    def __init__(self, directory: Path, num_replicas: int) -> None:
        self.store = directory / "store"
        self.sender = dbuffer.WeightSender(self.store)
        self.num_replicas = num_replicas
        checkpoint = save_revealing(0, directory)
        save_tokenizer(checkpoint)
        flags = ["--no-skip-tokenizer-init", "--chat-template", TEMPLATE, "--enable-scale-out"]
        if num_replicas > 1:
            flags += ["--data-parallel-size", str(num_replicas)]
        self.server = Server(
            checkpoint,
            directory,
            *BACKEND_FLAGS,
            *("--load-format", "dummy", "--max-num-seqs", str(STREAMS)),
            *("--max-model-len", "1024", "--hf-overrides", '{"max_position_embeddings": 1024}'),
            *flags,
            api_servers=num_replicas,
            development=num_replicas > 1,
            store=self.store,
            engine_id="policy",
            timeout_s=WAIT_S,
        )
        self.client = httpx.AsyncClient(
            base_url=self.server.url,
            timeout=WAIT_S,
            limits=httpx.Limits(max_connections=4 * STREAMS),
        )

    def publish(self, version: int) -> None:
        metadata = {"step": STEPS_PER_VERSION * version, "run": "test"}
        self.newest = self.sender.send(
            revealing_weights(version), version=version, metadata=metadata
        ).version

    async def follow(self, version: int) -> None:
        await asyncio.to_thread(self.publish, version)
        await asyncio.to_thread(
            self.sender.wait_applied, version, receivers=self.num_replicas, timeout_s=WAIT_S
        )

    async def ask(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        response = await self.client.post(path, json=body, headers=headers or {})
        return _told(response) | {"body": response.json()}

    async def stream(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        asked = body | {"stream": True}
        async with self.client.stream("POST", path, json=asked, headers=headers or {}) as response:
            lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
            chunks = [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
            return _told(response) | {"chunks": chunks}

    async def ready(self, **query: Any) -> tuple[int, Any]:
        response = await self.client.get("/ready", params=query)
        return response.status_code, response.json()

    def run_id(self) -> str:
        pointer = DoubleBuffer(self.store).newest_pointer()
        assert pointer is not None
        return str(pointer.id.run)


def _told(response: httpx.Response) -> dict[str, Any]:
    names = ("version", "run", "metadata")
    told = {name: response.headers.get(f"x-weight-{name}") for name in names}
    retry = response.headers.get("retry-after")
    return told | {"status": response.status_code, "retry after": retry}


def completion(num_tokens: int = 8, **more: Any) -> dict[str, Any]:
    return question(5) | {"max_tokens": num_tokens} | more


def chat(num_tokens: int = 8, **more: Any) -> dict[str, Any]:
    asked = completion(num_tokens, **more)
    del asked["prompt"]
    return asked | {"messages": [{"role": "user", "content": "word7 word8"}]}


def response(num_tokens: int = 8) -> dict[str, Any]:
    return {"model": MODEL, "input": "word7 word8", "max_output_tokens": num_tokens}


def message(num_tokens: int = 8) -> dict[str, Any]:
    return chat(num_tokens)


def generate(num_tokens: int = 8, **more: Any) -> dict[str, Any]:
    sampling = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    return {"model": MODEL, "token_ids": [1, 2, 3], "sampling_params": sampling | more}


ROUTES = [
    ("/v1/completions", completion),
    ("/v1/chat/completions", chat),
    ("/inference/v1/generate", generate),
]


WITHOUT_CHOICES = [("/v1/responses", response), ("/v1/messages", message)]


# What clients are told.


async def tell_versions(program: Program) -> None:
    """Each response has the version, its run and its metadata, and spans if asked for them."""
    run = program.run_id()
    metadata = {"step": STEPS_PER_VERSION, "run": "test"}
    told = {"version": "1", "run": run, "metadata": json.dumps(metadata), "status": OK}
    span = VersionSpan(1, 0, 8, run, metadata)
    several = completion(n=2, top_k=1, temperature=1, prompt=[[1, 2, 3], [4, 5, 6]])
    cases = [(path, body(), 1) for path, body in ROUTES]
    for path, body, count in [*cases, ("/v1/completions", several, 4)]:
        for send in (program.ask, program.stream):
            response = await send(path, body)
            assert response.items() >= told.items()
            if path.startswith("/v1/"):  # no client meets a value that it did not ask for
                fields = [field for one in choices_of(response) for field in one.items()]
                assert not [key for key, value in fields if "weight" in key and value is not None]
            response = await send(path, body, ASKED)
            assert response.items() >= told.items()
            choices = choices_of(response)
            assert [choice["index"] for choice in choices] == list(range(count))
            assert [versions_of(choice) for choice in choices] == [[span]] * count
    # The outputs of a beam search are no prompt's: their spans are not known.
    for body in (completion(n=2), completion(n=2, max_tokens=1, prompt=[[1, 2, 3], [4, 5, 6]])):
        response = await program.ask("/v1/completions", body | {"use_beam_search": True}, ASKED)
        choices = choices_of(response)
        assert [choice["weight_versions"] for choice in choices] == [None] * len(choices)
    # A response without tokens names no version.
    response = await program.ask("/v1/completions", completion(model="another"), ASKED)
    assert (response["status"], response["version"]) == (NOT_FOUND, None)
    response = _told(await program.client.get("/v1/models"))
    assert (response["status"], response["version"]) == (OK, None)


# What requests take.


async def require_versions(program: Program) -> None:
    path, body = "/v1/completions", completion()
    for met in (
        {"X-Weight-Min-Version": "1"},
        {"X-Weight-Min-Version": "1", "X-Weight-Wait-S": "1"},
    ):
        assert (await program.ask(path, body, met))["status"] == OK
    unmet = {"X-Weight-Min-Version": "2"}
    for send in (program.ask, program.stream):
        assert (await send(path, body, unmet))["status"] == CONFLICT
    response = await program.ask(path, body, unmet)
    assert response["retry after"] == "1"
    assert response["version"] == response["body"]["weights"]["version"] == "1"
    assert "version 1, and not yet version 2" in response["body"]["error"]["message"]
    status, body = await program.ready(min_version=2)
    [replica] = body["replicas"]
    assert (status, replica["version"]) == (UNAVAILABLE, "1")


async def tell_without_choices(program: Program) -> None:
    for path, body in WITHOUT_CHOICES:
        for send in (program.ask, program.stream):
            response = await send(path, body())
            assert (response["status"], response["version"]) == (OK, "1")
            response = await send(path, body(), {"X-Weight-Min-Version": "2"})
            assert response["status"] == CONFLICT


async def wait_for_a_version(program: Program) -> None:
    path, body = "/v1/completions", completion()
    headers = {"X-Weight-Min-Version": "2", "X-Weight-Wait-S": str(WAIT_S)}
    waiting = asyncio.create_task(program.ask(path, body, headers))
    ready = asyncio.create_task(program.ready(min_version=2, wait_s=WAIT_S))
    too_short = headers | {"X-Weight-Wait-S": "0.05"}
    assert (await program.ask(path, body, too_short))["status"] == CONFLICT
    await program.follow(2)
    response, (status, _) = await waiting, await ready
    assert (response["status"], response["version"], status) == (OK, "2", OK)


def wait_for_ever(program: Program) -> list[Coroutine[Any, Any, None]]:
    """Requests that wait when the server ends: each is answered, with an error."""

    async def ask(path: str, body: dict[str, Any]) -> None:
        headers = {"X-Weight-Min-Version": "100000", "X-Weight-Wait-S": "3600"}
        answer = await program.ask(path, body, headers)
        assert answer["status"] >= INTERNAL

    async def look() -> None:
        assert (await program.ready(min_version=100000, wait_s=3600))[0] == UNAVAILABLE

    return [look(), *(ask(path, body()) for path, body in (*ROUTES, *WITHOUT_CHOICES))]


async def switch_in_a_long_request(program: Program) -> None:
    """It goes on with the weights that come, and its spans tell them apart."""
    minimum = ASKED | {"X-Weight-Min-Version": "2"}
    path, body = "/v1/completions", completion(LONG_TOKENS)
    begun = asyncio.Event()

    async def first_chunk() -> None:
        asked = body | {"stream": True}
        async with program.client.stream("POST", path, json=asked) as response:
            async for _ in response.aiter_lines():
                begun.set()

    running_on = asyncio.create_task(program.ask(path, body, minimum))
    other = asyncio.create_task(first_chunk())
    await begun.wait()
    await program.follow(3)
    await other
    [choice] = choices_of(await running_on)
    assert choice["finish_reason"] == "length"
    assert set(choice["token_ids"]) == {token_of(2), token_of(3)}
    assert {span.version for span in versions_of(choice)} == {2, 3}


# Under load.


@contextlib.asynccontextmanager
async def publishing(program: Program, first: int) -> AsyncIterator[None]:
    """A version every so often, whether the engine has the one before or not."""
    is_over = asyncio.Event()

    async def publish() -> None:
        version = first
        while not is_over.is_set():
            await asyncio.to_thread(program.publish, version)
            version += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_over.wait(), EVERY_S)

    task = asyncio.create_task(publish())
    try:
        yield
    finally:
        is_over.set()
        await task


async def label_right_under_load(program: Program, first: int) -> None:
    """Streams of requests of all kinds, a part of which takes certain versions."""
    statuses: Counter[int] = Counter()
    seen: set[int] = set()
    num_switched = 0
    left = REQUESTS
    newest = first - 1

    async def one(rng: random.Random) -> None:
        nonlocal newest, num_switched
        path, body = rng.choice(ROUTES)
        headers = dict(ASKED)
        if rng.randrange(2):
            headers |= {"X-Weight-Min-Version": str(newest), "X-Weight-Wait-S": "5"}
        send = rng.choice([program.ask, program.stream])
        response = await send(path, body(rng.choice([4, 16, 64])), headers)
        statuses[response["status"]] += 1
        if response["status"] != OK:
            return
        assert problems_of(response, headers) == []
        [choice] = choices_of(response)
        versions = [span.version for span in versions_of(choice)]
        num_switched += len(versions) > 1
        seen.update(versions)
        newest = max([newest, *versions])

    async def client(number: int) -> None:
        nonlocal left
        rng = random.Random(number)
        # On a quick machine, so many requests are answered before there are enough versions.
        while left > 0 or len(seen) < NUM_SEEN or num_switched <= REQUESTS / 50:
            left -= 1
            await one(rng)

    async with publishing(program, first):
        await asyncio.gather(*(client(number) for number in range(STREAMS)))
    assert set(statuses) <= {OK, CONFLICT}
    assert statuses.total() >= REQUESTS


def choices_of(response: dict[str, Any]) -> list[dict[str, Any]]:
    if "body" in response:
        return list(response["body"]["choices"])
    joined: dict[int, dict[str, Any]] = {}
    for chunk in response["chunks"]:
        for choice in chunk["choices"]:
            whole = joined.setdefault(choice["index"], {"token_ids": []})
            tokens = whole["token_ids"] + (choice.get("token_ids") or [])
            whole |= choice
            whole["token_ids"] = tokens
    return [joined[index] for index in sorted(joined)]


def problems_of(response: dict[str, Any], headers: dict[str, str]) -> list[Any]:
    """Return what a response tells that its tokens, or its request, contradict."""
    [choice] = choices_of(response)
    tokens, spans = choice["token_ids"], versions_of(choice)
    problems: list[Any] = []
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != len(tokens):
        problems.append("the spans do not cover the tokens")
    for span in spans:
        if set(tokens[span.start : span.end]) != {token_of(span.version)}:
            problems.append(f"tokens of another version than {span.version}")
        if span.metadata["step"] != STEPS_PER_VERSION * span.version:
            problems.append(f"metadata of another version than {span.version}")
        if span.run != response["run"]:
            problems.append("another run than the header's")
    if int(response["version"]) != spans[0].version:
        problems.append("another version than the header's")
    if json.loads(response["metadata"])["step"] != STEPS_PER_VERSION * spans[0].version:
        problems.append("metadata of another version than the header's")
    if spans[0].version < int(headers.get("X-Weight-Min-Version", "0")):
        problems.append("a version below the minimum")
    return [f"{problem}: {choice}, {headers}" for problem in problems]


def tell_replicas_apart(program: Program) -> None:
    """Each API server counts each replica's switches, and refuses a follower in another process."""
    server, newest = program.server, program.newest
    refusal = str(error_of(lambda: follow(server.url, program.store).close()))
    assert "replicas that switch independently" in refusal
    assert "--middleware dbuffer.integrations.vllm.FollowStore" in refusal
    program.sender.wait_applied(newest, receivers=["policy", "policy.dp-1"], timeout_s=WAIT_S)

    def has_counted() -> bool:
        # A connection is of one API server; which, the kernel chooses.
        seen = [server.connected_anew().metrics_by_engine() for _ in range(6)]
        return all(
            metrics.get(f"dbuffer_version_applied of {name}") == newest
            and metrics[f"dbuffer_following of {name}"] == 1
            for metrics in seen
            for name in ("policy", "policy.dp-1")
        )

    until("all replicas are counted", has_counted, WAIT_S, 0.1)


async def serve(directory: Path, num_replicas: int) -> None:
    program = Program(directory, num_replicas)
    with program.sender:
        program.publish(1)
        await asyncio.to_thread(program.server.wait_ready)
        if num_replicas == 1:
            await tell_versions(program)
            await require_versions(program)
            await tell_without_choices(program)
            await wait_for_a_version(program)
            await switch_in_a_long_request(program)
            ends = [asyncio.create_task(one) for one in wait_for_ever(program)]
        await label_right_under_load(program, 4)
        if num_replicas > 1:
            await asyncio.to_thread(tell_replicas_apart, program)
    ended = program.server.terminate()
    assert num_replicas > 1 or ended == (0, [])
    if num_replicas == 1:
        await asyncio.gather(*ends)


if __name__ == "__main__":
    judge(lambda directory, number: asyncio.run(serve(directory, int(number))))
