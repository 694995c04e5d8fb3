"""`Engine` classes for vLLM: for an ``LLM``, an ``AsyncLLM``, one of its replicas, or a server.

All calls block. A call of an ``AsyncLLM`` runs in the event loop of the ``AsyncLLM``, so another
thread must make the call. A server is called over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
import secrets
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import InvalidStateError, wait
from typing import Any, TypeVar

from dbuffer.engine.contract import PAUSE_MODES, Engine, EngineFacts, PauseMode, WeightLabel
from dbuffer.engine.server import EngineServer
from dbuffer.errors import (
    EngineBusyError,
    EngineEndedError,
    EngineUnreachableError,
    EngineUpdateError,
    UnsupportedError,
)
from dbuffer.integrations.vllm.config import (
    CALL,
    LOAD_ADAPTER,
    facts_here,
    facts_of_server,
    is_launched,
    shared_caches,
)
from dbuffer.integrations.vllm.core import HOLD, NOT_RESET, RELEASE, refusal_in
from dbuffer.runtime.timing import TIMING

ResultT = TypeVar("ResultT")

_PROMPTS_S = 600.0
"""Longest wait for the answers to a canary's prompts."""

IN_ITS_EVENT_LOOP = (
    "this call waits for the engine's event loop, so it must not be made in that loop: make it in "
    "another thread, for instance with await asyncio.to_thread(...)"
)


