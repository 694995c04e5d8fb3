"""Responses of a vLLM server that follows a store, with the weight versions that generated them.

For each request, the middleware creates an `Exchange` in the request's asyncio task. The engine's
front end records the versions of each output in the exchange.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dbuffer.engine.contract import WeightLabel
from dbuffer.errors import OptionError
from dbuffer.integrations.vllm.core import ADMITTED
from dbuffer.integrations.vllm.requests import (
    HEADERS,
    MIN_VERSION,
    SPANS,
    Outlook,
    error_answer,
    headers_of,
    readiness,
    refused,
    requirement_in,
    values_by_name,
)
from dbuffer.runtime import options as checks

CURRENT: contextvars.ContextVar[Exchange | None] = contextvars.ContextVar("exchange", default=None)
WITHOUT_CHOICES = frozenset(
    {
        "/v1/responses",
        "/v1/messages",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/systemone",
        "/cohere/v2/chat",
        "/generative_scoring",
    }
)
"""Routes whose responses have no ``choices``. Some of them start to stream before the engine has
generated any output."""
_EVENTS = "text/event-stream"
_WITH_FIELDS = (_EVENTS, "application/json")
_EVENT_END = b"\n\n"
_DATA = b"data: "
_OK, _BAD_REQUEST, _NOT_ALLOWED = 200, 400, 405


@dataclass(slots=True)
class Exchange:
    """Record of the weight versions that generated one response, updated with each output."""

    wants_spans: bool = False
    has_choices: bool = True
    admitted: WeightLabel | None = None
    calls: list[tuple[int, dict[int, list[Any]]]] = field(default_factory=list)
    """Calls of the engine: number of choices, and the spans of each complete choice by index."""
    is_search: bool = False
    """Whether each of :attr:`calls` is a step of a beam search. Otherwise, each is a prompt."""

    def noting(
        self, num_choices: int, outputs: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[Any, None]:
        spans: dict[int, list[Any]] = {}
        self.is_search |= self.admitted is not None
        self.calls.append((num_choices, spans))
        return self._noting(spans, outputs)

    async def _noting(
        self, spans: dict[int, list[Any]], outputs: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[Any, None]:
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                for choice in output.outputs:
                    if self.admitted is None and (encoded := getattr(choice, ADMITTED, None)):
                        self.admitted = WeightLabel.decode(encoded)
                    if self.wants_spans and choice.weight_versions is not None:
                        spans[choice.index] = [_as_json(span) for span in choice.weight_versions]
                yield output

    def with_fields(self, body: Any, *, is_chunk: bool) -> Any:
        """Return a response, or a chunk of a streamed one, with version spans in its choices."""
        choices = body.get("choices") if isinstance(body, Mapping) else None
        if not isinstance(choices, list):
            return body
        if not is_chunk:
            # A beam search for one token calls the engine once, like a plain request. Its response
            # has more choices than the engine was called for.
            self.is_search |= len(choices) != sum(num_choices for num_choices, _ in self.calls)
        # In a whole response, count the choices: in vLLM's batch of chats, all choices of one chat
        # have the same index.
        with_fields = [
            choice
            | {"weight_versions": self._spans_of(choice.get("index", 0) if is_chunk else number)}
            if not is_chunk or choice.get("finish_reason") is not None
            else choice
            for number, choice in enumerate(choices)
        ]
        return {**body, "choices": with_fields}

    def _spans_of(self, index: int) -> list[Any] | None:
        for num_choices, spans in () if self.is_search else self.calls:
            if index < num_choices:
                return spans.get(index)
            index -= num_choices
        return None


def _as_json(span: Any) -> dict[str, Any]:
    label = WeightLabel(span.version, span.run, span.metadata)
    return label.as_json() | {"start": span.start, "end": span.end}


def observe(engine: Any) -> None:
    """Make an ``AsyncLLM`` record the versions of its outputs in the `Exchange` of each request.

    Also let the ``AsyncLLM`` refuse users' requests that set its weight version.
    """
    generate = engine.generate

    def generate_observed(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = generate(prompt, sampling_params, *args, **kwargs)
        exchange = CURRENT.get()
        return outputs if exchange is None else exchange.noting(sampling_params.n, outputs)

    async def refuse_version(new_version: str) -> None:  # noqa: ARG001
        # vLLM answers a ValueError with status 400.
        raise OptionError("this server follows a store, and its follower sets the version")

    engine.generate = generate_observed
    engine.update_weight_version = refuse_version


def has_spans() -> bool:
    """Whether this release of vLLM records which version generated each token."""
    from vllm.v1.engine.output_processor import RequestState

    return hasattr(RequestState, "track_weight_version")


async def serve(app: ASGIApp, outlook: Outlook, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve one HTTP request of a server whose engine follows a store."""
    # Remove the server's --root-path.
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    received: list[Message] = []
    try:
        headers = values_by_name(Headers(scope=scope).items(), HEADERS, prefix="x-weight-")
        exchange = Exchange(_wants_spans(path, headers), path not in WITHOUT_CHOICES)
        if outlook.adapters and MIN_VERSION in headers:
            outlook = outlook.of(await _model_in(receive, received))
        answering = asyncio.create_task(_answer_to(path, scope, headers, outlook))
        if await _leaves_before(answering, receive, received):
            return
        answer = answering.result()
    except OptionError as error:
        answer = error_answer(_BAD_REQUEST, "BadRequestError", str(error))
    if answer is not None:
        await answer(scope, receive, send)
        return

    async def receive_again() -> Message:
        return received.pop(0) if received else await receive()

    CURRENT.set(exchange)  # this asyncio task serves no other request
    await app(scope, receive_again, _Response(exchange, send).send)


