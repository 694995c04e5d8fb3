"""`TranslatedErrors`: replaces exceptions that leave a block; `needed_for`: failed imports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType

from dbuffer.errors import DBufferError

EXTRAS: dict[str, str | None] = {
    "httpx": None,
    "obstore": "objects",
    "prometheus_client": None,
    "rich": "cli",
    "safetensors": "safetensors",
    "typer": "cli",
    "zstandard": "delta",
}
"""Extra of dbuffer that installs a module's package; of several, one with few others. None: they
all install an engine or a framework, too."""


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


def needed_for(use: str) -> TranslatedErrors:
    """Translate a failed import in a ``with`` block; ``use`` names what needs the package.

    Raises:
        DBufferError: an optional package is not installed; the message says how to install it.
    """

    def translate(error: BaseException) -> None:
        if not isinstance(error, ModuleNotFoundError) or error.name is None:
            return
        module = error.name.partition(".")[0]
        if module not in EXTRAS:  # of a package that is incomplete
            return
        package = module.replace("_", "-")
        extra = EXTRAS[module]
        clone = "" if extra is None else f", or '.[{extra}]' in a clone of dbuffer"
        raise DBufferError(f"{use} needs {package}: pip install {package}{clone}") from error

    return TranslatedErrors(translate)
