"""`Contents`: what the next writer of a store finds there, and what follows from it.

A writer may have died anywhere, and a record may be damaged. A damaged one counts as none, but its
file is there: it tells a store that was published to from a new one.
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
    """Raise a `VersionError` for what is neither a version's number nor None."""
    if version is None or (type(version) is int and version <= MAX_INTEGER):
        return
    raise VersionError(f"a version is an integer below 2**63, not {version!r:.80}")


class Contents:
    """Pointer and manifests of a store at one moment, each read when it is first used."""

    def __init__(self, store: DoubleBuffer) -> None:
        self._store = store

    @cached_property
    def pointer(self) -> Pointer | None:
        return self._store.undamaged_pointer()

    @cached_property
    def manifests(self) -> dict[str, Manifest | None]:
        return {buffer: self._store.undamaged_manifest(buffer) for buffer in places.BUFFERS}

    def published(self, *, lost: bool = False) -> Iterator[tuple[str, Manifest]]:
        """Yield the buffers and manifests of the versions that lead to the newest, kept ones last.

        A version is kept before it leaves its buffer. What does not lead to the newest was lost;
        with ``lost``, also what is kept of that.
        """
        for buffer, manifest in self.manifests.items():
            if manifest is not None and self.has_published(manifest):
                yield buffer, manifest
        newest = self.newest
        for buffer, manifest in self._store.kept().items():
            if lost or newest is None or newest.reaches(manifest.id):
                yield buffer, manifest

    def has_published(self, manifest: Manifest) -> bool:
        """Whether a buffer's manifest is that of a version that was published, and not lost.

        A commit that failed may leave a complete manifest, whose number the next version takes.
        """
        newest = self.newest
        return manifest.state == "complete" and newest is not None and newest.reaches(manifest.id)

    @cached_property
    def newest(self) -> Lineage | None:
        """The newest version that was published; None: there is none, or all records are damaged.

        With no pointer to go by, it may be one whose commit failed.
        """
        if self.pointer is not None:
            return self.pointer.lineage
        if not (self._has_pointer_file or all(self._has_manifest_file)):
            return None  # the first version of all: its writer died before it moved the pointer
        newest = self.manifests[max(places.BUFFERS, key=self._generation_in)]
        return newest.lineage if newest is not None and newest.state == "complete" else None

    def id_of(self, version: int | VersionId) -> VersionId | None:
        """Return the id of the version of this number that leads to the newest; None: none does."""
        if isinstance(version, VersionId):
            return version
        return None if self.newest is None else self.newest.at(version)

    @property
    def last_generation(self) -> int:
        """Highest generation in the store; 0: none."""
        return max((record.generation for record in self._records), default=0)

    @property
    def last_version(self) -> int:
        """Number of the newest version that was published; 0: none."""
        return 0 if self.newest is None else self.newest.id.number

    def next_version(self, version: int | None, *, above: int = 0) -> int:
        """Choose the version to publish: ``version`` if that goes up, else one above the last.

        Args:
            version: a number, or None.
            above: number of the last version that the sender published, even if it was lost since.

        Raises:
            VersionError: it is no version, or does not go up.
        """
        last = max(self.last_version, above)
        require_version(version)
        if version is None:
            version = last + 1
            if version > MAX_INTEGER:
                raise VersionError(
                    f"{self._store.root} has version {last}, above which there is none: publish "
                    "into a new store"
                )
        if self.last_version < version <= last:
            raise VersionError(
                f"version {version} was lost from {self._store.root}, or readers may know one of "
                f"that number whose publishing failed: the next is {last + 1}"
            )
        if version <= last:
            raise VersionError(
                f"version {version} is not above version {last}, the last one in "
                f"{self._store.root}; versions only go up (put a trainer's step in the metadata)"
            )
        return version

    @property
    def idle_buffer(self) -> str:
        """Buffer that the next version is written into."""
        if self.pointer is not None:
            return other_buffer(self.pointer.buffer)
        first, second = self._has_manifest_file
        if not self._has_pointer_file and not (first and second):
            # Nothing was ever published. What a dead writer began must not come to light as the
            # older of two versions.
            return places.BUFFERS[1]
        # With no pointer to go by, spare the buffer that may hold the newest version.
        return other_buffer(max(places.BUFFERS, key=self._generation_in))

    @property
    def _records(self) -> list[Pointer | Manifest]:
        records = (self.pointer, *self.manifests.values())
        return [record for record in records if record is not None]

    def _generation_in(self, buffer: str) -> int:
        """Generation of the version that a buffer holds, published or about to be; 0: none."""
        manifest = self.manifests[buffer]
        return manifest.generation if manifest and manifest.state == "complete" else 0

    @property
    def _has_pointer_file(self) -> bool:
        return (self._store.root / places.POINTER_FILE).exists()

    @property
    def _has_manifest_file(self) -> list[bool]:
        root = self._store.root
        return [(root / buffer / places.MANIFEST_FILE).exists() for buffer in places.BUFFERS]
