"""`WeightSource`: vLLM's protocol of a trainer's weights, read without importing vLLM.

A source tells the names, dtypes and shapes of all tensors in ``metadata()``, and each pass over it
makes them whole, one at a time. On several ranks a pass is collective: all ranks make it together,
to the end. Where ``held_names()`` returns None, rank 0's tensors are published, and other ranks may
get anything; else each rank has the tensors of these names.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn

from dbuffer.errors import InvalidWeightsError
from dbuffer.runtime.messages import described, listed
from dbuffer.weights.checkpoint import LazyTensor


class WeightSource(Protocol):
    """Weights as vLLM's trainers give them; iterable, or since vLLM 0.33 with ``iter_full()``."""

    def metadata(self) -> Iterable[Any]:
        """Return name, dtype and shape of each tensor, in the order of a pass."""


def is_weight_source(weights: object) -> TypeGuard[WeightSource]:
    """Whether weights follow vLLM's protocol."""
    has_pass = hasattr(weights, "iter_full") or hasattr(weights, "__iter__")
    return has_pass and callable(getattr(weights, "metadata", None))


def parameters_of(source: object) -> dict[str, torch.Tensor] | None:
    """Return the parameters that a ``ModuleSource`` of vLLM's gathers one by one.

    None: this is no such source. A class derived from it may yield something else.
    """
    library = sys.modules.get("vllm.distributed.weight_transfer.base")
    if type(source) is not getattr(library, "ModuleSource", None):
        return None
    module = getattr(source, "_module", None)
    return dict(module.named_parameters()) if isinstance(module, nn.Module) else None


class SourceReader:
    """Reader of a weight source: its lazy tensors come out of one pass, in their order.

    Args:
        source: the source; its ``metadata()`` is called here, on all ranks.

    Raises:
        InvalidWeightsError: ``metadata()`` is not what vLLM's sources return.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._pass: Iterator[Any] | None = None
        held_names = getattr(source, "held_names", lambda: None)()
        self._held = None if held_names is None else frozenset(held_names)
        self.tensors: dict[str, LazyTensor] = {}
        """Tensors by the source's names."""
        try:
            for one in source.metadata():
                if one.name in self.tensors:
                    raise InvalidWeightsError(f"the source's metadata() has {one.name!r} twice")
                fetch = functools.partial(self._read, one.name)
                self.tensors[one.name] = LazyTensor(one.dtype, tuple(one.shape), fetch)
        except (AttributeError, TypeError) as error:
            raise InvalidWeightsError(
                f"metadata() of this {type(source).__name__} does not give a name, dtype and shape "
                f"for each tensor, as that of vLLM's sources does: {described(error)}"
            ) from error
        self._place = {name: place for place, name in enumerate(self.tensors)}

    def held_on(self, rank: int) -> list[int]:
        """Return the indices of the tensors that a pass gives on this rank."""
        if self._held is None:
            return [] if rank else list(self._place.values())
        return [place for name, place in self._place.items() if name in self._held]

    def finish(self) -> None:
        """Make the rest of a pass, or all of it where no tensor was read: others wait for that.

        Raises:
            InvalidWeightsError: the pass that was read gives more than ``metadata()`` says.
        """
        unfinished, self._pass = self._pass, None
        surplus = []
        for pair in pass_over(self._source) if unfinished is None else unfinished:
            if unfinished is not None and (name := _checked(pair)[0]) not in self._place:
                surplus.append(name)
        if surplus:
            raise InvalidWeightsError(
                f"the source gives {listed(surplus)}, which its metadata() does not have"
            )

    def _read(self, name: str) -> torch.Tensor:
        """Return the next tensor to read of the pass; those before it are not written here."""
        if self._pass is None:
            self._pass = pass_over(self._source)
        for pair in self._pass:
            other, tensor = _checked(pair)
            if other == name and tensor is not None:
                return tensor
            if self._place.get(other, len(self._place)) >= self._place[name]:
                what = f"no tensor for {name!r}" if other == name else repr(other)
                raise InvalidWeightsError(
                    f"the source gives {what} where its metadata() has {name!r}: both must be in "
                    "the same order, and have the same tensors"
                )
        raise InvalidWeightsError(f"the source ends before {name!r}, which its metadata() has")


def pass_over(source: Any) -> Iterator[Any]:
    """Begin a pass over a weight source."""
    return iter(source.iter_full() if hasattr(source, "iter_full") else source)


def _checked(pair: Any) -> tuple[str, torch.Tensor | None]:
    match pair:
        case (str(name), torch.Tensor() | None as tensor):
            return name, tensor
    raise InvalidWeightsError(f"the source gives {pair!r:.80}, not a name and a tensor")
