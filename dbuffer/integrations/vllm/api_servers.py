"""Several API servers that have an engine together: one of them follows, the others stand by."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Self

from dbuffer.errors import DBufferError
from dbuffer.integrations.engine.background import BackgroundFollower

logger = logging.getLogger(__name__)

LOOK_S = 0.2
"""Seconds between two looks of an API server whether it is its turn."""

_MAX_API_SERVERS = 4096


class Leadership:
    """Election of the API server that follows: it holds a socket's name for as long as it lives.

    They are processes of one host and one parent, and vLLM ends them by SIGKILL: a name in no
    directory is free again at once. It is not the store's lock: the store may not exist yet.

    Args:
        instance_id: id that these API servers share, and no others.
    """

    def __init__(self, instance_id: str) -> None:
        self._name = f"\0dbuffer-leader-{instance_id}"
        self._socket: socket.socket | None = None

    def try_take(self) -> bool:
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

    def say_ready(self) -> None:
        """Tell the others that the engine serves the newest version, and that they may serve."""
        assert self._socket is not None  # noqa: S101 - by try_take()
        self._socket.listen(_MAX_API_SERVERS)

    def is_ready(self) -> bool:
        """Whether the API server that follows has called :meth:`say_ready`."""
        with socket.socket(socket.AF_UNIX) as asking:
            asking.setblocking(False)
            # A connection is refused where no socket listens, or none has the name.
            return asking.connect_ex(self._name) in (0, errno.EAGAIN)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


class SharedFollowing:
    """Follows while this API server leads, and stands by before that. Made by :meth:`begin`."""

    def __init__(self, leadership: Leadership, follow: Callable[[], BackgroundFollower]) -> None:
        self._leadership = leadership
        self._follow = follow
        self._following: BackgroundFollower | None = None
        self._standing_by: asyncio.Task[None] | None = None

    @classmethod
    async def begin(
        cls,
        leadership: Leadership,
        follow: Callable[[], BackgroundFollower],
        follow_until_ready: Callable[[], Awaitable[BackgroundFollower]],
    ) -> Self:
        """Wait until the engine serves the newest version, whichever API server follows.

        Args:
            leadership: which of them follows.
            follow: begins to follow, and waits for nothing: the engine serves already.
            follow_until_ready: begins to follow, and waits until the engine serves the
                newest version.

        Raises:
            DBufferError: this one leads, and cannot follow.
        """
        shared = cls(leadership, follow)
        try:
            while not leadership.try_take():
                if leadership.is_ready():
                    shared._standing_by = asyncio.create_task(shared._stand_by())
                    return shared
                await asyncio.sleep(LOOK_S)
            shared._following = await follow_until_ready()
            leadership.say_ready()
        except BaseException:
            await shared.aclose()
            raise
        return shared

    async def _stand_by(self) -> None:
        while not self._leadership.try_take():
            await asyncio.sleep(LOOK_S)
        logger.info("the API server that followed has ended: this one follows from here on")
        self._leadership.say_ready()
        try:
            self._following = self._follow()
        except (DBufferError, OSError) as error:
            logger.error("the engine is followed no longer: %s", error)

    async def aclose(self) -> None:
        if self._standing_by is not None:
            self._standing_by.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._standing_by
        if self._following is not None:
            await self._following.aclose()
        self._leadership.close()
