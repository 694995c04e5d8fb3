"""`Contents`: what the next writer of a store finds there, and what follows from it.

A writer may have died anywhere, and a record may be damaged. A damaged one counts as none, but its
file is there: it tells a store that was published to from a new one.
"""

from __future__ import annotations

from collections.abc import Iterator

from dbuffer.errors import VersionError
from dbuffer.format import places
from dbuffer.format.manifest import MAX_INTEGER, Manifest, Pointer, WriterRecord
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

    def published(self) -> Iterator[tuple[str, Manifest]]:
        """Yield the buffers and manifests of the versions that the store holds, kept ones last.

        A version is kept before it leaves its buffer.
        """
        for buffer, manifest in self.manifests.items():
            if manifest is not None and self.has_published(manifest):
                yield buffer, manifest
        yield from self._store.kept().items()

    def has_published(self, manifest: Manifest) -> bool:
        """Whether a buffer's manifest is that of a version that was published.

        A commit that failed may leave a complete manifest, whose number the next version takes.
        """
        if manifest.state != "complete":
            return False
        if self.pointer is None:
            return manifest.version <= self.last_version
        # Generations, not versions: a mirror that begins anew writes lower versions over higher.
        return manifest.generation <= self.pointer.generation

    @property
    def last_generation(self) -> int:
        """Highest generation in the store; 0: none."""
        return max((record.generation for record in self._records), default=0)

    @property
    def last_version(self) -> int:
        """Newest version that was published; 0: none."""
        if self.pointer is not None:
            return self.pointer.version
        newest = max(map(self._version_in, places.BUFFERS))
        if None in self.manifests.values() and not self._has_pointer_file:
            # The first version of all: its writer died before it moved the pointer.
            return max(newest, 1) - 1
        return newest

    def next_version(self, version: int | None) -> int:
        """Choose the version to publish: ``version`` if that goes up, else one above the last.

        Raises:
            VersionError: it is no version, or does not go up.
        """
        last = self.last_version
        require_version(version)
        if version is None:
            version = last + 1
            if version > MAX_INTEGER:
                raise VersionError(
                    f"{self._store.root} has version {last}, above which there is none: publish "
                    "into a new store"
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
        return other_buffer(max(places.BUFFERS, key=self._version_in))

    @property
    def is_copy(self) -> bool:
        """Whether a mirror wrote the newest version."""
        whole = [each for each in self.manifests.values() if each and each.state == "complete"]
        newest = max(whole, key=lambda manifest: manifest.generation, default=None)
        return newest is not None and newest.origin is not None

    def history(self, before: WriterRecord | None) -> str | None:
        """History that the next sender goes on with; None: it begins another one.

        As in a store that was emptied, even if the writer ``before`` left its record.
        """
        if self._records:
            return max(self._records, key=lambda record: record.generation).history
        is_empty = not (self._has_pointer_file or any(self._has_manifest_file))
        return None if is_empty or before is None else before.history

    def lost_version(self, history: str | None) -> int | None:
        """Newest version of a history that a receiver tells of, where it is above the last one.

        The last versions were lost, in a power cut or because the store was put back from a copy.
        Their numbers would come again, for other weights.
        """
        told = [
            max(record.applied_version or 0, record.staged_version or 0)
            for record in self._store.receivers()
            if record.history == history
        ]
        newest = max(told, default=0)
        return newest if newest > self.last_version else None

    @property
    def _records(self) -> list[Pointer | Manifest]:
        records = (self.pointer, *self.manifests.values())
        return [record for record in records if record is not None]

    def _version_in(self, buffer: str) -> int:
        """Version that a buffer holds, published or about to be; 0: none."""
        manifest = self.manifests[buffer]
        return manifest.version if manifest and manifest.state == "complete" else 0

    @property
    def _has_pointer_file(self) -> bool:
        return (self._store.root / places.POINTER_FILE).exists()

    @property
    def _has_manifest_file(self) -> list[bool]:
        root = self._store.root
        return [(root / buffer / places.MANIFEST_FILE).exists() for buffer in places.BUFFERS]
