"""`Exchange`: one HTTP request to a vLLM server, and the weights that its answer comes from.

The middleware makes an exchange its own for the time of a request; the engine's front end, below
all routes, waits for the weights that the request takes, and tells the exchange about each output.
So no route of vLLM has to know, and nothing waits that was not authenticated.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from dbuffer.engine.weight_label import WeightLabel
from dbuffer.errors import EngineEndedError, OptionError
from dbuffer.integrations.vllm.admission import Admission, Refusal
from dbuffer.integrations.vllm.config import BACKEND, replicas_of
from dbuffer.integrations.vllm.core_labels import ADMITTED, LABEL, STOP_REASON, extra_args_with
from dbuffer.integrations.vllm.vllm_engine import ask_replica
from dbuffer.runtime.timing import TIMING

CURRENT: contextvars.ContextVar[Exchange | None] = contextvars.ContextVar("exchange", default=None)
"""The exchange that the running task serves."""
_ADMISSION_LOOK_S = 0.02
"""Interval at which an API server asks the engine for its version while requests wait for one."""


@dataclass(slots=True)
class Call:
    """One prompt of an exchange, as the engine has it."""

    num_choices: int
    spans: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Fields about the weights of each choice that is complete, by its index."""


@dataclass(slots=True)
class Exchange:
    """Knowledge of the weights behind one response, as outputs come."""

    admission: Admission | None = None
    wants_spans: bool = False
    has_choices: bool = True
    """Whether the response has choices, which tell spans, and that the engine ended one."""
    arrived_at: float = field(default_factory=time.monotonic)
    admitted: WeightLabel | None = None
    """Label of the weights that the response begins with, or None if nothing was generated."""
    calls: list[Call] = field(default_factory=list)
    num_tokens: int = 0
    is_ended: bool = False
    """Whether the engine ended it because of the weights."""
    calls_are_prompts: bool = True
    """Whether each call of the engine is a prompt, in order, and not a step of a beam search."""
    error: OptionError | None = None
    """Error in the request that its route could not see."""

    @property
    def is_refused(self) -> bool:
        """Whether it is invalid, or the engine ended it and nothing in a response would tell."""
        has_nothing = self.is_ended and self.num_tokens == 0
        return self.error is not None or has_nothing or self.is_cut_in_silence

    @property
    def is_cut_in_silence(self) -> bool:
        """Whether the engine ended it, and its route would tell the response as complete."""
        return self.is_ended and not self.has_choices

    def refuse(self, message: str) -> OptionError:
        """Let the answer be this error, whatever the route makes of it."""
        self.error = OptionError(message)
        return self.error

    @property
    def tells_spans(self) -> bool:
        """Whether the response is to have fields about its choices' weights."""
        return self.wants_spans and bool(self.calls)

    def note_choices(self, num_choices: int) -> None:
        """Note the number of a response's choices, which a beam search has for each beam."""
        # One of a single token calls the engine as prompts do.
        self.calls_are_prompts &= num_choices == sum(call.num_choices for call in self.calls)

    def fields_of(self, index: int) -> dict[str, Any]:
        """Return the fields about the weights of a response's choice.

        Choices are numbered through all prompts.
        """
        for call in self.calls if self.calls_are_prompts else ():
            if index < call.num_choices:
                return call.spans.get(index, _UNKNOWN)
            index -= call.num_choices
        return _UNKNOWN


_UNKNOWN = {"weight_versions": None}
"""Fields of a choice of which the engine does not tell the spans."""


