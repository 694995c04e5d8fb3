"""`Draft`: a version that is being written, from its claim of a buffer to its commit."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from dbuffer.errors import InvalidWeightsError, StoreAccessError
from dbuffer.format.layout import Layout, TensorSpec, align, digest
from dbuffer.format.lineage import Lineage, VersionId
from dbuffer.format.manifest import MAX_RECORD_BYTES, Manifest
from dbuffer.format.places import part_path
from dbuffer.io.copier import Copier
from dbuffer.io.devices import any_on_gpu
from dbuffer.io.tensors import (
    FileTensors,
    KeptMappings,
    MappedTensors,
    join_blocks,
    pack_checksums,
)
from dbuffer.io.transfer import DIGEST_OF_NOTHING, write_tensors
from dbuffer.publish.part import Part
from dbuffer.ranks.world import World
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.filesystem import Descriptor
from dbuffer.store.writer import BufferWriter, Claim
from dbuffer.weights.sources import Source

if TYPE_CHECKING:
    from dbuffer.publish.kept_copy import KeptCopy

MAX_METADATA_BYTES = MAX_RECORD_BYTES // 2
"""Largest size of a version's metadata, in bytes of JSON. Each read of the version's manifest
parses the metadata, so large values belong in tensors."""

MAX_METADATA_DEPTH = 100
"""Deepest nesting of a version's metadata. Any reader can parse it, even with little stack left."""


