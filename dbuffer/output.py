"""What writers of weights files share: the files' ends, and mappings that are made once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dbuffer import filesystem
from dbuffer.layout import Layout, digest
from dbuffer.tensors import MappedTensors
from dbuffer.writer import Claim


@dataclass(frozen=True, slots=True)
class Footer:
    """What follows the tensors in a weights file, and stays as it is while the layout does."""

    layout: Layout
    encoded: bytes
    """The layout in our own form."""
    tail: bytes
    """And in tensordict's."""
    layout_xxh3: str

    @classmethod
    def of(cls, layout: Layout) -> Footer:
        """Encode a layout, once."""
        encoded = layout.encode()
        return cls(layout, encoded, layout.encode_for_tensordict(), digest(encoded))

    @property
    def file_bytes(self) -> int:
        """Size of the whole weights file."""
        return self.layout.layout_offset + len(self.encoded) + len(self.tail)

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

    def of(self, claim: Claim, file_bytes: int, layout: Layout) -> MappedTensors:
        """The claimed file in memory, mapped once for as long as the file lives."""
        mapped = self._mapped.get(claim.path)
        if mapped is None or mapped.identity != filesystem.identity_of(claim.file.number):
            self._mapped = {
                path: known
                for path, known in self._mapped.items()
                if path.parent.name != claim.buffer
            }
            mapped = MappedTensors(claim.file.number, file_bytes, layout, shared=True)
            self._mapped[claim.path] = mapped
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
