"""Parts of a vLLM worker's memory that are asleep, by vLLM's calls."""

from __future__ import annotations

from typing import Any

import torch

from dbuffer.engine.contract import WEIGHTS
from dbuffer.engine.endpoint import RankEndpoint
from tests.support.engines.vllm_engines import NEEDS_VLLM

pytestmark = NEEDS_VLLM


class Worker:
    def __init__(self) -> None:
        self.model = torch.nn.Module()

    def get_model(self) -> torch.nn.Module:
        return self.model

    def sleep(self, level: int = 1) -> None: ...

    def wake_up(self, tags: list[str] | None = None) -> None: ...

    def discard(self, tags: tuple[str, ...]) -> None: ...


class Wrapper:
    """As vLLM's class around a worker."""

    def __init__(self) -> None:
        self.worker = Worker()


def test_parts_are_asleep_until_each_was_woken():
    from dbuffer.integrations.vllm.plugin import watch_workers

    watch_workers(Wrapper)
    wrapper: Any = Wrapper()
    state = RankEndpoint.of(wrapper.worker.model).state
    wrapper.sleep(level=1)
    assert (state.asleep, state.must_reload) == ({WEIGHTS, "kv_cache"}, False)
    wrapper.wake_up(tags=[WEIGHTS])
    assert (state.asleep, state.is_asleep) == ({"kv_cache"}, False)
    wrapper.wake_up(tags=["kv_cache"])
    assert state.asleep == set()
    wrapper.discard(("kv_cache",))
    assert (state.asleep, state.must_reload) == ({"kv_cache"}, False)
    wrapper.wake_up()
    assert state.asleep == set()
    wrapper.discard((WEIGHTS,))
    assert (state.is_asleep, state.must_reload) == (True, True)
