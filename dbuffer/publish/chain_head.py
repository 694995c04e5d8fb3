"""`ChainHead`: the version that was published last, and the deltas that lead to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from dbuffer.errors import StoreCorruptError
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import Manifest
from dbuffer.io.chain_reader import ChainReader
from dbuffer.io.footer import Footer
from dbuffer.store.hold import Held


@dataclass(frozen=True, slots=True, eq=False)
class ChainHead:
    """The version that was published last, at the end of its chain."""

    manifest: Manifest
    buffer: str
    """Buffer with its manifest."""
    footer: Footer
    checksums: list[int] | None
    """Checksums of its tensors, as they were published; None: it has none."""
    delta_bytes: dict[VersionId, int]
    """Bytes of the deltas of its chain, by the versions they lead to, oldest first. The chain's
    first version is there with 0 bytes."""

    @classmethod
    def of(cls, held: Held, footer: Footer, *, hashed: bool) -> Self:
        """Describe a held version by its own records; ``hashed``: with its checksums."""
        manifest, reader = held.manifest, ChainReader(held, footer.layout)
        checksums = reader.expected({}) if hashed else None
        if hashed and checksums is None:
            raise StoreCorruptError(
                f"{held.path}: its checksums were damaged after it was published"
            )
        first, *later = manifest.chain or [manifest.id]
        delta_bytes = {first: 0} | {each: reader.header(each).num_bytes for each in later}
        return cls(manifest, held.buffer, footer, checksums, delta_bytes)

    @property
    def anchor(self) -> VersionId:
        """The full version that its deltas start from, or the version itself."""
        return self.manifest.anchor or self.manifest.id

    def follows(self, version: VersionId | None) -> bool:
        """Whether a delta leads from this version to it."""
        return len(self.delta_bytes) > 1 and list(self.delta_bytes)[-2] == version

    def checksums_after(self, changed: Mapping[int, int]) -> list[int] | None:
        """Return the checksums of all tensors when some have ``changed``, or None without any.

        Other tensors keep their published checksums, even if the file was damaged since.
        """
        if self.checksums is None:
            return None
        return [changed.get(index, known) for index, known in enumerate(self.checksums)]
