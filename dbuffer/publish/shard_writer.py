"""`ShardWriter`: writes a rank's boxes, into a file that all ranks map or a part of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

from dbuffer.errors import StoreAccessError
from dbuffer.format.layout import Layout, Piece
from dbuffer.io.changes import cut_work
from dbuffer.io.copier import Copier
from dbuffer.io.footer import Footer
from dbuffer.io.tensors import (
    DTYPES,
    KeptMappings,
    MappedTensors,
    join_blocks,
)
from dbuffer.io.transfer import DIGEST_OF_NOTHING, part_path, write_tensor
from dbuffer.publish.draft import ClaimInfo, map_shared
from dbuffer.publish.shards import Box, WriteAssignment, layout_in_parts
from dbuffer.ranks.world import World
from dbuffer.store import filesystem
from dbuffer.store.filesystem import Descriptor


class ShardWriter(ABC):
    """Writer of one rank's boxes. For a version: `begin`, `write`, `finish` or `drop`."""

    rows_only: ClassVar[bool]
    """Whether what is written must lie in one row of bytes in the whole tensor."""

    def __init__(self, store: Path) -> None:
        self._store = store

    def footer_of(self, plain: Footer, assignment: WriteAssignment) -> Footer:  # noqa: ARG002
        """Return the footer of a weights file whose tensors are written by this assignment."""
        return plain

    def keep_only(self, layout: Layout) -> None:  # noqa: B027
        """Let go of what holds the room of files that will not be written again."""

    @abstractmethod
    def begin(self, info: ClaimInfo, footer: Footer) -> None:
        """Open the claimed file to write."""

    @abstractmethod
    def write(self, boxes: Sequence[Box], sources: Sequence[torch.Tensor], copier: Copier) -> None:
        """Write the elements of each box, cast to the layout's dtype."""

    @abstractmethod
    def finish(self, world: World, *, hashed: bool) -> list[int] | None:
        """Wait until all ranks have all bytes in their files; return the checksums, if ``hashed``.

        Collective.
        """

    @abstractmethod
    def drop(self) -> None:
        """Give up what was begun, if anything was."""

    def close(self) -> None:
        self.drop()


class SharedFileWriter(ShardWriter):
    """One machine: all ranks map the weights file, and copy each piece to its place.

    Nobody flushes but rank 0, when it commits: what any process of the machine has written into
    a mapping is in the file.
    """

    rows_only = False

    def __init__(self, store: Path, *, owner_only: bool, is_rewritten: bool) -> None:
        super().__init__(store)
        self._owner_only = owner_only
        self._is_rewritten = is_rewritten
        """Whether a weights file is written again and again; else each version has a new file."""
        self._kept = KeptMappings()
        self._mapped: MappedTensors | None = None

    def keep_only(self, layout: Layout) -> None:
        self._mapped = None
        self._kept.keep_only(layout if self._is_rewritten else None)

    def begin(self, info: ClaimInfo, footer: Footer) -> None:
        path = info.path_in(self._store)
        with filesystem.os_errors("open the buffer that rank 0 has claimed", path):
            # No lock: rank 0 holds it for all.
            file = filesystem.open_regular(path, os.O_RDWR, owner_only=self._owner_only)
        with file:
            if [*filesystem.identity_of(file.number)] != info.inode:
                raise StoreAccessError(
                    f"{path} is another file than rank 0's: is {self._store} the same directory "
                    "for all ranks?"
                )
            self._map(path, file.number, footer)

    def _map(self, path: Path, file: int, footer: Footer) -> MappedTensors:
        self._mapped = map_shared(self._kept, path, file, footer)
        return self._mapped

    def write(self, boxes: Sequence[Box], sources: Sequence[torch.Tensor], copier: Copier) -> None:
        views = self.mapped.views
        copier.copy_tensors([box.of(views[box.tensor]) for box in boxes], list(sources))

    def finish(self, world: World, *, hashed: bool) -> list[int] | None:
        if not hashed:
            return None
        mapped = self.mapped
        slices = mapped.cut_blocks(world.size)

        def hash_slice() -> list[int]:
            if world.rank >= len(slices):
                return []
            first, end = slices[world.rank]
            return [mapped.hash_block(block) for block in mapped.layout.blocks[first:end]]

        shares = world.each("hash its slice", hash_slice)
        digests = list(itertools.chain.from_iterable(shares))
        return join_blocks(mapped.layout.blocks, digests)

    def drop(self) -> None:
        """Unmap the files: an abandoned file keeps its room for as long as a rank maps it."""
        self._mapped = None
        self._kept.clear()

    @property
    def mapped(self) -> MappedTensors:
        """The file that was begun."""
        if self._mapped is None:
            raise StoreAccessError("no version was begun")
        return self._mapped


