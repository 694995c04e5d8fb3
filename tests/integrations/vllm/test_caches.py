"""Each kind of engine drops all that old weights computed in its pause: of tokens, of encoders.

Stand-ins note what vLLM is asked for. `vllm_async.py` shows with real engines that no token comes
from the cache of an older version, and `vllm_caches.py` that none comes through a connector; to
show that of an encoder's outputs, an engine needs an encoder.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from dbuffer import (
    EngineEndedError,
    EngineUnreachableError,
    EngineUpdateError,
    OptionError,
    UnsupportedError,
)
from dbuffer.engine.contract import Engine
from dbuffer.integrations.vllm import core as vllm_core
from dbuffer.integrations.vllm.vllm_engine import (
    AsyncVllm,
    OfflineVllm,
    VllmServer,
)

PREFIX, ENCODER = "reset_prefix_cache", "reset_encoder_cache"


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def note_async(calls: list[str], name: str) -> Callable[..., Any]:
    async def call() -> None:
        calls.append(name)

    return call


def offline(calls: list[str], _: asyncio.AbstractEventLoop) -> Engine:
    def note(name: str, **expected: Any) -> Callable[..., bool]:
        def call(**options: Any) -> bool:
            assert options == expected
            calls.append(name)
            return True

        return call

    engine = SimpleNamespace(
        engine_core=None, vllm_config=config(), has_unfinished_requests=lambda: False
    )
    engine.reset_encoder_cache = note(ENCODER)
    reset = note(PREFIX, reset_connector=True)
    return OfflineVllm(SimpleNamespace(llm_engine=engine, reset_prefix_cache=reset))


def config(**changes: Any) -> SimpleNamespace:
    caches = {"enable_prefix_caching": False, "is_multimodal_model": False}
    caches |= {"runner_type": "generate"} | changes
    return SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=1),
        cache_config=SimpleNamespace(**caches),
        model_config=SimpleNamespace(**caches),
        kv_transfer_config=changes.get("kv_transfer_config"),
    )


def asynchronous(calls: list[str], loop: asyncio.AbstractEventLoop, **changes: Any) -> Engine:
    def asking(method: str, *_: Any) -> Any:
        return note_async(calls, method)()

    engine = SimpleNamespace(
        engine_core=SimpleNamespace(call_utility_async=asking),
        vllm_config=config(**changes),
        errored=False,
        output_handler=SimpleNamespace(get_loop=lambda: loop),
    )
    return AsyncVllm(engine)


def replica(calls: list[str], loop: asyncio.AbstractEventLoop) -> Engine:
    def ask(method: str, *_: Any, engine: bytes) -> Any:
        assert engine == b"\x01\x00"
        return note_async(calls, method)()

    engine = SimpleNamespace(
        engine_core=SimpleNamespace(_call_utility_async=ask),
        vllm_config=config(),
        errored=False,
        output_handler=SimpleNamespace(get_loop=lambda: loop),
    )
    return AsyncVllm(engine, 1)


def server(calls: list[str], _: asyncio.AbstractEventLoop) -> Engine:
    def answer(request: httpx.Request) -> httpx.Response:
        calls.append(request.url.path.removeprefix("/"))
        return httpx.Response(200, json={"success": True})

    made = VllmServer("http://127.0.0.1:8000")
    made._client.close()
    made._client = httpx.Client(base_url=made.url, transport=httpx.MockTransport(answer))
    return made


@pytest.mark.parametrize("make", [offline, server])
def test_a_pause_drops_every_cache(make, loop):
    calls: list[str] = []
    engine = make(calls, loop)
    engine.pause("keep")
    first, *resets = ["pause", *calls] if make is offline else calls
    assert first == "pause", "a cache filled after a reset would stay"
    assert resets == [PREFIX, ENCODER]
    engine.close()


def test_a_call_to_an_event_loop_that_is_not_running_says_so_and_the_next_is_answered(timing):
    timing.alive_check_s = 0.05
    idle = asyncio.new_event_loop()
    engine = asynchronous([], idle)
    with pytest.raises(EngineUnreachableError, match="event loop is not running"):
        engine.pause("keep")
    assert engine.is_idle()
    idle.run_until_complete(asyncio.to_thread(engine.pause, "keep"))
    idle.close()
    with pytest.raises(EngineEndedError):
        engine.pause("keep")


class Core:
    scheduler = SimpleNamespace(set_pause_state=lambda _: None)
    model_executor = SimpleNamespace(is_sleeping=False)

    def resume_scheduler(self) -> None:
        """Go on."""

    def pause_scheduler(self) -> str:
        return "paused"


class HeldCore(Core):
    def __init__(self, paused: Future[None] | None, *, resets: bool = True) -> None:
        self.calls: list[str] = []
        self._paused, self._resets = paused, resets
        self.model_executor = SimpleNamespace(is_sleeping=False, sleeping_tags=())
        self.scheduler = SimpleNamespace(requests={}, num_waiting_for_streaming_input=0)

    def is_scheduler_paused(self) -> bool:
        return False

    def pause_scheduler(self, mode: str = "", clear_cache: bool = True) -> Any:
        assert not clear_cache, "a front end's cache of inputs would be out of step"
        self.calls.append(f"pause {mode}")
        return self._paused

    def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        assert reset_running_requests
        assert reset_connector
        self.calls.append(PREFIX)
        return self._resets

    def reset_encoder_cache(self) -> None:
        self.calls.append(ENCODER)


def test_a_core_drops_every_cache_once_it_is_paused():
    core = HeldCore(None)
    assert vllm_core._hold(core, "keep", True) is None
    assert core.calls == ["pause keep", PREFIX, ENCODER]
    paused: Future[None] = Future()
    core = HeldCore(paused)
    dropped = vllm_core._hold(core, "wait", True)
    assert core.calls == ["pause wait"], "a cache filled after a reset would stay"
    paused.set_result(None)
    assert dropped.result(0) is None
    assert core.calls == ["pause wait", PREFIX, ENCODER]
    core = HeldCore(None)
    assert vllm_core._hold(core, "keep", False) is None
    assert core.calls == ["pause keep"]


@pytest.mark.parametrize("is_at_once", [True, False])
def test_a_cache_that_a_core_cannot_drop_fails_the_pause(is_at_once):
    paused: Future[None] = Future()
    core = HeldCore(None if is_at_once else paused, resets=False)
    with pytest.raises(EngineUpdateError, match="could not reset"):
        dropped = vllm_core._hold(core, "keep", True)
        paused.set_result(None)
        dropped.result(0)
    assert ENCODER not in core.calls


@pytest.mark.parametrize("end", ["dbuffer_release", "resume_scheduler"])
def test_pauses_called_in_a_switch_are_answered_although_one_caller_gave_up(end):
    class Holding(Core):
        is_scheduler_paused, sleep = None, Core.pause_scheduler

    vllm_core.add_pauses(Holding, type("InStep", (Core,), {}))
    core: Any = Holding()
    vllm_core._state_of(core).hold = vllm_core._Hold(other_pause=None)
    results = [core.pause_scheduler() for _ in range(3)]
    results[0].cancel()
    getattr(core, end)()
    assert [result.done() for result in results] == [True] * 3


@pytest.mark.parametrize("make", [asynchronous, replica])
def test_a_pause_in_place_drops_none(make, loop):
    calls: list[str] = []
    engine = make(calls, loop)
    engine.require_pause("in_place")
    engine.pause("in_place")
    assert calls == [vllm_core.HOLD]
    engine.close()


IN_PLACE = UnsupportedError, "in_place"


@pytest.mark.parametrize(
    ("make", "pause", "error", "told"),
    [
        # Answers would mix versions.
        (partial(asynchronous, enable_prefix_caching=True), "in_place", *IN_PLACE),
        (partial(asynchronous, is_multimodal_model=True), "in_place", *IN_PLACE),
        (partial(asynchronous, kv_transfer_config={}), "in_place", *IN_PLACE),
        (partial(asynchronous, runner_type="pooling"), "wait", UnsupportedError, "pooling model"),
        (offline, "in_place", OptionError, "in_place"),
        (server, "in_place", OptionError, "in_place"),
    ],
)
def test_a_pause_that_an_engine_cannot_make_is_refused(make, pause, error, told, loop):
    engine = make([], loop)
    with pytest.raises(error, match=told):
        engine.require_pause(pause)
    engine.close()
