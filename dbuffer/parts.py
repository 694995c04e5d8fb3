"""Versions in parts: each rank of a trainer writes a file of its own, readers put them together.

So it is where ranks do not share memory: on a network mount, from any number of hosts.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from dbuffer import filesystem
from dbuffer.errors import StoreAccessError, StoreCorruptError, StoreInsecureError
from dbuffer.filesystem import Descriptor
from dbuffer.layout import BLOCK_BYTES, SPAN_BYTES, Layout, Placed, digest
from dbuffer.manifest import part_name
from dbuffer.spans import OnBytes
from dbuffer.tensors import Copier, FileTensors, as_bytes, is_plain, join_blocks, split_evenly


def part_path(path: Path, part: int) -> Path:
    """Where a part of the weights file at ``path`` is."""
    return path.with_name(part_name(path.name, part))


class PartFile:
    """The part that one rank writes, a new file.

    Raises:
        StoreFullError, StoreAccessError: it cannot be made.
    """

    def __init__(self, path: Path, part: int) -> None:
        self.path = part_path(path, part)
        self._digests: dict[Placed, list[int]] = {}
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with filesystem.os_errors("make a part", self.path):
            self._file = Descriptor(os.open(self.path, flags, 0o600))

    def write(self, piece: Placed, source: torch.Tensor, dtype: torch.dtype) -> None:
        """Write one piece, cast to ``dtype``, a bounded run at a time; keep its blocks' digests.

        Raises:
            StoreFullError, StoreAccessError: a write was refused.
        """
        digests: list[int] = []
        offset = piece.place
        with filesystem.os_errors("write a part", self.path):
            for data in _runs_of(source, dtype):
                filesystem.write_at(self._file.number, offset, data)
                offset += data.nbytes
                starts = range(0, data.nbytes, BLOCK_BYTES)
                digests += map(_hash_at(data), starts)
        self._digests[piece] = digests

    def finish(self) -> list[int]:
        """Flush and close it; the digests of its pieces' blocks, in the layout's order.

        Raises:
            StoreFullError, StoreAccessError: what was written did not all arrive.
        """
        filesystem.sync_file(self._file.number, self.path)
        self._file.close()
        return [digest for piece in sorted(self._digests) for digest in self._digests[piece]]

    def drop(self) -> None:
        """Remove it: the version will not be published."""
        self._file.close()
        with contextlib.suppress(OSError):  # the next sender removes it
            self.path.unlink()


def _runs_of(source: torch.Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """The bytes of a tensor as ``dtype``, some :data:`SPAN_BYTES` at a time."""
    elements = source.detach().reshape(-1)
    step = SPAN_BYTES // dtype.itemsize
    if is_plain(elements, dtype):
        flat = elements.view(torch.uint8)
        for first in range(0, flat.numel(), SPAN_BYTES):
            yield as_bytes(flat[first : first + SPAN_BYTES])
        return
    memory = torch.empty(step, dtype=dtype)
    for first in range(0, elements.numel(), step):
        run = elements[first : first + step]
        yield as_bytes(memory[: run.numel()].copy_(run).view(torch.uint8))


def join_shares(layout: Layout, shares: Sequence[list[int]]) -> list[int]:
    """The checksum of each tensor from what :meth:`PartFile.finish` gave for each part."""
    queues = [iter(share) for share in shares]
    part_at = {(piece.tensor, piece.offset): piece.part for piece in layout.pieces}
    empty = int(digest(b""), 16)
    digests, part = [], 0
    for block in layout.blocks:
        part = part_at.get((block.tensor, block.offset), part)  # or that of the block before
        digests.append(next(queues[part]) if block.num_bytes else empty)
    return join_blocks(layout.blocks, digests, len(layout.specs))


def check_parts(path: Path, layout: Layout) -> None:
    """See that every part is there, whole, on this host too.

    Raises:
        StoreAccessError: one is not.
    """
    with filesystem.os_errors("look at the parts", path):
        filesystem.refresh(path.parent)
        for part, num_bytes in enumerate(layout.part_bytes):
            if not num_bytes:
                continue
            try:
                found = part_path(path, part).stat().st_size
            except FileNotFoundError:
                found = None
            if found != num_bytes:
                raise StoreAccessError(
                    f"{part_path(path, part)} has {found} bytes here, and {num_bytes} where it was "
                    "written: is the store on one mount that all ranks see alike?"
                )


class _Run(NamedTuple):
    """What is read in one call."""

    part: int
    place: int
    start: int
    """In memory."""
    end: int
    first_block: int
    end_block: int


def read_parts(
    file: int,
    path: Path,
    layout: Layout,
    memory: FileTensors,
    copier: Copier,
    *,
    hashed: bool,
    on_bytes: OnBytes | None = None,
) -> list[int]:
    """Put a version together in memory; its checksums, if they are to be taken.

    Args:
        file: the open weights file.
        path: where that is; its parts are beside it.
        layout: its layout.
        memory: where the tensors go.
        copier: its threads read.
        hashed: whether checksums are wanted.
        on_bytes: called with the bytes of each run that was read, from several threads.

    Raises:
        StoreCorruptError: a part is shorter or longer than its layout says.
        StoreInsecureError: someone else could have written a part.
        StoreNotFoundError: a part was removed meanwhile.
        StoreAccessError: one cannot be read.
    """

    def read(run: _Run, part: int) -> memoryview:
        wanted = memory.raw[run.start : run.end]
        if filesystem.read_into(part, run.place, wanted) < wanted.nbytes:
            raise StoreCorruptError(f"{part_path(path, run.part)} was cut short")
        return wanted

    return _for_each_run(file, path, layout, copier, read, hashed=hashed, on_bytes=on_bytes)


def copy_parts(
    file: int,
    destination: int,
    path: Path,
    layout: Layout,
    copier: Copier,
    *,
    hashed: bool,
    on_bytes: OnBytes | None = None,
) -> list[int]:
    """Put a version together in another open file, as :func:`read_parts` does in memory."""

    def copy(run: _Run, part: int) -> memoryview:
        data = memoryview(filesystem.read_at(part, run.place, run.end - run.start))
        if data.nbytes < run.end - run.start:
            raise StoreCorruptError(f"{part_path(path, run.part)} was cut short")
        filesystem.write_at(destination, run.start, data)
        return data

    return _for_each_run(file, path, layout, copier, copy, hashed=hashed, on_bytes=on_bytes)


def _for_each_run(
    file: int,
    path: Path,
    layout: Layout,
    copier: Copier,
    move: Callable[[_Run, int], memoryview],
    *,
    hashed: bool,
    on_bytes: OnBytes | None,
) -> list[int]:
    """Let the copier's threads ``move`` all runs, each out of its open part; the checksums."""
    digests = [int(digest(b""), 16)] * len(layout.blocks)
    runs = sorted(_runs(layout))
    with contextlib.ExitStack() as stack, filesystem.os_errors("read the parts", path):
        files = _open_parts(stack, file, path, layout)

        def work(first: int, end: int) -> None:
            for run in runs[first:end]:
                data = move(run, files[run.part])
                if hashed:
                    starts = range(0, data.nbytes, BLOCK_BYTES)
                    digests[run.first_block : run.end_block] = map(_hash_at(data), starts)
                if on_bytes is not None:
                    on_bytes(data.nbytes)

        if runs:
            sizes = [run.end - run.start for run in runs]
            copier.in_parallel(work, split_evenly(sizes, copier.num_threads))
    return join_blocks(layout.blocks, digests, len(layout.specs)) if hashed else []