class Outlook:
    """The labels of an engine's cores, for requests that wait for weights."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self._labels: list[WeightLabel] = []
        self._looked_at = 0.0

    async def labels(self) -> list[WeightLabel]:
        """Ask the engine's cores; return the label of each.

        Raises:
            EngineEndedError: the engine has ended: vLLM never answers a call that was in flight.
        """
        self._require_alive()
        replicas = replicas_of(self._engine.vllm_config)
        if len(replicas) == 1:
            calls = [self._engine.engine_core.call_utility_async(LABEL)]
        else:
            calls = [ask_replica(self._engine, one, LABEL) for one in replicas]
        answers = asyncio.gather(*calls)
        try:
            while not (await asyncio.wait([answers], timeout=TIMING.alive_check_s))[0]:
                self._require_alive()
        finally:
            answers.cancel()
        return [WeightLabel.decode(text) for text in answers.result()]

    def _require_alive(self) -> None:
        if self._engine.errored:
            raise EngineEndedError("the engine has ended")

    async def refusal(
        self, admission: Admission, arrived_at: float | None = None
    ) -> Refusal | None:
        """Wait for weights that a request takes; return the reason that there are none, or None.

        Args:
            admission: its requirements.
            arrived_at: start of its wait. Default: now.

        Raises:
            EngineEndedError: the engine has ended, by itself or with its server.
        """
        # An older answer would refuse a request that was sent because a switch is done.
        not_before = time.monotonic() if arrived_at is None else arrived_at
        deadline = not_before + admission.wait_s
        while True:
            refusal = admission.refusal_by(await self._labels_since(not_before))
            left_s = deadline - time.monotonic()
            if refusal is None or refusal.is_final or left_s <= 0:
                return refusal
            await asyncio.sleep(min(_ADMISSION_LOOK_S, left_s))
            # Any number of requests that wait ask once in this time, but for the last look of each.
            now = time.monotonic()
            not_before = now if now >= deadline else now - _ADMISSION_LOOK_S

    async def _labels_since(self, not_before: float) -> list[WeightLabel]:
        """Return an answer to a question that was asked at this time or later; ask if need be."""
        async with self._lock:
            if self._looked_at < not_before:
                looked_at = time.monotonic()
                self._labels = await self.labels()
                self._looked_at = looked_at
            return self._labels


def observe(engine: Any, outlook: Outlook) -> None:
    """Let an ``AsyncLLM`` tell the exchange of each request about its outputs.

    It takes its weight version from no request.
    """
    generate, encode = engine.generate, engine.encode

    def generate_observed(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        exchange = CURRENT.get()
        if exchange is None:
            return generate(prompt, sampling_params, *args, **kwargs)
        if BACKEND in (sampling_params.extra_args or {}):
            raise exchange.refuse(f"{BACKEND!r} in vllm_xargs: use the headers X-Weight-…")
        call = Call(sampling_params.n)
        exchange.calls_are_prompts &= exchange.num_tokens == 0
        exchange.calls.append(call)
        if exchange.admission is not None:
            sampling_params = sampling_params.clone()
            sampling_params.extra_args = extra_args_with(
                sampling_params.extra_args, exchange.admission
            )
        outputs = _once_admitted(
            exchange, outlook, generate(prompt, sampling_params, *args, **kwargs)
        )
        if _has_spans():
            return _with_spans(exchange, call, outputs)
        return _between_labels(exchange, call, outputs, outlook.labels)

    def encode_observed(*args: Any, **kwargs: Any) -> Any:
        exchange = CURRENT.get()
        if exchange is not None and (exchange.admission is not None or exchange.wants_spans):
            raise exchange.refuse(
                "X-Weight-… headers are for routes that generate tokens; an answer without tokens "
                "does not tell its weights"
            )
        return encode(*args, **kwargs)

    set_version = engine.update_weight_version

    async def set_version_observed(new_version: str) -> None:
        if (exchange := CURRENT.get()) is not None:
            raise exchange.refuse("this server follows a store, and its follower sets the version")
        await set_version(new_version)

    engine.generate, engine.encode = generate_observed, encode_observed
    engine.update_weight_version = set_version_observed


@functools.cache
def _has_spans() -> bool:
    """Whether this vLLM's outputs tell which tokens came from which version."""
    from vllm.v1.engine.output_processor import RequestState

    return hasattr(getattr(RequestState, "_new_completion_output", None), ADMITTED)


async def _once_admitted(
    exchange: Exchange, outlook: Outlook, outputs: AsyncGenerator[Any, None]
) -> AsyncGenerator[Any, None]:
    """Pass outputs on, once there are weights that the request takes, or it waited for them.

    If there are none then, the core ends the request; if the engine has ended, vLLM says so.
    """
    async with contextlib.aclosing(outputs):
        if exchange.admission is not None and exchange.num_tokens == 0:
            with contextlib.suppress(EngineEndedError):
                await outlook.refusal(exchange.admission, exchange.arrived_at)
        async for output in outputs:
            for choice in output.outputs:
                exchange.num_tokens += len(choice.token_ids)
                exchange.is_ended |= choice.stop_reason == STOP_REASON
            yield output


async def _with_spans(exchange: Exchange, call: Call, outputs: AsyncGenerator[Any, None]) -> Any:
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            for choice in output.outputs:
                if exchange.admitted is None and (encoded := getattr(choice, ADMITTED, None)):
                    exchange.admitted = WeightLabel.decode(encoded)
                if exchange.wants_spans and choice.weight_versions is not None:
                    spans = [
                        WeightLabel(span.version, span.run, span.metadata).as_json()
                        | {"start": span.start, "end": span.end}
                        for span in choice.weight_versions
                    ]
                    call.spans[choice.index] = {"weight_versions": spans}
            yield output


async def _between_labels(
    exchange: Exchange,
    call: Call,
    outputs: AsyncGenerator[Any, None],
    labels: Callable[[], Coroutine[Any, Any, list[WeightLabel]]],
) -> Any:
    """Pass outputs on, and note the label before the first and after the last (before 0.32)."""
    before = asyncio.create_task(labels())
    try:
        await asyncio.sleep(0)  # the question goes into the core's queue, and then the request
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                exchange.admitted = exchange.admitted or _common(await before)
                for choice in output.outputs:
                    if exchange.wants_spans and choice.finish_reason is not None:
                        start, end = exchange.admitted, _common(await labels())
                        call.spans[choice.index] = {
                            "weight_version_start": start and start.version,
                            "weight_version_end": end and end.version,
                        }
                yield output
    finally:
        before.cancel()


def _common(labels: list[WeightLabel]) -> WeightLabel | None:
    """Return the label of all replicas, or None if they differ: any of them may answer."""
    first, *others = labels
    return first if all(label == first for label in others) else None


def with_fields(body: Any, exchange: Exchange, *, is_chunk: bool) -> Any:
    """Return a response, or a chunk of a stream, with the fields about each choice's weights."""
    choices = body.get("choices") if isinstance(body, Mapping) else None
    if not isinstance(choices, list):
        return body
    if not is_chunk:
        exchange.note_choices(len(choices))
    told = [
        choice | exchange.fields_of(choice.get("index", 0))
        if not is_chunk or choice.get("finish_reason") is not None
        else choice
        for choice in choices
    ]
    return {**body, "choices": told}
