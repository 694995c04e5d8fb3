"""Tensors and a mapped weights file: typed views, checksums.

The checksum of a tensor is xxh3 (64 bits) of its bytes; for one longer than a block, xxh3 of the
digests of its blocks, so that any number of threads can work on one tensor.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import os
import weakref
from collections.abc import Sequence
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
"""On Linux; Python 3.11 has no name for it."""

_PAGE_MAP = Path("/proc/self/pagemap")
_PAGE_IN_USE, _PAGE_OF_FILE = np.uint64(3 << 62), np.uint64(1 << 61)
"""Bits of its 8 bytes for each page (Linux, Documentation/admin-guide/mm/pagemap.rst)."""

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

    @classmethod
    def in_memory(cls, layout: Layout) -> FileTensors:
        """Allocate memory for a layout's tensors; its content is undefined."""
        return cls(new_memory(layout.checksums_offset), layout)

    def tensor(self, index: int) -> torch.Tensor:
        return view_tensor(self._bytes, self.layout, index)

    @property
    def data(self) -> torch.Tensor:
        return self._bytes[: self.layout.checksums_offset]

    def read_ahead(self) -> None:
        """Read every page of a mapping into memory; other memory has all its pages."""

    @cached_property
    def views(self) -> list[torch.Tensor]:
        return [self.tensor(index) for index in range(len(self.layout.specs))]

    def cut_tensors(self, parts: int) -> list[tuple[int, int]]:
        if (slices := self._tensor_slices.get(parts)) is None:
            slices = self._tensor_slices[parts] = split_evenly(self.layout.sizes, parts)
        return slices

    def cut_blocks(self, parts: int) -> list[tuple[int, int]]:
        if (slices := self._block_slices.get(parts)) is None:
            sizes = [block.num_bytes for block in self.layout.blocks]
            slices = self._block_slices[parts] = split_evenly(sizes, parts)
        return slices

    def hash_block(self, block: Block) -> int:
        start = self.layout.offsets[block.tensor] + block.offset
        return xxhash.xxh3_64_intdigest(self.raw[start : start + block.num_bytes])


class MappedTensors(FileTensors):
    """A weights file mapped into memory.

    Args:
        file: open file.
        file_bytes: its size.
        layout: of its tensors.
        access: ``mmap.ACCESS_WRITE``: a writer's mapping; copies into it are in the file.
            ``ACCESS_COPY``: a reader's, to hand out: a program that changes a snapshot's tensor
            changes its own copy of that page, never the file. ``ACCESS_READ``: to copy from.
    """

    def __init__(self, file: int, file_bytes: int, layout: Layout, *, access: int) -> None:
        super().__init__(map_file(file, file_bytes, access), layout)
        self.identity = filesystem.identity_of(file)
        """Identity of the mapped file, which another file of the same name may replace."""
        self._access = access
        self._device_copies = 0
        if access == mmap.ACCESS_COPY:
            _read_mappings[self.address] = self

    def read_ahead(self) -> None:
        """Touch every page, with the interpreter's lock let go."""
        self._bytes[:: mmap.PAGESIZE].amax()

    def is_unwritten(self) -> bool:
        """Whether it shows the file: no page is this process's own, as a write would make it."""
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
        """Page-lock the file when a GPU's tensors come a second time.

        That takes as long as four copies do afterwards, so a file that is written once is not
        locked. Of files in main memory only: to lock another one's pages, which the kernel
        writes to a disk, is not safe.
        """
        if self._device_copies == 1:
            try:
                num_bytes = self._bytes.numel()
                is_read_only = self._access == mmap.ACCESS_READ
                PageLock.owned_by(self, self.address, num_bytes, read_only=is_read_only)
            except StoreAccessError as error:
                log_once(logger, "copies from a GPU take longer: %s", str(error))
        self._device_copies += 1


_read_mappings: weakref.WeakValueDictionary[int, MappedTensors] = weakref.WeakValueDictionary()
"""Readers' mappings in this process, by the address of their memory."""


