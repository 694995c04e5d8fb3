"""Requests and responses of a vLLM server that follows: admission by version, and versions told.

* A response to which the engine contributed has the headers ``X-Weight-Version``,
  ``X-Weight-History`` and ``X-Weight-Metadata``: of the weights of its first token.
* With ``X-Weight-Versions: true`` in the request, each choice has ``weight_versions`` too: spans of
  its tokens, under the names that vLLM and SGLang give them. In a stream, in the choice's last
  chunk.
* With an :class:`Admission` in its headers, a request is answered by such weights, or by 409.
* ``GET /ready`` answers 200 if a request with such a query would be admitted, else 503.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dbuffer.errors import OptionError
from dbuffer.integrations.engine.version_id import WeightLabel
from dbuffer.integrations.vllm.admission import (
    SPANS_HEADER,
    Admission,
    Refusal,
    flag_of,
    require_known,
)
from dbuffer.integrations.vllm.exchanges import CURRENT, Exchange, Outlook, with_fields

RETRY_AFTER_S = 1
"""``Retry-After`` of a refusal that may be over by then: trainers publish every few seconds."""
_MAX_HEADER_CHARS = 4096
"""Longest metadata in a header; servers and proxies take 8 KiB for all of them."""
_BAD_REQUEST, _CONFLICT, _OK, _UNAVAILABLE = 400, 409, 200, 503


async def serve(app: ASGIApp, outlook: Outlook, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve one HTTP request of a server whose engine follows a store."""
    headers = dict(Headers(scope=scope).items())
    try:
        # A server's --root-path is a part of the path.
        if scope["path"].removeprefix(scope.get("root_path", "")) == "/ready":
            query = dict(QueryParams(scope["query_string"]).items())
            ready = await _readiness(outlook, Admission.parse_query(query) or Admission())
            await ready(scope, receive, send)
            return
        require_known(headers)
        admission = Admission.parse(headers)
        wants_spans = flag_of(SPANS_HEADER, headers.get(SPANS_HEADER.lower()))
    except OptionError as error:
        await _error(_BAD_REQUEST, "BadRequestError", str(error))(scope, receive, send)
        return
    if admission is not None and (refusal := await outlook.refusal(admission)) is not None:
        await _refused(refusal, await outlook.labels())(scope, receive, send)
        return
    exchange = Exchange(admission, wants_spans)
    CURRENT.set(exchange)  # of this task alone, which serves no other request
    response = _Response(exchange, send)
    await app(scope, receive, response.send)
    if exchange.error is not None:
        answer = _error(_BAD_REQUEST, "BadRequestError", str(exchange.error))
        await answer(scope, receive, send)
    elif exchange.is_refused:
        assert admission is not None  # noqa: S101 - else the engine ends none
        labels = await outlook.labels()
        refusal = admission.refusal_by(labels) or Refusal("another version when it came", False)
        await _refused(refusal, labels)(scope, receive, send)


class _Response:
    """Sends a response on, with its headers and fields about weights.

    It keeps the response's start back until there is a body: then the engine has begun, or refused.
    """

    def __init__(self, exchange: Exchange, send: Send) -> None:
        self._exchange = exchange
        self._send = send
        self._start: Message | None = None
        """The start, while it is kept back."""
        self._held: list[Message] = []
        """Messages about choices that the engine has refused, while it may refuse the others."""
        self._rewrite: _Rewrite | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._held.append(message)
        if self._start is not None and self._exchange.is_refused:
            return
        held, self._held = self._held, []
        for one in held:
            await self._pass_on(one)

    async def _pass_on(self, message: Message) -> None:
        start = self._start
        if start is not None and self._rewrite is None and self._exchange.tells_spans:
            self._rewrite = _rewrite_of(start)
        if self._rewrite is not None:
            is_last = not message.get("more_body", False)
            body = self._rewrite(message.get("body", b""), self._exchange, is_last)
            if body is None:
                return
            message = {**message, "body": body}
        if start is not None:
            self._start = None
            headers = MutableHeaders(raw=list(start.get("headers", ())))
            if self._rewrite is not None:
                del headers["content-length"]
                if not message.get("more_body", False):
                    headers["content-length"] = str(len(message["body"]))
            headers.update(_headers_of(self._exchange.admitted))
            await self._send({**start, "headers": headers.raw})
        await self._send(message)


_Rewrite = Callable[[bytes, Exchange, bool], bytes | None]
"""Rewrites a part of a body, the last of which is marked; None: nothing can be sent yet."""


def _rewrite_of(start: Message) -> _Rewrite | None:
    """Return what adds the fields to a body of this type; None: it has no choices."""
    kind = Headers(raw=list(start.get("headers", ()))).get("content-type", "")
    if start["status"] != _OK:
        return None
    if kind.startswith("application/json"):
        return _JsonBody()
    return _EventStream() if kind.startswith("text/event-stream") else None


class _JsonBody:
    """Adds fields to a body of JSON once it is whole."""

    def __init__(self) -> None:
        self._body = b""

    def __call__(self, part: bytes, exchange: Exchange, is_last: bool) -> bytes | None:
        self._body += part
        if not is_last:
            return None
        return _encoded(with_fields(json.loads(self._body), exchange, is_chunk=False))


class _EventStream:
    """Adds fields to the chunk of each choice that ends it."""

    def __init__(self) -> None:
        self._rest = b""

    def __call__(self, part: bytes, exchange: Exchange, is_last: bool) -> bytes | None:
        *events, rest = (self._rest + part).split(_EVENT_END)
        told = [_with_fields_in_event(event, exchange) + _EVENT_END for event in events]
        self._rest = b"" if is_last else rest
        return b"".join([*told, *([rest] if is_last else [])])


_EVENT_END = b"\n\n"
_DATA = b"data: "


def _with_fields_in_event(event: bytes, exchange: Exchange) -> bytes:
    if not event.startswith(_DATA + b"{"):
        return event  # as the last one, [DONE]
    chunk = json.loads(event.removeprefix(_DATA))
    return _DATA + _encoded(with_fields(chunk, exchange, is_chunk=True))


def _headers_of(label: WeightLabel | None) -> dict[str, str]:
    """Return the headers about weights; none if nothing was generated."""
    if label is None:
        return {}
    metadata = json.dumps(label.metadata) if label.metadata else ""
    values = {
        "x-weight-version": label.version,
        "x-weight-history": label.history,
        "x-weight-metadata": metadata if len(metadata) <= _MAX_HEADER_CHARS else None,
    }
    return {name: value for name, value in values.items() if value}


async def _readiness(outlook: Outlook, admission: Admission) -> JSONResponse:
    refusal = await outlook.refusal(admission)
    labels = await outlook.labels()
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
