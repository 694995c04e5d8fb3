"""Calls to the inference server in local mode (a single server on this machine).

A server with Atropos' bridge routes is notified of each version. A stock vLLM server is not
notified: it follows the store with the middleware ``FollowStore``.
"""

from __future__ import annotations

import time
from typing import Any

from dbuffer.errors import DBufferError, EngineUnreachableError, UnsupportedError
from dbuffer.integrations.vllm.vllm_engine import VllmServer

_PROBE_S = 2.0
_RETRY_S = 0.25


def notify(server: VllmServer, notification: dict[str, Any], timeout_s: float) -> None:
    """Call a server's Atropos route, if any. Retry up to ``timeout_s`` until the server answers."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            _has_route(server, "POST", "/bridge/notify_update", json=notification)
        except EngineUnreachableError:
            if time.monotonic() + _RETRY_S > deadline:
                raise
        else:
            return
        time.sleep(_RETRY_S)


def is_stock(server: VllmServer) -> bool:
    """Whether a server answers, has vLLM's routes, and does not have Atropos' routes."""
    try:
        has_version = _has_route(server, "GET", "/version", timeout=_PROBE_S)
        return has_version and not _has_route(server, "GET", "/bridge/info", timeout=_PROBE_S)
    except DBufferError:
        return False


def _has_route(server: VllmServer, method: str, path: str, **options: Any) -> bool:
    try:
        server.request(method, path, **options)
    except UnsupportedError:
        return False
    return True
