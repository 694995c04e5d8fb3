"""Records and names of a bucket's objects, through which versions go from one store to another.

``CURRENT`` describes the newest version. The version's files are objects cut into parts, which are
immutable: their names have the digests of their content, so that a part that a mirror puts late,
after another mirror took over, changes no object. A part that arrived is not put again.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar, NamedTuple, Self

import msgspec
from msgspec.structs import asdict, replace

from dbuffer.errors import StoreCorruptError
from dbuffer.format.layout import digest
from dbuffer.format.lineage import VERSION_ID, Positive, Token, VersionId
from dbuffer.format.manifest import (
    MAX_RECORD_BYTES,
    Manifest,
    ReceiverRecord,
    Record,
    decodable,
)

POINTER_OBJECT = "CURRENT"
RECEIVERS_PREFIX = "receivers"
VERSIONS_PREFIX = "versions"
"""Directory of the parts of versions' files."""

PART_BYTES = 32 << 20
"""Size of the parts that are written: many enough for requests side by side, and few enough for
what a request costs."""

MAX_OBJECT_BYTES = 16 * MAX_RECORD_BYTES
"""No object with a record is larger; a part is as large as the version says."""

_PART = re.compile(
    rf"{VERSIONS_PREFIX}/{VERSION_ID.pattern}\.(weights|delta)/[0-9]{{6}}-[0-9a-f]{{16}}"
)
_RECEIVERS = re.compile(rf"{RECEIVERS_PREFIX}/mirror-[A-Za-z0-9-]{{0,64}}-[0-9a-f]{{16}}\.json")


class Part(NamedTuple):
    """Object with a part of a file."""

    name: str
    offset: int
    """Place of its first byte in the file."""
    num_bytes: int
    xxh3: Token


class Parts(NamedTuple):
    """A file in parts: all but the last have the same size."""

    num_bytes: Positive
    digests: list[Token]
    """Digest of each part."""


@decodable
class BucketVersion(Record, frozen=True, kw_only=True):
    """``CURRENT``: the newest version in a bucket, and the parts of its files."""

    NAME: ClassVar = "bucket's version"

    writer: Token
    """Random name of the mirror that put it."""
    epoch: Positive
    """Number of the mirror that put it. A mirror takes over with the next number. If it reads a
    higher one later, it has lost the bucket; if a lower one, a restore has put an old record back.
    """
    manifest: Manifest
    """The version's manifest; its ``anchor_buffer`` is None."""
    part_bytes: Positive
    """Size of each part but the last of a file."""
    weights: list[Token]
    """Digests of the weights file's parts."""
    deltas: list[Parts]
    """Parts of the deltas that lead to the versions of its chain, but the first."""
    xxh3: Token
    """Digest of the other fields: a reader remembers a version, and must not remember a wrong one.
    """

    @classmethod
    def sealed(cls, **fields: Any) -> Self:
        """Make a record of all other fields."""
        return cls(**fields, xxh3=_joint_digest(fields))

    def by(self, writer: str, epoch: int) -> Self:
        """Return it as another mirror puts it."""
        changes: dict[str, Any] = {"writer": writer, "epoch": epoch}
        return replace(self, **changes, xxh3=_joint_digest(asdict(self) | changes))

    def __post_init__(self) -> None:
        if self.xxh3 != _joint_digest(asdict(self)):
            raise StoreCorruptError(f"{self.NAME}: it is not as it was written")
        if self.manifest.state != "complete":
            raise StoreCorruptError(f"{self.NAME}: field 'manifest' describes no mirrored version")
        if len(self.deltas) != len(self.manifest.chain[1:]):
            raise StoreCorruptError(f"{self.NAME}: field 'deltas' is not of its chain")
        for file in self.files.values():
            count = -(-file.num_bytes // self.part_bytes)
            if len(file.digests) != count:
                raise StoreCorruptError(f"{self.NAME}: its parts are not {count} digests")

    @property
    def id(self) -> VersionId:
        """The version's id."""
        return self.manifest.id

    @property
    def parts(self) -> list[Part]:
        """All objects that it consists of."""
        return [part for directory in self.files for part in self.parts_in(directory)]

    @property
    def weights_parts(self) -> list[Part]:
        """Parts of the weights file."""
        return self.parts_in(weights_directory(self.manifest.file_version))

    def delta(self, version: VersionId) -> Parts:
        """Return the parts of the delta that leads to a version of its chain."""
        return self.files[delta_directory(version)]

    def parts_in(self, directory: str) -> list[Part]:
        """Return the parts of the file in a directory, in their order."""
        file, size = self.files[directory], self.part_bytes
        parts = []
        for index, xxh3 in enumerate(file.digests):
            name, offset = part_object(directory, index, xxh3), index * size
            parts.append(Part(name, offset, min(size, file.num_bytes - offset), xxh3))
        return parts

    @property
    def files(self) -> dict[str, Parts]:
        """Its files, by the directories of their parts."""
        manifest = self.manifest
        weights = weights_directory(manifest.file_version)
        files = {weights: Parts(manifest.file_bytes, self.weights)}
        deltas = zip(manifest.chain[1:], self.deltas, strict=True)
        return files | {delta_directory(version): file for version, file in deltas}


@decodable
class BucketReceivers(Record, frozen=True, kw_only=True):
    """``receivers/MIRROR.json``: records of a mirror, and of the receivers of its local store."""

    NAME: ClassVar = "bucket's receivers"

    records: list[ReceiverRecord]
    updated_at: float
    """Time by the mirror's clock: an object that is put again differs from the one before."""


def version_of(name: str) -> VersionId | None:
    """Return the version whose part a mirror gives this name, or None if it gives none.

    A part of a weights file belongs to its anchor, a part of a delta to the version it leads to.
    """
    match = _PART.fullmatch(name)
    return match and VersionId(match[1], int(match[2]))


def weights_directory(version: VersionId) -> str:
    """Directory of the parts of the weights file that holds this version."""
    return f"{VERSIONS_PREFIX}/{version}.weights"


def delta_directory(version: VersionId) -> str:
    """Directory of the parts of the delta that leads to this version."""
    return f"{VERSIONS_PREFIX}/{version}.delta"


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
    """Digest of all fields of a version but the digest itself."""
    others = {name: value for name, value in fields.items() if name != "xxh3"}
    return digest(json.dumps(msgspec.to_builtins(others), sort_keys=True).encode())