class Draft:
    """One rank's part of a version that is being written. Rank 0 claims and commits the version.

    A ``with`` block that ends without a commit abandons the draft.

    Args:
        mappings: mappings of the store's files, kept from one draft to the next.
        part: parts of tensors ("boxes") that this rank writes, or None for a stream of tensors.
    """

    id: VersionId
    path: Path
    inode: tuple[int, int] | None
    """Device and inode of the file that rank 0 has claimed, or None without a file."""

    def __init__(
        self,
        store: DoubleBuffer,
        mappings: KeptMappings,
        copier: Copier,
        part: Part | None,
        *,
        is_mapped: bool,
        hashed: bool,
    ) -> None:
        self.is_mapped = is_mapped
        self.hashed = hashed
        self._store = store
        self._mappings = mappings
        self._copier = copier
        self._part = part
        self._writer: BufferWriter | None = None
        self._claim: Claim | None = None
        self._mapped: MappedTensors | None = None
        self._part_file: Descriptor | None = None
        """File that this rank writes on a network mount, where each rank's part is a file."""
        self._digests: dict[int, list[int]] = {}
        """Digests of the blocks of each part ("box") that was hashed while it was copied, keyed by
        the box's number. Empty boxes have no entry."""
        self._checksums: list[int] | None = None
        self._is_done = False

    def begin(self, writer: BufferWriter, version: Lineage, *, with_file: bool = True) -> list[Any]:
        """Claim the idle buffer, on rank 0 for all ranks; return the arguments of :meth:`join`.

        All ranks must first unmap the files that the claim may remove (`KeptMappings.keep_only`).
        Without ``with_file``, the version consists of deltas and an earlier version's file.
        """
        layout = None if self._part is None else self._part.whole
        self._claim = claim = writer.claim(version, layout, with_file=with_file)
        self._writer = writer
        with filesystem.os_errors("look at the weights file", claim.path):
            inode = None if claim.file is None else filesystem.identity_of(claim.file.number)
        claimed: list[Any] = [str(version.id), str(claim.path.relative_to(self._store.root)), inode]
        self.join(*claimed)
        return claimed

    def join(self, version: str, file: str, inode: Any) -> None:
        """Set the id and the file of this draft's version, as rank 0's :meth:`begin` gave them."""
        self.id, self.path = VersionId.parse(version), self._store.root / file
        self.inode = None if inode is None else (inode[0], inode[1])

    @property
    def writer(self) -> BufferWriter:
        assert self._writer is not None  # noqa: S101
        return self._writer

    @property
    def claim(self) -> Claim:
        assert self._claim is not None  # noqa: S101
        return self._claim

    @property
    def part(self) -> Part:
        assert self._part is not None  # noqa: S101 - given, or of a stream that has come
        return self._part

    @property
    def layout(self) -> Layout:
        return self.part.whole

    @property
    def has_file(self) -> bool:
        """Whether the version has its own weights file, and not only a delta."""
        return self.inode is not None

    @property
    def mapped(self) -> MappedTensors:
        if self._mapped is None:
            with contextlib.ExitStack() as stack:
                file = self._claim.weights if self._claim else stack.enter_context(self._open())
                number, layout, access = file.number, self.layout, mmap.ACCESS_WRITE
                self._mapped = self._mappings.get(
                    self.path,
                    number,
                    lambda: MappedTensors(number, layout.file_bytes, layout, access=access),
                )
        return self._mapped

    def _open(self) -> Descriptor:
        """Open the file that rank 0 has claimed, without a lock: rank 0 locks it for all ranks."""
        with filesystem.os_errors("open the buffer that rank 0 has claimed", self.path):
            owner_only = self._store.owner_only
            file = filesystem.open_regular(self.path, os.O_RDWR, owner_only=owner_only)
        if filesystem.identity_of(file.number) != self.inode:
            file.close()
            raise StoreAccessError(
                f"{self.path} is not the file that rank 0 made: is {self._store.root} the same "
                "directory for all ranks?"
            )
        return file

    def memory(self) -> FileTensors:
        return self.mapped if self.is_mapped else FileTensors.in_memory(self.layout)

    def write(self, numbers: Sequence[int], elements: list[torch.Tensor]) -> None:
        """Write the elements of some parts ("boxes") of tensors, cast to the file's dtypes."""
        part, copier = self.part, self._copier
        if not self.is_mapped:
            for batch, number, layout in part.batches(numbers):
                offset = part.layout.offsets[number]
                self._write_tensors(self._file_to_write(), number, layout, offset, elements[batch])
        elif part.has_all and len(numbers) == len(part.layout.specs):
            if self._store.medium.is_in_memory and any_on_gpu(elements):
                self.mapped.expect_device()
            self._checksums = copier.write(self.mapped, elements, hashed=self.hashed)
        else:
            boxes = [part.boxes[number] for number in numbers]
            views = [box.of(self.mapped.views[box.tensor]) for box in boxes]
            copier.copy_tensors(views, elements)

    def write_stream(self, source: Source) -> None:
        """Write tensors one after another, as an iterator yields them.

        The layout is known only after the last tensor, so this method makes the draft's `Part`.
        """
        specs, end, done_bytes = list[TensorSpec](), 0, 0
        for spec, tensor in source.stream or ():
            source.refuse_values([spec], [tensor])
            self._write_tensors(self.claim.weights, len(specs), Layout.of([spec]), end, [tensor])
            specs.append(spec)
            end = align(end + spec.num_bytes)
            done_bytes += spec.num_bytes
            if source.progress is not None:
                source.progress(done_bytes, 0)
        if not specs:
            raise InvalidWeightsError("there is no tensor in the weights to publish")
        names = source.new_names([spec.name for spec in specs])
        specs = [spec._replace(name=name) for spec, name in zip(specs, names, strict=True)]
        self._part = Part(Layout.of(specs))

    def _write_tensors(
        self,
        file: Descriptor,
        number: int,
        layout: Layout,
        offset: int,
        elements: list[torch.Tensor],
    ) -> None:
        """Write consecutive boxes, from box ``number`` on, into a file that is not mapped."""
        digests = write_tensors(
            file, self.path, layout, elements, self._copier, offset=offset, hashed=self.hashed
        )
        for block, block_digest in zip(layout.blocks, digests, strict=self.hashed):
            if block.num_bytes:
                self._digests.setdefault(number + block.tensor, []).append(block_digest)

    def _file_to_write(self) -> Descriptor:
        if self.part.has_all:
            return self.claim.weights
        if self._part_file is None:
            path = part_path(self.path, self.part.rank)
            self._part_file = filesystem.make_file(path, os.O_WRONLY)
        return self._part_file

    def finish_parts(self, world: World) -> list[int] | None:
        """Flush the ranks' part files, if any, and return each tensor's checksum. Collective.

        Return None if versions have no checksums. The commit flushes the weights file.
        """
        layout = self.layout
        if self._checksums is not None or (self.is_mapped and not self.hashed):
            return self._checksums
        if self.is_mapped and layout.num_bytes and not self._digests:
            slices = self.mapped.cut(world.size, into_blocks=True)
            with world.step("hash its slice") as step:
                first, end = slices[world.rank] if world.rank < len(slices) else (0, 0)
                step.result = self._copier.digests(self.mapped, layout.blocks[first:end])
            return join_blocks(layout.blocks, list(itertools.chain(*step.results)))
        with world.step("flush its part") as step:
            if self._part_file is not None:
                filesystem.sync_file(self._part_file.number, part_path(self.path, self.part.rank))
                self._part_file.close()
                self._part_file = None  # from here on rank 0 abandons all parts if a step fails
            digests = [digests for _, digests in sorted(self._digests.items())]
            step.result = list(itertools.chain(*digests))
        return join_digests_of_parts(layout, step.results) if self.hashed else None

    def commit(
        self, metadata: dict[str, Any], checksums: list[int] | None, **described: Any
    ) -> Manifest:
        """Publish the version, on rank 0. ``described`` are further fields of the manifest."""
        if self.has_file:
            sizes = {part_path(self.path, part): n for part, n in enumerate(self.layout.part_bytes)}
            if problem := self.writer.problem_with({path: n for path, n in sizes.items() if n}):
                raise StoreAccessError(f"{problem}; do all ranks have the store on the same mount?")
            described |= self._seal(checksums)
        manifest = self.writer.commit(self.claim, metadata=metadata, **described)
        self._is_done = True
        return manifest

    def _seal(self, checksums: list[int] | None) -> dict[str, Any]:
        """Append layout and checksums to the weights file; return its fields for the manifest."""
        layout, file, table_xxh3 = self.layout, self.claim.weights.number, None
        with filesystem.os_errors("write the layout", self.path):
            if checksums is not None:
                table = pack_checksums(checksums)
                filesystem.write_at(file, layout.checksums_offset, table)
                table_xxh3 = digest(table)
            filesystem.write_at(file, layout.layout_offset, layout.encoded + layout.tail)
        return layout.describe_file(table_xxh3)

    def abandon(self) -> None:
        """Abandon the version, unless it was committed. The next claim reuses its buffer."""
        if self._is_done:
            return
        self._is_done = True
        if self._part_file is not None:
            self._part_file.close()
            with contextlib.suppress(OSError):  # the next claim removes the file
                part_path(self.path, self.part.rank).unlink()
        if self._writer is not None:
            self._writer.abandon(self.claim)
        self._mapped = None
        self._mappings.keep_only()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abandon()


