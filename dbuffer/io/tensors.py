"""`FileTensors`: typed views of a weights file's tensors, mapped or in memory; and checksums."""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from dbuffer.errors import StoreAccessError
from dbuffer.format.layout import ITEM_BYTES, Block, Layout
from dbuffer.io.devices import PageLock
from dbuffer.runtime.lazy import cached_property
from dbuffer.runtime.trouble import log_once
from dbuffer.store import filesystem

logger = logging.getLogger(__name__)

_MAP_NORESERVE = 0x4000 if os.uname().machine in ("x86_64", "aarch64") else 0

_PAGE_MAP = Path("/proc/self/pagemap")
_PAGE_IN_USE, _PAGE_OF_FILE = np.uint64(3 << 62), np.uint64(1 << 61)
"""Flags in a page's 8-byte entry of ``/proc/self/pagemap``: the page is in use; it is a file's page
(Linux, Documentation/admin-guide/mm/pagemap.rst)."""

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class FileTensors:
    """Tensors of a weights file, in memory. ``data`` has the file's bytes from its beginning."""

    def __init__(self, data: torch.Tensor, layout: Layout) -> None:
        self.layout = layout
        self._bytes = data
        self.address = data.data_ptr()
        self._slices: dict[tuple[int, bool], list[tuple[int, int]]] = {}

    @classmethod
    def in_memory(cls, layout: Layout) -> FileTensors:
        return cls(new_memory(layout.checksums_offset), layout)

    @cached_property
    def raw(self) -> memoryview:
        return as_bytes(self._bytes)

    def tensor(self, index: int) -> torch.Tensor:
        return view_tensor(self._bytes, self.layout, index)

    @property
    def data(self) -> torch.Tensor:
        return self._bytes[: self.layout.checksums_offset]

    def read_ahead(self) -> None:
        """Read every page of a mapped file into memory. For other memory, do nothing."""

    @cached_property
    def views(self) -> list[torch.Tensor]:
        return [self.tensor(index) for index in range(len(self.layout.specs))]

    def cut(self, parts: int, *, into_blocks: bool = False) -> list[tuple[int, int]]:
        """Cut the tensors, or their blocks, into at most ``parts`` slices of about equal size."""
        if (slices := self._slices.get((parts, into_blocks))) is None:
            layout = self.layout
            sizes = [block.num_bytes for block in layout.blocks] if into_blocks else layout.sizes
            slices = self._slices[parts, into_blocks] = split_evenly(sizes, parts)
        return slices

    def hash_block(self, block: Block) -> int:
        start = self.layout.offsets[block.tensor] + block.offset
        return xxhash.xxh3_64_intdigest(self.raw[start : start + block.num_bytes])


class MappedTensors(FileTensors):
    """Tensors of a weights file that is mapped into memory.

    ``access`` is ``mmap.ACCESS_WRITE`` for a writer, and ``ACCESS_READ`` for a reader that copies
    the tensors. It is ``ACCESS_COPY`` for a reader that returns the tensors to users: a user who
    writes to a tensor changes a private copy of the page, never the file.
    """

    def __init__(self, file: int, file_bytes: int, layout: Layout, *, access: int) -> None:
        super().__init__(map_file(file, file_bytes, access), layout)
        self.identity = filesystem.identity_of(file)
        """Device and inode of the mapped file. The path may later name another file."""
        self._access = access
        self._device_copies = 0
        if access == mmap.ACCESS_COPY:
            _read_mappings[self.address] = self

    def read_ahead(self) -> None:
        self._bytes[:: mmap.PAGESIZE].amax()

    def is_unwritten(self) -> bool:
        """Whether no user has written to the mapping. A write replaces a page by a private copy."""
        if self._access != mmap.ACCESS_COPY:
            return True
        first, num_pages = self.address // mmap.PAGESIZE, -(-len(self.raw) // mmap.PAGESIZE)
        try:
            with _PAGE_MAP.open("rb", buffering=0) as file:
                file.seek(8 * first)
                pages = np.frombuffer(file.read(8 * num_pages), np.uint64)
        except OSError as error:
            log_once(logger, "files are mapped anew for each version: %s", str(error))
            return False
        is_own = (pages & _PAGE_IN_USE != 0) & (pages & _PAGE_OF_FILE == 0)
        return len(pages) == num_pages and not bool(is_own.any())

    def expect_device(self) -> None:
        """Prepare for a copy between the file and a GPU; page-lock the file at the second call.

        Page-locking takes as long as four later copies, so a file that is copied only once is not
        locked. Don't call this for a file on a disk: it is unsafe to lock pages that the kernel
        writes to a disk.
        """
        if self._device_copies == 1:
            try:
                num_bytes = self._bytes.numel()
                is_read_only = self._access == mmap.ACCESS_READ
                lock = PageLock(self.address, num_bytes, read_only=is_read_only)
                weakref.finalize(self, lock.release).atexit = False  # the kernel unlocks at exit
            except StoreAccessError as error:
                log_once(logger, "copies from a GPU take longer: %s", str(error))
        self._device_copies += 1


_read_mappings: weakref.WeakValueDictionary[int, MappedTensors] = weakref.WeakValueDictionary()
"""Mappings that this process's readers return to users, keyed by the address of their memory."""


