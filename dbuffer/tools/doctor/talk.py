"""`Talk`: messages between the doctors on two hosts, through small files that are replaced."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from dbuffer.errors import StoreAccessError, StoreCorruptError
from dbuffer.store import filesystem

TICK_S = 0.02
"""A pause before a directory is changed again. Over NFSv3 two changes within one tick of the
server's clock (up to 10 ms) look like one, and who has looked between them misses the second."""

_POLL_S = 0.02
_MAX_MESSAGE_BYTES = 1 << 16


class Talk:
    """Messages both ways, one after another, each in the place of the one before."""

    def __init__(self, outbox: Path, inbox: Path) -> None:
        self._outbox, self._inbox = outbox, inbox
        self._num_sent = self._num_received = 0

    def say(self, **message: Any) -> None:
        """Send a message, which can be any JSON."""
        self._num_sent += 1
        time.sleep(TICK_S)
        data = json.dumps({"number": self._num_sent, **message}).encode()
        path = self._outbox / "message"
        scratch = self._outbox.with_name("scratch")
        filesystem.replace_file(path, data, scratch=scratch, durable=True)

    def heard(self) -> dict[str, Any] | None:
        """The next message; None if there is none yet.

        Raises:
            StoreAccessError: the directory is gone, and with it the other host.
            StoreCorruptError: it is not a message.
        """
        path = self._inbox / "message"
        try:
            # Not only our own: users may have other numbers on the other host.
            data = filesystem.read_small(path, _MAX_MESSAGE_BYTES, owner_only=False)
        except FileNotFoundError:
            if os.path.lexists(self._inbox):
                return None
            raise StoreAccessError(f"the other host ended, or removed {self._inbox}") from None
        try:
            message = json.loads(data)
            number = int(message["number"])
        except (ValueError, KeyError, TypeError) as error:
            raise StoreCorruptError(f"{path} is not a message of a doctor: {error}") from None
        if number <= self._num_received:
            return None
        self._num_received = number
        return dict(message)

    def hear(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the next message.

        Raises:
            StoreAccessError, StoreCorruptError: as :meth:`heard`, or none came in time.
        """
        deadline = time.monotonic() + timeout_s
        while (message := self.heard()) is None:
            if time.monotonic() > deadline:
                raise StoreAccessError(
                    f"the other host has said nothing in {self._inbox} for {timeout_s:g} s"
                )
            time.sleep(_POLL_S)
        return message
