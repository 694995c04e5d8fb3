"""Tensors and a mapped weights file: typed views, parallel copies, checksums.

The checksum of a tensor is xxh3 (64 bits) of its bytes; for one longer than a block, xxh3 of the
digests of its blocks, so that any number of threads can work on one tensor.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
import xxhash

from dbuffer import filesystem
from dbuffer.errors import OptionError
from dbuffer.layout import ITEM_BYTES, Block, Layout

MAX_DEFAULT_THREADS = 8
"""Copies are bound by memory bandwidth, which a handful of cores use up."""

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class FileTensors:
    """The tensors of a weights file in memory: typed views, and blocks to hash.

    ``data`` holds the bytes from the first tensor on, at least to the end of the last.
    """

    def __init__(self, data: torch.Tensor, layout: Layout) -> None:
        self.layout = layout
        self._bytes = data
        self.raw = as_bytes(data)
        self.address = data.data_ptr()
        self._tensor_slices: dict[int, list[tuple[int, int]]] = {}
        self._block_slices: dict[int, list[tuple[int, int]]] = {}

    def tensor(self, index: int) -> torch.Tensor:
        """A view of one tensor."""
        return view_tensor(self._bytes, self.layout, index)

    @property
    def data(self) -> torch.Tensor:
        """The bytes of all tensors, one after another."""
        return self._bytes[: self.layout.checksums_offset]

    def read_ahead(self) -> None:
        """Have every page at hand, which those of a mapping are not by themselves."""

    @functools.cached_property
    def views(self) -> list[torch.Tensor]:
        """Views of all tensors, made once."""
        return [self.tensor(index) for index in range(len(self.layout.specs))]

    def cut_tensors(self, parts: int) -> list[tuple[int, int]]:
        """Slices of :attr:`views` of about equal bytes; made once."""
        if (slices := self._tensor_slices.get(parts)) is None:
            slices = self._tensor_slices[parts] = split_evenly(self.layout.sizes, parts)
        return slices

    def cut_blocks(self, parts: int) -> list[tuple[int, int]]:
        """Slices of :attr:`blocks` of about equal bytes; made once."""
        if (slices := self._block_slices.get(parts)) is None:
            sizes = [block.num_bytes for block in self.blocks]
            slices = self._block_slices[parts] = split_evenly(sizes, parts)
        return slices

    @property
    def blocks(self) -> list[Block]:
        """All blocks of all tensors, in the file's order."""
        return self.layout.blocks

    def hash_block(self, block: Block) -> int:
        """The digest of one block's bytes."""
        start = self.layout.offsets[block.tensor] + block.offset
        return xxhash.xxh3_64_intdigest(self.raw[start : start + block.num_bytes])


class MappedTensors(FileTensors):
    """A weights file mapped into memory.

    A writer's mapping is shared: what is copied in is in the file. A reader's is private: a
    program that changes a snapshot's tensor changes its own copy of that page, never the file.
    """

    def __init__(self, file: int, file_bytes: int, layout: Layout, *, shared: bool) -> None:
        mapped = _map(file, file_bytes, shared=shared)
        super().__init__(torch.frombuffer(mapped, dtype=torch.uint8), layout)
        self.identity = filesystem.identity_of(file)
        """Of the file, which may be replaced by another of its name."""

    def read_ahead(self) -> None:
        """Touch every page, with the interpreter's lock let go."""
        self._bytes[:: mmap.PAGESIZE].amax()


def as_bytes(data: torch.Tensor) -> memoryview:
    """The memory of a flat tensor of bytes."""
    return memoryview(data.numpy())  # type: ignore[arg-type]  # an array is a buffer


def view_tensor(data: torch.Tensor, layout: Layout, index: int) -> torch.Tensor:
    """One of a layout's tensors, in the bytes that the layout describes."""
    spec = layout.specs[index]
    start = layout.offsets[index]
    flat = data[start : start + spec.num_bytes]
    return flat.view(DTYPES[spec.dtype]).view(spec.shape)


