"""Program of `test_canary.py`, which says what it shows."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from dbuffer.integrations.vllm import follow
from dbuffer.testing.waiting import until
from tests.support.engines import preforked
from tests.support.engines.tiny_models import revealing_weights, save_revealing, token_of
from tests.support.engines.vllm_engines import EXTENSION, judge
from tests.support.engines.vllm_servers import (
    ANSWER_TOKENS,
    API_KEY,
    WAIT_S,
    Server,
    question,
)
from tests.support.ports import free_port

BAD = 3
"""Version that the probe refuses."""


def run(directory: Path, *arguments: str) -> None:
    if arguments:
        follow_server(directory, *arguments)
    else:
        train(directory)


def train(directory: Path) -> None:
    """Publish to a server that another process follows, which is killed in its probe."""
    flags = ("--worker-extension-cls", EXTENSION, "--api-key", API_KEY)
    checkpoint, log = save_revealing(0, directory), directory / "server.log"
    server = Server(checkpoint, log, *flags, port=free_port(), development=True)
    server.wait_ready()
    follower = start_follower(directory, server, "canary")
    with dbuffer.WeightSender(directory / "store") as sender:
        for version in (1, 2):
            sender.send(revealing_weights(version))
            sender.wait_applied(version, receivers="canary", timeout_s=WAIT_S)
        (directory / "hold").touch()
        sender.send(revealing_weights(BAD))
        until("the probe has begun", (directory / "begun").exists, WAIT_S)
        follower.kill()
        follower.wait(WAIT_S)
        with pytest.raises(dbuffer.WaitTimeoutError):
            sender.wait_applied(BAD, receivers="canary", timeout_s=1.0)
        assert server.answer() == tokens_of(BAD)
        (directory / "hold").unlink()
        follower = start_follower(directory, server, "canary")
        with pytest.raises(dbuffer.ReceiverFailedError, match=r"refused by canary: .* nonsense"):
            sender.wait_applied(BAD, receivers="canary", timeout_s=WAIT_S)
        until("it has gone back", lambda: server.answer() == tokens_of(2), WAIT_S, 0.05)
        assert server.version() == "2"
        follower.kill()
        follower.wait(WAIT_S)
        start_follower(directory, server, "other")
        time.sleep(2.0)
        assert server.answer() == tokens_of(2)
        sender.send(revealing_weights(4))
        sender.wait_applied(4, receivers="other", timeout_s=WAIT_S)
        assert server.answer() == tokens_of(4)
    server.kill()


def start_follower(directory: Path, server: Server, engine_id: str) -> preforked.Process:
    command = [__file__, str(directory), server.url, engine_id]
    return preforked.start(command, env=dict(os.environ), output=directory / f"{engine_id}.log")


def follow_server(directory: Path, url: str, engine_id: str) -> None:
    """Follow until killed. The canary's probe waits while the file ``hold`` exists."""

    def probe(url: str) -> str | None:
        if (directory / "hold").exists():
            (directory / "begun").touch()
            until("it may go on", lambda: not (directory / "hold").exists(), WAIT_S)
        return "it talks nonsense" if answer_of(url) == tokens_of(BAD) else None

    canary = probe if engine_id == "canary" else None
    store = directory / "store"
    with follow(url, store, engine_id=engine_id, api_key=API_KEY, canary=canary):
        time.sleep(10 * WAIT_S)


def answer_of(url: str) -> Any:
    import httpx

    headers = {"Authorization": f"Bearer {API_KEY}"}
    response = httpx.post(f"{url}/v1/completions", json=question(5), headers=headers)
    return response.json()["choices"][0]["token_ids"]


def tokens_of(version: int) -> list[int]:
    return [token_of(version)] * ANSWER_TOKENS


if __name__ == "__main__":
    judge(run)
