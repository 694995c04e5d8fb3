"""`Draft`: how a version comes to be, whoever fills it: begun, filled, committed or abandoned."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch

from dbuffer.errors import ClosedError, InvalidWeightsError, StoreAccessError
from dbuffer.format.layout import Layout, TensorSpec, align
from dbuffer.format.manifest import MAX_RECORD_BYTES, Manifest
from dbuffer.io.chain_reader import ChainReader
from dbuffer.io.copier import Copier
from dbuffer.io.footer import Footer
from dbuffer.io.tensors import (
    DTYPES,
    FileTensors,
    KeptMappings,
    MappedTensors,
    copy_one,
    join_digests,
)
from dbuffer.io.transfer import OnBytes, part_path, read_tensors, write_tensor, write_tensors
from dbuffer.store import filesystem
from dbuffer.store.hold import Held
from dbuffer.store.writer import BufferWriter, Claim

Progress = Callable[[int, int], None]
"""Called with the bytes copied so far and in all; 0: the total is not known."""

MAX_METADATA_BYTES = MAX_RECORD_BYTES // 2
"""Metadata is read with every look at a manifest; large things belong in a tensor."""

MAX_METADATA_DEPTH = 100
"""Nesting that any reader can parse, however deep its stack is already."""


class Drafts:
    """The drafts of one writer, one after another, and what one leaves for the next.

    That is the mappings of files which are written again, and the footer, while nothing changes.
    """

    def __init__(self, writer: BufferWriter) -> None:
        self.writer = writer
        self.mapped = KeptMappings()
        self._footer: Footer | None = None

    def footer_of(self, specs: tuple[TensorSpec, ...], aliases: dict[str, str]) -> Footer:
        self._footer = Footer.like(self._footer, specs, aliases)
        return self._footer

    def map_file(self, path: Path, file: int, footer: Footer) -> MappedTensors:
        """A weights file with these tensors in memory, shared with all who have it open."""
        return self.mapped.of(
            path,
            file,
            lambda: MappedTensors(file, footer.file_bytes, footer.layout, shared=True),
        )

    def begin(
        self, version: int, footer: Footer | None, *, hashed: bool, with_file: bool = True
    ) -> Draft:
        """Claim the idle buffer for a version; with checksums, if ``hashed``.

        ``footer`` is that of its tensors; None where they are known only when the last has come.
        One without a file is to be committed upon that of an earlier version.
        """
        # A mapping keeps an unlinked file's room, which the next version may need.
        self.mapped.keep_only(None if footer is None else footer.layout)
        layout_xxh3, file_bytes = None, 0
        if footer is not None:
            layout_xxh3, file_bytes = footer.layout_xxh3, footer.file_bytes
        try:
            claim = self.writer.claim(
                version, layout_xxh3=layout_xxh3, file_bytes=file_bytes, with_file=with_file
            )
        except BaseException:
            self.mapped.clear()
            raise
        return Draft(self, claim, footer, hashed=hashed)

    def close(self) -> None:
        self.mapped.clear()
        self.writer.close()


class Draft:
    """A version in the making. Leaving its ``with`` block without a commit abandons it."""

    def __init__(
        self, drafts: Drafts, claim: Claim, footer: Footer | None, *, hashed: bool
    ) -> None:
        self._drafts = drafts
        self.claim = claim
        """The buffer that it was given."""
        self._footer = footer
        self._hashed = hashed
        self._is_done = False
        self._specs: list[TensorSpec] = []
        self._end = 0
        self._written: list[int] = []
        self.checksums: list[int] | None = None
        """Checksums of its tensors, in the layout's order; None: it gets none."""

    @property
    def root(self) -> Path:
        """The store's directory."""
        return self._drafts.writer.root

    @property
    def has_file(self) -> bool:
        """Whether it is filled; else it is committed upon the file of an earlier version."""
        return self.claim.file is not None

    @property
    def footer(self) -> Footer:
        if self._footer is None:
            if not self._specs:
                raise InvalidWeightsError("there is no tensor in the weights to publish")
            self._footer = Footer.of(Layout.of(self._specs))
        return self._footer

    @property
    def layout(self) -> Layout:
        return self.footer.layout

    @property
    def is_mapped(self) -> bool:
        return self._drafts.writer.medium.maps_files

    @property
    def mapped(self) -> MappedTensors:
        return self._drafts.map_file(self.claim.path, self.claim.weights.number, self.footer)

    def fill(self, tensors: list[torch.Tensor], copier: Copier) -> None:
        """Write all tensors, cast where dtypes differ."""
        hashed = self._hashed
        if self.is_mapped:
            self.checksums = copier.write(self.mapped, tensors, hashed=hashed)
        else:
            file, path, layout = self.claim.weights, self.claim.path, self.layout
            self.checksums = write_tensors(file, path, layout, tensors, copier, hashed=hashed)

    def fill_one_by_one(
        self, tensors: Iterable[torch.Tensor], copier: Copier, on_bytes: OnBytes | None = None
    ) -> None:
        """Write tensors that are made when they are asked for, and dropped when written.

        ``on_bytes`` is called with the bytes of each.
        """
        layout = self.layout
        mapped = self.mapped if self.is_mapped else None
        for index, (spec, tensor) in enumerate(zip(layout.specs, tensors, strict=True)):
            if mapped is not None:
                copy_one(mapped.views[index], tensor)
            else:
                self._write(spec, layout.offsets[index], tensor)
            if on_bytes is not None:
                on_bytes(spec.num_bytes)
        if self._hashed:
            self.checksums = self._written if mapped is None else copier.checksums(mapped)

    def append(self, spec: TensorSpec, tensor: torch.Tensor) -> None:
        """Write one tensor behind those before, where the layout is not known beforehand."""
        self._write(spec, self._end, tensor)
        self._specs.append(spec)
        self._end = align(self._end + spec.num_bytes)
        self.checksums = self._written if self._hashed else None

    def fill_from(
        self, held: Held, layout: Layout, copier: Copier, on_bytes: OnBytes | None
    ) -> None:
        """Copy another store's version, which has this layout there."""
        chain, hashed = ChainReader(held, layout), self._hashed
        if self.is_mapped:
            self.checksums = chain.read(self.mapped, copier, on_bytes=on_bytes, hashed=hashed)
        elif held.manifest.anchor is None:
            file, own = held.file.number, self.claim.weights
            self.checksums = read_tensors(
                file, held.path, layout, own, copier, hashed=hashed, on_bytes=on_bytes
            )
        else:
            tensors = FileTensors.in_memory(self.layout)
            chain.read(tensors, copier, on_bytes=on_bytes)
            self.fill(tensors.views, copier)

    def _write(self, spec: TensorSpec, offset: int, tensor: torch.Tensor) -> None:
        file, dtype, hashed = self.claim.weights, DTYPES[spec.dtype], self._hashed
        digests = write_tensor(file, self.claim.path, offset, tensor, dtype, hashed=hashed)
        if hashed:
            self._written.append(join_digests(digests))

    def add_delta(self, chunks: Iterable[bytes], identity: str | None = None) -> int:
        """Write the file of a delta that leads to it, or to another version of its chain.

        Returns:
            The file's size.
        """
        return self._drafts.writer.add_delta(self.claim, identity or self.claim.identity, chunks)

    def commit(self, metadata: dict[str, Any], **described: Any) -> Manifest:
        """Publish it. ``described``: fields of the manifest that are not this writer's to say.

        Raises:
            WriterSupersededError, StoreFullError, StoreAccessError, ClosedError: as
                `BufferWriter.commit`.
        """
        if self._is_done:
            raise ClosedError("this draft was committed, or abandoned")
        if self.has_file:
            self._check_parts()
            described |= self.footer.seal(self.claim, self.checksums)
        manifest = self._drafts.writer.commit(self.claim, metadata=metadata, **described)
        self._is_done = True
        return manifest

    def _check_parts(self) -> None:
        """Require every part that ranks have written to be there, whole, on this host too."""
        path, layout = self.claim.path, self.layout
        if not layout.is_in_parts:
            return
        with filesystem.os_errors("look at the parts", path):
            filesystem.refresh(path.parent)
            for part, num_bytes in enumerate(layout.part_bytes):
                if not num_bytes:
                    continue
                try:
                    size = part_path(path, part).stat().st_size
                except FileNotFoundError:
                    size = None
                if size != num_bytes:
                    raise StoreAccessError(
                        f"{part_path(path, part)} has {size} bytes here, and {num_bytes} where it "
                        "was written: is the store on one mount that all ranks see alike?"
                    )

    def abandon(self) -> None:
        """Give it up, unless it was committed: its buffer is started over the next time."""
        if not self._is_done:
            self._is_done = True
            self._drafts.writer.abandon(self.claim)
            # A mapping keeps an unlinked file's room, which the next version needs.
            self._drafts.mapped.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abandon()


def checked_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """The metadata as a reader will get it."""
    try:
        text = json.dumps(dict(metadata or {}), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidWeightsError(f"metadata must be what JSON can hold: {error}") from None
    if len(text) > MAX_METADATA_BYTES:
        raise InvalidWeightsError(
            f"metadata of {len(text)} bytes is above the limit of {MAX_METADATA_BYTES}"
        )
    checked: dict[str, Any] = json.loads(text)
    level: list[Any] = [checked]
    for _ in range(MAX_METADATA_DEPTH):
        level = [child for value in level for child in _children(value)]
    if level:
        raise InvalidWeightsError(f"metadata is nested more than {MAX_METADATA_DEPTH} levels deep")
    return checked


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def counter(progress: Progress | None, total: int) -> OnBytes | None:
    """Return a function that sums up copied bytes, from several threads, for ``progress``.

    None: there is no ``progress`` to call.
    """
    if progress is None:
        return None
    done = 0
    lock = threading.Lock()

    def count(num_bytes: int) -> None:
        nonlocal done
        with lock:
            done += num_bytes
            progress(done, total)

    return count
