"""Program of `test_load.py`, which says what it shows."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dbuffer
from tests.support.engines.tiny_models import make_model, revealing_weights, token_of
from tests.support.engines.vllm_servers import (
    API_KEY,
    BACKEND_FLAGS,
    WAIT_S,
    Server,
    following,
    question,
)
from tests.support.ports import free_port

NUM_STREAMS = 20
PUBLISH_EVERY_S = 0.2
QUIET_S, BUSY_S = 60.0, 600.0
NUM_SAMPLES = 20
NUM_TOKENS = 64
VERSION_OF = {token_of(version): version for version in range(498)}


def run(directory: Path) -> dict[str, Any]:
    store, checkpoint = directory / "store", directory / "model"
    make_model("qwen3", 0).save_pretrained(checkpoint)
    with dbuffer.WeightSender(store) as sender:
        sender.send(revealing_weights(1))
        server = Server(
            checkpoint,
            directory / "server.txt",
            *BACKEND_FLAGS,
            *following(store),
            *("--max-num-seqs", str(NUM_STREAMS), "--api-key", API_KEY),
            port=free_port(),
        )
        try:
            server.wait_ready()
            found: dict[str, Any] = {"quiet": load(server, QUIET_S)}
            before = server.metrics()["pause_seconds_count"]
            versions = itertools.count(2)
            samples: list[list[int]] = []
            with (
                repeated(PUBLISH_EVERY_S, lambda: publish(sender, next(versions))),
                repeated(BUSY_S / NUM_SAMPLES, lambda: samples.append(size_of(server))),
            ):
                found["busy"] = load(server, BUSY_S)
            found["samples"] = samples
            found["switches"] = server.metrics()["pause_seconds_count"] - before
        finally:
            server.kill()
    return found


def publish(sender: dbuffer.WeightSender, version: int) -> None:
    sender.send(revealing_weights(version), version=version)


def size_of(server: Server) -> list[int]:
    """Bytes of its own, and descriptors, of all of its processes."""
    processes = server.processes()
    return [
        sum(process.memory_full_info().uss for process in processes),
        sum(process.num_fds() for process in processes),
    ]


@contextlib.contextmanager
def repeated(every_s: float, action: Callable[[], object]) -> Iterator[None]:
    """Do something again and again, in a thread, for as long as the block lasts."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(every_s):
            action()

    with ThreadPoolExecutor(1) as pool:
        repeating = pool.submit(repeat)
        try:
            yield
        finally:
            ended.set()
        repeating.result()


def load(server: Server, lasts_s: float) -> dict[str, Any]:
    """Let all streams ask for a while; what they saw."""
    streams = asyncio.run(ask_all(server.url, time.monotonic() + lasts_s))
    return {
        "errors": [error for stream in streams for error in stream.errors],
        "answers": sum(stream.num_answers for stream in streams),
        "cut short": sum(stream.num_short for stream in streams),
        "backwards": [jump for stream in streams for jump in stream.backwards],
        "gaps_ms": [round(1e3 * gap, 1) for stream in streams for gap in stream.gaps_s],
    }


async def ask_all(url: str, deadline: float) -> list[Stream]:
    import httpx

    streams = [Stream(number) for number in range(NUM_STREAMS)]
    headers = {"Authorization": f"Bearer {API_KEY}"}
    limits = httpx.Limits(max_connections=NUM_STREAMS, max_keepalive_connections=NUM_STREAMS)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=WAIT_S, limits=limits
    ) as client:
        await asyncio.gather(*(stream.ask_until(client, deadline) for stream in streams))
    return streams


class Stream:
    """Asks one thing after the other, and looks at each token as it comes."""

    def __init__(self, number: int) -> None:
        self._length = 5 + 3 * number
        self._version = 0
        self.errors: list[str] = []
        self.num_answers = self.num_short = 0
        self.backwards: list[tuple[int, int]] = []
        self.gaps_s: list[float] = []
        """Between tokens of one answer."""

    async def ask_until(self, client: Any, deadline: float) -> None:
        import httpx

        while time.monotonic() < deadline:
            started = time.monotonic()
            try:
                await self._ask(client)
            except (httpx.HTTPError, AssertionError) as error:
                self.errors.append(f"{error!r} after {time.monotonic() - started:.3f} s")

    async def _ask(self, client: Any) -> None:
        asked = question(self._length) | {"stream": True, "max_tokens": NUM_TOKENS}
        num_tokens, at = 0, None
        async with client.stream("POST", "/v1/completions", json=asked) as response:
            assert response.status_code == 200, response.status_code
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                tokens = json.loads(line[len("data: ") :])["choices"][0]["token_ids"] or []
                now = time.monotonic()
                if at is not None:
                    self.gaps_s.append(now - at)
                at = now
                num_tokens += len(tokens)
                for token in tokens:
                    self._see(token)
        self.num_answers += 1
        self.num_short += num_tokens < NUM_TOKENS

    def _see(self, token: int) -> None:
        """A token tells its version, but for a multiple of a number of versions."""
        ahead = (VERSION_OF.get(token, -1) - self._version) % len(VERSION_OF)
        if token not in VERSION_OF or ahead > len(VERSION_OF) / 2:
            self.backwards.append((self._version, token))
        else:
            self._version += ahead


if __name__ == "__main__":
    target = Path(sys.argv[1])
    (target / "observed.json").write_text(json.dumps(run(target)))
