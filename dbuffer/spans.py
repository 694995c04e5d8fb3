"""Reading and writing a weights file that is not mapped, in long runs and several at once.

Across a network a mapping is the wrong tool: a file that goes away is a SIGBUS, and a page that
is written first comes over the network to be read. So bytes go through `pread` and `pwrite`, and
are hashed in passing, while they are in a core's cache.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import xxhash

from dbuffer import filesystem
from dbuffer.errors import StoreCorruptError
from dbuffer.layout import SPAN_BYTES, Layout, Span
from dbuffer.tensors import (
    DTYPES,
    Copier,
    FileTensors,
    as_bytes,
    is_plain,
    join_blocks,
    split_evenly,
)

OnBytes = Callable[[int], None]


def read_tensors(
    file: int,
    path: Path,
    memory: FileTensors,
    copier: Copier,
    *,
    hashed: bool,
    on_bytes: OnBytes | None = None,
) -> list[int]:
    """Read all tensors of an open file into memory; their checksums, if they are to be taken.

    ``on_bytes`` is called with the bytes of each run that was read, from several threads.

    Raises:
        StoreCorruptError: the file is shorter than its layout.
        StoreNotFoundError: it was removed meanwhile.
        StoreAccessError: it cannot be read.
    """

    def read(span: Span, own: int) -> memoryview:
        wanted = memory.raw[span.start : span.end]
        _read_span(own, span, wanted, path)
        return wanted

    layout = memory.layout
    return _for_each_span(file, path, layout, copier, read, hashed=hashed, on_bytes=on_bytes)


def write_tensors(
    file: int,
    path: Path,
    layout: Layout,
    sources: Sequence[torch.Tensor],
    copier: Copier,
    *,
    hashed: bool,
) -> list[int]:
    """Write all tensors into an open file, cast where dtypes differ; their checksums, if wanted.

    Takes some :data:`SPAN_BYTES` of memory a thread, and a copy of a tensor that is not contiguous.

    Raises:
        StoreFullError, StoreAccessError: a write was refused.
    """
    digests = [0] * len(layout.blocks)

    def work(first: int, end: int) -> None:
        pieces = _Pieces(layout, sources)
        for span in layout.spans[first:end]:
            data = pieces.gather(span)
            filesystem.write_at(file, span.start, data)
            if hashed:
                _hash_span(layout, span, data, digests)

    with filesystem.os_errors("write the weights", path):
        copier.in_parallel(work, _cut_spans(layout, copier.num_threads))
    return join_blocks(layout.blocks, digests, len(layout.specs)) if hashed else []


def copy_tensors(
    source: int,
    destination: int,
    path: Path,
    layout: Layout,
    copier: Copier,
    *,
    hashed: bool,
    on_bytes: OnBytes | None = None,
) -> list[int]:
    """Copy all tensors from one open file, at ``path``, to another; as :func:`read_tensors`."""

    def copy(span: Span, own: int) -> memoryview:
        data = memoryview(bytearray(span.end - span.start))
        _read_span(own, span, data, path)
        filesystem.write_at(destination, span.start, data)
        return data

    return _for_each_span(source, path, layout, copier, copy, hashed=hashed, on_bytes=on_bytes)


def _for_each_span(
    file: int,
    path: Path,
    layout: Layout,
    copier: Copier,
    move: Callable[[Span, int], memoryview],
    *,
    hashed: bool,
    on_bytes: OnBytes | None,
) -> list[int]:
    """Let the copier's threads ``move`` all spans out of an open file; the checksums."""
    digests = [0] * len(layout.blocks)

    def work(first: int, end: int) -> None:
        # Of its own: threads that share an open file spoil each other's read-ahead.
        own = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for span in layout.spans[first:end]:
                data = move(span, own)
                if hashed:
                    _hash_span(layout, span, data, digests)
                if on_bytes is not None:
                    on_bytes(data.nbytes)
        finally:
            os.close(own)

    with filesystem.os_errors("read the weights", path):
        copier.in_parallel(work, _cut_spans(layout, copier.num_threads))
    return join_blocks(layout.blocks, digests, len(layout.specs)) if hashed else []


def _read_span(file: int, span: Span, memory: memoryview, path: Path) -> None:
    if filesystem.read_into(file, span.start, memory) < memory.nbytes:
        raise StoreCorruptError(f"{path} is shorter than what was published")


def _hash_span(layout: Layout, span: Span, data: memoryview, digests: list[int]) -> None:
    """Set the digests of a span's blocks; ``data`` holds its bytes."""
    for index in range(span.first_block, span.end_block):
        block = layout.blocks[index]
        start = layout.offsets[block.tensor] + block.offset - span.start
        digests[index] = xxhash.xxh3_64_intdigest(data[start : start + block.num_bytes])


def _cut_spans(layout: Layout, parts: int) -> list[tuple[int, int]]:
    return split_evenly([span.end - span.start for span in layout.spans], parts)


class _Pieces:
    """Brings the blocks of a span into one run of bytes, just as the file holds them."""

    def __init__(self, layout: Layout, sources: Sequence[torch.Tensor]) -> None:
        self._layout = layout
        self._sources = sources
        self._memory = torch.empty(2 * SPAN_BYTES, dtype=torch.uint8)
        self._flat: tuple[int, torch.Tensor] | None = None

    def gather(self, span: Span) -> memoryview:
        """The bytes of a span; valid until the next call."""
        layout = self._layout
        memory = self._memory[: span.end - span.start].zero_()  # gaps are written too
        for block in layout.blocks[span.first_block : span.end_block]:
            if not block.num_bytes:
                continue
            start = layout.offsets[block.tensor] + block.offset - span.start
            dtype = DTYPES[layout.specs[block.tensor].dtype]
            source = self._sources[block.tensor]
            place = memory[start : start + block.num_bytes]
            if is_plain(source, dtype):
                address = source.data_ptr() + block.offset
                ctypes.memmove(place.data_ptr(), address, block.num_bytes)
            else:
                elements = self._contiguous(block.tensor)
                first = block.offset // dtype.itemsize
                typed = place.view(dtype)
                typed.copy_(elements[first : first + typed.numel()])
        return as_bytes(memory)

    def _contiguous(self, index: int) -> torch.Tensor:
        """A tensor's elements in a row; one that lies otherwise is copied once, not per block."""
        if self._flat is None or self._flat[0] != index:
            self._flat = None  # before the next is made
            self._flat = index, self._sources[index].detach().reshape(-1)
        return self._flat[1]
