"""Program of `test_canary.py`, which says what it shows."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from dbuffer.integrations.vllm import follow
from dbuffer.integrations.vllm.vllm_engine import VllmServer
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing.waiting import until
from tests.support.engines import preforked
from tests.support.engines.tiny_models import revealing_weights, save_revealing, token_of
from tests.support.engines.vllm_engines import EXTENSION, greedy, judge, start_llm
from tests.support.engines.vllm_servers import (
    ANSWER_TOKENS,
    API_KEY,
    BACKEND_FLAGS,
    WAIT_S,
    Server,
    following,
    question,
)
from tests.support.ports import free_port
from tests.support.waiting import error_of

BAD = 3
"""Version that the probe refuses."""


PROMPTS = [list(range(5, 12)), list(range(40, 44))]
"""Tokens that no version answers with, so all good versions find them equally likely."""


def run(directory: Path, *arguments: str) -> None:
    if arguments == ("prompts",):
        judge_by_prompts(directory)
    elif arguments:
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
        other = start_follower(directory, server, "other")
        time.sleep(2.0)
        assert server.answer() == tokens_of(2)
        sender.send(revealing_weights(4))
        sender.wait_applied(4, receivers="other", timeout_s=WAIT_S)
        assert server.answer() == tokens_of(4)
        other.kill()
        other.wait(WAIT_S)
        weights = revealing_weights(5)
        weights["lm_head.weight"].fill_(float("nan"))
        start_follower(directory, server, "prompter")
        sender.wait_applied(4, receivers="prompter", timeout_s=WAIT_S)
        sender.send(weights)
        with pytest.raises(dbuffer.ReceiverFailedError, match=r"5 .* was refused by prompter"):
            sender.wait_applied(5, receivers="prompter", timeout_s=WAIT_S)
        until("it has gone back", lambda: server.answer() == tokens_of(4), WAIT_S, 0.05)
    server.kill()


def judge_by_prompts(directory: Path) -> None:
    """Publish to a canary that an engine's configuration names: an ``LLM``, and then servers."""
    checkpoint, store = save_revealing(0, directory), directory / "store"
    with dbuffer.WeightSender(store, keep=4) as sender:
        sender.send(revealing_weights(1))
        # The logits are 0 for these tokens, and 8 for the one that a version answers with.
        canary = {"prompts": PROMPTS, "min_mean_logprob": -13.0}
        settings = {"store": str(store), "engine_id": "llm", "canary": canary}
        llm = start_llm(checkpoint, additional_config={"dbuffer": settings})
        # The engine has loaded the version, and nothing has judged it yet.
        assert DoubleBuffer(store).receiver("llm").state == "on_trial"
        with follow(llm) as follower:
            expected = follower._engine.prompt_logprobs(PROMPTS)
            assert len(expected) == sum(map(len, PROMPTS)) - len(PROMPTS)
            assert follower.sync() is None
            sender.wait_applied(1, receivers="llm", timeout_s=WAIT_S)
            sender.send(unlikely_weights(2))
            refusal = error_of(follower.sync)
            assert "refused by llm: the mean log-probability of its prompts' 9" in str(refusal)
            assert set(greedy(llm)[0]) == {token_of(1)}
        flags = ["--api-key", API_KEY, *BACKEND_FLAGS]
        flags += following(store, engine_id="canary", canary=canary)
        server = Server(checkpoint, directory / "server.log", *flags, port=free_port())
        server.wait_ready()
        sender.wait_applied(1, receivers="canary", timeout_s=WAIT_S)
        seen = VllmServer(server.url, api_key=API_KEY).prompt_logprobs(PROMPTS)
        assert seen == pytest.approx(expected, abs=1e-3)
        weights = revealing_weights(3)
        weights["lm_head.weight"].fill_(float("nan"))
        for bad, told in ((unlikely_weights(3), "must be at least -13"), (weights, "is nan")):
            refused = sender.send(bad).version
            with pytest.raises(dbuffer.ReceiverFailedError, match=told):
                sender.wait_applied(refused, receivers="canary", timeout_s=WAIT_S)
            until("it has gone back", lambda: server.answer() == tokens_of(1), WAIT_S, 0.05)
        sender.send(revealing_weights(5))
        sender.wait_applied(5, receivers="canary", timeout_s=WAIT_S)
        assert server.answer() == tokens_of(5)
        server.kill()


def unlikely_weights(version: int) -> dict[str, Any]:
    weights = revealing_weights(version)
    weights["lm_head.weight"] *= 10
    return weights


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

    canary: Any = {
        "canary": probe,
        "prompter": {"prompts": PROMPTS, "min_mean_logprob": -13.0},
    }.get(engine_id)
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
