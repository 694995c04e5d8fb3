"""`Footer`: the end of a weights file, and what the manifest says of a file that has one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dbuffer.format.layout import Layout, TensorSpec, digest
from dbuffer.io.tensors import pack_checksums
from dbuffer.store import filesystem
from dbuffer.store.hold import HeldVersion
from dbuffer.store.writer import Claim


@dataclass(frozen=True, slots=True)
class Footer:
    """Bytes behind the tensors of a weights file; the same for all versions of one layout."""

    layout: Layout
    encoded: bytes
    """The layout in our own form."""
    tail: bytes
    """And in tensordict's; empty where the data is in parts."""
    layout_xxh3: str

    @classmethod
    def of(cls, layout: Layout) -> Footer:
        encoded = layout.encode()
        # Data in parts is nothing that tensordict can find: without an end it refuses the file.
        tail = b"" if layout.is_in_parts else layout.encode_for_tensordict()
        return cls(layout, encoded, tail, digest(encoded))

    @classmethod
    def like(
        cls, last: Footer | None, specs: tuple[TensorSpec, ...], aliases: dict[str, str]
    ) -> Footer:
        """Return the footer for these tensors: ``last``, if the layout is the same."""
        if last is not None and (last.layout.specs, last.layout.aliases) == (specs, aliases):
            return last
        return cls.of(Layout.of(specs, aliases))

    @property
    def file_bytes(self) -> int:
        return self.layout.layout_offset + len(self.encoded) + len(self.tail)

    def seal(self, claim: Claim, checksums: list[int] | None) -> dict[str, Any]:
        """Write it into a file that holds all tensors, with their checksums, if there are any.

        It is written into a file that had it already, too: that may be damaged since.

        Returns:
            The fields of the manifest that describe the file.
        """
        layout, table_xxh3 = self.layout, None
        with filesystem.os_errors("write the layout", claim.path):
            if checksums is not None:
                table = pack_checksums(checksums)
                filesystem.write_at(claim.weights.number, layout.checksums_offset, table)
                table_xxh3 = digest(table)
            data = self.encoded + self.tail
            filesystem.write_at(claim.weights.number, self.layout.layout_offset, data)
        return self.described(table_xxh3)

    def described(self, table_xxh3: str | None) -> dict[str, Any]:
        """Return the fields of a manifest that describe a file with this footer.

        ``table_xxh3``: digest of the table of checksums in it; None: there are none.
        """
        layout = self.layout
        return {
            "file_bytes": self.file_bytes,
            "num_tensors": len(layout.specs),
            "num_bytes": layout.num_bytes,
            "layout_offset": layout.layout_offset,
            "layout_bytes": len(self.encoded),
            "layout_xxh3": self.layout_xxh3,
            "checksums_offset": layout.checksums_offset,
            "checksums_xxh3": table_xxh3,
        }


class KeptFooter:
    """Footer of copies of versions, in which parts are joined; the next one mostly shares it."""

    def __init__(self) -> None:
        self._kept: tuple[str | None, Layout, Footer] | None = None
        """Footer, with the layout that it was made of, and the digest of that."""

    def of_copy(self, held: HeldVersion) -> tuple[Layout, Footer]:
        """Return the layout of a held version, and the footer of its copy."""
        layout_xxh3 = held.manifest.layout_xxh3
        if self._kept is None or self._kept[0] != layout_xxh3:
            layout = held.read_layout()
            self._kept = layout_xxh3, layout, Footer.of(layout.joined())
        return self._kept[1:]
