"""Compares two versions in a device's memory, and encodes the changes as `changes` does.

The device finds the changed words, and splits the words and their gaps into streams of bytes. Only
these are copied to main memory, where threads compress them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dbuffer.format.delta import GAP_BYTES
from dbuffer.format.layout import Layout
from dbuffer.format.ranges import ByteRanges
from dbuffer.io import changes
from dbuffer.io.changes import Changes, ranges_of
from dbuffer.io.copier import Copier
from dbuffer.io.devices import Download

DEVICE_BYTES = 64 << 20
"""Bytes of a version that a device compares at a time. The host waits once for each comparison,
which takes as much memory again, and up to 45 bytes for each changed word."""


def find_on_device(
    before: torch.Tensor,
    after: torch.Tensor,
    layout: Layout,
    *,
    first_byte: int,
    file_starts: Sequence[int],
    max_bytes: float,
) -> list[DeviceChanges]:
    """Compare two versions in a device's memory. Takes the arguments of `find_changes`.

    The distances between tensors must be equal in the weights file and in memory.
    """
    starts, ranges, num_bytes = np.array(file_starts, np.int64), list[DeviceChanges](), 0
    for start, end, width in ranges_of(layout, first_byte, first_byte + len(after), DEVICE_BYTES):
        if num_bytes > max_bytes:
            break
        inside = slice(start - first_byte, end - first_byte)
        tensors = layout.byte_ranges.within(start, end).in_words(width)
        [shift] = {*(starts[tensors.tensors] // width - tensors.starts).tolist()}
        sides = before[inside], after[inside]
        ranges.append(DeviceChanges(*sides, start // width, width, tensors, shift))
        num_bytes += ranges[-1].num_bytes
    return ranges


class DeviceChanges:
    """Changed words of a range of memory on a device, on their way to main memory.

    Args:
        old, new: the range in the two versions.
        first: place of the range's first word in the device's copy, in words of ``width`` bytes.
        tensors: the range's tensors, in the same words.
        shift: number of words from a place in the copy to the same word's place in the file.
    """

    def __init__(
        self,
        old: torch.Tensor,
        new: torch.Tensor,
        first: int,
        width: int,
        tensors: ByteRanges,
        shift: int,
    ) -> None:
        self._width, self._tensors, self._place = width, tensors.tensors, first + shift
        words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
        differences = new.view(words) - old.view(words)
        gaps = zip([first, *tensors.ends], [*tensors.starts, first + len(differences)], strict=True)
        if padding := [place - first for gap in gaps for place in range(*gap)]:
            differences[torch.tensor(padding, device=new.device)] = 0
        (positions,) = differences.nonzero(as_tuple=True)  # the host waits for the device here
        self.num_bytes = width * len(positions)
        step = changes.COMPARED_BYTES // width
        self._bounds = [*range(0, len(differences), step), len(differences)]
        bounds = torch.tensor([*self._bounds, *tensors.ends - first], device=new.device)
        if self.num_bytes:
            planes = _planes_on_device(positions, differences[positions], bounds)
            self._download = Download(planes)

    def encode(self) -> Changes:
        """Wait for the changed words, and encode them as `find_changes` does."""
        if not self.num_bytes:
            return Changes([], set())
        data, width = self._download.wait().numpy(), self._width
        planes_bytes = (GAP_BYTES + width) * (self.num_bytes // width)
        ends, firsts, lasts = data[:-planes_bytes].view(np.int64).reshape(3, -1)
        planes = data[-planes_bytes:].reshape(GAP_BYTES + width, -1)
        chunks, num_ranges = [], len(self._bounds) - 1
        sizes = width * np.diff(ends[: num_ranges + 1])
        step = changes.CHUNK_BYTES // changes.COMPARED_BYTES
        for at in range(0, num_ranges, step):
            for group in changes.groups_of(enumerate(sizes[at : at + step].tolist(), at)):
                start, end = group[0], group[-1] + 1
                of_chunk = planes[:, ends[start] : ends[end]]
                of_chunk[:GAP_BYTES, 0] = 0
                first, last = (int(place) + self._place for place in (firsts[start], lasts[end]))
                chunks.append(
                    changes.pack_chunk(first, last, width, of_chunk.shape[1], list(of_chunk))
                )
        counts = np.diff(ends[num_ranges + 1 :], prepend=0)
        return Changes(chunks, set(self._tensors[counts > 0].tolist()))


def _planes_on_device(
    positions: torch.Tensor, differences: torch.Tensor, bounds: torch.Tensor
) -> torch.Tensor:
    """Return the bytes of changed words for `DeviceChanges.encode`, as one tensor.

    First come three lists of integers: for each of ``bounds``, the number of positions before it,
    the next position, and the last position before it. Then come the lowest bytes of all gaps, the
    next bytes of all gaps and so on; then the bytes of the differences, in the same order.
    """
    ends = torch.searchsorted(positions, bounds)
    firsts, lasts = positions[ends.clamp(max=len(positions) - 1)], positions[(ends - 1).clamp(0)]
    gaps = positions.diff(prepend=positions[:1]) - 1
    zigzag = (differences << 1) ^ (differences >> (8 * differences.itemsize - 1))
    rows = [words.view(torch.uint8).view(len(words), -1) for words in (gaps, zigzag)]
    planes = torch.cat([rows[0][:, :GAP_BYTES], rows[1]], 1).T
    return torch.cat([torch.cat([ends, firsts, lasts]).view(torch.uint8), planes.reshape(-1)])


def encode_all(ranges: Sequence[DeviceChanges], copier: Copier) -> Changes:
    encoded: list[Changes] = []

    def work(first: int, end: int) -> None:
        encoded.extend(changes.encode() for changes in ranges[first:end])

    copier.in_parallel(work, copier.cut_work([1 + changes.num_bytes for changes in ranges]))
    return Changes.joined(encoded)
