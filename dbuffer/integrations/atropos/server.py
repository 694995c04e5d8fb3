"""`BridgeServer`: one inference server, brought to a version that is in the store.

There are three kinds. One that has Atropos' bridge routes is notified, and follows the store by
itself. A stock vLLM in development mode is driven from here, by a follower. A stock vLLM without
it can only follow by itself, with the middleware ``FollowStore``. Of those that follow by
themselves, the store's acknowledgement says when they have switched.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from dbuffer.engine.background import BackgroundFollower
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.follower import Follower
from dbuffer.errors import (
    DBufferError,
    EngineUnreachableError,
    EngineUpdateError,
    StoreNotFoundError,
    UnsupportedError,
    WaitTimeoutError,
)
from dbuffer.integrations.vllm.follow_vllm import follow
from dbuffer.integrations.vllm.vllm_engine import VllmServer
from dbuffer.store.acknowledgements import wait_applied
from dbuffer.store.buffer import DoubleBuffer

logger = logging.getLogger(__name__)

_HEALTH_S = 5.0
_PROBE_S = 2.0
_RETRY_S = 0.25
_ERROR_CHECK_S = 0.1


class BridgeServer:
    """The server at a URL, and the store that it follows."""

    def __init__(self, url: str, store: Path) -> None:
        self._url = url
        self._server = VllmServer(url)
        self._store = store
        self._follower: BackgroundFollower | None = None

    def bring_to(self, version: int, notification: dict[str, Any], timeout_s: float) -> None:
        """Return when the server answers with ``version``, which is published, or a later one."""
        deadline = time.monotonic() + timeout_s
        route = "/bridge/notify_update"
        has_routes = self._has_route_by(deadline, "POST", route, json=notification)
        if not has_routes and (self._follower is not None or self._is_drivable(deadline)):
            self._wait_followed(version, deadline, timeout_s)
            return
        store = DoubleBuffer(self._store)
        writer = store.writer()
        if writer is None:
            raise StoreNotFoundError(f"the store at {self._store} was removed")
        try:
            left_s = max(0.0, deadline - time.monotonic())
            wait_applied(store, version, 1, timeout_s=left_s, writer=writer)
        except WaitTimeoutError as error:
            what = "takes notifications" if has_routes else "has no routes to drive it by"
            raise WaitTimeoutError(
                f"{error}. The server at {self._server.url} {what}, so it must follow "
                f"{self._store} by itself, with the middleware "
                "dbuffer.integrations.vllm.FollowStore; or start a vLLM with "
                "VLLM_SERVER_DEV_MODE=1, which is driven from here"
            ) from None

    def warn_unless_healthy(self) -> None:
        """Log it if the server does not answer, or not that it is healthy."""
        try:
            self._server.request("GET", "/health", timeout=_HEALTH_S)
        except DBufferError as error:
            message = "the server at %s is not healthy: %s; updates wait while it starts"
            logger.warning(message, self._server.url, str(error))

    def resume_if_left_paused(self) -> None:
        """End the pause of a trainer that was killed in a switch.

        A paused server answers no request, so a trainer that waits for answers before its first
        update would hang. The server serves the version that it has.
        """
        try:
            response = self._server.request("GET", "/is_paused", timeout=_HEALTH_S)
            if response.json()["is_paused"] is not True:
                return
        except (DBufferError, ValueError, LookupError, TypeError):  # not in development mode
            return
        follower = Follower(VllmServer(self._url), EngineOptions(store=str(self._store)))
        try:
            with follower:
                follower.start()
        except (DBufferError, OSError) as error:
            logger.warning(
                "the server at %s is paused, and stays so: %s", self._server.url, str(error)
            )

    def is_stock(self) -> bool:
        """Whether it answers, and is a vLLM without Atropos' routes, which writes no mapping."""
        try:
            has_version = self._has_route("GET", "/version", timeout=_PROBE_S)
            return has_version and not self._has_route("GET", "/bridge/info", timeout=_PROBE_S)
        except DBufferError:
            return False

    def close(self) -> None:
        if self._follower is not None:
            self._follower.close()
            self._follower = None
        self._server.close()

    def _is_drivable(self, deadline: float) -> bool:
        query = {"config_format": "json"}
        return self._has_route_by(deadline, "GET", "/server_info", params=query)

    def _has_route_by(self, deadline: float, method: str, path: str, **more: Any) -> bool:
        """Call a route, and return whether there is one; wait while the server starts."""
        while True:
            try:
                return self._has_route(method, path, **more)
            except EngineUnreachableError:
                if time.monotonic() + _RETRY_S > deadline:
                    raise
            time.sleep(_RETRY_S)

    def _has_route(self, method: str, path: str, **more: Any) -> bool:
        """Call a route, and return whether there is one."""
        try:
            self._server.request(method, path, **more)
        except UnsupportedError:
            return False
        return True

    def _wait_followed(self, version: int, deadline: float, timeout_s: float) -> None:
        before = None
        if self._follower is None:
            follower = follow(self._url, self._store, timeout_s=timeout_s)
            assert isinstance(follower, BackgroundFollower)  # noqa: S101 - a URL is followed so
            self._follower = follower
        else:
            before = self._follower.error  # of another version
        while True:
            left_s = deadline - time.monotonic()
            try:
                self._follower.wait_applied(version, max(0.0, min(left_s, _ERROR_CHECK_S)))
            except WaitTimeoutError:
                if left_s <= 0:
                    raise
            else:
                return
            error = self._follower.error
            # A server that is away may come back, and slow ranks get ready; the rest stays wrong.
            heals = error is None or isinstance(error, EngineUnreachableError | WaitTimeoutError)
            if error is not before and not heals:
                raise error if isinstance(error, DBufferError) else EngineUpdateError(str(error))
