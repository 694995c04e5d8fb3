"""The real S3 server in tests, and a proxy before it that makes requests fail.

A test with the fixture ``bucket_url`` finds the server in its environment, as its children do::

    store = obstore.store.from_url(bucket_url)

With the fixture ``proxy``, clients that are made afterwards go through a :class:`FaultyProxy`::

    proxy.inject(lose_answer, nth=2, when=lambda request: request.method == "PUT")

A fault is a function of an :class:`Exchange`; a test can write its own, for instance one that kills
a child.
"""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.object_server import RunningServer, variables
from tests.support.waiting import Gate


def set_environment(endpoint: str, patch: pytest.MonkeyPatch) -> None:
    """Let clients of S3 in this process, and in its children, use the endpoint."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        patch.delenv(name)
    for name, value in variables(endpoint).items():
        patch.setenv(name, value)


@dataclass
class Request:
    """A request that came to the proxy."""

    method: str
    path: str
    """With the bucket, without the query."""
    query: str
    status: int | None = None
    """Status that the client was sent; ``None`` before, or if it was sent none."""
    received_bytes: int = 0
    """Size of the body that the client sent."""
    sent_bytes: int = 0
    """Size of the body that the client was sent."""
    is_faulty: bool = False


@dataclass(frozen=True)
class Answer:
    """Answer of the server."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


