"""An ``LLM`` whose engine process dies while it is called: vLLM itself lets the calls wait."""

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
from vllm_engines import NEEDS_VLLM, TIMEOUT_S, engine_arguments, environment, leave, observe

SOON_S = 20.0
LAST = "set_weight_version"

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(TIMEOUT_S + 10)]


def test_calls_under_way_when_the_engine_dies_end_with_it(tmp_path: Path) -> None:
    env = environment(processes=True)
    seen = observe(__file__, tmp_path, env=env)
    assert seen["errors"] == dict.fromkeys(seen["calls"], "EngineEndedError")
    assert seen["ended_s"] < SOON_S
    # An exception on one rank would shift the answers of the others.
    [answer] = seen["bad request"]
    assert answer["outcome"] == "invalid"
    assert "no request of this version of dbuffer" in answer["problem"]


# From here on, the program that runs in the subprocess.


def call_and_kill(directory: Path) -> dict[str, Any]:
    import vllm
    from tiny_models import save_revealing

    from dbuffer.integrations.vllm.engines import OfflineVllm

    llm = vllm.LLM(**engine_arguments(save_revealing(0, directory), how="extension"))
    engine = OfflineVllm(llm)
    [core] = llm.llm_engine.engine_core.resources.engine_manager.processes
    calls: dict[str, Callable[[], Any]] = {
        "check": lambda: engine.misfits([]),
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
        client.resources.engine_dead = False
    return {
        "bad request": bad,
        "calls": list(calls),
        "errors": errors,
        "ended_s": time.monotonic() - started,
    }


if __name__ == "__main__":
    place = Path(sys.argv[1])
    leave(place, call_and_kill(place))  # vLLM's own clean-up waits for the dead
