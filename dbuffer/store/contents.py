"""`Contents`: a store's version pointer and manifests, as a new writer finds them.

The previous writer may have been killed at any instruction, and records may be damaged. A damaged
record is ignored, but its file shows that the store is not new.
"""

from __future__ import annotations

from collections.abc import Iterator

from dbuffer.errors import VersionError
from dbuffer.format import places
from dbuffer.format.lineage import Lineage, VersionId
from dbuffer.format.manifest import MAX_INTEGER, Manifest, Pointer
from dbuffer.runtime.lazy import cached_property
from dbuffer.store.buffer import DoubleBuffer, other_buffer


def require_version(version: object) -> None:
    if version is None or (type(version) is int and version <= MAX_INTEGER):
        return
    raise VersionError(f"a version is an integer below 2**63, not {version!r:.80}")


class Contents:
    """Version pointer and manifests of a store, each read at its first use."""

    def __init__(self, store: DoubleBuffer) -> None:
        self._store = store

    @cached_property
    def pointer(self) -> Pointer | None:
        return self._store.undamaged_pointer()

    @cached_property
    def manifests(self) -> dict[str, Manifest | None]:
        return {buffer: self._store.undamaged_manifest(buffer) for buffer in places.BUFFERS}

    @cached_property
    def newest_buffer(self) -> str | None:
        """Buffer that the version pointer names, or None if nothing was ever published.

        If the pointer is missing or damaged, this is the buffer that may hold the newest version.
        """
        if self.pointer is not None:
            return self.pointer.buffer
        root = self._store.root
        have_manifests = [
            (root / buffer / places.MANIFEST_FILE).exists() for buffer in places.BUFFERS
        ]
        if not (root / places.POINTER_FILE).exists() and not all(have_manifests):
            return None  # the first version's writer died before it flipped the pointer

        def generation(buffer: str) -> int:
            manifest = self.manifests[buffer]
            return manifest.generation if manifest and manifest.state == "complete" else 0

        return max(places.BUFFERS, key=generation)

    @cached_property
    def newest(self) -> Lineage | None:
        """Newest undamaged version that was published, or None.

        If the version pointer is missing or damaged, this may be a version whose commit failed.
        """
        if self.pointer is not None:
            return self.pointer.lineage
        newest = None if self.newest_buffer is None else self.manifests[self.newest_buffer]
        return newest.lineage if newest is not None and newest.state == "complete" else None

    @property
    def idle_buffer(self) -> str:
        # B comes first: a version that a dead writer began in B must not count as the older one.
        return places.BUFFERS[1] if self.newest_buffer is None else other_buffer(self.newest_buffer)

    def has_published(self, manifest: Manifest) -> bool:
        """Whether a manifest describes a version that was published and was not lost since."""
        # A failed commit may leave a complete manifest.
        newest = self.newest
        return manifest.state == "complete" and newest is not None and newest.reaches(manifest.id)

    def published(self, *, lost: bool = False) -> Iterator[tuple[str, Manifest]]:
        """Yield the buffer and manifest of the newest version and of versions that lead to it.

        Kept versions come last. With ``lost``, also yield kept versions that do not lead to the
        newest version. A version is kept before its buffer is reused, so no version is missed.
        """
        for buffer, manifest in self.manifests.items():
            if manifest is not None and self.has_published(manifest):
                yield buffer, manifest
        for buffer, manifest in self._store.kept().items():
            if lost or self.newest is None or self.newest.reaches(manifest.id):
                yield buffer, manifest

    def id_of(self, version: int | VersionId) -> VersionId | None:
        """Return a version's id, or None if no version of this number leads to the newest."""
        if isinstance(version, VersionId):
            return version
        return None if self.newest is None else self.newest.at(version)

    @property
    def last_generation(self) -> int:
        records = (self.pointer, *self.manifests.values())
        return max((record.generation for record in records if record is not None), default=0)

    def next_version(self, version: int | None, *, above: int = 0) -> int:
        """Return the next version's number: ``version``, or by default the last number plus one.

        Raises:
            VersionError: ``version`` is not a valid version number. Or ``version`` is not above the
                store's newest version, or not above ``above``: the sender's last version, which the
                store may have lost.
        """
        require_version(version)
        root, in_store = self._store.root, 0 if self.newest is None else self.newest.id.number
        last = max(in_store, above)
        if version is None:
            version = last + 1
        if version > MAX_INTEGER:
            raise VersionError(
                f"{root} is at version {last}, the highest possible number: publish into a new "
                "store"
            )
        if in_store < version <= last:
            raise VersionError(
                f"version {version} was lost from {root}, or readers may know one of that number "
                f"whose publishing failed: the next is {last + 1}"
            )
        if version <= last:
            raise VersionError(
                f"version {version} is not above version {last}, the last one in {root}; versions "
                "only go up (put a trainer's step in the metadata)"
            )
        return version