def file_under(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the identity of the file under a reader's tensor, or None for other tensors."""
    if not _read_mappings or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if tensor.device.type != "cpu":
        return None
    mapped = _read_mappings.get(tensor.untyped_storage().data_ptr())
    return None if mapped is None else mapped.identity


class KeptMappings:
    """Mappings of the files that are written, or read, again and again.

    Making one takes as long as copying into it, page by page.
    """

    def __init__(self) -> None:
        self._mapped: dict[Path, MappedTensors] = {}

    def get(self, path: Path, file: int) -> MappedTensors | None:
        """Return the mapping of an open file, unless a write here has changed it.

        If there is none, the mapping of the other file that this one replaces is dropped.
        """
        mapped = self._mapped.get(path)
        if (
            mapped is not None
            and mapped.identity == filesystem.identity_of(file)
            and mapped.is_unwritten()
        ):
            return mapped
        # A mapping keeps an unlinked file's room; and each buffer has one file.
        self._mapped = {
            kept_path: kept
            for kept_path, kept in self._mapped.items()
            if kept_path.parent != path.parent and kept_path.exists()
        }
        return None

    def keep(self, path: Path, mapped: MappedTensors) -> None:
        """Keep the mapping of the file at ``path``."""
        self._mapped[path] = mapped

    def keep_only(self, layout: Layout | None) -> None:
        """Unmap files of other layouts, or of all if None: they will not be written again.

        A mapping keeps an unlinked file's room, which the new file may need.
        """
        self._mapped = {
            path: mapped for path, mapped in self._mapped.items() if mapped.layout is layout
        }

    def clear(self) -> None:
        self._mapped.clear()


def new_memory(num_bytes: int) -> torch.Tensor:
    """Allocate flat bytes of main memory, not yet written.

    Raises:
        StoreAccessError: there is no room for them.
    """
    try:
        return torch.empty(num_bytes, dtype=torch.uint8)
    except (MemoryError, RuntimeError) as error:
        raise StoreAccessError(
            f"cannot allocate {num_bytes} bytes of memory for a version; is there a limit on this "
            "process's memory (ulimit -v, vm.overcommit_memory)?"
        ) from error


def as_bytes(data: torch.Tensor) -> memoryview:
    """Return the memory of a flat tensor of bytes."""
    array: Any = data.numpy()  # a buffer, which numpy's types say from Python 3.12 on only
    return memoryview(array)


def flat_view(tensor: torch.Tensor, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """View a contiguous tensor's memory as a flat tensor of another dtype.

    A single element is contiguous whatever its stride is, and torch views it only with a stride of
    1.
    """
    flat = tensor.detach().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(dtype)


def view_tensor(data: torch.Tensor, layout: Layout, index: int) -> torch.Tensor:
    """View one of a layout's tensors in the bytes that the layout describes."""
    spec = layout.specs[index]
    start = layout.offsets[index]
    flat = data[start : start + spec.num_bytes]
    return flat.view(DTYPES[spec.dtype]).view(spec.shape)


def map_file(file: int, file_bytes: int, access: int) -> torch.Tensor:
    """Map an open file; the mapping holds no lock.

    A map keeps a duplicate of its descriptor, and with it the lock of whatever it was opened as;
    forked children keep it too. So the file is opened once more.
    """
    mode = os.O_RDWR if access == mmap.ACCESS_WRITE else os.O_RDONLY
    with filesystem.os_errors("map a weights file", path := f"/proc/self/fd/{file}"):
        opened = filesystem.Descriptor.open(path, mode)
    # A reader writes into no page of it, or few: none need be set aside for a copy of each.
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
    # torch warns of memory that cannot be written, which it cannot know otherwise.
    array = np.frombuffer(mapped, np.uint8)
    memory = (ctypes.c_ubyte * file_bytes).from_address(array.ctypes.data)
    memory.owner = array  # type: ignore[attr-defined] # keeps the mapping
    return torch.frombuffer(memory, dtype=torch.uint8)


def copy_one(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a single tensor, casting if dtypes differ."""
    with torch.inference_mode():
        destination.copy_(source)


def can_cast_to(dtype: torch.dtype) -> bool:
    """Whether floating-point tensors can be published in this dtype.

    Not two numbers an element, nor a dtype of scales, which has no sign.
    """
    is_special = DTYPE_NAMES.get(dtype) in ("float4_e2m1fn_x2", "float8_e8m0fnu")
    return dtype in DTYPE_NAMES and dtype.is_floating_point and not is_special


def is_plain(tensor: torch.Tensor, dtype: torch.dtype, *, device: str = "cpu") -> bool:
    """Whether the tensor's bytes lie on such a device just as a file of ``dtype`` holds them."""
    return (
        tensor.dtype is dtype
        and tensor.device.type == device
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


def join_blocks(blocks: Sequence[Block], digests: Sequence[int]) -> list[int]:
    """Return the checksum of each tensor that these blocks make up, from their digests."""
    pairs = zip(blocks, digests, strict=True)
    by_tensor = itertools.groupby(pairs, lambda pair: pair[0].tensor)
    return [join_digests([digest for _, digest in of_one]) for _, of_one in by_tensor]


def join_digests(digests: Sequence[int]) -> int:
    """Return the checksum of a tensor from the digests of its blocks, one at least."""
    if len(digests) == 1:
        return digests[0]
    return xxhash.xxh3_64_intdigest(pack_checksums(digests))


def pack_checksums(checksums: Sequence[int]) -> bytes:
    """Return the table of checksums for the file."""
    return b"".join(checksum.to_bytes(8, "little") for checksum in checksums)


def unpack_checksums(data: bytes) -> list[int]:
    """Return the checksums in a file's table."""
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
