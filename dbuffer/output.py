"""What writers of weights files share: the files' ends, mappings that are made once, metadata."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbuffer import filesystem
from dbuffer.errors import InvalidWeightsError
from dbuffer.filesystem import Descriptor
from dbuffer.layout import Layout, TensorSpec, digest
from dbuffer.manifest import MAX_RECORD_BYTES, Manifest
from dbuffer.tensors import MappedTensors, pack_checksums
from dbuffer.writer import Claim

MAX_METADATA_BYTES = MAX_RECORD_BYTES // 2
"""Metadata is read with every look at a manifest; large things belong in a tensor."""

MAX_METADATA_DEPTH = 100
"""Nesting that any reader can parse, however deep its stack is already."""


@dataclass(frozen=True, slots=True)
class Footer:
    """What follows the tensors in a weights file, and stays as it is while the layout does."""

    layout: Layout
    encoded: bytes
    """The layout in our own form."""
    tail: bytes
    """And in tensordict's; empty where the data is in parts."""
    layout_xxh3: str

    @classmethod
    def of(cls, layout: Layout) -> Footer:
        """Encode a layout, once."""
        encoded = layout.encode()
        # Data in parts is nothing that tensordict can find: without an end it refuses the file.
        tail = b"" if layout.is_in_parts else layout.encode_for_tensordict()
        return cls(layout, encoded, tail, digest(encoded))

    @classmethod
    def like(
        cls, last: Footer | None, specs: tuple[TensorSpec, ...], aliases: dict[str, str]
    ) -> Footer:
        """That of such tensors; the ``last`` one, where nothing changed."""
        if last is not None and (last.layout.specs, last.layout.aliases) == (specs, aliases):
            return last
        return cls.of(Layout.of(specs, aliases))

    @property
    def file_bytes(self) -> int:
        """Size of the whole weights file."""
        return self.layout.layout_offset + len(self.encoded) + len(self.tail)

    def seal(self, claim: Claim, checksums: list[int] | None, metadata: dict[str, Any]) -> Manifest:
        """Write the checksums, if there are any, into a whole file; what describes it."""
        layout, table_xxh3 = self.layout, None
        if checksums is not None:
            table = pack_checksums(checksums)
            with filesystem.os_errors("write the checksums", claim.path):
                filesystem.write_at(claim.file.number, layout.checksums_offset, table)
            table_xxh3 = digest(table)
        return Manifest(
            state="complete",
            version=claim.marked.version,
            generation=claim.marked.generation,
            run=claim.marked.run,
            file=claim.path.name,
            file_bytes=self.file_bytes,
            num_tensors=len(layout.specs),
            num_bytes=layout.num_bytes,
            layout_offset=layout.layout_offset,
            layout_bytes=len(self.encoded),
            layout_xxh3=self.layout_xxh3,
            checksums_offset=layout.checksums_offset,
            checksums_xxh3=table_xxh3,
            published_at=time.time(),
            metadata=metadata,
        )

    def write(self, claim: Claim) -> None:
        """Write it into a new file."""
        with filesystem.os_errors("write the layout", claim.path):
            filesystem.write_at(
                claim.file.number, self.layout.layout_offset, self.encoded + self.tail
            )


class KeptMappings:
    """A writer's mappings of the files that it writes again and again.

    Making one takes as long as copying into it, page by page.
    """

    def __init__(self) -> None:
        self._mapped: dict[Path, MappedTensors] = {}

    def of(self, path: Path, file: Descriptor, footer: Footer) -> MappedTensors:
        """The claimed file in memory, mapped once for as long as the file lives."""
        mapped = self._mapped.get(path)
        if mapped is None or mapped.identity != filesystem.identity_of(file.number):
            self._mapped = {
                other: known
                for other, known in self._mapped.items()
                if other.parent != path.parent  # each buffer has one file
            }
            mapped = MappedTensors(file.number, footer.file_bytes, footer.layout, shared=True)
            self._mapped[path] = mapped
        return mapped

    def drop_other_layouts(self, layout: Layout) -> None:
        """Unmap what will not be written again.

        A mapping keeps an unlinked file's room, which the new file may need.
        """
        self._mapped = {
            path: mapped for path, mapped in self._mapped.items() if mapped.layout is layout
        }

    def clear(self) -> None:
        """Unmap all."""
        self._mapped.clear()


def checked_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """The metadata as a reader will get it.

    Raises:
        InvalidWeightsError: JSON cannot hold it, or it is too large.
    """
    try:
        text = json.dumps(dict(metadata or {}))
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
