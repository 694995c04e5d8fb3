"""Names and records of a bucket's objects, through which versions go from one store to another.

All objects but the pointer and the receivers' are immutable, and their names have the digests of
their content: what a mirror puts late, after another took over, changes no object. Large files are
cut into parts.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar, NamedTuple, Self

import msgspec

from dbuffer.errors import StoreCorruptError
from dbuffer.format.layout import digest
from dbuffer.format.lineage import VERSION_ID, Positive, Token, VersionId
from dbuffer.format.manifest import (
    MAX_RECORD_BYTES,
    Manifest,
    ReceiverRecord,
    Record,
    Versioned,
    decodable,
    encode,
)

POINTER_OBJECT = "CURRENT"
RECEIVERS_PREFIX = "receivers"

PART_BYTES = 32 << 20
"""Size of the parts that are written: many enough for requests side by side, and few enough for
what a request costs."""

MAX_OBJECT_BYTES = 16 * MAX_RECORD_BYTES
"""No object with a record is larger; a part is as large as the version says."""

VERSIONS_PREFIX = "versions"
"""Directory of versions' records, and of the parts of their files."""
_RECORD = re.compile(rf"{VERSIONS_PREFIX}/([0-9]{{19}})-([0-9a-f]{{16}})-[0-9a-f]{{16}}\.json")
_PART = re.compile(
    rf"{VERSIONS_PREFIX}/{VERSION_ID.pattern}\.(weights|delta)/[0-9]{{6}}-[0-9a-f]{{16}}"
)
_RECEIVERS = re.compile(rf"{RECEIVERS_PREFIX}/mirror-[A-Za-z0-9-]{{0,64}}-[0-9a-f]{{16}}\.json")


class Parts(NamedTuple):
    """A file in parts: all but the last have the same size."""

    num_bytes: Positive
    digests: list[Token]
    """Digest of each part."""


@decodable
class BucketPointer(Versioned, frozen=True, kw_only=True):
    """``CURRENT``: which version is the newest in a bucket."""

    NAME: ClassVar = "bucket's version pointer"

    writer: Token
    """Random name of the mirror that put it: one that reads another name has lost the bucket."""
    version_xxh3: Token
    """Digest of the object with the version's record."""
    xxh3: Token
    """Digest of the other fields: a reader remembers a pointer, and must not remember a wrong one.
    """

    @property
    def version_name(self) -> str:
        """Name of the object with the version's record."""
        return version_object(self.id, self.version_xxh3)

    @classmethod
    def to(cls, version: BucketVersion, writer: str) -> Self:
        """Make the pointer that names a version."""
        manifest = version.manifest
        return cls._sealed(
            id=manifest.id,
            runs=manifest.runs,
            writer=writer,
            version_xxh3=digest(encode(version)),
        )

    def by(self, writer: str) -> Self:
        """Return it as another mirror puts it."""
        return self._sealed(
            id=self.id, runs=self.runs, writer=writer, version_xxh3=self.version_xxh3
        )

    @classmethod
    def _sealed(cls, **fields: Any) -> Self:
        return cls(**fields, xxh3=_joint_digest(fields))

    def __post_init__(self) -> None:
        Versioned.__post_init__(self)
        if self.xxh3 != _joint_digest(msgspec.structs.asdict(self)):
            raise StoreCorruptError(f"{self.NAME}: it is not as it was written")


