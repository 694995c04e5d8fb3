"""Program of `test_versions.py`, which says what it shows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

import dbuffer
from dbuffer.integrations.vllm import versions_of
from dbuffer.store.buffer import DoubleBuffer
from tests.support.children import free_port
from tests.support.engines.tiny_models import (
    revealing_weights,
    save_revealing,
    save_tokenizer,
    token_of,
)
from tests.support.engines.vllm_engines import leave, vllm_release
from tests.support.engines.vllm_servers import (
    BACKEND_FLAGS,
    MODEL,
    WAIT_S,
    Server,
    following,
    question,
)
from tests.support.soak import is_soak

STREAMS = 20
REQUESTS = 2000 if is_soak() else 100
EVERY_S = 0.3
"""Between two versions, under load."""
STEPS_PER_VERSION = 10
LONG_TOKENS = 200
HAS_SPANS = vllm_release() >= (0, 32)
ASKED = {"X-Weight-Versions": "true"}
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


class Program:
    """A server that follows, its trainer and its clients."""

    def __init__(self, directory: Path, num_replicas: int) -> None:
        self.store = directory / "store"
        self.sender = dbuffer.WeightSender(self.store)
        self.num_replicas = num_replicas
        checkpoint = save_revealing(0, directory)
        save_tokenizer(checkpoint)
        flags = ["--no-skip-tokenizer-init", "--chat-template", TEMPLATE]
        if HAS_SPANS:
            flags.append("--enable-scale-out")
        if num_replicas > 1:
            flags += ["--data-parallel-size", str(num_replicas)]
        self.server = Server(
            checkpoint,
            directory / "server.log",
            *BACKEND_FLAGS,
            *following(self.store, engine_id="policy", timeout_s=WAIT_S),
            *("--load-format", "dummy", "--max-num-seqs", str(STREAMS)),
            *flags,
            port=free_port(),
            api_servers=num_replicas,
        )
        self.client = httpx.AsyncClient(
            base_url=self.server.url,
            timeout=WAIT_S,
            limits=httpx.Limits(max_connections=4 * STREAMS),
        )

    def publish(self, version: int) -> None:
        metadata = {"step": STEPS_PER_VERSION * version, "run": "test"}
        self.sender.send(revealing_weights(version), version=version, metadata=metadata)

    async def follow(self, version: int) -> None:
        """Publish a version, and wait until the engine serves it."""
        await asyncio.to_thread(self.publish, version)
        await asyncio.to_thread(
            self.sender.wait_applied, version, receivers=self.num_replicas, timeout_s=WAIT_S
        )

    async def ask(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Return what is told of a response: status, headers about weights, body."""
        response = await self.client.post(path, json=body, headers=headers or {})
        return _told(response) | {"body": response.json()}

    async def stream(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Return the same of a response that comes in chunks."""
        asked = body | {"stream": True}
        async with self.client.stream("POST", path, json=asked, headers=headers or {}) as response:
            lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
            chunks = [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
            return _told(response) | {"chunks": chunks}

    async def ready(self, **query: Any) -> dict[str, Any]:
        response = await self.client.get("/ready", params=query)
        return {"status": response.status_code, "body": response.json()}


def _told(response: httpx.Response) -> dict[str, Any]:
    names = ("version", "history", "metadata")
    told = {name: response.headers.get(f"x-weight-{name}") for name in names}
    retry = response.headers.get("retry-after")
    return told | {"status": response.status_code, "retry after": retry}


def completion(num_tokens: int = 8, **more: Any) -> dict[str, Any]:
    return question(5) | {"max_tokens": num_tokens} | more


def chat(num_tokens: int = 8, **more: Any) -> dict[str, Any]:
    asked = completion(num_tokens, **more)
    del asked["prompt"]
    return asked | {"messages": [{"role": "user", "content": "word7 word8"}]}


def generate(num_tokens: int = 8, **more: Any) -> dict[str, Any]:
    sampling = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    return {"model": MODEL, "token_ids": [1, 2, 3], "sampling_params": sampling | more}


# What clients are told.


async def observe_told(program: Program) -> dict[str, Any]:
    several = completion(n=2, top_k=1, temperature=1, prompt=[[1, 2, 3], [4, 5, 6]])
    routes = {
        "completion": ("/v1/completions", completion()),
        "several": ("/v1/completions", several),
        "chat": ("/v1/chat/completions", chat()),
    } | ({"generate": ("/inference/v1/generate", generate())} if HAS_SPANS else {})
    seen: dict[str, Any] = {"history": DoubleBuffer(program.store).newest_pointer().history}  # type: ignore[union-attr]
    for name, (path, body) in routes.items():
        seen[name] = {
            "plain": await program.ask(path, body),
            "asked": await program.ask(path, body, ASKED),
            "stream": await program.stream(path, body),
            "asked stream": await program.stream(path, body, ASKED),
        }
    beams = completion(n=2, use_beam_search=True)
    seen["beams"] = await program.ask("/v1/completions", beams, ASKED)
    seen["not found"] = await program.ask("/v1/completions", completion(model="another"), ASKED)
    seen["models"] = _told(await program.client.get("/v1/models"))
    return seen


# What requests take.


async def observe_admission(program: Program) -> dict[str, Any]:
    """The engine serves version 1."""
    history = DoubleBuffer(program.store).newest_pointer().history  # type: ignore[union-attr]
    met = {
        "min": {"X-Weight-Min-Version": "1"},
        "exact": {"X-Weight-Exact-Version": "1"},
        "step": {"X-Weight-Min-Step": str(STEPS_PER_VERSION)},
        "history": {"X-Weight-History": history, "X-Weight-Min-Version": "1"},
    }
    unmet = {
        "min": {"X-Weight-Min-Version": "2"},
        "exact": {"X-Weight-Exact-Version": "2"},
        "step": {"X-Weight-Min-Step": "10.5"},
        "history": {"X-Weight-History": "0" * 16},
    }
    wrong = {
        "min": {"X-Weight-Min-Version": "two"},
        "exact": {"X-Weight-Exact-Version": "0"},
        "step": {"X-Weight-Min-Step": "nan"},
        "history": {"X-Weight-History": "x"},
        "wait": {"X-Weight-Min-Version": "1", "X-Weight-Wait-S": "-1"},
        "wait alone": {"X-Weight-Wait-S": "1"},
        "name": {"X-Weight-Min-Verson": "1"},
        "flag": {"X-Weight-Versions": "yes"},
    }
    path, body = "/v1/completions", completion()
    seen: dict[str, Any] = {
        kind: {name: await program.ask(path, body, headers) for name, headers in cases.items()}
        for kind, cases in {"met": met, "unmet": unmet, "wrong": wrong}.items()
    }
    seen["unmet stream"] = await program.ask(path, body | {"stream": True}, unmet["min"])
    seen["ready"] = {
        "now": await program.ready(),
        "met": await program.ready(min_version=1),
        "unmet": await program.ready(min_version=2),
        "wrong": await program.ready(min_version="two"),
        "unknown": await program.ready(minimum=2),
    }
    return seen


async def observe_waiting(program: Program) -> dict[str, Any]:
    """A request for a version that comes while it waits."""
    headers = {"X-Weight-Min-Version": "2", "X-Weight-Wait-S": str(WAIT_S)}
    waiting = asyncio.create_task(program.ask("/v1/completions", completion(), headers))
    ready = asyncio.create_task(program.ready(min_version=2, wait_s=WAIT_S))
    too_short = headers | {"X-Weight-Wait-S": "0.05"}
    seen = {"in vain": await program.ask("/v1/completions", completion(), too_short)}
    await program.follow(2)
    seen |= {"admitted": await waiting, "ready": await ready}
    past = {"X-Weight-Exact-Version": "1", "X-Weight-Wait-S": str(WAIT_S)}
    seen["past"] = await program.ask("/v1/completions", completion(), past)
    return seen


async def observe_exact(program: Program) -> dict[str, Any]:
    """Long requests during a switch: one takes version 2 alone, the others go on."""
    exact = ASKED | {"X-Weight-Exact-Version": "2"}
    minimum = ASKED | {"X-Weight-Min-Version": "2"}
    path, body = "/v1/completions", completion(LONG_TOKENS)
    begun = asyncio.Event()

    async def first_chunk() -> None:
        asked = body | {"stream": True}
        async with program.client.stream("POST", path, json=asked) as response:
            async for _ in response.aiter_lines():
                begun.set()

    running = {
        "exact": asyncio.create_task(program.ask(path, body, exact)),
        "exact stream": asyncio.create_task(program.stream(path, body, exact)),
        "minimum": asyncio.create_task(program.ask(path, body, minimum)),
    }
    other = asyncio.create_task(first_chunk())
    await begun.wait()
    await program.follow(3)
    await other
    return {name: await request for name, request in running.items()}


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


async def observe_load(program: Program, first: int) -> dict[str, Any]:
    """Streams of requests of all kinds, a part of which takes certain versions."""
    routes = [
        ("/v1/completions", completion),
        ("/v1/chat/completions", chat),
        *([("/inference/v1/generate", generate)] if HAS_SPANS else []),
    ]
    seen: dict[str, Any] = {"wrong": [], "statuses": {}, "versions": set(), "switched in": 0}
    left = REQUESTS
    newest = first - 1

    async def one(rng: random.Random) -> None:
        nonlocal newest
        path, body = rng.choice(routes)
        headers = dict(ASKED)
        match rng.randrange(4):
            case 0:
                headers |= {"X-Weight-Min-Version": str(newest), "X-Weight-Wait-S": "5"}
            case 1:
                headers["X-Weight-Exact-Version"] = str(newest)
        send = rng.choice([program.ask, program.stream])
        response = await send(path, body(rng.choice([4, 16, 64])), headers)
        seen["statuses"][response["status"]] = seen["statuses"].get(response["status"], 0) + 1
        if response["status"] != 200:
            return
        seen["wrong"] += problems_of(response, headers)
        [choice] = choices_of(response)
        versions = [span.version for span in versions_of(choice)]
        seen["switched in"] += len(versions) > 1
        seen["versions"].update(versions)
        newest = max([newest, *versions])

    async def client(number: int) -> None:
        nonlocal left
        rng = random.Random(number)
        while left > 0:
            left -= 1
            await one(rng)

    async with publishing(program, first):
        await asyncio.gather(*(client(number) for number in range(STREAMS)))
    return seen | {"versions": len(seen["versions"])}


def choices_of(response: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of a response; of chunks, joined."""
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
    if HAS_SPANS:
        ends = [0, *(span.end for span in spans)]
        if [span.start for span in spans] != ends[:-1] or ends[-1] != len(tokens):
            problems.append("the spans do not cover the tokens")
        for span in spans:
            if set(tokens[span.start : span.end]) != {token_of(span.version)}:
                problems.append(f"tokens of another version than {span.version}")
            if span.metadata["step"] != STEPS_PER_VERSION * span.version:
                problems.append(f"metadata of another version than {span.version}")
            if span.history != response["history"]:
                problems.append("another history than the header's")
    else:
        possible = range(spans[0].version, spans[-1].version + 1)
        if not set(tokens) <= {token_of(version) for version in possible}:
            problems.append("tokens of none of the versions between")
    if int(response["version"]) != spans[0].version:
        problems.append("another version than the header's")
    if json.loads(response["metadata"])["step"] != STEPS_PER_VERSION * spans[0].version:
        problems.append("metadata of another version than the header's")
    if spans[0].version < int(headers.get("X-Weight-Min-Version", "0")):
        problems.append("a version below the minimum")
    exact = headers.get("X-Weight-Exact-Version")
    if exact is not None and set(tokens) != {token_of(int(exact))}:
        problems.append("tokens of another version than the exact one")
    is_ended = choice.get("stop_reason") == "weight_version"
    if is_ended and (exact is None or choice["finish_reason"] != "abort"):
        problems.append("ended for no reason")
    return [f"{problem}: {choice}, {headers}" for problem in problems]


async def observe(directory: Path, num_replicas: int) -> dict[str, Any]:
    program = Program(directory, num_replicas)
    seen: dict[str, Any] = {}
    with program.sender:
        program.publish(1)
        await asyncio.to_thread(program.server.wait_ready)
        if num_replicas == 1:
            seen["told"] = await observe_told(program)
            seen["admission"] = await observe_admission(program)
            seen["waiting"] = await observe_waiting(program)
            seen["exact"] = await observe_exact(program)
        seen["load"] = await observe_load(program, 4)
    seen["exit"] = program.server.terminate()
    return seen


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    leave(directory, asyncio.run(observe(directory, int(sys.argv[2]))))
