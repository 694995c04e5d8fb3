"""`WordRanges`: where the tensors of a layout lie, counted in words of one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

Integers: TypeAlias = npt.NDArray[np.int64]


class WordRanges(NamedTuple):
    """Places in a file of tensors that have words of one size, in the order of the file.

    A *word* is an element, or 8 bytes of a longer one. Empty tensors are left out.
    """

    tensors: Integers
    """Their indices."""
    starts: Integers
    """First word of each, counted in words of this size from the first tensor's beginning."""
    ends: Integers

    @classmethod
    def of(
        cls, offsets: Sequence[int], sizes: Sequence[int], widths: Sequence[int], width: int
    ) -> Self:
        """Return the ranges of tensors with words of this width, from the columns of a layout."""
        starts, lengths = np.array(offsets, np.int64), np.array(sizes, np.int64)
        (tensors,) = ((np.array(widths, np.int64) == width) & (lengths > 0)).nonzero()
        ends = (starts + lengths)[tensors] // width
        return cls(tensors, starts[tensors] // width, ends)

    def within(self, start: int, end: int) -> Self:
        """Return the tensors that have words in a range."""
        some = slice(
            int(self.ends.searchsorted(start, side="right")), int(self.starts.searchsorted(end))
        )
        return type(self)(self.tensors[some], self.starts[some], self.ends[some])

    def owners(self, places: Integers) -> Integers:
        """Return which of these tensors each place is in; -1: in none."""
        found = self.ends.searchsorted(places, side="right")
        found[found == len(self.ends)] = -1
        found[self.starts[found] > places] = -1
        return found
