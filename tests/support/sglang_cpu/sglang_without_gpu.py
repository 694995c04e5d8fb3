"""Lets SGLang run on a CPU: packages of which it needs no more than that they can be imported.

Imported in every process of the environment that ``dev.py`` makes for SGLang, from a ``.pth`` file.
What they stand for are kernels for GPUs, formats of files and images. Models, scheduler, caches and
servers are SGLang's own; that it answers as transformers does is tested.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

STANDS_FOR = ("IPython", "gguf", "sgl_kernel", "soundfile", "torchvision", "triton")

HIDDEN = ("vllm",)
"""SGLang takes kernels from a vLLM that it finds, and the environment holds one for other tests."""


class _AnythingMeta(type):
    """Of a class that can be called, used as a decorator, and asked for whatever is in it."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        decorated = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if decorated else cls

    def __getattr__(cls, name: str) -> Any:
        # Who asks triton for its driver takes an error for: there is no GPU.
        if name.startswith("__") or name == "driver":
            raise AttributeError(name)
        return _Anything

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())


class _Anything(metaclass=_AnythingMeta):
    """What every name in such a package is."""


class _Package(ModuleType):
    """A package that has every name."""

    # Below whatever is asked for: those who can do without have an old version here.
    __version__ = "0"
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package = name.partition(".")[0]
        if package in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return ModuleSpec(name, self, is_package=True) if package in STANDS_FOR else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


sys.meta_path.insert(0, _Finder())