async def _model_in(receive: Receive, received: list[Message]) -> str | None:
    """Return the model that a request's JSON names, or None."""
    while not received or received[-1].get("more_body", False):
        received.append(await receive())
    try:
        fields = json.loads(b"".join(message.get("body", b"") for message in received))
    except ValueError:  # vLLM refuses a request with invalid JSON
        return None
    model = fields.get("model") if isinstance(fields, dict) else None
    return model if isinstance(model, str) else None


async def _leaves_before(
    answering: asyncio.Task[Any], receive: Receive, received: list[Message]
) -> bool:
    """Wait until a task ends. If the client disconnects first, cancel the task and return True.

    Parts of the request's body that arrive while waiting are appended to ``received``.
    """

    async def watch() -> None:
        while not (received and received[-1]["type"] == "http.disconnect"):
            received.append(await receive())

    await asyncio.sleep(0)  # most answers are ready after one turn of the event loop
    if answering.done():
        return False
    watching = asyncio.create_task(watch())
    try:
        await asyncio.wait([answering, watching], return_when=asyncio.FIRST_COMPLETED)
        return not answering.done()
    finally:
        watching.cancel()
        answering.cancel()


async def _answer_to(
    path: str, scope: Scope, headers: Mapping[str, str], outlook: Outlook
) -> JSONResponse | None:
    if path == "/ready":
        names = "min_version", "wait_s", "model"
        values = values_by_name(QueryParams(scope["query_string"]).multi_items(), names)
        return await readiness(outlook.of(values.get("model")), requirement_in(values, *names[:2]))
    if path == "/weights/done":
        if scope["method"] != "POST":
            return error_answer(_NOT_ALLOWED, "MethodNotAllowed", f"{path} takes POST")
        return JSONResponse({"version": outlook.done()})
    requirement = requirement_in(headers)
    return None if requirement[0] is None else await refused(outlook, requirement)


def _wants_spans(path: str, headers: Mapping[str, str]) -> bool:
    text = headers.get(SPANS, "false")
    if text not in ("true", "false"):
        checks.refuse(SPANS, text, "true or false")
    if text == "true" and path in WITHOUT_CHOICES:
        raise OptionError(
            f"{SPANS} is for routes whose responses have choices. Responses of {path} have none; "
            "their headers name the weights of the first token"
        )
    if text == "true" and not has_spans():
        raise OptionError(f"{SPANS} needs vLLM 0.32 or later")
    return text == "true"


class _Response:
    """Sends a response to the client, with headers and JSON fields about the weight version.

    The start of the response waits for the engine's first output, because the headers name the
    version of this output. Fields are added once the JSON of the response is complete. In a stream,
    fields are added to the event that ends a choice.
    """

    def __init__(self, exchange: Exchange, send: Send) -> None:
        self._exchange = exchange
        self._send = send
        self._start: Message | None = None
        self._waiting: list[Message] = []
        self._content_type = ""
        self._incomplete = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        exchange, is_last = self._exchange, not message.get("more_body", False)
        self._waiting.append(message)
        is_begun = exchange.admitted is not None or exchange.has_choices or is_last
        if self._start is not None and not is_begun:
            return  # the stream began before the engine's first output
        messages, self._waiting = self._waiting, []
        for message in messages:
            await self._pass_on(message)

    async def _pass_on(self, message: Message) -> None:
        start, exchange = self._start, self._exchange
        is_last = not message.get("more_body", False)
        headers = MutableHeaders(raw=list(start.get("headers", ())) if start else [])
        if start is not None and start["status"] == _OK and exchange.wants_spans and exchange.calls:
            self._content_type = headers.get("content-type", "")
        if self._content_type.startswith(_WITH_FIELDS):
            body = self._rewrite(message.get("body", b""), is_last=is_last)
            if body is None:
                return
            message = {**message, "body": body}
            del headers["content-length"]
            if is_last:
                headers["content-length"] = str(len(body))
        if start is not None:
            self._start = None
            headers.update(headers_of(exchange.admitted) if exchange.admitted else {})
            await self._send({**start, "headers": headers.raw})
        await self._send(message)

    def _rewrite(self, part: bytes, *, is_last: bool) -> bytes | None:
        """Return the events or the JSON that ``part`` completes, with fields added.

        Return None if the response is JSON that is still incomplete.
        """
        self._incomplete += part
        if self._content_type.startswith(_EVENTS):
            *events, self._incomplete = self._incomplete.split(_EVENT_END)
            complete = b"".join(self._with_fields(event) + _EVENT_END for event in events)
            return complete + self._incomplete if is_last else complete
        if not is_last:
            return None
        return _encoded(self._exchange.with_fields(json.loads(self._incomplete), is_chunk=False))

    def _with_fields(self, event: bytes) -> bytes:
        if not event.startswith(_DATA + b"{"):
            return event  # not JSON: the last event of a stream, [DONE]
        chunk = json.loads(event.removeprefix(_DATA))
        return _DATA + _encoded(self._exchange.with_fields(chunk, is_chunk=True))


def _encoded(values: Any) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode()
