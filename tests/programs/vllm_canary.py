"""Prompts in an engine's configuration judge a canary's versions from the start.

`vllm_server.py` has a canary that another process follows, and that a probe judges.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dbuffer
from dbuffer.integrations.vllm import follow
from dbuffer.integrations.vllm.vllm_engine import VllmServer
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing.waiting import until
from tests.support.engines.tiny_models import revealing_weights, save_revealing, token_of
from tests.support.engines.vllm_engines import greedy, judge, start_llm
from tests.support.engines.vllm_servers import (
    API_KEY,
    BACKEND_FLAGS,
    CANARY_PROMPTS,
    WAIT_S,
    Server,
    tokens_of,
)
from tests.support.waiting import error_of


def run(directory: Path) -> None:
    """Publish to a canary that an engine's configuration names: an ``LLM``, and then a server."""
    checkpoint, store = save_revealing(0, directory), directory / "store"
    with dbuffer.WeightSender(store, keep=4) as sender:
        sender.send(revealing_weights(1))
        # The logits are 0 for these tokens, and 8 for the one that a version answers with.
        canary = {"prompts": CANARY_PROMPTS, "min_mean_logprob": -13.0}
        settings: dict[str, Any] = {"store": str(store), "engine_id": "llm", "canary": canary}
        llm = start_llm(checkpoint, additional_config={"dbuffer": settings})
        # The engine has loaded the version, and nothing has judged it yet.
        assert DoubleBuffer(store).receiver("llm").state == "on_trial"
        with follow(llm) as follower:
            expected = follower._engine.prompt_logprobs(CANARY_PROMPTS)
            assert len(expected) == sum(map(len, CANARY_PROMPTS)) - len(CANARY_PROMPTS)
            assert follower.sync() is None
            sender.wait_applied(1, receivers="llm", timeout_s=WAIT_S)
            sender.send(unlikely_weights(2))
            refusal = error_of(follower.sync)
            assert "refused by llm: the mean log-probability of its prompts' 9" in str(refusal)
            assert set(greedy(llm)[0]) == {token_of(1)}
        settings |= {"engine_id": "canary"}
        server = Server(checkpoint, directory, "--api-key", API_KEY, *BACKEND_FLAGS, **settings)
        server.wait_ready()
        sender.wait_applied(1, receivers="canary", timeout_s=WAIT_S)
        seen = VllmServer(server.url, api_key=API_KEY).prompt_logprobs(CANARY_PROMPTS)
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


if __name__ == "__main__":
    judge(run)
