"""Reads and writes weights files on network mounts, without mapping them.

If a mapped file is removed by another host, a read of its mapping raises SIGBUS. So threads read
and write long spans with `pread` and `pwrite`, and hash each span while it is in a core's cache. If
a version has no part files, its weights file is read as the only part.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import xxhash

from dbuffer.errors import StoreAccessError, StoreCorruptError
from dbuffer.format.layout import SPAN_BYTES, Layout, Span
from dbuffer.format.places import part_path
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import (
    DTYPES,
    FileTensors,
    as_bytes,
    is_plain,
    join_blocks,
    split_evenly,
)
from dbuffer.store import filesystem
from dbuffer.store.filesystem import Descriptor

DIGEST_OF_NOTHING = xxhash.xxh3_64_intdigest(b"")


def read_tensors(
    file: int,
    path: Path,
    layout: Layout,
    into: FileTensors | Descriptor,
    copier: Copier,
    *,
    hashed: bool,
) -> list[int] | None:
    """Read all tensors of an open weights file and its part files; return checksums if ``hashed``.

    ``into`` is memory, or another open file, which gets the data of all part files.

    Raises:
        StoreCorruptError: a file is shorter than its layout says, or a part file is longer.
        StoreAccessError: a file cannot be read, or other users can write to a part file.
        StoreNotFoundError: a file was removed meanwhile.
    """
    # Set the digests of empty tensors here: if the version is in parts, no part file has them.
    digests = [DIGEST_OF_NOTHING] * len(layout.blocks)

    def work(first: int, end: int) -> None:
        for part, spans in itertools.groupby(layout.spans[first:end], lambda span: span.part):
            # Each thread opens the file: the kernel reads ahead badly on a shared descriptor.
            name = f"/proc/self/fd/{files[part]}"
            with Descriptor.open(name, os.O_RDONLY) as opened:
                for span in spans:
                    data = _read_span(opened.number, span, into, path)
                    if hashed:
                        _hash_span(layout, span, data, digests)

    with contextlib.ExitStack() as stack, filesystem.os_errors("read the weights", path):
        files = _open_parts(stack, file, path, layout)
        copier.in_parallel(work, _cut_spans(layout, copier.num_threads))
    return join_blocks(layout.blocks, digests) if hashed else None


def write_tensors(
    file: Descriptor,
    path: Path,
    layout: Layout,
    sources: Sequence[torch.Tensor],
    copier: Copier,
    *,
    offset: int = 0,
    hashed: bool,
) -> list[int]:
    """Write the tensors of a layout into an open file, cast to the layout's dtypes.

    ``offset`` is the offset of the first tensor in the file. Return the digests of the layout's
    blocks if ``hashed``, else [].
    """
    digests = [0] * len(layout.blocks)
    # Don't write the padding after the last tensor: a part file ends with its last tensor.
    end_byte = layout.offsets[-1] + layout.sizes[-1] if layout.specs else 0
    slices = _cut_spans(layout, copier.num_threads)
    shared = _share_copies(layout, sources, slices)

    def work(first: int, end: int) -> None:
        for span, data in _fill_spans(layout, sources, shared, layout.spans[first:end]):
            filesystem.write_at(file.number, offset + span.start, data[: end_byte - span.start])
            if hashed:
                _hash_span(layout, span, data, digests)

    with filesystem.os_errors("write the weights", path):
        copier.in_parallel(work, slices)
    return digests if hashed else []


def chunks_of(file: Descriptor, path: Path | str) -> Iterator[bytes]:
    offset = 0
    with filesystem.os_errors("read", path):
        while chunk := filesystem.read_at(file.number, offset, SPAN_BYTES):
            yield chunk
            offset += len(chunk)


def _open_parts(
    stack: contextlib.ExitStack, file: int, path: Path, layout: Layout
) -> dict[int | None, int]:
    files: dict[int | None, int] = {None: file}
    trusted = os.fstat(file)
    for part, num_bytes in enumerate(layout.part_bytes):
        if not num_bytes:
            continue
        name = part_path(path, part)
        opened = stack.enter_context(filesystem.open_regular(name, os.O_RDONLY, owner_only=False))
        status = os.fstat(opened.number)
        writable = stat.S_IMODE(status.st_mode) & ~stat.S_IMODE(trusted.st_mode) & 0o022
        if status.st_uid != trusted.st_uid or writable:
            raise StoreAccessError(
                f"{name} has another owner than {path.name}, or more users can write to it: other "
                "users may have changed it; publish again"
            )
        if status.st_size != num_bytes:
            raise StoreCorruptError(
                f"{name} has {status.st_size} bytes, and was published with {num_bytes}"
            )
        files[part] = opened.number
    return files


def _read_span(file: int, span: Span, into: FileTensors | Descriptor, path: Path) -> memoryview:
    if isinstance(into, FileTensors):
        data = into.raw[span.start : span.end]
    else:
        data = memoryview(bytearray(span.end - span.start))
    if filesystem.read_into(file, span.place, data) < data.nbytes:
        raise StoreCorruptError(
            f"{part_path(path, span.part)} is shorter than when it was published"
        )
    if isinstance(into, Descriptor):
        filesystem.write_at(into.number, span.start, data)
    return data


def _hash_span(layout: Layout, span: Span, data: memoryview, digests: list[int]) -> None:
    for index in range(span.first_block, span.end_block):
        block = layout.blocks[index]
        start = layout.offsets[block.tensor] + block.offset - span.start
        digests[index] = xxhash.xxh3_64_intdigest(data[start : start + block.num_bytes])


def _cut_spans(layout: Layout, num_slices: int) -> list[tuple[int, int]]:
    return split_evenly([span.end - span.start for span in layout.spans], num_slices)


class _SharedCopy:
    """Flat copy of a tensor, made for the first of several slices, and kept until the last."""

    def __init__(self, source: torch.Tensor, num_slices: int) -> None:
        self._source, self._num_left = source, num_slices
        self._lock = threading.Lock()
        self._flat: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """Return the copy. Call this once for each slice."""
        with self._lock:
            flat = self._source.detach().reshape(-1) if self._flat is None else self._flat
            self._num_left -= 1
            self._flat = flat if self._num_left else None
            return flat


def _share_copies(
    layout: Layout, sources: Sequence[torch.Tensor], slices: Sequence[tuple[int, int]]
) -> dict[int, _SharedCopy]:
    """Return the copies that several slices share, keyed by the tensor's index.

    A tensor is shared only if some slice has no other tensor. So no more copies are in memory than
    one per slice. Each other tensor is in at most two slices, which each make a copy.
    """
    if all(source.is_contiguous() for source in sources):  # their flat views take no memory
        return {}
    blocks, spans = layout.blocks, layout.spans
    ranges = [
        (blocks[spans[first].first_block].tensor, blocks[spans[end - 1].end_block - 1].tensor)
        for first, end in slices
    ]
    alone = {first for first, last in ranges if first == last}
    num_slices = {index: sum(a <= index <= b for a, b in ranges) for index in alone}
    return {
        index: _SharedCopy(sources[index], count)
        for index, count in num_slices.items()
        if count > 1 and not sources[index].is_contiguous()
    }


def _fill_spans(
    layout: Layout,
    sources: Sequence[torch.Tensor],
    shared: Mapping[int, _SharedCopy],
    spans: Sequence[Span],
) -> Iterator[tuple[Span, memoryview]]:
    """Yield each span with its bytes as the file holds them.

    The next span overwrites these bytes. They are a copy, because the trainer may change its tensor
    between the write and the hash.
    """
    room = torch.empty(max((span.end - span.start for span in spans), default=0), dtype=torch.uint8)
    flat_of, flat = -1, torch.empty(0)
    for span in spans:
        memory = room[: span.end - span.start].zero_()  # padding is written too
        for block in layout.blocks[span.first_block : span.end_block]:
            if not block.num_bytes:
                continue
            start = layout.offsets[block.tensor] + block.offset - span.start
            dtype = DTYPES[layout.specs[block.tensor].dtype]
            source = sources[block.tensor]
            place = memory[start : start + block.num_bytes]
            if is_plain(source, dtype):
                address = source.data_ptr() + block.offset
                ctypes.memmove(place.data_ptr(), address, block.num_bytes)
                continue
            if flat_of != block.tensor:  # copied once for all its blocks
                flat = torch.empty(0)  # free it before the next is made
                copy = shared.get(block.tensor)
                flat = source.detach().reshape(-1) if copy is None else copy.take()
                flat_of = block.tensor
            first = block.offset // dtype.itemsize
            typed = place.view(dtype)
            typed.copy_(flat[first : first + typed.numel()])
        yield span, as_bytes(memory)
