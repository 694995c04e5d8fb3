"""`TranslatedErrors`: what a block raises, in other terms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType


class TranslatedErrors(contextlib.AbstractContextManager[None]):
    """Gives each exception that leaves a ``with`` block to ``translate``.

    That raises what is to be raised instead, or returns: the exception goes on.

    In the place of a generator that catches one and raises another: on Python 3.13 (not on 3.11)
    its frame and contextlib's then hold each other, and with them whatever the callers had in hand
    (memory of a version, descriptors), until the garbage collector comes by, which engines rarely
    let.
    """

    def __init__(self, translate: Callable[[BaseException], None]) -> None:
        self._translate = translate

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._translate(error)