class OfflineVllm(Engine):
    """``Engine`` of an ``LLM``. An ``LLM`` computes only during its calls, and needs no pause."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._engine = llm.llm_engine
        self.scores_prompts = self._engine.vllm_config.model_config.runner_type != "pooling"

    def facts(self) -> EngineFacts:
        return facts_here(self._engine.vllm_config)

    def send(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        return self._call(lambda: self._llm.collective_rpc(CALL, args=(request,)))

    def _call(self, call: Callable[[], ResultT]) -> ResultT:
        client = self._engine.engine_core
        pending = getattr(client, "utility_results", None)
        if pending is None:  # the engine core is in this process
            return call()
        self.require_alive()
        with _ending_calls(client.resources, pending):
            try:
                return call()
            except Exception as error:
                if client.resources.engine_dead:
                    raise EngineEndedError(f"the engine is dead: {error}") from error
                raise

    def require_alive(self) -> None:
        resources = getattr(self._engine.engine_core, "resources", None)
        if resources is not None and resources.engine_dead:
            raise EngineEndedError("the engine is dead: its process has ended")

    def pause(self, mode: PauseMode) -> None:  # noqa: ARG002
        self._call(self._drop_caches)

    def _drop_caches(self) -> None:
        if self._engine.has_unfinished_requests():
            raise EngineBusyError("the engine is generating: wait for its requests, then sync")
        if not self._llm.reset_prefix_cache(reset_connector=True):
            raise EngineUpdateError(NOT_RESET)
        self._engine.reset_encoder_cache()

    def prompt_logprobs(self, prompts: Sequence[str] | Sequence[list[int]]) -> list[float]:
        parameters = _scoring()
        outputs = self._call(
            lambda: self._llm.generate([*map(_as_input, prompts)], parameters, use_tqdm=False)
        )
        return list(itertools.chain.from_iterable(map(_logprobs_in, outputs)))

    def weight_version(self) -> str:
        return str(self._call(self._engine.get_weight_version))

    def set_weight_version(self, label: WeightLabel) -> None:
        self._call(lambda: self._engine.set_weight_version(label.encode()))


@contextlib.contextmanager
def _ending_calls(resources: Any, pending: dict[Any, Any]) -> Iterator[None]:
    """Make pending calls of an engine fail if its process dies. vLLM would leave them waiting."""
    is_done = threading.Event()

    def watch() -> None:
        while not is_done.wait(TIMING.alive_check_s):
            if resources.engine_dead:
                for future in list(pending.values()):
                    with contextlib.suppress(
                        InvalidStateError
                    ):  # the call was answered in the meantime
                        future.set_exception(EngineEndedError("the engine died in mid-call"))
                return

    watcher = threading.Thread(target=watch, name="dbuffer-engine-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_done.set()
        watcher.join()


class AsyncVllm(Engine):
    """``Engine`` of an ``AsyncLLM``. Do not call it in the thread of the ``AsyncLLM``'s event loop.

    ``replica`` is the index of one data-parallel replica, which is switched without the others.
    Default: all replicas, as one engine.
    """

    has_own_pause = True
    pauses = (*PAUSE_MODES, "in_place")

    def __init__(self, engine: Any, replica: int | None = None) -> None:
        self._engine = engine
        self._loop = self.loop_of(engine)
        self._replica = replica
        self.scores_prompts = replica is None

    @staticmethod
    def loop_of(engine: Any) -> asyncio.AbstractEventLoop:
        """Return the event loop of an ``AsyncLLM``. This function is thread-safe."""
        # The output handler is a task in the event loop. It is None until a coroutine needs it.
        handler = engine.output_handler
        if handler is not None:
            loop: asyncio.AbstractEventLoop = handler.get_loop()
            return loop
        try:
            return asyncio.get_running_loop()
        except RuntimeError:
            raise UnsupportedError(
                "this AsyncLLM runs in no event loop yet: make it, or its follower, in a coroutine"
            ) from None

    def require_alive(self) -> None:
        if self._loop.is_closed():
            raise EngineEndedError("the engine's event loop has ended")
        if self._engine.errored:
            raise EngineEndedError("the engine is dead")

    def is_idle(self) -> bool:
        return not (self._loop.is_running() or self._loop.is_closed() or self._engine.errored)

    def require_pause(self, mode: PauseMode) -> None:
        super().require_pause(mode)
        config = self._engine.vllm_config
        if config.model_config.runner_type == "pooling":
            raise UnsupportedError(
                "a pooling model can follow a store only in an LLM: in an AsyncLLM, an answer that "
                "is computed during a switch would mix two versions"
            )
        if mode == "in_place" and (shared := shared_caches(config)):
            raise UnsupportedError(
                f'pause="in_place" drops no cache, and this engine has {" and ".join(shared)}: '
                "requests after a switch would use cached results of old weights. Choose another "
                "pause"
            )

    def facts(self) -> EngineFacts:
        return facts_here(self._engine.vllm_config, self._replica)

    def send(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self._call("collective_rpc", CALL, None, (request,))
        return answers

    def is_paused(self) -> bool:
        return bool(self._call("is_scheduler_paused"))

    def pause(self, mode: PauseMode) -> None:
        drops_caches = mode != "in_place"
        try:
            refusal = self._call(HOLD, mode if drops_caches else "keep", drops_caches)
        except Exception as error:
            if (refusal := refusal_in(error)) is None:
                raise
        if refusal is not None:
            raise EngineBusyError(refusal)

    def resume(self) -> None:
        self._call(RELEASE)

    def prompt_logprobs(self, prompts: Sequence[str] | Sequence[list[int]]) -> list[float]:
        async def score(prompt: str | list[int]) -> list[float]:
            request_id = f"dbuffer-{secrets.token_hex(8)}"
            async for output in self._engine.generate(_as_input(prompt), _scoring(), request_id):
                last = output
            return _logprobs_in(last)

        async def score_all() -> list[list[float]]:
            try:
                scores = asyncio.gather(*map(score, prompts))
                return await asyncio.wait_for(scores, _PROMPTS_S)
            except TimeoutError as error:
                raise EngineUnreachableError(
                    f"the engine did not answer prompts within {_PROMPTS_S:g} s: is it paused?"
                ) from error

        return list(itertools.chain.from_iterable(self._await(score_all)))

    def weight_version(self) -> str:
        return str(self._call("get_weight_version"))

    def set_weight_version(self, label: WeightLabel) -> None:
        self._call("set_weight_version", label.encode())

    def load_adapter(self, request: Any) -> None:
        """Load the adapter of a ``LoRARequest`` into a LoRA slot of the engine.

        Raises:
            EngineUpdateError: a rank refuses the adapter.
        """
        fields = request.lora_name, request.lora_int_id, request.lora_path
        answers = self._call("collective_rpc", LOAD_ADAPTER, None, fields)
        if refusal := next(filter(None, answers), None):
            raise EngineUpdateError(f"the engine refuses the adapter: {refusal}")

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._await(lambda: ask_core(self._engine, self._replica, method, *arguments))

    def _await(self, call: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Run a coroutine in the engine's event loop; return its result."""
        if asyncio._get_running_loop() is self._loop:  # noqa: SLF001 - None outside of event loops
            raise EngineBusyError(IN_ITS_EVENT_LOOP)
        self.require_alive()
        future = asyncio.run_coroutine_threadsafe(call(), self._loop)
        # If the engine dies, vLLM never answers pending calls.
        while not wait([future], TIMING.alive_check_s).done:
            if self._engine.errored or self._loop.is_closed():
                future.cancel()
                raise EngineEndedError("the engine, or its event loop, has ended during a call")
            if self.is_idle():  # the program is between two calls of `run_until_complete`
                future.cancel()
                raise EngineUnreachableError(
                    "the engine's event loop is not running: let it run, and sync in another "
                    "thread meanwhile, as with await asyncio.to_thread(...)"
                )
        try:
            return future.result()
        except Exception as error:
            if self._engine.errored:
                raise EngineEndedError(f"the engine is dead: {error}") from error
            raise


