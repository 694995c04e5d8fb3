"""`lazily`: a package whose names are imported when they are used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazily(package: str, places: Mapping[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """A package's ``__getattr__`` and ``__all__``.

    ``places`` says where each of its names is: ``".module"``, or ``".module:name there"``.
    """

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, name_there = places[name].partition(":")
        return getattr(importlib.import_module(module, package), name_there or name)

    return get, list(places)
