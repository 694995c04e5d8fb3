"""`Closing`: what is closed when its ``with`` block is left."""

from __future__ import annotations

from typing import Self


class Closing:
    """Something with a ``close()``, for ``with``."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
