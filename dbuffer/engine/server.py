"""`EngineServer`: calls to an inference server over HTTP. Failed calls raise dbuffer's errors."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from typing import Any

from dbuffer.engine.contract import Engine
from dbuffer.errors import (
    EngineUnreachableError,
    EngineUpdateError,
    OptionError,
    UnsupportedError,
)
from dbuffer.runtime import options as checks
from dbuffer.runtime.extras import needed_for

_UNAVAILABLE = (502, 503, 504)
"""Status codes of a proxy that cannot reach its server, and of a server that is starting."""

_CONNECT_S = 5.0
_CALL_S = 30.0
_LONG_S = 600.0
"""Time-out of calls that may wait for unfinished requests, or load weights."""
_RESUME_TRIES = 5
_RESUME_RETRY_S = 0.2


class EngineServer(Engine):
    """Inference server that is driven over HTTP.

    Raises:
        OptionError: ``url`` is not a server's address, or the server refuses the API key.
        EngineUnreachableError: (a ``ConnectionError``) the server does not answer.
        UnsupportedError: the server was started without the HTTP route of the call.
        EngineUpdateError: the server answered with an error.
    """

    is_server = True
    IS_WHAT: str
    WITHOUT_ROUTE: str

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        with needed_for("following a server (`follow` with a URL)"):
            import httpx
        self._httpx = httpx
        address = httpx.URL(checks.server_url("url", url))
        self.url = str(address.copy_with(userinfo=b""))
        """Address, without a password, for messages."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._long = httpx.Timeout(_LONG_S, connect=_CONNECT_S)
        self._client = httpx.Client(
            base_url=address, headers=headers, timeout=httpx.Timeout(_CALL_S, connect=_CONNECT_S)
        )

    def close(self) -> None:
        self._client.close()

    def _name(self) -> str:
        """Make the engine's name from its address, so that a restart does not change the name."""
        url = self._httpx.URL(self.url)
        # Engines on several hosts may follow the same store, each at "localhost".
        is_loopback = url.host in ("localhost", "::1") or url.host.startswith("127.")
        host = socket.gethostname() if is_loopback else url.host
        return f"{re.sub('[^A-Za-z0-9.-]', '-', host):.64}-{url.port or url.scheme}"

    def _get(self, path: str, key: str, **params: Any) -> Any:
        body = self._body(self.request("GET", path, params=params))
        if key not in body:
            raise EngineUnreachableError(f"{self.url}{path} answers without {key!r}: {body!r:.200}")
        return body[key]

    def _response(self, method: str, path: str, **options: Any) -> Any:
        try:
            return self._client.request(method, path, **options)
        except self._httpx.HTTPError as error:
            raise EngineUnreachableError(
                f"{self.url} does not answer: {type(error).__name__} {error}"
            ) from error

    def request(self, method: str, path: str, **options: Any) -> Any:
        """Send a request, with options for ``httpx``; return its response, or raise."""
        response = self._response(method, path, **options)
        if response.status_code in _UNAVAILABLE:
            raise EngineUnreachableError(
                f"{self.url} answers {path} with {response.status_code}: {response.text:.200}"
            )
        if response.status_code in (401, 403):
            raise OptionError(
                f"{self.url} refuses {path} with this API key ({response.status_code}): give the "
                f"key that the server was started with{self._advice_on_url}"
            )
        if response.status_code in (404, 405):
            raise UnsupportedError(
                f"{self.url} has no {path}: {self.WITHOUT_ROUTE}{self._advice_on_url}"
            )
        if not response.is_success:
            reason = f"{response.status_code} {response.text:.2000}"
            raise EngineUpdateError(f"{method} {self.url}{path}: {reason}")
        return response

    @property
    def _advice_on_url(self) -> str:
        return "; give its address without /v1" if self.url.endswith("/v1") else ""

    def _request_resume(self, path: str, **options: Any) -> None:
        """Resume the server, with retries: a lost answer must not leave it paused."""
        for _ in range(_RESUME_TRIES - 1):
            try:
                self.request("POST", path, **options)
            except (EngineUnreachableError, EngineUpdateError):
                time.sleep(_RESUME_RETRY_S)
            else:
                return
        self.request("POST", path, **options)

    def _body(self, response: Any) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            body = response.json()
            if isinstance(body, dict):
                return body
        raise EngineUnreachableError(
            f"{response.url} does not answer as {self.IS_WHAT} does: {response.text:.200}"
        )