class Exchange:
    """A request in the proxy, and what a fault can do with it."""

    def __init__(self, proxy: FaultyProxy, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        self.request = Request(handler.command, parts.path, parts.query)
        self.headers = handler.headers
        self._proxy = proxy
        self._handler = handler
        self._body: bytes | None = None
        self.bytes_per_s = math.inf

    def body(self) -> bytes:
        """Read the body that the client sends."""
        if self._body is None:
            headers = self._handler.headers
            assert "Transfer-Encoding" not in headers, "the proxy reads no chunks"
            self._body = self._read(int(headers.get("Content-Length", 0)))
        return self._body

    def forward(self) -> Answer:
        """Send the request to the server as it is, and return its answer."""
        body = self.body()
        with contextlib.closing(self._connect()) as connection:
            connection.endheaders(body)
            answer = connection.getresponse()
            return Answer(answer.status, answer.getheaders(), answer.read())

    def forward_half(self) -> None:
        """Send the server the first half of the request's body, and no more."""
        body = self.body()
        with contextlib.closing(self._connect()) as connection:
            connection.endheaders(body[: len(body) // 2])

    def answer(self, answer: Answer, *, cut: bool = False) -> None:
        """Send an answer to the client, or half of it."""
        has_body = self.request.method != "HEAD" and answer.status not in (204, 304)
        headers = [
            (name, value)
            for name, value in answer.headers
            if name.lower() not in ("connection", "transfer-encoding")
            and not (has_body and name.lower() == "content-length")
        ]
        headers.append(("Connection", "close"))
        if has_body:
            headers.append(("Content-Length", str(len(answer.body))))
        lines = [f"HTTP/1.1 {answer.status} {http.client.responses.get(answer.status, '-')}"]
        lines += [f"{name}: {value}" for name, value in headers]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        body = answer.body if has_body else b""
        if cut:
            head, body = (head, body[: len(body) // 2]) if body else (head[: len(head) // 2], b"")
        # Recorded first: the client that has the answer may look for it.
        self.request.status = None if cut else answer.status
        self.request.sent_bytes = len(body)
        self._write(head + body)

    def _connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self._proxy.server.port)
        request, path = self.request, self._handler.path
        connection.putrequest(request.method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in self._handler.headers.items():  # the signature is for this Host
            connection.putheader(name, value)
        return connection

    def _read(self, size: int) -> bytes:
        body = bytearray()
        for start in range(0, size, _PIECE_BYTES):
            time.sleep(_PIECE_BYTES / self.bytes_per_s)
            body += self._handler.rfile.read(min(_PIECE_BYTES, size - start))
        self.request.received_bytes = len(body)
        if len(body) < size:
            raise ConnectionResetError("the client closed the connection amid a body")
        return bytes(body)

    def _write(self, raw: bytes) -> None:
        for start in range(0, len(raw), _PIECE_BYTES):
            time.sleep(_PIECE_BYTES / self.bytes_per_s)
            self._handler.wfile.write(raw[start : start + _PIECE_BYTES])


_PIECE_BYTES = 16 * 1024

Fault = Callable[[Exchange], object]


def drop(exchange: Exchange) -> None:
    """Close the connection; the server never sees the request."""
    exchange.body()


def lose_answer(exchange: Exchange) -> None:
    """Close the connection after the server has done what was requested."""
    exchange.forward()


def truncate_upload(exchange: Exchange) -> None:
    """Close both connections amid the body of the request."""
    exchange.forward_half()


def truncate_answer(exchange: Exchange) -> None:
    """Close the connection amid the answer."""
    exchange.answer(exchange.forward(), cut=True)


def corrupt_answer(exchange: Exchange) -> None:
    """Flip a bit in the middle of the answer's body, if it has one."""
    answer = exchange.forward()
    body = bytearray(answer.body)
    if body:
        body[len(body) // 2] ^= 1
    exchange.answer(replace(answer, body=bytes(body)))


def repeat(exchange: Exchange) -> None:
    """Send the request to the server twice; the client gets the second answer."""
    exchange.forward()
    exchange.answer(exchange.forward())


def status(code: int) -> Fault:
    """Answer with an error; the server never sees the request."""
    text = f"<Error><Code>{http.client.responses[code]}</Code><Message>test</Message></Error>"

    def fault(exchange: Exchange) -> None:
        exchange.body()
        exchange.answer(Answer(code, [("Content-Type", "application/xml")], text.encode()))

    return fault


def slow(bytes_per_s: float) -> Fault:
    """Pass the bodies of request and answer on at this speed."""

    def fault(exchange: Exchange) -> None:
        exchange.bytes_per_s = bytes_per_s
        exchange.answer(exchange.forward())

    return fault


class Hold(Gate):
    """Fault that keeps a request from the server until the test lets it go on."""

    def __call__(self, exchange: Exchange) -> None:
        exchange.body()
        self.hold_up()
        exchange.answer(exchange.forward())


FAULTS: dict[str, Fault] = {
    "drop": drop,
    "lose_answer": lose_answer,
    "truncate_upload": truncate_upload,
    "truncate_answer": truncate_answer,
    "corrupt_answer": corrupt_answer,
    "repeat": repeat,
    "503": status(503),
}
"""Faults that need no argument, by name."""


def _is_any(request: Request) -> bool:
    return True


@dataclass
class _Rule:
    fault: Fault
    when: Callable[[Request], bool]
    passing: int
    striking: int

    def strikes(self, request: Request) -> bool:
        if self.striking == 0 or not self.when(request):
            return False
        if self.passing:
            self.passing -= 1
            return False
        self.striking -= 1
        return True


class FaultyProxy(socketserver.ThreadingTCPServer):
    """HTTP proxy before an S3 server, in threads; it records and spoils requests.

    Each connection is for one request.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, server: RunningServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server = server
        self._lock = threading.Lock()
        self._requests: list[Request] = []
        self._rules: list[_Rule] = []
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Endpoint of S3 for clients whose requests are to be spoiled."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def requests(self) -> list[Request]:
        """All requests so far, in the order of their coming."""
        with self._lock:
            return list(self._requests)

    def inject(
        self,
        fault: Fault,
        *,
        nth: int = 1,
        when: Callable[[Request], bool] = _is_any,
        times: int = 1,
    ) -> None:
        """Spoil the nth request from now on that matches, and the next ``times - 1``."""
        with self._lock:
            self._rules.append(_Rule(fault, when, nth - 1, times))

    def heal(self) -> None:
        """Let all requests pass from now on."""
        with self._lock:
            self._rules.clear()

    def close(self) -> None:
        """Refuse further requests."""
        self.shutdown()
        self._thread.join()
        self.server_close()
        if self._errors:
            raise ExceptionGroup("the proxy failed", self._errors)  # type: ignore[type-var]

    def pass_on(self, exchange: Exchange) -> None:
        """Record a request, and forward or spoil it."""
        with self._lock:
            self._requests.append(exchange.request)
            rule = next((rule for rule in self._rules if rule.strikes(exchange.request)), None)
        if rule is None:
            exchange.answer(exchange.forward())
        else:
            exchange.request.is_faulty = True
            rule.fault(exchange)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        assert error is not None
        # A client that ended, or a server: part of many a test.
        if not isinstance(error, ConnectionError | http.client.HTTPException):
            self._errors.append(error)


class _Handler(BaseHTTPRequestHandler):
    disable_nagle_algorithm = True
    server: FaultyProxy

    def _pass_on(self) -> None:
        self.server.pass_on(Exchange(self.server, self))

    do_DELETE = do_GET = do_HEAD = do_POST = do_PUT = _pass_on  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Print nothing; the proxy records requests."""
