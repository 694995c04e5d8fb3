"""Requests and responses of a vLLM server that follows: admission by version, and versions told.

* A response to which the engine contributed has the headers ``X-Weight-Version``,
  ``X-Weight-Run`` and ``X-Weight-Metadata``: of the weights of its first token.
* With ``X-Weight-Versions: true`` in the request, each choice has ``weight_versions`` too: spans of
  its tokens, under the names that vLLM and SGLang give them. In a stream, in the choice's last
  chunk.
* With an :class:`Admission` in its headers, a request is answered by such weights, or by 409.
* ``POST /update_weight_version`` is refused by 400: the follower alone tells the weights.
* ``GET /ready`` answers 200 if a request with such a query would be admitted, else 503.

Responses without choices (:data:`WITHOUT_CHOICES`) have the headers, and no spans. They cannot tell
that a switch ended a request in the middle: in a stream that is an error, else the 409.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Self

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dbuffer.engine.weight_label import WeightLabel
from dbuffer.errors import EngineEndedError, OptionError
from dbuffer.integrations.vllm.admission import (
    SPANS_HEADER,
    Admission,
    Refusal,
    flag_of,
    given_once,
    weight_headers,
)
from dbuffer.integrations.vllm.core_labels import STOP_REASON
from dbuffer.integrations.vllm.exchanges import CURRENT, Exchange, Outlook, with_fields

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
"""Routes that generate, and answer without choices. Some begin a stream before the engine does."""
RETRY_AFTER_S = 1
"""``Retry-After`` of a refusal that may be over by then: trainers publish every few seconds."""
_CUT_SHORT = "ended by a switch to weights that the request does not take"
_MAX_HEADER_CHARS = 4096
"""Longest metadata in a header; servers and proxies take 8 KiB for all of them."""
_BAD_REQUEST, _CONFLICT, _OK, _UNAVAILABLE = 400, 409, 200, 503


async def serve(app: ASGIApp, outlook: Outlook, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve one HTTP request of a server whose engine follows a store."""
    # A server's --root-path is a part of the path.
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    try:
        if path == "/ready":
            query = given_once(QueryParams(scope["query_string"]).multi_items())
            admission = Admission.parse_query(query) or Admission()
            ready = await _unless_disconnected(receive, _readiness(outlook, admission))
            if ready is not None:
                await ready(scope, receive, send)
            return
        exchange = _exchange_for(path, weight_headers(Headers(scope=scope).items()))
    except OptionError as error:
        await _error(_BAD_REQUEST, "BadRequestError", str(error))(scope, receive, send)
        return
    CURRENT.set(exchange)  # of this task alone, which serves no other request
    response = _Response(exchange, send)
    try:
        await app(scope, receive, response.send)
    except Exception:
        if response.has_begun or not exchange.is_refused:
            raise
    if exchange.is_refused and not response.has_begun:
        await (await _refusal(exchange, outlook))(scope, receive, send)


def _exchange_for(path: str, headers: Mapping[str, str]) -> Exchange:
    """Return the exchange of a request.

    Raises:
        OptionError: a header is invalid, or its route does not take it.
    """
    wants_spans = flag_of(SPANS_HEADER, headers.get(SPANS_HEADER.lower()))
    has_choices = path not in WITHOUT_CHOICES
    if wants_spans and not has_choices:
        raise OptionError(
            f"{SPANS_HEADER} is for routes whose responses have choices, and {path} has none: its "
            "responses tell the weights of their first token, in headers"
        )
    return Exchange(Admission.parse(headers), wants_spans, has_choices)


async def _refusal(exchange: Exchange, outlook: Outlook) -> JSONResponse:
    """Return the response to a request that is invalid, or that the engine has ended."""
    if exchange.error is not None:
        return _error(_BAD_REQUEST, "BadRequestError", str(exchange.error))
    assert exchange.admission is not None  # noqa: S101 - else the engine ends none
    try:
        labels = await outlook.labels()
    except EngineEndedError as error:
        return _error(_UNAVAILABLE, "EngineEndedError", str(error))
    refusal = exchange.admission.refusal_by(labels)
    return _refused(refusal or Refusal("another version when it came", False), labels)


