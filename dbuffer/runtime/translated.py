"""`TranslatedErrors`: replaces the exceptions that leave a block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType


class TranslatedErrors(contextlib.AbstractContextManager[None]):
    """Gives each exception that leaves a ``with`` block to ``translate``.

    If ``translate`` returns, the exception goes on; to replace it, ``translate`` raises another.

    This is no generator that catches one exception and raises another: on Python 3.13 (not on 3.11)
    its frame and contextlib's would then hold each other, and with them all objects of the callers
    (memory of a version, descriptors), until the garbage collector runs, which engines rarely
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
