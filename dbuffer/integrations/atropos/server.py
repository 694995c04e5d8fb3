"""`BridgeServer`: one inference server, which follows the store.

A server with Atropos' bridge routes is notified of each version. A stock vLLM has the middleware
``FollowStore``, and is not. The store's acknowledgement says when either has switched.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from dbuffer.errors import (
    DBufferError,
    EngineUnreachableError,
    StoreNotFoundError,
    UnsupportedError,
    WaitTimeoutError,
)
from dbuffer.integrations.vllm.vllm_engine import VllmServer
from dbuffer.store.acknowledgements import wait_applied
from dbuffer.store.buffer import DoubleBuffer

logger = logging.getLogger(__name__)

_HEALTH_S = 5.0
_PROBE_S = 2.0
_RETRY_S = 0.25


class BridgeServer:
    """The server at a URL, and the store that it follows."""

    def __init__(self, url: str, store: Path) -> None:
        self._server = VllmServer(url)
        self._store = store

    def bring_to(self, version: int, notification: dict[str, Any], timeout_s: float) -> None:
        """Return when the server answers with ``version``, which is published, or a later one."""
        deadline = time.monotonic() + timeout_s
        self._notify(notification, deadline)
        store = DoubleBuffer(self._store)
        writer = store.writer()
        if writer is None:
            raise StoreNotFoundError(f"the store at {self._store} was removed")
        try:
            left_s = max(0.0, deadline - time.monotonic())
            wait_applied(store, version, 1, timeout_s=left_s, writer=writer)
        except WaitTimeoutError as error:
            raise WaitTimeoutError(
                f"{error}. The server at {self._server.url} must follow {self._store} by itself, "
                "with the middleware dbuffer.integrations.vllm.FollowStore"
            ) from None

    def warn_unless_healthy(self) -> None:
        """Log it if the server does not answer, or not that it is healthy."""
        try:
            self._server.request("GET", "/health", timeout=_HEALTH_S)
        except DBufferError as error:
            message = "the server at %s is not healthy: %s; updates wait while it starts"
            logger.warning(message, self._server.url, str(error))

    def is_stock(self) -> bool:
        """Whether it answers, and is a vLLM without Atropos' routes, which writes no mapping."""
        try:
            has_version = self._has_route("GET", "/version", timeout=_PROBE_S)
            return has_version and not self._has_route("GET", "/bridge/info", timeout=_PROBE_S)
        except DBufferError:
            return False

    def close(self) -> None:
        self._server.close()

    def _notify(self, notification: dict[str, Any], deadline: float) -> None:
        """Call Atropos' route, if the server has it; wait while the server starts."""
        while True:
            try:
                self._has_route("POST", "/bridge/notify_update", json=notification)
            except EngineUnreachableError:
                if time.monotonic() + _RETRY_S > deadline:
                    raise
            else:
                return
            time.sleep(_RETRY_S)

    def _has_route(self, method: str, path: str, **more: Any) -> bool:
        """Call a route, and return whether there is one."""
        try:
            self._server.request(method, path, **more)
        except UnsupportedError:
            return False
        return True
