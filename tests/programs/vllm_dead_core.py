"""Program of `test_dead_core.py`, which says what it shows."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dbuffer
from dbuffer.integrations.engine.version_id import WeightLabel
from dbuffer.integrations.vllm import follow
from tests.support.engines.tiny_models import revealing_weights, save_revealing
from tests.support.engines.vllm_engines import greedy, leave, start_llm
from tests.support.waiting import error_of, until

SOON_S = 20.0
LEVELS = (1, 2)
"""Of sleep: after the second the weights are gone."""
LAST = "set_weight_version"


def call_and_kill(directory: Path) -> dict[str, Any]:
    llm = start_llm(save_revealing(0, directory), how="extension")
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
        "set_weight_version": lambda: engine.set_weight_version(WeightLabel("3")),
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
        until(f"{name} is under way", lambda: client.utility_results, SOON_S)
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
