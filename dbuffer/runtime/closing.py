"""`Closing`, which a ``with`` block closes; `ProcessBound`, which no other process can use."""

from __future__ import annotations

import os
from typing import Any, NoReturn, Self

from dbuffer.errors import ClosedError


class Closing:
    """Something with a ``close()``, for ``with``."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class ProcessBound:
    """Object of one process, which cannot be pickled for a child that `multiprocessing` spawns."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def _is_inherited(self) -> bool:
        """Whether another process made it, and this one is a fork of that."""
        return self._pid != os.getpid()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ClosedError(
            f"a {type(self).__name__} belongs to the process that made it, and cannot be handed to "
            "another one: make one there"
        )
