"""`WeightSource`: vLLM's protocol for a trainer's weights. Reading a source does not import vLLM.

A source's ``metadata`` has the names, dtypes and shapes of all tensors. Each iteration over the
source (a "pass") yields the unsharded tensors, one at a time. On several ranks a pass is
collective: all ranks must make the pass together, to its end.

| | vLLM 0.28 to 0.32 | since 0.33 |
| --- | --- | --- |
| metadata | a method | a cached property |
| a pass | ``__iter__()`` | ``iter_full()`` |
| a rank's part | ``held_names()`` | ``owners`` in the metadata |
| other ranks' tensors | None in a pass | not in a pass |

If all ranks have all tensors, rank 0 publishes them, and dbuffer ignores the other ranks' tensors.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeGuard

import torch
from torch import distributed, nn

from dbuffer.errors import InvalidWeightsError, UnsupportedError
from dbuffer.runtime.messages import described, listed
from dbuffer.weights.lazy_tensor import LazyTensor


class WeightSource(Protocol):
    """Trainer's weights in the form of vLLM's weight-transfer protocol."""

    @property
    def metadata(self) -> Any:
        """Name, dtype and shape of each tensor, or a method that returns this list."""


def is_weight_source(weights: object) -> TypeGuard[WeightSource]:
    """Whether weights are a weight source in vLLM's protocol."""
    if hasattr(type(weights), "iter_full"):
        return True
    return hasattr(weights, "__iter__") and callable(getattr(weights, "metadata", None))


def parameters_of(source: object, *, may_be_sharded: bool) -> dict[str, torch.Tensor] | None:
    """Return the parameters of the module in vLLM's ``ModuleSource``, or None for other sources.

    The result is also None for classes derived from ``ModuleSource``, which may yield other tensors
    than the parameters. If parameters are sharded, the result is None unless ``may_be_sharded``.
    """
    library = sys.modules.get("vllm.distributed.weight_transfer.base")
    if type(source) is not getattr(library, "ModuleSource", None):
        return None
    module = getattr(source, "_module", None)
    if not isinstance(module, nn.Module):
        return None
    parameters: dict[str, torch.Tensor] = dict(module.named_parameters())
    is_sharded = any(hasattr(parameter, "full_tensor") for parameter in parameters.values())
    return None if is_sharded and not may_be_sharded else parameters


class SourceReader:
    """Reader of a weight source, with a lazy tensor for each tensor of the source.

    The lazy tensors must be fetched in order, because all come from a single iteration over the
    source (a "pass"). The constructor reads the source's ``metadata``, on all ranks.

    Raises:
        InvalidWeightsError: ``metadata`` does not have the form that vLLM defines.
        UnsupportedError: the source yields parts of tensors instead of complete tensors.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._pass: Iterator[Any] | None = None
        if not getattr(source, "implements_iter_full", lambda: True)():
            raise UnsupportedError(
                f"this {type(source).__name__} has no iter_full(), and dbuffer does not read "
                "iter_local(): add iter_full(), or send the sharded module itself"
            )
        self.tensors: dict[str, LazyTensor] = {}
        try:
            metadata = list(metadata_of(source))
            for entry in metadata:
                if entry.name in self.tensors:
                    raise InvalidWeightsError(f"the source's metadata has {entry.name!r} twice")
                fetch = functools.partial(self._read, entry.name)
                self.tensors[entry.name] = LazyTensor(entry.dtype, tuple(entry.shape), fetch)
        except (AttributeError, TypeError) as error:
            raise InvalidWeightsError(
                f"metadata of this {type(source).__name__} does not have a name, dtype and shape "
                f"for each tensor, as vLLM's sources have: {described(error)}"
            ) from error
        self._place = {name: place for place, name in enumerate(self.tensors)}
        self._held = _held_names(source, metadata)

    def held_on(self, rank: int) -> list[int]:
        """Return the indices of tensors to publish on this rank, whose number is ``rank``."""
        if self._held is None:
            return [] if rank else list(self._place.values())
        return [place for name, place in self._place.items() if name in self._held]

    def require_all(self) -> None:
        """Refuse a source if this rank does not have all of its tensors."""
        if self._held is not None and (missing := self._place.keys() - self._held):
            raise UnsupportedError(
                f"this rank does not have {listed(sorted(missing))} of the "
                f"{type(self._source).__name__}, which is split between ranks: send the source "
                "with a ShardedWeightSender, on all ranks"
            )

    def finish(self) -> None:
        """Read the rest of the source, because all ranks must read a source to its end."""
        unfinished, self._pass = self._pass, None
        surplus = []
        for pair in pass_over(self._source) if unfinished is None else unfinished:
            if unfinished is not None and (name := _checked(pair)[0]) not in self._place:
                surplus.append(name)
        if surplus:
            raise InvalidWeightsError(
                f"the source yields {listed(surplus)}, which its metadata does not have"
            )

    def _read(self, name: str) -> torch.Tensor:
        """Return the source's tensor ``name``. Skip earlier tensors, which other ranks publish."""
        if self._pass is None:
            self._pass = pass_over(self._source)
        for pair in self._pass:
            next_name, tensor = _checked(pair)
            if next_name == name and tensor is not None:
                return tensor
            if self._place.get(next_name, len(self._place)) >= self._place[name]:
                item = f"no tensor for {name!r}" if next_name == name else repr(next_name)
                raise InvalidWeightsError(
                    f"the source yields {item} where its metadata has {name!r}: the source and "
                    "its metadata must have the same tensors in the same order"
                )
        raise InvalidWeightsError(f"the source ended without {name!r}, which its metadata has")


def metadata_of(source: Any) -> Iterator[Any]:
    """Return a source's ``metadata``, which is an attribute since vLLM 0.33 and a method before."""
    metadata: Any = source.metadata
    return iter(metadata() if callable(metadata) else metadata)


def is_split(source: Any) -> bool:
    """Whether a source has tensors that rank 0 lacks. The result is the same on all ranks."""
    if not hasattr(source, "iter_full"):
        return getattr(source, "held_names", lambda: None)() is not None
    owners = [getattr(entry, "owners", None) for entry in metadata_of(source)]
    return any(ranks is not None and 0 not in ranks for ranks in owners)


def _held_names(source: Any, metadata: Iterable[Any]) -> frozenset[str] | None:
    """Return the names of this rank's tensors, or None if all ranks have all tensors."""
    if (held_names := getattr(source, "held_names", None)) is not None:
        return None if (names := held_names()) is None else frozenset(names)
    owners = {entry.name: getattr(entry, "owners", None) for entry in metadata}
    if all(ranks is None for ranks in owners.values()):
        return None
    # The numbers in vLLM's ``owners`` are the trainer's ranks in torch.distributed.
    has_ranks = distributed.is_available() and distributed.is_initialized()
    rank = distributed.get_rank() if has_ranks else 0
    return frozenset(name for name, ranks in owners.items() if ranks is None or rank in ranks)


def pass_over(source: Any) -> Iterator[Any]:
    """Begin an iteration (a "pass") over a weight source."""
    return iter(source.iter_full() if hasattr(source, "iter_full") else source)


def _checked(pair: Any) -> tuple[str, torch.Tensor | None]:
    match pair:
        case (str(name), torch.Tensor() | None as tensor):
            return name, tensor
    raise InvalidWeightsError(f"the source yields {pair!r:.80}, not a name and a tensor")
