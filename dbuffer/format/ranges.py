"""`ByteRanges`: the byte ranges of tensors in a file or in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

Integers: TypeAlias = npt.NDArray[np.int64]


class ByteRanges(NamedTuple):
    """Byte ranges of tensors, in ascending order, without overlaps and without empty tensors."""

    tensors: Integers
    starts: Integers
    ends: Integers
    word_bytes: Integers
    """Word size of each tensor in bytes: the size of its elements, but at most 8."""

    @classmethod
    def of(cls, *columns: Sequence[int]) -> Self:
        """Return tensors' ranges, from three lists in bytes: starts, sizes and word sizes."""
        starts, sizes, word_bytes = (np.array(column, np.int64) for column in columns)
        tensors = np.argsort(starts, kind="stable")
        tensors = tensors[sizes[tensors] > 0]
        return cls(tensors, starts[tensors], (starts + sizes)[tensors], word_bytes[tensors])

    def within(self, start: int, end: int) -> Self:
        first = int(self.ends.searchsorted(start, side="right"))
        rows = slice(first, int(self.starts.searchsorted(end)))
        return type(self)(*(column[rows] for column in self))

    def in_words(self, width: int) -> Self:
        """Return the ranges, which begin and end with whole words, in words of ``width`` bytes."""
        return self._replace(starts=self.starts // width, ends=self.ends // width)

    def counts(self, places: Integers) -> Integers:
        counts: Integers = places.searchsorted(self.ends) - places.searchsorted(self.starts)
        return counts

    def owners(self, places: Integers) -> Integers:
        """Return, for each place, the index of the range that contains it, or -1 if none does."""
        rows = self.ends.searchsorted(places, side="right")
        rows[rows == len(self.ends)] = -1
        rows[self.starts[rows] > places] = -1
        return rows
