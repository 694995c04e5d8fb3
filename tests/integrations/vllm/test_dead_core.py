"""An ``LLM`` with its engine in another process, which sleeps, loads by itself, and dies.

vLLM lets calls wait that are under way when the process dies.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from tests.support.engines.tiny_models import revealing_weights, save_revealing, token_of
from tests.support.engines.vllm_engines import (
    NEEDS_VLLM,
    TIMEOUT_S,
    engine_arguments,
    environment,
    greedy,
    leave,
    observe,
)
from tests.support.waiting import error_of

SOON_S = 20.0
LEVELS = (1, 2)
"""Of sleep: after the second the weights are gone."""
LAST = "set_weight_version"

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(TIMEOUT_S + 10)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    env = environment(processes=True, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    return observe(__file__, tmp_path_factory.mktemp("core"), env=env)


def test_sleeping_engine_is_busy(seen: dict[str, Any]) -> None:
    for level in LEVELS:
        assert seen[f"asleep {level}"].startswith("EngineBusyError: the engine's weights are asle")


def test_weights_come_back_from_light_sleep_with_their_version(seen: dict[str, Any]) -> None:
    assert seen["label in sleep 1"] == "1"
    assert seen["woken 1"] == {"switched": None, "label": "1", "tokens": [token_of(1)]}


@pytest.mark.parametrize("loss", ["woken 2", "reload_weights", "load_weights"])
def test_lost_weights_are_brought_again(seen: dict[str, Any], loss: str) -> None:
    assert seen[loss] == {"switched": 1, "label": "1", "tokens": [token_of(1)]}


def test_lost_weights_have_no_version(seen: dict[str, Any]) -> None:
    assert seen["label in sleep 2"] == "unknown"
    assert seen["label after reload_weights"] == "unknown"
    assert seen["tokens after reload_weights"] == [token_of(0)]


def test_calls_under_way_when_the_engine_dies_end_with_it(seen: dict[str, Any]) -> None:
    assert seen["errors"] == dict.fromkeys(seen["calls"], "EngineEndedError")
    assert seen["ended_s"] < SOON_S
    assert seen["sync"] == "EngineEndedError: the engine is dead: its process has ended"
    # An exception on one rank would shift the answers of the others.
    [answer] = seen["bad request"]
    assert answer["error"] == "OptionError"
    assert "no request of this version of dbuffer" in answer["problem"]


# From here on, the program that runs in the subprocess.


def call_and_kill(directory: Path) -> dict[str, Any]:
    import vllm

    from dbuffer.integrations.vllm import follow

    llm = vllm.LLM(**engine_arguments(save_revealing(0, directory), how="extension"))
    store = directory / "store"
    with dbuffer.WeightSender(store) as sender, follow(llm, store) as follower:
        sender.send(revealing_weights(1))
        follower.sync()
        seen = lose_weights(llm, follower)
        seen |= kill_in_calls(llm)
        seen["sync"] = error_of(follower.sync)
    return seen


def lose_weights(llm: Any, follower: Any) -> dict[str, Any]:
    """Let it sleep and wake, and load past dbuffer; sync after each."""
    from dbuffer.integrations.engine.engine_options import UpdateRequest
    from dbuffer.integrations.engine.messages import RankRequest
    from dbuffer.integrations.vllm.vllm_engine import OfflineVllm

    seen: dict[str, Any] = {}
    engine = OfflineVllm(llm)

    def sync() -> dict[str, Any]:
        switch = follower.sync()
        label = llm.llm_engine.get_weight_version()
        return {"switched": switch and switch.version, "label": label, "tokens": tokens(llm)}

    for level in LEVELS:
        llm.sleep(level)
        seen[f"asleep {level}"] = error_of(
            lambda: engine.do(RankRequest("update", update=UpdateRequest()))
        )
        seen[f"label in sleep {level}"] = llm.llm_engine.get_weight_version()
        llm.wake_up()
        seen[f"woken {level}"] = sync()
    llm.collective_rpc("reload_weights")
    seen["label after reload_weights"] = llm.llm_engine.get_weight_version()
    seen["tokens after reload_weights"] = tokens(llm)
    seen["reload_weights"] = sync()
    llm.collective_rpc(load_alone)
    seen["load_weights"] = sync()
    return seen


def load_alone(worker: Any) -> None:
    """Load as a worker extension of a user's may."""
    import torch

    model = worker.get_model()
    model.load_weights([("model.norm.weight", torch.zeros(model.config.hidden_size))])


def tokens(llm: Any) -> list[int]:
    return sorted({token for answer in greedy(llm) for token in answer})


def kill_in_calls(llm: Any) -> dict[str, Any]:
    from dbuffer.integrations.engine.messages import RankRequest
    from dbuffer.integrations.vllm.vllm_engine import OfflineVllm

    engine = OfflineVllm(llm)
    [core] = llm.llm_engine.engine_core.resources.engine_manager.processes
    calls: dict[str, Callable[[], Any]] = {
        "check": lambda: engine.call(RankRequest("check")),
        "pause": lambda: engine.pause("keep"),
        "weight_version": engine.weight_version,
        "set_weight_version": lambda: engine.set_weight_version("3"),
    }
    bad = llm.collective_rpc("dbuffer_call", args=({"call": "begin"},))
    client = llm.llm_engine.engine_core
    os.kill(core.pid, signal.SIGSTOP)  # it answers none of them
    errors: dict[str, str] = {}

    def call(name: str) -> None:
        try:
            calls[name]()
        except Exception as error:
            errors[name] = type(error).__name__

    started = time.monotonic()
    for name in calls:  # one by one: each has to end by itself
        client.utility_results.clear()
        thread = threading.Thread(target=call, args=(name,), daemon=True)
        thread.start()
        while not client.utility_results:
            time.sleep(0.05)
        if name == LAST:
            os.kill(core.pid, signal.SIGKILL)
        else:
            client.resources.engine_dead = True  # what vLLM notes when the process has ended
        thread.join(SOON_S)
        client.resources.engine_dead = name == LAST
    return {
        "bad request": bad,
        "calls": list(calls),
        "errors": errors,
        "ended_s": time.monotonic() - started,
    }


if __name__ == "__main__":
    place = Path(sys.argv[1])
    leave(place, call_and_kill(place))  # vLLM's own clean-up waits for the dead