def file_under(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return device and inode of the file that a reader's tensor is mapped from, else None."""
    if not _read_mappings or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if tensor.device.type != "cpu":
        return None
    mapped = _read_mappings.get(tensor.untyped_storage().data_ptr())
    return None if mapped is None else mapped.identity


class KeptMappings:
    """Mappings of weights files, kept so that the next version in a file needs no new mapping.

    A new mapping takes as long as copying into the file, because the kernel maps page by page.
    """

    def __init__(self) -> None:
        self._mapped: dict[Path, MappedTensors] = {}

    def get(self, path: Path, file: int, make: Callable[[], MappedTensors]) -> MappedTensors:
        """Return the mapping of an open file. If there is none, ``make`` it and keep it.

        Before that, unmap the buffer's earlier files and all removed files.
        """
        mapped = self._mapped.get(path)
        if (
            mapped is not None
            and mapped.identity == filesystem.identity_of(file)
            and mapped.is_unwritten()
        ):
            return mapped
        # A buffer has one weights file at a time, so unmap earlier files. Also unmap removed files,
        # which take up space while they are mapped.
        self._mapped = {
            kept_path: kept
            for kept_path, kept in self._mapped.items()
            if kept_path.parent != path.parent and kept_path.exists()
        }
        del mapped  # unmap it
        return self._mapped.setdefault(path, make())

    def keep_only(self, layout: Layout | None = None) -> None:
        """Unmap all files with other layouts. Default: unmap all files, to free space."""
        self._mapped = {
            path: mapped for path, mapped in self._mapped.items() if mapped.layout is layout
        }


def new_memory(num_bytes: int, device: torch.device | None = None) -> torch.Tensor:
    """Allocate memory as a flat tensor of undefined bytes, or raise a StoreAccessError.

    The memory is main memory, or a device's.
    """
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except (MemoryError, RuntimeError) as error:
        raise StoreAccessError(
            f"cannot allocate {num_bytes} bytes of memory for a version; is there a limit on this "
            "process's memory (ulimit -v, vm.overcommit_memory)?"
        ) from error


def as_bytes(data: torch.Tensor) -> memoryview:
    array: Any = data.numpy()  # a buffer; numpy's types say so only from Python 3.12 on
    return memoryview(array)


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor's memory as a flat tensor of bytes."""
    # A tensor of one element is contiguous with any stride, but torch views it as another dtype
    # only if the stride is 1.
    flat = tensor.detach().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def view_tensor(data: torch.Tensor, layout: Layout, index: int) -> torch.Tensor:
    spec = layout.specs[index]
    start = layout.offsets[index]
    flat = data[start : start + spec.num_bytes]
    return flat.view(DTYPES[spec.dtype]).view(spec.shape)


def map_file(file: int, file_bytes: int, access: int) -> torch.Tensor:
    """Map an open file. The mapping does not hold the file's lock.

    Python's ``mmap`` keeps a duplicate of the file's descriptor. A lock lasts until all duplicates
    are closed, also in forked children. So the file is opened again, without a lock, to be mapped.
    """
    mode = os.O_RDWR if access == mmap.ACCESS_WRITE else os.O_RDONLY
    with filesystem.os_errors("map a weights file", path := f"/proc/self/fd/{file}"):
        opened = filesystem.Descriptor.open(path, mode)
    # Reserve no memory for private copies of pages: a reader writes to few pages, if any.
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE if access == mmap.ACCESS_COPY else mmap.MAP_SHARED
    protection = mmap.PROT_READ if access == mmap.ACCESS_READ else mmap.PROT_READ | mmap.PROT_WRITE
    try:
        with opened:
            mapped = mmap.mmap(opened.number, file_bytes, flags, protection)
    except OSError as error:
        raise StoreAccessError(
            f"cannot map {file_bytes} bytes of a weights file: {error.strerror}; is there a limit "
            "on this process's memory (ulimit -v, vm.overcommit_memory)?"
        ) from error
    if access != mmap.ACCESS_READ:
        return torch.frombuffer(mapped, dtype=torch.uint8)
    # torch warns about read-only buffers. Pass it a ctypes array at the mapping's address, which
    # torch takes for writable.
    array = np.frombuffer(mapped, np.uint8)
    memory = (ctypes.c_ubyte * file_bytes).from_address(array.ctypes.data)
    memory.owner = array  # type: ignore[attr-defined] # keeps the mapping
    return torch.frombuffer(memory, dtype=torch.uint8)


def copy_one(destination: torch.Tensor, source: torch.Tensor) -> None:
    with torch.inference_mode():
        destination.copy_(source)


def can_cast_to(dtype: torch.dtype) -> bool:
    """Whether floating-point tensors can be published in this dtype."""
    # Exclude float4_e2m1fn_x2, with two numbers in an element, and float8_e8m0fnu, without a sign.
    is_special = DTYPE_NAMES.get(dtype) in ("float4_e2m1fn_x2", "float8_e8m0fnu")
    return dtype in DTYPE_NAMES and dtype.is_floating_point and not is_special


def is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor's memory has the very bytes that a file stores for it, with this dtype."""
    return (
        tensor.dtype is dtype
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def split_evenly(sizes: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Cut ``range(len(sizes))`` into at most ``parts`` slices with about equal sums of sizes."""
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


def join_blocks(blocks: Sequence[Block], digests: Sequence[int]) -> list[int]:
    """Return the checksum of each tensor that the blocks belong to, given the blocks' digests."""
    pairs = zip(blocks, digests, strict=True)
    by_tensor = itertools.groupby(pairs, lambda pair: pair[0].tensor)
    return [join_digests([digest for _, digest in of_one]) for _, of_one in by_tensor]


def join_digests(digests: Sequence[int]) -> int:
    """Return the checksum of a tensor, given the digests of its blocks (at least one)."""
    if len(digests) == 1:
        return digests[0]
    return xxhash.xxh3_64_intdigest(pack_checksums(digests))


def pack_checksums(checksums: Sequence[int]) -> bytes:
    return b"".join(checksum.to_bytes(8, "little") for checksum in checksums)


def unpack_checksums(data: bytes) -> list[int]:
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