def fill(target: Draft | KeptCopy, verb: str, source: Source, world: World) -> None:
    """Write the elements of all ranks' parts ("boxes") into a draft or a kept copy. Collective.

    Each rank first writes the boxes whose data it has. The ranks gather other tensors only after
    all ranks have succeeded, so that no rank waits in a gather for a rank that has failed.
    """
    part, specs = target.part, target.part.layout.specs
    with world.step(f"{verb} its part"):
        done_bytes = 0
        for numbers, elements in part.local_boxes(source):
            target.write(numbers, elements)
            if source.is_lazy and source.progress is not None:
                done_bytes += sum(specs[number].num_bytes for number in numbers)
                source.progress(done_bytes, part.layout.num_bytes)
        if source.is_lazy and not part.gathered:
            source.finish()
    if not part.gathered:
        return
    problem: Exception | None = None
    with world.step(f"gather and {verb}"):
        for number, tensor in part.gather(source):
            if problem is None:
                try:
                    source.refuse_values([specs[number]], [tensor])
                    target.write([number], [tensor])
                except Exception as error:  # noqa: BLE001 - other ranks wait in the next gather
                    problem = error
        if problem is not None:
            raise problem


def join_digests_of_parts(layout: Layout, by_rank: Sequence[list[int]]) -> list[int]:
    """Compute each tensor's checksum from the digests of the blocks that each rank has written."""
    queues = [iter(digests) for digests in by_rank]
    part_at = {(piece.tensor, piece.offset): piece.part for piece in layout.pieces}
    digests, part = [], 0
    for block in layout.blocks:
        part = part_at.get((block.tensor, block.offset), part)  # a piece may have many blocks
        digests.append(next(queues[part]) if block.num_bytes else DIGEST_OF_NOTHING)
    return join_blocks(layout.blocks, digests)


def checked_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return metadata as readers get it back from JSON, or raise an `InvalidWeightsError`."""
    try:
        text = json.dumps(dict(metadata or {}), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidWeightsError(f"metadata cannot be stored as JSON: {error}") from None
    if len(text) > MAX_METADATA_BYTES:
        raise InvalidWeightsError(
            f"metadata of {len(text)} bytes is above the limit of {MAX_METADATA_BYTES}"
        )
    checked: dict[str, Any] = json.loads(text)
    level: list[Any] = [metadata]
    for _ in range(MAX_METADATA_DEPTH):
        level = [child for value in level for child in _children(value)]
    if level:
        raise InvalidWeightsError(f"metadata is nested more than {MAX_METADATA_DEPTH} levels deep")
    return checked


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        # JSON would turn a key such as 1 into the string "1", which may also be a key.
        if keys := [key for key in value if not isinstance(key, str)]:
            raise InvalidWeightsError(f"metadata has a key that is no string: {keys[0]!r:.80}")
        return value.values()
    return value if isinstance(value, list | tuple) else ()
