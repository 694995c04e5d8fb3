"""`Draft`: a version in the making: begun, filled, committed or abandoned."""

from __future__ import annotations

import json
import mmap
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from dbuffer.errors import ClosedError, InvalidWeightsError, StoreAccessError
from dbuffer.format.layout import Layout, TensorSpec, align
from dbuffer.format.lineage import Lineage
from dbuffer.format.manifest import MAX_RECORD_BYTES, Manifest
from dbuffer.io.chain_reader import ChainReader
from dbuffer.io.copier import Copier
from dbuffer.io.devices import any_on_gpu
from dbuffer.io.footer import Footer
from dbuffer.io.tensors import (
    DTYPES,
    FileTensors,
    KeptMappings,
    MappedTensors,
    join_digests,
)
from dbuffer.io.transfer import OnBytes, part_path, read_tensors, write_tensor, write_tensors
from dbuffer.store import filesystem
from dbuffer.store.hold import Held
from dbuffer.store.writer import BufferWriter

Progress = Callable[[int, int], None]
"""Called with the bytes copied so far and in all; 0: the total is not known."""

MAX_METADATA_BYTES = MAX_RECORD_BYTES // 2
"""Metadata is read with every look at a manifest; large things belong in a tensor."""

MAX_METADATA_DEPTH = 100
"""Nesting that any reader can parse, however deep its stack is already."""


@dataclass(frozen=True, slots=True)
class ClaimInfo:
    """Description of the buffer that rank 0 has claimed, for all ranks."""

    version: str
    """Id of the version."""
    buffer: str
    file: str
    inode: list[int] | None
    """Device and inode of the file on rank 0's host, or None if the version has no file."""

    @classmethod
    def of(cls, draft: Draft) -> ClaimInfo:
        claim = draft.claim
        inode = None if claim.file is None else [*filesystem.identity_of(claim.file.number)]
        return cls(str(draft.id), claim.buffer, claim.path.name, inode)

    def path_in(self, store: Path) -> Path:
        return store / self.buffer / self.file


