"""`needed_for`: imports of optional packages, whose errors say what to install."""

from __future__ import annotations

from dbuffer.errors import DBufferError
from dbuffer.runtime.trouble import TranslatedErrors

EXTRAS: dict[str, str | None] = {
    "httpx": None,
    "obstore": "objects",
    "prometheus_client": None,
    "rich": "cli",
    "safetensors": "safetensors",
    "typer": "cli",
    "zstandard": "delta",
}
"""Extra of dbuffer to install for a module, keyed by the module's name. The value is None if each
extra with the module's package also installs an engine or a framework."""


def needed_for(use: str) -> TranslatedErrors:
    """Return a ``with`` block that explains a failed import. ``use`` is the feature that needs it.

    Raises:
        DBufferError: an optional package is not installed; the message says how to install it.
    """

    def translate(error: BaseException) -> None:
        if not isinstance(error, ModuleNotFoundError) or error.name is None:
            return
        module = error.name.partition(".")[0]
        if module not in EXTRAS:  # the package is installed, but incomplete
            return
        package = module.replace("_", "-")
        extra = EXTRAS[module]
        clone = "" if extra is None else f", or '.[{extra}]' in a clone of dbuffer"
        raise DBufferError(f"{use} needs {package}: pip install {package}{clone}") from error

    return TranslatedErrors(translate)
