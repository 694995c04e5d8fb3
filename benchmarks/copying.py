"""Lower bounds: copy tensors within warm memory, hash them, and write some of their elements."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import xxhash

from benchmarks.models import Weights
from dbuffer.format.ranges import Integers
from dbuffer.io.copier import Copier
from dbuffer.io.delta import Words
from dbuffer.io.tensors import as_bytes

FROM_MEMORY, FROM_CACHE = "xxh3, from memory", "xxh3, from a core's cache"

_PIECE_BYTES = 1 << 18


def memcpy_variants(source: Weights, halves: HalvesCopy) -> dict[str, Callable[[], object]]:
    """Return ways to copy all tensors to ``halves.destination``. The fastest is the limit."""
    sources, destinations = list(source.values()), list(halves.destination.values())
    return {
        "copy_ each": lambda: _copy_each(destinations, sources),
        "_foreach_copy_": lambda: torch._foreach_copy_(destinations, sources),
        "_foreach_copy_, 2 threads": lambda: halves(source),
    }


def hash_variants(source: Weights) -> dict[str, Callable[[], object]]:
    """Return functions that hash all bytes, from memory and from a core's cache, in two threads."""
    views = [as_bytes(tensor.view(-1).view(torch.uint8)) for tensor in source.values()]
    pieces = [
        view[at : at + _PIECE_BYTES] for view in views for at in range(0, len(view), _PIECE_BYTES)
    ]
    num_cached = sum(map(len, pieces)) // _PIECE_BYTES
    cached = [max(pieces, key=len)] * num_cached
    threads = ThreadPoolExecutor(2)

    def hash_all(some: Sequence[memoryview]) -> None:
        halves = some[: len(some) // 2], some[len(some) // 2 :]
        list(threads.map(lambda half: [*map(xxhash.xxh3_64_intdigest, half)], halves))

    return {FROM_MEMORY: lambda: hash_all(pieces), FROM_CACHE: lambda: hash_all(cached)}


class HalvesCopy:
    """Copies tensors into fixed destinations, half of the bytes in each of two threads."""

    def __init__(self, destination: Weights) -> None:
        self.destination = destination
        self._tensors = list(destination.values())
        self._middle = _middle(self._tensors)
        self._threads = ThreadPoolExecutor(2)

    def __call__(self, source: Weights) -> None:
        """Copy the tensors of ``source``, which must have all names of the destination."""
        sources = [source[name] for name in self.destination]
        halves = (slice(None, self._middle), slice(self._middle, None))
        parts = [(self._tensors[half], sources[half]) for half in halves]
        list(self._threads.map(lambda part: torch._foreach_copy_(*part), parts))


def scatter(places: Integers, values: Words, words: Words, copier: Copier) -> None:
    """Write words at known places: the lower bound of applying a delta or patches."""

    def work(first: int, end: int) -> None:
        words[places[first:end]] = values[first:end]

    cuts = np.linspace(0, len(places), 8 * copier.num_threads + 1, dtype=int).tolist()
    copier.in_parallel(work, list(itertools.pairwise(cuts)))


def _copy_each(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for destination, source in zip(destinations, sources, strict=True):
        destination.copy_(source)


def _middle(tensors: Sequence[torch.Tensor]) -> int:
    half, seen = sum(tensor.nbytes for tensor in tensors) / 2, 0
    for index, tensor in enumerate(tensors):
        seen += tensor.nbytes
        if seen >= half:
            return index + 1
    return len(tensors)
