"""`lazily`, which imports a package's names at their first use, and `cached_property`."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:

    class cached_property:  # noqa: N801 - it replaces Python's
        """Attribute of an instance, computed at its first use.

        Python 3.11's own class of this name has one lock for all instances, which stays locked in a
        child that is forked while a thread computes: the child would hang at its first use.
        """

        def __init__(self, compute: Callable[[Any], Any]) -> None:
            self._compute = compute
            self.__doc__ = compute.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self._name] = self._compute(instance)
            return value


def lazily(package: str) -> tuple[Callable[[str], Any], list[str]]:
    """Return the ``__getattr__`` and ``__all__`` of a package that imports its names when used.

    The package lists its names as imports under ``if TYPE_CHECKING``, for type checkers.
    """
    places: dict[str, tuple[str, str]] = {}
    for block in ast.parse(inspect.getsource(sys.modules[package])).body:
        for statement in block.body if isinstance(block, ast.If) else ():
            if isinstance(statement, ast.ImportFrom) and statement.module is not None:
                for alias in statement.names:
                    places[alias.asname or alias.name] = statement.module, alias.name

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, name_there = places[name]
        return getattr(importlib.import_module(module), name_there)

    return get, list(places)