class PartFileWriter(ShardWriter):
    """A network mount: each rank writes a part of its own, a new file, and flushes it."""

    rows_only = True

    def __init__(self, store: Path, *, rank: int) -> None:
        super().__init__(store)
        self._rank = rank
        self._footer: tuple[Footer, WriteAssignment, Footer] | None = None
        self._path = store
        self._file: Descriptor | None = None
        self._layout = Layout((), (), {})
        self._mine: dict[int, Piece] = {}
        self._digests: dict[Piece, list[int]] = {}

    def footer_of(self, plain: Footer, assignment: WriteAssignment) -> Footer:
        known = self._footer
        if known is None or known[0] is not plain or known[1] is not assignment:
            known = plain, assignment, Footer.of(layout_in_parts(plain.layout, assignment))
            self._footer = known
        return known[2]

    def begin(self, info: ClaimInfo, footer: Footer) -> None:
        self._layout = layout = footer.layout
        self._mine = self._pieces_of(layout)
        self._digests = {}
        if self._mine:
            self._path = part_path(info.path_in(self._store), self._rank)
            self._file = filesystem.make_file(self._path, os.O_WRONLY)

    def write(self, boxes: Sequence[Box], sources: Sequence[torch.Tensor], copier: Copier) -> None:
        file, path = self._file, self._path
        if file is None:
            if not boxes:
                return
            raise StoreAccessError("no version was begun")
        pieces = [self._mine[box.tensor] for box in boxes]

        def work(first: int, end: int) -> None:
            for piece, source in zip(pieces[first:end], sources[first:end], strict=True):
                dtype = DTYPES[self._layout.specs[piece.tensor].dtype]
                digests = write_tensor(file, path, piece.place, source, dtype, hashed=True)
                self._digests[piece] = digests

        copier.in_parallel(work, cut_work([piece.num_bytes for piece in pieces], copier))

    def finish(self, world: World, *, hashed: bool) -> list[int] | None:
        def flush() -> list[int]:
            """The digests of its pieces' blocks, in the layout's order, hashed in passing."""
            if self._file is None:
                return []
            filesystem.sync_file(self._file.number, self._path)
            self._file.close()
            pieces = sorted(self._digests) if hashed else []
            return [digest for piece in pieces for digest in self._digests[piece]]

        shares = world.each("flush its part", flush)
        self._file = None  # rank 0 abandons all, from here on
        return join_digests_of_parts(self._layout, shares) if hashed else None

    def _pieces_of(self, layout: Layout) -> dict[int, Piece]:
        """This rank's, by the tensor."""
        return {piece.tensor: piece for piece in layout.pieces if piece.part == self._rank}

    def drop(self) -> None:
        if self._file is not None:
            self._file.close()
            with contextlib.suppress(OSError):  # the next claim removes it
                self._path.unlink()
            self._file = None


def join_digests_of_parts(layout: Layout, shares: Sequence[list[int]]) -> list[int]:
    """The checksum of each tensor from the digests of the blocks in each part."""
    queues = [iter(share) for share in shares]
    part_at = {(piece.tensor, piece.offset): piece.part for piece in layout.pieces}
    digests, part = [], 0
    for block in layout.blocks:
        part = part_at.get((block.tensor, block.offset), part)  # or that of the block before
        digests.append(next(queues[part]) if block.num_bytes else DIGEST_OF_NOTHING)
    return join_blocks(layout.blocks, digests)
