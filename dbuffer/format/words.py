"""`WordRanges`: where the tensors of a layout lie, counted in words of one size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    def by_width(
        cls, offsets: Sequence[int], sizes: Sequence[int], widths: Sequence[int]
    ) -> dict[int, Self]:
        """Return the ranges of tensors by the width of their words, from columns of a layout."""
        starts, lengths, of_tensor = (
            np.array(column, np.int64) for column in (offsets, sizes, widths)
        )
        ranges = {}
        for width in (1, 2, 4, 8):
            (tensors,) = ((of_tensor == width) & (lengths > 0)).nonzero()
            ends = (starts + lengths)[tensors] // width
            ranges[width] = cls(tensors, starts[tensors] // width, ends)
        return ranges

    def within(self, start: int, end: int) -> Self:
        """Return the tensors that have words in a range."""
        some = slice(
            int(self.ends.searchsorted(start, side="right")), int(self.starts.searchsorted(end))
        )
        return type(self)(self.tensors[some], self.starts[some], self.ends[some])

    def counts_of(self, places: Integers) -> Integers:
        """Return how many of some ascending places are in each of these tensors."""
        counts: Integers = places.searchsorted(self.ends) - places.searchsorted(self.starts)
        return counts

    def split(self, places: Integers) -> Iterator[tuple[int, int, slice]]:
        """Split ascending places, all of them in these tensors, by the tensor.

        Yields:
            Index of a tensor, its first word, and which of the places are in it; only tensors with
            a place.
        """
        start = 0
        for row, end in enumerate(places.searchsorted(self.ends).tolist()):
            if start < end:
                yield int(self.tensors[row]), int(self.starts[row]), slice(start, end)
            start = end

    def owners(self, places: Integers) -> Integers:
        """Return which of these tensors each place is in; -1: in none."""
        found = self.ends.searchsorted(places, side="right")
        found[found == len(self.ends)] = -1
        found[self.starts[found] > places] = -1
        return found