def _hash_at(data: memoryview) -> Callable[[int], int]:
    return lambda start: xxhash.xxh3_64_intdigest(data[start : start + BLOCK_BYTES])


def _runs(layout: Layout) -> Iterator[_Run]:
    """What is to be read, each piece in runs of whole blocks."""
    first_of = {(block.tensor, block.offset): i for i, block in enumerate(layout.blocks)}
    for piece in layout.pieces:
        start = layout.offsets[piece.tensor] + piece.offset
        for at in range(0, piece.num_bytes, SPAN_BYTES):
            num_bytes = min(SPAN_BYTES, piece.num_bytes - at)
            first = first_of[piece.tensor, piece.offset + at]
            num_blocks = -(-num_bytes // BLOCK_BYTES)
            yield _Run(
                *(piece.part, piece.place + at, start + at, start + at + num_bytes),
                *(first, first + num_blocks),
            )


def _open_parts(
    stack: contextlib.ExitStack, file: int, path: Path, layout: Layout
) -> dict[int, int]:
    """Descriptors of the parts, which must be trusted no less than the weights file."""
    trusted = os.fstat(file)
    files = {}
    for part, num_bytes in enumerate(layout.part_bytes):
        if not num_bytes:
            continue
        name = part_path(path, part)
        descriptor = filesystem.open_regular(name, os.O_RDONLY, owner_only=False)
        stack.callback(os.close, descriptor)
        found = os.fstat(descriptor)
        writable = stat.S_IMODE(found.st_mode) & ~stat.S_IMODE(trusted.st_mode) & 0o022
        if found.st_uid != trusted.st_uid or writable:
            raise StoreInsecureError(f"{name} has another owner or mode than {path.name}")
        if found.st_size != num_bytes:
            raise StoreCorruptError(
                f"{name} has {found.st_size} bytes, and was published with {num_bytes}"
            )
        files[part] = descriptor
    return files
