"""`Closing`, which a ``with`` block closes; `ProcessBound`, which no other process can use."""

from __future__ import annotations

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
    """Something that cannot be pickled, as `multiprocessing` does for a spawned child."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ClosedError(
            f"a {type(self).__name__} belongs to the process that made it, and cannot be handed to "
            "another one: make one there"
        )
