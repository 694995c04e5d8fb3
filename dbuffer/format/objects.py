"""Records and names of the objects in a bucket, which ``docs/design.md`` ("Buckets") specifies.

Each file of a version is one immutable object. Its name contains the version, and the token of the
mirror that put it. So a put that arrives late, after another mirror took over, never replaces an
object of the other mirror.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import msgspec
from msgspec import Meta
from msgspec.structs import asdict, replace

from dbuffer.errors import StoreCorruptError
from dbuffer.format.layout import digest
from dbuffer.format.lineage import RUN, VERSION_ID, Positive, Token, VersionId
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

MAX_OBJECT_BYTES = 16 * MAX_RECORD_BYTES
"""Largest size in bytes of an object that holds a record. The sizes of other objects are in the
bucket's ``CURRENT``."""

_FILE = re.compile(rf"{VERSIONS_PREFIX}/{VERSION_ID.pattern}-{RUN.pattern}\.(?:weights|delta)")
_RECEIVERS = re.compile(rf"{RECEIVERS_PREFIX}/mirror-[A-Za-z0-9-]{{0,64}}-[0-9a-f]{{16}}\.json")


class FileObject(NamedTuple):
    name: Annotated[str, Meta(pattern=rf"^{_FILE.pattern}\Z")]
    num_bytes: Positive


@decodable
class BucketVersion(Record, frozen=True, kw_only=True):
    """Contents of a bucket's ``CURRENT``: the newest version, and the names of its files."""

    NAME: ClassVar = "bucket's version"

    writer: Token
    """Token of the mirror that put the record: the time of its start, and random digits. The next
    mirror takes over with a higher token."""
    manifest: Manifest
    """Manifest of the version. Its ``anchor_buffer`` is None, since a bucket has no buffers."""
    files: list[FileObject]
    """Weights file of the version (or of its anchor, if it has one), and then one delta for each
    version of the manifest's chain after the first."""
    xxh3: Token
    """Digest of all other fields."""

    @classmethod
    def sealed(cls, **fields: Any) -> Self:
        return cls(**fields, xxh3=_joint_digest(fields))

    def by(self, writer: str) -> Self:
        return replace(self, writer=writer, xxh3=_joint_digest(asdict(self) | {"writer": writer}))

    def __post_init__(self) -> None:
        if self.xxh3 != _joint_digest(asdict(self)):
            raise StoreCorruptError(f"{self.NAME}: it was damaged after it was written")
        if self.manifest.state != "complete":
            raise StoreCorruptError(f"{self.NAME}: field 'manifest' describes no mirrored version")
        if len(self.files) != 1 + len(self.manifest.chain[1:]):
            raise StoreCorruptError(f"{self.NAME}: field 'files' does not fit its chain")

    @property
    def id(self) -> VersionId:
        return self.manifest.id

    @property
    def weights_file(self) -> FileObject:
        return self.files[0]

    @property
    def deltas(self) -> dict[VersionId, FileObject]:
        """Delta files of the version's chain, keyed by the version that each delta leads to."""
        return dict(zip(self.manifest.chain[1:], self.files[1:], strict=True))


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


def file_name(version: VersionId, writer: str, kind: Literal["weights", "delta"]) -> str:
    return f"{VERSIONS_PREFIX}/{version}-{writer}.{kind}"


def receivers_object(mirror: str) -> str:
    return f"{RECEIVERS_PREFIX}/{mirror}.json"


def is_of_receivers(name: str) -> bool:
    return _RECEIVERS.fullmatch(name) is not None


def _joint_digest(fields: dict[str, Any]) -> str:
    digested = {name: value for name, value in fields.items() if name != "xxh3"}
    return digest(json.dumps(msgspec.to_builtins(digested), sort_keys=True).encode())
