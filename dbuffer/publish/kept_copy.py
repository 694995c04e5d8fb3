"""`KeptCopy`: one rank's part of the last version, in main memory or on a GPU.

A sender compares the next version with this copy, to find what changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dbuffer.io.changes import (
    DEVICE_BYTES,
    Changes,
    DeviceChanges,
    Patch,
    apply_patch,
    encode_found,
    find_changes,
    find_on_device,
)
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import FileTensors, new_memory
from dbuffer.publish.part import Part
from dbuffer.runtime.lazy import cached_property

MAX_CHANGED_SHARE = 0.5
"""Largest fraction of a version's bytes that a delta may change. If more bytes change, the version
has no delta."""

_BATCH_BYTES = 32 << 20

_PENDING_BYTES = 256 << 20
"""Bytes of changed values that a copy on a device collects in main memory before it encodes them.
The place of each value takes 4 more bytes, which do not count."""


class KeptCopy:
    """Copy of the boxes that this rank published last. In its layout, each box is one tensor.

    The copy is in the memory of ``device``, or in main memory if ``device`` is None.
    """

    def __init__(self, part: Part, copier: Copier, device: torch.device | None = None) -> None:
        self.part = part
        self.device = device
        self._copier = copier
        self._max_bytes = MAX_CHANGED_SHARE * part.whole.num_bytes
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._digests: dict[int, list[int]] = {}
        """Digests of blocks, keyed by the number of a box, of all boxes that have not changed since
        they were hashed."""
        self._changes: list[Changes] | None = None
        """Changes since the last `take_changes`; None until the copy holds a version."""
        self._on_device: list[DeviceChanges] = []
        """Changes later than ``_changes``, and not encoded yet."""

    @cached_property
    def contents(self) -> FileTensors:
        """Tensors of the copy, whose memory is allocated at the first use, in `write`.

        All ranks call `write` in one step, so if a rank has too little memory, all ranks raise.
        """
        layout = self.part.layout
        memory = new_memory(layout.checksums_offset, self.device)
        return FileTensors(self._zeroed(memory), layout)

    def take_changes(self) -> Changes:
        """Return the changes since the last call.

        If the changes are too large for a delta, return only some, which are larger already.
        """
        self._encode()
        changes, self._changes = Changes.joined(self._changes or ()), []
        has_all = changes.num_bytes <= self._max_bytes
        self._forget_digests(changes.tensors if has_all else set(self._digests))
        return changes

    def write(self, numbers: Sequence[int], elements: list[torch.Tensor]) -> None:
        """Compare parts ("boxes") of tensors with the copy, then copy and cast them into it."""
        # Read each element only once: the trainer may change it between two reads, but the delta
        # and the copy must have the same value.
        contents, copier = self.contents, self._copier
        if self._changes is None:
            copier.copy_tensors([contents.views[number] for number in numbers], elements)
            return
        max_bytes = _BATCH_BYTES if self.device is None else DEVICE_BYTES
        for batch, number, layout in self.part.batches(numbers, max_bytes):
            new = FileTensors(self._scratch_of(layout.checksums_offset), layout)
            copier.copy_tensors(new.views, elements[batch])
            self._compare(contents.layout.offsets[number], new.data)
            copier.copy_tensors(contents.views[number : number + len(layout.specs)], new.views)

    def _compare(self, first_byte: int, new: torch.Tensor) -> None:
        """Compare the bytes from ``first_byte`` on with new bytes, and note the changes."""
        assert self._changes is not None  # noqa: S101 - the copy holds a version
        layout, old = self.part.layout, self.contents.data[first_byte : first_byte + len(new)]
        pending_bytes = sum(changes.num_bytes for changes in self._on_device)
        max_bytes = self._max_bytes - pending_bytes - sum(it.num_bytes for it in self._changes)
        if max_bytes < 0:
            return
        if self.device is not None:
            self._on_device += find_on_device(old, new, layout, first_byte=first_byte)
            if pending_bytes > _PENDING_BYTES:
                self._encode()
            return
        changes = find_changes(
            old,
            new,
            layout,
            self._copier,
            first_byte=first_byte,
            file_starts=self.part.file_starts,
            max_bytes=max_bytes,
        )
        self._changes.append(changes)

    def _encode(self) -> None:
        found, self._on_device = self._on_device, []
        changes = encode_found(found, self.part.layout, self._copier, self.part.file_starts)
        self._changes = [*(self._changes or ()), changes]

    def patch(self, patch: Patch) -> Changes:
        contents = self.contents
        changes = apply_patch(patch, contents.data, contents.layout, self._copier)
        self._forget_digests(changes.tensors)
        return changes

    def _forget_digests(self, numbers: set[int]) -> None:
        for number in numbers:
            self._digests.pop(number, None)

    def digests(self) -> list[int]:
        """Return the digests of the copy's non-empty blocks, in order; hash only changed parts."""
        blocks = [
            block
            for block in self.contents.layout.blocks
            if block.num_bytes and block.tensor not in self._digests
        ]
        digests = self._copier.digests(self.contents, blocks)
        for block, digest in zip(blocks, digests, strict=True):
            self._digests.setdefault(block.tensor, []).append(digest)
        return [digest for _, digests in sorted(self._digests.items()) for digest in digests]

    def _scratch_of(self, num_bytes: int) -> torch.Tensor:
        if len(self._scratch) < num_bytes:
            self._scratch = new_memory(num_bytes, self.device)
        return self._zeroed(self._scratch[:num_bytes])

    def _zeroed(self, memory: torch.Tensor) -> torch.Tensor:
        """Zero memory on a device, because comparing there includes the padding between tensors."""
        return memory if self.device is None else memory.zero_()