async def _unless_disconnected(
    receive: Receive, work: Coroutine[Any, Any, JSONResponse]
) -> JSONResponse | None:
    """Do some work; stop it and return None if the client leaves."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.create_task(work), asyncio.create_task(watch())
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        watching.cancel()


class _Response:
    """Sends a response on, with its headers and fields about weights.

    It keeps the response's start back until there is a body of the engine's: then the engine has
    begun, or refused.
    """

    def __init__(self, exchange: Exchange, send: Send) -> None:
        self._exchange = exchange
        self._send = send
        self.has_begun = False
        self._is_over = False
        self._start: Message | None = None
        """The start, while it is kept back."""
        self._held: list[Message] = []
        """Messages from before the engine has begun, or about choices that it has refused while it
        may refuse the others."""
        self._body: _Body | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self.has_begun and self._exchange.is_cut_in_silence:
            await self._cut_short()
            return
        self._held.append(message)
        if self._start is not None and (self._exchange.is_refused or self._awaits_engine(message)):
            return
        held, self._held = self._held, []
        for one in held:
            await self._pass_on(one)

    async def _cut_short(self) -> None:
        """End the stream with an error, in place of its route's words that it is complete."""
        if not self._is_over:
            self._is_over = True
            error = {"type": STOP_REASON, "message": _CUT_SHORT}
            # As OpenAI's clients read errors, and as Anthropic's do.
            event = {"type": "error", "code": STOP_REASON, "message": _CUT_SHORT, "error": error}
            body = b"event: error\n" + _DATA + _encoded(event) + _EVENT_END
            await self._send({"type": "http.response.body", "body": body})

    def _awaits_engine(self, message: Message) -> bool:
        """Whether this is a part of a stream that has begun before the engine."""
        has_nothing = self._exchange.admitted is None and self._exchange.num_tokens == 0
        is_last = not message.get("more_body", False)
        return has_nothing and not self._exchange.has_choices and not is_last

    async def _pass_on(self, message: Message) -> None:
        start = self._start
        if start is not None and self._body is None and self._exchange.tells_spans:
            self._body = _Body.begun_by(start, self._exchange)
        is_last = not message.get("more_body", False)
        if self._body is not None:
            body = self._body.rewrite(message.get("body", b""), is_last=is_last)
            if body is None:
                return
            message = {**message, "body": body}
        if start is not None:
            self._start = None
            headers = MutableHeaders(raw=list(start.get("headers", ())))
            if self._body is not None:
                del headers["content-length"]
                if is_last:
                    headers["content-length"] = str(len(message["body"]))
            headers.update(_headers_of(self._exchange.admitted))
            self.has_begun = True
            await self._send({**start, "headers": headers.raw})
        await self._send(message)


class _Body:
    """Adds fields about weights to the choices of a body: of JSON once it is whole, or of events.

    A stream has them in the chunk of each choice that ends it.
    """

    def __init__(self, exchange: Exchange, *, is_stream: bool) -> None:
        self._exchange = exchange
        self._is_stream = is_stream
        self._rest = b""

    @classmethod
    def begun_by(cls, start: Message, exchange: Exchange) -> Self | None:
        """Make one for a response that starts so, or return None if it has no choices."""
        kind = Headers(raw=list(start.get("headers", ()))).get("content-type", "")
        is_stream = kind.startswith("text/event-stream")
        if start["status"] != _OK or not (is_stream or kind.startswith("application/json")):
            return None
        return cls(exchange, is_stream=is_stream)

    def rewrite(self, part: bytes, *, is_last: bool) -> bytes | None:
        """Return a part of the body with the fields, or None if nothing can be sent yet."""
        self._rest += part
        if self._is_stream:
            *events, self._rest = self._rest.split(_EVENT_END)
            told = [self._told(event) + _EVENT_END for event in events]
            return b"".join([*told, *([self._rest] if is_last else [])])
        if not is_last:
            return None
        return _encoded(with_fields(json.loads(self._rest), self._exchange, is_chunk=False))

    def _told(self, event: bytes) -> bytes:
        if not event.startswith(_DATA + b"{"):
            return event  # as the last one, [DONE]
        chunk = json.loads(event.removeprefix(_DATA))
        return _DATA + _encoded(with_fields(chunk, self._exchange, is_chunk=True))


_EVENT_END = b"\n\n"
_DATA = b"data: "


def _headers_of(label: WeightLabel | None) -> dict[str, str]:
    """Return the headers about weights; none if nothing was generated."""
    if label is None:
        return {}
    metadata = json.dumps(label.metadata) if label.metadata else ""
    values = {
        "x-weight-version": label.version,
        "x-weight-run": label.run,
        "x-weight-metadata": metadata if len(metadata) <= _MAX_HEADER_CHARS else None,
    }
    return {name: value for name, value in values.items() if value}


async def _readiness(outlook: Outlook, admission: Admission) -> JSONResponse:
    try:
        refusal = await outlook.refusal(admission)
        labels = await outlook.labels()
    except EngineEndedError as error:
        refusal, labels = Refusal(str(error), is_final=False), []
    body = {
        "ready": refusal is None,
        "reason": None if refusal is None else refusal.reason,
        "replicas": [label.as_json() for label in labels],
    }
    return JSONResponse(body, _OK if refusal is None else _UNAVAILABLE)


def _refused(refusal: Refusal, labels: Sequence[WeightLabel]) -> JSONResponse:
    waits = {} if refusal.is_final else {"retry-after": str(RETRY_AFTER_S)}
    ahead = ", and it does not go back" if refusal.is_final else ""
    message = f"this engine has {refusal.reason}{ahead}"
    oldest = min(labels, key=lambda label: label.number or 0)
    headers = waits | _headers_of(oldest)
    return _error(_CONFLICT, "WeightVersionError", message, headers, weights=oldest.as_json())


def _error(
    status: int, kind: str, message: str, headers: Mapping[str, str] | None = None, **more: Any
) -> JSONResponse:
    """Make an answer about an error, in the form that OpenAI's clients read."""
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error, **more}, status, headers)


def _encoded(values: Any) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode()