@decodable
class BucketVersion(Record, frozen=True, kw_only=True):
    """``versions/NUMBER-RUN-XXH3.json``: a version, and the parts of its files."""

    NAME: ClassVar = "bucket's version"

    manifest: Manifest
    """The version's manifest; its ``anchor_buffer`` is None."""
    part_bytes: Positive
    """Size of each part but the last of a file."""
    weights: list[Token]
    """Digests of the weights file's parts."""
    deltas: dict[str, Parts]
    """Parts of each delta of its chain, by the id of the version that it leads to."""

    def __post_init__(self) -> None:
        manifest = self.manifest
        if manifest.state != "complete":
            raise StoreCorruptError(f"{self.NAME}: field 'manifest' describes no mirrored version")
        if set(map(str, manifest.chain[1:])) != self.deltas.keys():
            raise StoreCorruptError(f"{self.NAME}: field 'deltas' is not of its chain")
        for parts in (self.weights_parts, *map(self.delta_parts, manifest.chain[1:])):
            count = -(-parts.num_bytes // self.part_bytes)
            if len(parts.digests) != count:
                raise StoreCorruptError(f"{self.NAME}: its parts are not {count} digests")

    @property
    def name(self) -> str:
        """Name of its object."""
        return version_object(self.id, digest(encode(self)))

    @property
    def id(self) -> VersionId:
        """The version's id."""
        return self.manifest.id

    @property
    def anchor(self) -> VersionId:
        """The version in the weights file."""
        return self.manifest.anchor or self.manifest.id

    @property
    def weights_parts(self) -> Parts:
        return Parts(self.manifest.file_bytes, self.weights)

    def delta_parts(self, version: VersionId) -> Parts:
        """Parts of the delta that leads to this version."""
        return self.deltas[str(version)]

    @property
    def part_sizes(self) -> dict[str, int]:
        """Sizes of all parts that it consists of, by the names of their objects."""
        sizes = {}
        files = {weights_object(self.anchor): self.weights_parts}
        for version in map(VersionId.parse, self.deltas):
            files[delta_object(version)] = self.delta_parts(version)
        for directory, parts in files.items():
            for index, name in enumerate(part_objects(directory, parts.digests)):
                offset = index * self.part_bytes
                sizes[name] = min(self.part_bytes, parts.num_bytes - offset)
        return sizes

    @property
    def objects(self) -> set[str]:
        """Names of all objects that it consists of, and of its record's."""
        return {self.name, *self.part_sizes}


@decodable
class BucketReceivers(Record, frozen=True, kw_only=True):
    """``receivers/MIRROR.json``: records of a mirror, and of the receivers of its local store."""

    NAME: ClassVar = "bucket's receivers"

    records: list[ReceiverRecord]
    updated_at: float
    """Time by the mirror's clock: an object that is put again differs from the one before."""


def version_object(version: VersionId, xxh3: str) -> str:
    """Name of the object with a version's record, whose digest is the last."""
    return f"{VERSIONS_PREFIX}/{version.number:019}-{version.run}-{xxh3}.json"


def version_of(name: str) -> VersionId | None:
    """Return the version whose record or part a mirror gives this name, or None if it gives none.

    A part of a weights file belongs to its anchor, a part of a delta to the version it leads to.
    """
    if match := _RECORD.fullmatch(name):
        return VersionId(match[2], int(match[1]))
    match = _PART.fullmatch(name)
    return match and VersionId(match[1], int(match[2]))


def weights_object(version: VersionId) -> str:
    """Directory of the parts of the weights file that holds this version."""
    return f"{VERSIONS_PREFIX}/{version}.weights"


def delta_object(version: VersionId) -> str:
    """Directory of the parts of the delta that leads to this version."""
    return f"{VERSIONS_PREFIX}/{version}.delta"


def part_objects(directory: str, digests: list[str]) -> list[str]:
    """Names of the parts of a file."""
    return [part_object(directory, index, xxh3) for index, xxh3 in enumerate(digests)]


def part_object(directory: str, index: int, xxh3: str) -> str:
    """Name of a part."""
    return f"{directory}/{index:06}-{xxh3}"


def receivers_object(mirror: str) -> str:
    """Name of the object with the records of a mirror's store."""
    return f"{RECEIVERS_PREFIX}/{mirror}.json"


def is_of_receivers(name: str) -> bool:
    """Whether an object's name is one that a mirror gives to records of receivers."""
    return _RECEIVERS.fullmatch(name) is not None


def _joint_digest(fields: dict[str, Any]) -> str:
    """Digest of all fields of a pointer but the digest itself."""
    others = {name: value for name, value in fields.items() if name != "xxh3"}
    return digest(json.dumps(others, sort_keys=True).encode())
