"""Several API servers that have an engine together: one of them follows, the others stand by."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

from dbuffer.errors import DBufferError
from dbuffer.format.layout import digest
from dbuffer.integrations.engine.background import InBackground
from dbuffer.store import filesystem
from dbuffer.store.filesystem import Descriptor

logger = logging.getLogger(__name__)

LOOK_S = 0.2
"""How often an API server looks whether it is its turn."""

_READY = b"ready"


class Leadership:
    """Which of the API servers follows: that which has a lock, for as long as it lives.

    They are processes of one host and one parent, so the lock is a file of its directory for
    temporary files. It is not in the store: that may not be there yet.

    Args:
        instance_id: what the API servers share, and no others.
    """

    def __init__(self, instance_id: str) -> None:
        name = f"dbuffer-leader-{digest(instance_id.encode())}"
        self._path = Path(tempfile.gettempdir()) / name
        self._lock: Descriptor | None = None

    def try_take(self) -> bool:
        """Take it, if nobody has it."""
        lock = filesystem.take_lock(self._path, "leader's", may_lack_locks=False)
        # Who had it removes the file, and then lets go of it.
        if lock is not None and not filesystem.is_at(lock, self._path):
            lock.close()
            lock = None
        self._lock = lock
        return lock is not None

    def say_ready(self) -> None:
        """Tell the others that the engine serves what was there: they may serve, too."""
        assert self._lock is not None  # noqa: S101 - by try_take()
        filesystem.write_at(self._lock.number, 0, _READY)

    def is_ready(self) -> bool:
        """Whether who has it, or who had it before, has said so."""
        with contextlib.suppress(FileNotFoundError):
            return filesystem.read_small(self._path, len(_READY)) == _READY
        return False

    def close(self) -> None:
        if self._lock is not None:
            self._path.unlink(missing_ok=True)
            self._lock.close()


class SharedFollowing:
    """Follows while this API server leads, and stands by before that. Made by :meth:`begin`."""

    def __init__(self, leadership: Leadership, follow: Callable[[], InBackground]) -> None:
        self._leadership = leadership
        self._follow = follow
        self._following: InBackground | None = None
        self._standing_by: asyncio.Task[None] | None = None

    @classmethod
    async def begin(
        cls,
        leadership: Leadership,
        follow: Callable[[], InBackground],
        wait_ready: Callable[[InBackground], Awaitable[None]],
    ) -> Self:
        """Wait until the engine serves what is there, by this API server's doing or another's.

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
            shared._following = follow()
            await wait_ready(shared._following)
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