async def ask_core(engine: Any, replica: int | None, method: str, *arguments: Any) -> Any:
    """Call a method of one replica's engine core in an ``AsyncLLM``; return the core's answer.

    If ``replica`` is None, call all cores, and return the first core's answer.
    """
    if replica is None:
        return await engine.engine_core.call_utility_async(method, *arguments)
    # vLLM's own call to all cores returns only the answer of the first core.
    return await engine.engine_core._call_utility_async(  # noqa: SLF001
        method, *arguments, engine=replica.to_bytes(2, "little")
    )


def _scoring() -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)


def _as_input(prompt: str | list[int]) -> Any:
    return prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}


def _logprobs_in(output: Any) -> list[float]:
    return [_own(position).logprob for position in output.prompt_logprobs if position is not None]


def _own(position: dict[Any, Any]) -> Any:
    """Return the entry of the prompt's own token at a position, which vLLM puts first."""
    return next(iter(position.values()))


class VllmServer(EngineServer):
    """``Engine`` of a vLLM server in development mode (``VLLM_SERVER_DEV_MODE=1``)."""

    IS_WHAT = "vLLM"
    scores_prompts = True
    WITHOUT_ROUTE = (
        "start vLLM with VLLM_SERVER_DEV_MODE=1, or let it follow by itself with --middleware "
        "dbuffer.integrations.vllm.FollowStore"
    )

    def facts(self) -> EngineFacts:
        facts = facts_of_server(self._get("/server_info", "vllm_config", config_format="json"))
        if self._follows_by_itself():
            raise UnsupportedError(
                f"{self.url} follows a store by itself (FollowStore), and an engine has one "
                "follower: close this follower, or start the server without the middleware"
            )
        if facts.configured is not None:  # the workers already follow under this name
            return facts
        return dataclasses.replace(facts, name=f"vllm-{self._name()}")

    def _follows_by_itself(self) -> bool:
        with contextlib.suppress(ValueError, TypeError):
            return "replicas" in self._response("GET", "/ready").json()
        return False

    def send(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        body = {"method": CALL, "kwargs": {"request": request}}
        response = self.request("POST", "/collective_rpc", json=body, timeout=self._long)
        return self._body(response).get("results", []) if response.content else []

    def is_paused(self) -> bool:
        return bool(self._get("/is_paused", "is_paused"))

    def pause(self, mode: PauseMode) -> None:
        params = {"mode": mode, "clear_cache": "false"}
        self.request("POST", "/pause", params=params, timeout=self._long)
        caches = {"reset_running_requests": "true", "reset_external": "true"}
        response = self.request("POST", "/reset_prefix_cache", params=caches)
        if not self._body(response).get("success"):
            raise EngineUpdateError(f"{self.url} could not reset its prefix cache")
        self.request("POST", "/reset_encoder_cache")

    def resume(self) -> None:
        self._request_resume("/resume")

    def prompt_logprobs(self, prompts: Sequence[str] | Sequence[list[int]]) -> list[float]:
        model = self._get("/v1/models", "data")[0]["id"]
        body = {"model": model, "prompt": [*prompts], "max_tokens": 1, "prompt_logprobs": 0}
        answer = self._body(self.request("POST", "/v1/completions", json=body, timeout=self._long))
        positions = itertools.chain.from_iterable(
            choice["prompt_logprobs"] for choice in answer["choices"]
        )
        # JSON has no NaN.
        return [
            math.nan if (logprob := _own(position)["logprob"]) is None else logprob
            for position in positions
            if position is not None
        ]

    def weight_version(self) -> str:
        return str(self._get("/weight_info", "weight_version"))

    def set_weight_version(self, label: WeightLabel) -> None:
        self.request("POST", "/update_weight_version", json={"new_version": label.encode()})


def is_one_of_several(target: Any) -> bool:
    """Whether an object is an ``LLM`` that torchrun started as one rank of an engine."""
    if not hasattr(target, "llm_engine"):
        return False
    parallel = target.llm_engine.vllm_config.parallel_config
    return is_launched(parallel) and parallel.world_size > 1


def is_async(target: Any) -> bool:
    """Whether an object is an ``AsyncLLM``."""
    return hasattr(target, "output_handler") and hasattr(target, "engine_core")


def vllm_engine_of(target: Any, *, api_key: str | None = None) -> Engine:
    """Return the `Engine` of a ``vllm.LLM``, an ``AsyncLLM``, or a server given by its URL."""
    if isinstance(target, str):
        return VllmServer(target, api_key=api_key)
    if is_one_of_several(target):
        raise UnsupportedError(
            "this LLM is one rank of an engine that torchrun started: every rank must call "
            "dbuffer.integrations.vllm.follow with its LLM"
        )
    if hasattr(target, "llm_engine"):
        return OfflineVllm(target)
    if is_async(target):
        return AsyncVllm(target)
    raise UnsupportedError(f"a {type(target).__name__} is not an engine of vLLM")
