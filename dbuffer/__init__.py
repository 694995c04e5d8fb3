"""Double-buffered weight transport over a filesystem, for reinforcement-learning post-training.

The public names come from `dbuffer.errors` and `dbuffer.api`. The module `dbuffer.api` is imported
when one of its names is first used, because it imports torch, which takes seconds.
"""

import importlib
import typing

from dbuffer import errors
from dbuffer.errors import *  # noqa: F403

__version__ = "0.1.0"

if typing.TYPE_CHECKING:
    from dbuffer.api import *  # noqa: F403
else:

    def __getattr__(name):
        if name == "__all__":
            modules = (errors, importlib.import_module("dbuffer.api"))
            names = (name for module in modules for name in vars(module))
            return sorted({"__version__", *(name for name in names if not name.startswith("_"))})
        if not name.startswith("_"):
            api = importlib.import_module("dbuffer.api")
            if hasattr(api, name):
                return getattr(api, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__getattr__("__all__")})