class Draft:
    """A version in the making. Leaving its ``with`` block without a commit abandons it.

    Making one claims the idle buffer, which may wait for readers, and removes files that need not
    stay (`BufferWriter.claim`).

    Args:
        writer: writes the store.
        mappings: mappings of the store's files, kept from one draft to the next.
        version: the version, and what leads to it.
        footer: footer of its tensors, or None for a stream until its last tensor has come.
        hashed: whether its checksums are computed as it is filled.
        with_file: whether it has a weights file. Otherwise it has an anchor.
    """

    def __init__(
        self,
        writer: BufferWriter,
        mappings: KeptMappings,
        version: Lineage,
        footer: Footer | None,
        *,
        hashed: bool,
        with_file: bool = True,
    ) -> None:
        # A mapping keeps an unlinked file's room, which the next version may need.
        mappings.keep_only(footer.layout if footer and writer.rewrites_files else None)
        try:
            self.claim = writer.claim(
                version,
                layout_xxh3=None if footer is None else footer.layout_xxh3,
                file_bytes=0 if footer is None else footer.file_bytes,
                with_file=with_file,
            )
        except BaseException:
            mappings.clear()
            raise
        self._writer = writer
        self._mappings = mappings
        self.id = version.id
        self._footer = footer
        self._hashed = hashed
        self._is_done = False

    @property
    def has_file(self) -> bool:
        """Whether it has a weights file to fill. Otherwise it has an anchor."""
        return self.claim.file is not None

    @property
    def footer(self) -> Footer:
        assert self._footer is not None  # noqa: S101 - given, or of a stream that has come
        return self._footer

    @property
    def is_mapped(self) -> bool:
        return self._writer.medium.maps_files

    @property
    def mapped(self) -> MappedTensors:
        """Its weights file in memory, on a local mount."""
        file = self.claim.weights.number
        return map_shared(self._mappings, self.claim.path, file, self.footer)

    def fill(self, tensors: list[torch.Tensor], copier: Copier) -> list[int] | None:
        """Write all tensors, cast where dtypes differ; return their checksums, if ``hashed``."""
        hashed = self._hashed
        if self.is_mapped:
            mapped = self.mapped
            if self._writer.medium.is_in_memory and any_on_gpu(tensors):
                mapped.expect_device()
            return copier.write(mapped, tensors, hashed=hashed)
        file, path, layout = self.claim.weights, self.claim.path, self.footer.layout
        return write_tensors(file, path, layout, tensors, copier, hashed=hashed)

    def fill_one_by_one(
        self, tensors: Iterable[torch.Tensor], copier: Copier, progress: Progress | None
    ) -> list[int] | None:
        """Write tensors that are made one at a time and dropped when written.

        Returns their checksums, if ``hashed``.
        """
        layout = self.footer.layout
        on_bytes = counter(progress, layout.num_bytes)
        mapped = self.mapped if self.is_mapped else None
        checksums = []
        for index, (spec, tensor) in enumerate(zip(layout.specs, tensors, strict=True)):
            if mapped is not None:
                copier.copy_tensors([mapped.views[index]], [tensor])
            else:
                checksums += self._write(spec, layout.offsets[index], tensor)
            if on_bytes is not None:
                on_bytes(spec.num_bytes)
        if not self._hashed:
            return None
        return checksums if mapped is None else copier.checksums(mapped)

    def fill_from_stream(
        self,
        stream: Iterable[tuple[TensorSpec, torch.Tensor]],
        new_names: Callable[[list[str]], list[str]],
        progress: Progress | None,
    ) -> list[int] | None:
        """Write tensors one behind the other; their layout is known when the last has come.

        Args:
            stream: tensors, under their given names.
            new_names: function that returns the names to publish, for all given names.
            progress: called with the bytes written so far.

        Returns:
            Their checksums, if ``hashed``.
        """
        on_bytes = counter(progress, 0)
        specs, end, checksums = [], 0, []
        for spec, tensor in stream:
            checksums += self._write(spec, end, tensor)
            specs.append(spec)
            end = align(end + spec.num_bytes)
            if on_bytes is not None:
                on_bytes(spec.num_bytes)
        if not specs:
            raise InvalidWeightsError("there is no tensor in the weights to publish")
        names = new_names([spec.name for spec in specs])
        specs = [spec._replace(name=name) for spec, name in zip(specs, names, strict=True)]
        self._footer = Footer.of(Layout.of(specs))
        return checksums if self._hashed else None

    def fill_from(self, held: Held, layout: Layout, copier: Copier) -> list[int] | None:
        """Copy a version of another store, which has this layout there; return its checksums."""
        if not self.is_mapped and held.manifest.anchor is None:
            file, own, hashed = held.file.number, self.claim.weights, self._hashed
            return read_tensors(file, held.path, layout, own, copier, hashed=hashed)
        reader = ChainReader(held, layout)
        return self.fill_in_memory(
            lambda memory, hashed: reader.read(memory, copier, hashed=hashed),
            copier,
        )

    def fill_in_memory(
        self, read: Callable[[FileTensors, bool], list[int] | None], copier: Copier
    ) -> list[int] | None:
        """Fill it by a function of memory, and of whether it is to hash the tensors."""
        if self.is_mapped:
            return read(self.mapped, self._hashed)
        tensors = FileTensors.in_memory(self.footer.layout)
        read(tensors, False)
        return self.fill(tensors.views, copier)

    def _write(self, spec: TensorSpec, offset: int, tensor: torch.Tensor) -> list[int]:
        """Write one tensor; return its checksum in a list, which is empty unless ``hashed``."""
        file, dtype, hashed = self.claim.weights, DTYPES[spec.dtype], self._hashed
        digests = write_tensor(file, self.claim.path, offset, tensor, dtype, hashed=hashed)
        return [join_digests(digests)] if hashed else []

    def commit(
        self, metadata: dict[str, Any], checksums: list[int] | None, **described: Any
    ) -> Manifest:
        """Publish it, with the checksums of its tensors, or without any.

        ``described``: further fields of the manifest.

        Raises:
            WriterSupersededError, StoreFullError, StoreAccessError, ClosedError: as
                `BufferWriter.commit`.
        """
        if self._is_done:
            raise ClosedError("this draft was committed, or abandoned")
        if self.has_file:
            self._check_parts()
            described |= self.footer.seal(self.claim, checksums)
        manifest = self._writer.commit(self.claim, metadata=metadata, **described)
        self._is_done = True
        return manifest

    def _check_parts(self) -> None:
        """Require every part that ranks have written to be there, whole, on this host too."""
        path, layout = self.claim.path, self.footer.layout
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
        """Give it up, unless it was committed: its buffer is begun anew the next time."""
        if not self._is_done:
            self._is_done = True
            self._writer.abandon(self.claim)
            # A mapping keeps an unlinked file's room, which the next version needs.
            self._mappings.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abandon()


def map_shared(mappings: KeptMappings, path: Path, file: int, footer: Footer) -> MappedTensors:
    """Map an open weights file with these tensors, shared with all processes that map it."""
    return mappings.of(
        path,
        file,
        lambda: MappedTensors(file, footer.file_bytes, footer.layout, access=mmap.ACCESS_WRITE),
    )


def checked_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the metadata as a reader gets it, or raise an `InvalidWeightsError`."""
    try:
        text = json.dumps(dict(metadata or {}), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidWeightsError(f"metadata must be what JSON can hold: {error}") from None
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
        # JSON would make strings of others, and lose one of two that are alike then.
        if others := [key for key in value if not isinstance(key, str)]:
            raise InvalidWeightsError(f"metadata has a key that is no string: {others[0]!r:.80}")
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def counter(progress: Progress | None, total: int) -> OnBytes | None:
    """Return a function that sums up copied bytes, from several threads, for ``progress``.

    Return None without a ``progress`` to call.
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
