"""Several API servers that have an engine together: one of them follows, the others stand by."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Self

from dbuffer.engine.background import BackgroundFollower
from dbuffer.runtime.trouble import log_once, message_of

logger = logging.getLogger(__name__)


_MAX_API_SERVERS = 4096
LOOK_S = 0.2
"""Interval at which an API server looks whether it is its turn to follow."""


class SharedFollower:
    """Follows while this API server leads, and stands by before that. Made by :meth:`begin`.

    The API servers of an engine are processes of one host and one parent, and vLLM ends them by
    SIGKILL. The one that leads holds a socket's name, in no directory, which is free again at once
    when its process ends. It is not the store's lock: the store may not exist yet.

    Args:
        instance_id: id that these API servers share, and no others.
        follow: begins to follow, and waits for nothing: the engine serves already.
    """

    def __init__(self, instance_id: str, follow: Callable[[], BackgroundFollower]) -> None:
        self._name = f"\0dbuffer-leader-{instance_id}"
        self._follow = follow
        self._socket: socket.socket | None = None
        self._follower: BackgroundFollower | None = None
        self._standing_by: asyncio.Task[None] | None = None

    @classmethod
    async def begin(
        cls,
        instance_id: str,
        follow: Callable[[], BackgroundFollower],
        follow_until_ready: Callable[[], Awaitable[BackgroundFollower]],
    ) -> Self:
        """Wait until the engine serves the newest version, whichever API server follows.

        ``follow_until_ready`` begins to follow, and waits for that.

        Raises:
            DBufferError: this one leads, and cannot follow.
        """
        shared = cls(instance_id, follow)
        try:
            while not shared.try_lead():
                if shared.is_led():
                    shared._standing_by = asyncio.create_task(shared._stand_by())
                    return shared
                await asyncio.sleep(LOOK_S)
            shared._follower = await follow_until_ready()
            shared._announce()
        except BaseException:
            await shared.aclose()
            raise
        return shared

    def try_lead(self) -> bool:
        """Take the name, if it is free."""
        taken = socket.socket(socket.AF_UNIX)
        try:
            taken.bind(self._name)
        except OSError as error:
            taken.close()
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        self._socket = taken
        return True

    def is_led(self) -> bool:
        """Whether an API server leads, and has brought the engine to the newest version."""
        with socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)
            # A connection is refused where no socket listens, or none has the name.
            return client.connect_ex(self._name) in (0, errno.EAGAIN)

    def _announce(self) -> None:
        """Let :meth:`is_led` be true on the other API servers."""
        assert self._socket is not None  # noqa: S101 - by try_lead()
        self._socket.listen(_MAX_API_SERVERS)

    async def _stand_by(self) -> None:
        while self._follower is None:
            if self.try_lead():
                try:
                    self._follower = self._follow()
                # Another API server may be able to, or this one later, whatever it is.
                except Exception as error:  # noqa: BLE001
                    message = "no API server follows the engine; trying again: %s"
                    log_once(logger, message, message_of(error))
                    self._resign()
            await asyncio.sleep(LOOK_S)
        logger.info("the API server that followed has ended: this one follows from here on")
        self._announce()

    def _resign(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def aclose(self) -> None:
        if self._standing_by is not None:
            self._standing_by.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._standing_by
        if self._follower is not None:
            await self._follower.aclose()
        self._resign()
