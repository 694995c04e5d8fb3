"""Modules that are imported when they are first used, so that no process imports them to collect.

Each process of a run imports every test file, and runs a quarter of them.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any


class Later:
    """Stand-in for a module, by its name."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks at all globals for marks of its own
            raise AttributeError(name)
        with warnings.catch_warnings():
            # torchrl warns of its own legacy classes, and of torch's, as it is imported.
            warnings.simplefilter("ignore", DeprecationWarning)
            return getattr(importlib.import_module(self._module), name)