def _map(file: int, file_bytes: int, *, shared: bool) -> mmap.mmap:
    # A map keeps a duplicate of its descriptor, and with it the lock of whatever it was opened
    # as; forked children keep it too. So the file is opened once more, with no lock.
    own = os.open(f"/proc/self/fd/{file}", (os.O_RDWR if shared else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
        return mmap.mmap(own, file_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(own)


class Copier:
    """Copies and hashes with a fixed number of threads."""

    def __init__(self, num_threads: int | None = None) -> None:
        if num_threads is None:
            num_threads = min(MAX_DEFAULT_THREADS, os.cpu_count() or 1)
        if num_threads < 1:
            raise OptionError(f"num_threads is {num_threads}, and must be at least 1")
        self.num_threads = num_threads
        self._pool: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def write(self, mapped: FileTensors, sources: list[torch.Tensor]) -> None:
        """Copy each source into the file, casting where dtypes differ."""
        self._copy(mapped, mapped.views, sources)

    def read(self, mapped: FileTensors, targets: list[torch.Tensor]) -> None:
        """Copy each tensor of the file into its target."""
        self._copy(mapped, targets, mapped.views)

    def copy_bytes(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy one flat run of bytes."""

        def work(first: int, end: int) -> None:
            destination[first:end].copy_(source[first:end])

        if not source.numel():
            return
        share = -(-source.numel() // self.num_threads)
        starts = range(0, source.numel(), share)
        self.in_parallel(work, [(at, min(at + share, source.numel())) for at in starts])

    def write_hashed(self, mapped: FileTensors, sources: list[torch.Tensor]) -> list[int]:
        """Copy into the file; the checksum of each tensor, of the bytes that are there now."""
        return self._copy_and_hash(mapped, sources, into_file=True)

    def read_hashed(self, mapped: FileTensors, targets: list[torch.Tensor]) -> list[int]:
        """Copy out of the file; the checksum of each tensor's bytes in the file.

        They are hashed after they were copied. A writer that overwrites them never puts the old
        bytes back, so a checksum that is right proves that the copy before it was right.
        """
        return self._copy_and_hash(mapped, targets, into_file=False)

    def checksums(self, mapped: FileTensors) -> list[int]:
        """The checksum of each tensor in the file."""
        digests = [0] * len(mapped.blocks)

        def work(first: int, end: int) -> None:
            for index in range(first, end):
                digests[index] = mapped.hash_block(mapped.blocks[index])

        self.in_parallel(work, mapped.cut_blocks(self.num_threads))
        return join_blocks(mapped.blocks, digests, len(mapped.layout.specs))

    def _copy(
        self,
        mapped: FileTensors,
        destinations: list[torch.Tensor],
        sources: list[torch.Tensor],
    ) -> None:
        def work(first: int, end: int) -> None:
            # One call for many tensors: the interpreter's lock is let go once, not per tensor.
            torch._foreach_copy_(destinations[first:end], sources[first:end])

        self.in_parallel(work, mapped.cut_tensors(self.num_threads))

    def _copy_and_hash(
        self, mapped: FileTensors, others: list[torch.Tensor], *, into_file: bool
    ) -> list[int]:
        blocks, offsets = mapped.blocks, mapped.layout.offsets
        addresses = self._plain_addresses(mapped, others, into_file=into_file)
        digests = [0] * len(blocks)

        def work(first: int, end: int) -> None:
            for index in range(first, end):
                block = blocks[index]
                address = addresses[block.tensor]
                if address and block.num_bytes:
                    inside = mapped.address + offsets[block.tensor] + block.offset
                    outside = address + block.offset
                    ends = (inside, outside) if into_file else (outside, inside)
                    ctypes.memmove(*ends, block.num_bytes)
                digests[index] = mapped.hash_block(block)

        self.in_parallel(work, mapped.cut_blocks(self.num_threads))
        return join_blocks(blocks, digests, len(others))

    def _plain_addresses(
        self, mapped: FileTensors, others: Sequence[torch.Tensor], *, into_file: bool
    ) -> list[int]:
        """Where each tensor lies that is copied byte by byte; 0 for the rest, copied here."""
        addresses = [0] * len(others)
        for index, (view, other) in enumerate(zip(mapped.views, others, strict=True)):
            if is_plain(other, view.dtype):
                addresses[index] = other.data_ptr()
            else:
                copy_one(*((view, other) if into_file else (other, view)))
        return addresses

    def in_parallel(
        self, work: Callable[[int, int], Any], slices: Sequence[tuple[int, int]]
    ) -> None:
        """Call ``work(first, end)`` for all slices at once."""

        def without_autograd(first: int, end: int) -> None:
            # Grad mode is a thread's own; targets may be parameters or inference tensors.
            with torch.inference_mode():
                work(first, end)

        first_slice, *others = slices
        if others and self._pool is None:
            self._pool = ThreadPoolExecutor(self.num_threads - 1, "dbuffer-copy")
        futures = [
            self._pool.submit(without_autograd, *piece)
            for piece in others
            if self._pool is not None
        ]
        try:
            without_autograd(*first_slice)
        finally:
            wait(futures)  # nobody may write on behind a caller's back
        for future in futures:
            future.result()


def copy_one(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a single tensor, casting if dtypes differ."""
    with torch.inference_mode():
        destination.copy_(source)


def can_cast_to(dtype: torch.dtype) -> bool:
    """Whether floating-point tensors can be published in this dtype."""
    is_packed = DTYPE_NAMES.get(dtype) == "float4_e2m1fn_x2"  # two numbers an element
    return dtype in DTYPE_NAMES and dtype.is_floating_point and not is_packed


def is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the tensor's bytes lie in main memory just as a file of ``dtype`` holds them."""
    return (
        tensor.dtype is dtype
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def split_evenly(sizes: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Cut ``range(len(sizes))`` into at most ``parts`` slices of about equal total size."""
    share = max(1, -(-sum(sizes) // parts))
    slices: list[tuple[int, int]] = []
    first = filled = 0
    for index, size in enumerate(sizes):
        filled += size
        if filled >= share and len(slices) < parts - 1:
            slices.append((first, index + 1))
            first, filled = index + 1, 0
    if first < len(sizes):
        slices.append((first, len(sizes)))
    return slices


def join_blocks(blocks: Sequence[Block], digests: Sequence[int], num_tensors: int) -> list[int]:
    """The checksum of each tensor from the digests of its blocks."""
    joined = [0] * num_tensors
    first = 0
    while first < len(blocks):
        tensor, end = blocks[first].tensor, first + 1
        while end < len(blocks) and blocks[end].tensor == tensor:
            end += 1
        joined[tensor] = digests[first]
        if end - first > 1:
            joined[tensor] = join_digests(digests[first:end])
        first = end
    return joined


def join_digests(digests: Sequence[int]) -> int:
    """One digest for a tensor of several blocks."""
    return xxhash.xxh3_64_intdigest(pack_checksums(digests))


def pack_checksums(checksums: Sequence[int]) -> bytes:
    """The table of checksums as it stands in the file."""
    return b"".join(checksum.to_bytes(8, "little") for checksum in checksums)


def unpack_checksums(data: bytes) -> list[int]:
    """The other way round."""
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
