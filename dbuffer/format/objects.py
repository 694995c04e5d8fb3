"""Records and names of the objects in a bucket, which ``docs/design.md`` ("Buckets") specifies.

Each file of a version is one immutable object, named with the digest of its content. So if a mirror
puts an object late, after another mirror took over, the object never replaces other content.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeAlias

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

RANGE_BYTES = 32 << 20
"""Bytes of a file that are hashed together, and that one request gets. Small enough for many
requests in parallel, and large enough that the overhead of each request is small."""

MAX_OBJECT_BYTES = 16 * MAX_RECORD_BYTES
"""Largest size in bytes of an object that holds a record. The sizes of other objects are in the
bucket's ``CURRENT``."""

Kind: TypeAlias = Literal["weights", "delta"]

_FILE = re.compile(rf"{VERSIONS_PREFIX}/{VERSION_ID.pattern}-[0-9a-f]{{16}}\.(weights|delta)")
_RECEIVERS = re.compile(rf"{RECEIVERS_PREFIX}/mirror-[A-Za-z0-9-]{{0,64}}-[0-9a-f]{{16}}\.json")


class Content(NamedTuple):
    num_bytes: Positive
    xxh3: Token
    """Digest of the object's only range of bytes, or the digest of all ranges' digests."""


class FileObject(NamedTuple):
    name: str
    content: Content


@decodable
class BucketVersion(Record, frozen=True, kw_only=True):
    """Contents of a bucket's ``CURRENT``: the newest version, and the content of its files."""

    NAME: ClassVar = "bucket's version"

    writer: Token
    """Random token of the mirror that put the record."""
    epoch: Positive
    """Number of the mirror that put the record. The next mirror takes over with a higher number."""
    manifest: Manifest
    """Manifest of the version. Its ``anchor_buffer`` is None, since a bucket has no buffers."""
    weights: Token
    deltas: list[Content]
    """Content of the deltas that lead to all versions of the manifest's chain but the first."""
    xxh3: Token
    """Digest of all other fields."""

    @classmethod
    def sealed(cls, **fields: Any) -> Self:
        return cls(**fields, xxh3=_joint_digest(fields))

    def by(self, writer: str, epoch: int) -> Self:
        changes: dict[str, Any] = {"writer": writer, "epoch": epoch}
        return replace(self, **changes, xxh3=_joint_digest(asdict(self) | changes))

    def __post_init__(self) -> None:
        if self.xxh3 != _joint_digest(asdict(self)):
            raise StoreCorruptError(f"{self.NAME}: it was damaged after it was written")
        if self.manifest.state != "complete":
            raise StoreCorruptError(f"{self.NAME}: field 'manifest' describes no mirrored version")
        if len(self.deltas) != len(self.manifest.chain[1:]):
            raise StoreCorruptError(f"{self.NAME}: field 'deltas' does not fit its chain")

    @property
    def id(self) -> VersionId:
        return self.manifest.id

    @property
    def weights_file(self) -> FileObject:
        """Weights file with the newest version or, if the manifest has an anchor, the anchor."""
        content = Content(self.manifest.file_bytes, self.weights)
        return file_object(self.manifest.file_version, "weights", content)

    @property
    def delta_files(self) -> dict[VersionId, FileObject]:
        """Delta files of the newest version, keyed by the version that each delta leads to."""
        files = zip(self.manifest.chain[1:], self.deltas, strict=True)
        return {version: file_object(version, "delta", content) for version, content in files}

    @property
    def files(self) -> list[FileObject]:
        return [self.weights_file, *self.delta_files.values()]


@decodable
class BucketReceivers(Record, frozen=True, kw_only=True):
    """Contents of ``receivers/MIRROR.json``: records of a mirror and of its store's receivers."""

    NAME: ClassVar = "bucket's receivers"

    records: list[ReceiverRecord]
    updated_at: float
    """Time of the put by the mirror's clock. It makes the content of each put different."""


def version_of(name: str) -> VersionId | None:
    """Return the version that a file belongs to, by the file's name, or None for other files.

    A weights file belongs to the version that it holds, a delta to the version that it leads to.
    """
    match = _FILE.fullmatch(name)
    return match and VersionId(match[1], int(match[2]))


def file_object(version: VersionId, kind: Kind, content: Content) -> FileObject:
    return FileObject(f"{VERSIONS_PREFIX}/{version}-{content.xxh3}.{kind}", content)


def receivers_object(mirror: str) -> str:
    return f"{RECEIVERS_PREFIX}/{mirror}.json"


def is_of_receivers(name: str) -> bool:
    return _RECEIVERS.fullmatch(name) is not None


def _joint_digest(fields: dict[str, Any]) -> str:
    digested = {name: value for name, value in fields.items() if name != "xxh3"}
    return digest(json.dumps(msgspec.to_builtins(digested), sort_keys=True).encode())
