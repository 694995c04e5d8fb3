"""An ``LLM`` with its engine in another process, which sleeps, loads by itself, and dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from dbuffer.engine.contract import RankRequest, WeightLabel
from dbuffer.engine.engine_options import UpdateRequest
from dbuffer.integrations.vllm import follow
from dbuffer.integrations.vllm.vllm_engine import OfflineVllm
from dbuffer.testing.waiting import until
from tests.support.engines.tiny_models import revealing_weights, save_revealing, token_of
from tests.support.engines.vllm_engines import greedy, judge, start_llm

SOON_S = 20.0


def run(directory: Path) -> None:
    llm = start_llm(save_revealing(0, directory), how="extension")
    store = directory / "store"
    with dbuffer.WeightSender(store) as sender, follow(llm, store) as follower:
        sender.send(revealing_weights(1))
        follower.sync()
        lose_weights(llm, follower)
        kill_in_calls(llm)
        with pytest.raises(dbuffer.EngineEndedError, match="the engine is dead: its process has"):
            follower.sync()


def lose_weights(llm: Any, follower: Any) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    engine = OfflineVllm(llm)

    def sync() -> int | None:
        switch = follower.sync()
        assert label_of(llm) == "1"
        assert tokens(llm) == [token_of(1)]
        return switch and switch.version

    for level, is_lost in ((1, False), (2, True)):
        llm.sleep(level)
        with pytest.raises(dbuffer.EngineBusyError, match="the engine's weights are asleep"):
            engine.do(RankRequest("update", update=UpdateRequest()))
        assert label_of(llm) == ("unknown" if is_lost else "1")
        llm.wake_up()
        assert sync() == (1 if is_lost else None)
    llm.collective_rpc("reload_weights")
    assert label_of(llm) == "unknown"
    assert tokens(llm) == [token_of(0)]
    assert sync() == 1
    if hasattr(Worker, "reset_weights"):  # zeroes parameters, and calls no loader
        llm.collective_rpc("reset_weights")
        assert label_of(llm) == "unknown"
        assert sync() == 1
    llm.collective_rpc(load_alone)
    assert sync() == 1


def label_of(llm: Any) -> str:
    return str(llm.llm_engine.get_weight_version())


def load_alone(worker: Any) -> None:
    import torch

    model = worker.get_model()
    model.load_weights([("model.norm.weight", torch.zeros(model.config.hidden_size))])


def tokens(llm: Any) -> list[int]:
    return sorted({token for answer in greedy(llm) for token in answer})


def kill_in_calls(llm: Any) -> None:
    """End calls that are under way when the engine dies; vLLM lets them wait."""
    # An exception on one rank would shift the answers of the others.
    [bad] = llm.collective_rpc("dbuffer_call", args=({"call": "begin"},))
    assert bad["error"] == "OptionError"
    assert "no request of this version of dbuffer" in bad["problem"]
    engine = OfflineVllm(llm)
    client = llm.llm_engine.engine_core
    [core] = client.resources.engine_manager.processes
    calls: list[Callable[[], Any]] = [
        lambda: engine.call(RankRequest("check")),
        lambda: engine.pause("keep"),
        engine.weight_version,
        lambda: engine.set_weight_version(WeightLabel("3")),
    ]
    os.kill(core.pid, signal.SIGSTOP)  # it answers none of them
    started = time.monotonic()
    pool = ThreadPoolExecutor()  # whose thread may wait for ever
    for call in calls:  # one by one: each has to end by itself
        client.utility_results.clear()
        calling = pool.submit(call)
        until("it is under way", lambda: client.utility_results, SOON_S)
        is_last = call is calls[-1]
        if is_last:
            os.kill(core.pid, signal.SIGKILL)
        else:
            client.resources.engine_dead = True  # what vLLM notes when the process has ended
        with pytest.raises(dbuffer.EngineEndedError):
            calling.result(SOON_S)
        client.resources.engine_dead = is_last
    assert time.monotonic() - started < SOON_S


if __name__ == "__main__":
    judge(run)
