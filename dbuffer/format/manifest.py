"""Small records of a store, and the strict codec that reads and writes them.

``docs/design.md`` ("Records") specifies the records. The codec refuses a record with a field that
is missing, unknown, of a wrong type or out of range.
"""

from __future__ import annotations

import json
import math
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeGuard, TypeVar

import msgspec
from msgspec import Meta

from dbuffer.errors import StoreCorruptError, UnsupportedError
from dbuffer.format.lineage import (
    MAX_RUNS,
    Count,
    Lineage,
    Positive,
    Relation,
    Run,
    Token,
    VersionId,
    relation,
)
from dbuffer.format.places import BUFFERS, WEIGHTS_FILE
from dbuffer.runtime.trouble import TranslatedErrors

FORMAT = 1
"""Version of the on-disk format. Files with any other version are refused."""

UNDECODABLE = (StoreCorruptError, UnsupportedError)
"""Errors that are raised by reading a file that is damaged or has another format."""


def naming(path: Path | str) -> TranslatedErrors:
    """Return a context manager that puts a file's name before the messages of decoding errors."""

    def translate(error: BaseException) -> None:
        if isinstance(error, UNDECODABLE):
            raise type(error)(f"{path}: {error}") from None

    return TranslatedErrors(translate)


MAX_RECORD_BYTES = 1 << 20
"""Largest size of a record in bytes. It limits how much a reader loads from a hostile store."""

MAX_APPLIED_METADATA_BYTES = 1024
"""Largest size of a version's metadata, as JSON, that a receiver's record repeats in full. Each
acknowledgement writes the record again, and a waiting sender reads the records of all receivers."""

_RECEIVER_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_MIRROR_ID = re.compile(r"mirror-.*-[0-9a-f]{16}")

_BufferName = Annotated[str, Meta(pattern=rf"^({'|'.join(BUFFERS)})\Z")]
ReceiverId = Annotated[str, Meta(pattern=rf"^{_RECEIVER_ID.pattern}\Z")]
_Boot = Annotated[str, Meta(pattern=r"^[0-9a-f-]{0,36}\Z")]
_WeightsFile = Annotated[str, Meta(pattern=rf"^{WEIGHTS_FILE.pattern}\Z")]

RecordT = TypeVar("RecordT", bound="Record")

FILE_FIELDS = (
    *("file_bytes", "num_tensors", "num_bytes", "layout_offset", "layout_bytes"),
    *("layout_xxh3", "checksums_offset", "checksums_xxh3"),
)


class Lag(NamedTuple):
    """Lag of a receiver behind the newest version, in versions and in the trainer's steps."""

    versions: int
    steps: int | float | None
    """Difference of the trainer's steps: the numbers under ``step`` in the two versions' metadata.
    Negative if an earlier version was published again. None if a version has no step, or if
    different runs (starts of a sender) published the two versions."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of all records, whose fields' types and ranges msgspec checks.

    No field has a default: msgspec would use the default for a field that is missing in a file.
    """

    NAME: ClassVar[str]


def decodable(kind: type[RecordT]) -> type[RecordT]:
    """Return ``kind`` after msgspec has analyzed its fields.

    Otherwise msgspec would analyze them at the first use, and crash if two threads did so at once.
    """
    msgspec.json.Decoder(kind)
    return kind


class Versioned(Record, frozen=True, kw_only=True):
    """Base class of records that have a version's ``id`` and the ``runs`` that led to it."""

    id: VersionId
    runs: Annotated[list[Run], Meta(max_length=MAX_RUNS)]

    def __post_init__(self) -> None:
        require_runs(self.NAME, self.id, self.runs)

    @property
    def version(self) -> int:
        return self.id.number

    @property
    def lineage(self) -> Lineage:
        return Lineage(self.id, self.runs)


def require_runs(name: str, version: VersionId, runs: list[Run]) -> None:
    if not runs or runs[0].id != version.run:
        raise StoreCorruptError(f"{name}: its runs do not lead to {version}: {runs!r:.200}")


@decodable
class Pointer(Versioned, frozen=True, kw_only=True):
    """Contents of ``CURRENT``, the version pointer: it names the buffer with the newest version."""

    NAME: ClassVar = "version pointer"

    buffer: _BufferName
    generation: Count
    """Generation in the buffer's manifest. If the manifest has another generation, a writer has
    begun to rewrite the buffer since."""
    writer: Token
    """Token of the writer: a sender's run id, or a mirror's random token."""


@decodable
class Manifest(Versioned, frozen=True, kw_only=True):
    """Contents of ``A/manifest.json``: a buffer's version, or a mark that a rewrite has begun."""

    NAME: ClassVar = "manifest"

    state: Literal["writing", "complete"]
    generation: Count
    """Number that changes twice in each rewrite of the buffer: before the first byte is written,
    and after the last one."""
    writer: Token
    """Token of the writer: the version's run id, or a mirror's random token."""
    file: _WeightsFile
    """Name of the weights file. The file is in this buffer, or in :attr:`anchor_buffer`."""
    file_bytes: Count
    num_tensors: Count
    num_bytes: Count
    layout_offset: Count
    layout_bytes: Count
    layout_xxh3: Token | None
    checksums_offset: Count
    checksums_xxh3: Token | None
    """Digest of the weights file's table of checksums, or None if the version has no checksums."""
    is_final: bool
    """Whether the weights file is never overwritten. If the file may be overwritten, and the
    version has no checksums, readers on other hosts cannot detect a mix of two versions."""
    anchor: VersionId | None
    """Earlier version that is in the weights file. Deltas of :attr:`chain` lead from the anchor to
    this version. None if this version is itself in the weights file."""
    anchor_buffer: _BufferName | None
    chain: list[VersionId]
    """Versions that deltas connect, oldest first and this version last. A delta leads to each of
    them, except the first, from the version before. Empty if the version has no deltas."""
    published_at: float
    """Time of the publish in seconds since the epoch, by the writer's clock. It is only for
    display."""
    metadata: dict[str, Any]

    def __post_init__(self) -> None:
        Versioned.__post_init__(self)
        self._check_chain()
        if self.state == "complete":
            table_end = self.checksums_offset + 8 * self.num_tensors
            if self.layout_xxh3 is None or table_end > self.layout_offset:
                raise StoreCorruptError(f"{self.NAME}: its checksums and its layout overlap")
            if self.layout_offset + self.layout_bytes > self.file_bytes:
                raise StoreCorruptError(f"{self.NAME}: its layout lies beyond the end of the file")

    def _check_chain(self) -> None:
        chain = self.chain
        if len(set(chain)) < len(chain) or len(chain) == 1:
            raise StoreCorruptError(
                f"{self.NAME}: its chain has only one version, or a version twice: {chain!r:.80}"
            )
        if self.anchor is None and self.anchor_buffer is not None:  # a bucket has no buffers
            raise StoreCorruptError(f"{self.NAME}: it has an anchor_buffer, but no anchor")
        if self.anchor is not None and self.anchor not in chain[:-1]:
            raise StoreCorruptError(
                f"{self.NAME}: its anchor is not one of the earlier versions in its chain"
            )
        if self.state == "complete" and chain and chain[-1] != self.id:
            raise StoreCorruptError(f"{self.NAME}: its chain of deltas leads to another version")

    @property
    def is_copy(self) -> bool:
        return self.writer != self.id.run

    @property
    def of_file(self) -> dict[str, Any]:
        """Fields of this manifest that describe the weights file, without the file's name."""
        return {name: getattr(self, name) for name in FILE_FIELDS}

    @property
    def file_version(self) -> VersionId:
        """Version in the weights file: the anchor or, without an anchor, this version."""
        return self.anchor or self.id

    @property
    def since_anchor(self) -> list[VersionId]:
        """Versions after the one in the weights file, up to and with the manifest's own version."""
        return self.deltas_after(self.file_version)

    def upon(self, buffer: str) -> dict[str, Any]:
        """Return the fields that a later version's manifest takes over from this manifest.

        The later version consists of this version's weights file, and of deltas. ``buffer`` is this
        manifest's buffer.
        """
        fields = self.of_file | {"file": self.file}
        directory = self.anchor_buffer or buffer
        return fields | {"anchor": self.file_version, "anchor_buffer": directory}

    def deltas_after(self, version: VersionId) -> list[VersionId]:
        """Return the versions whose deltas lead from ``version`` to this manifest's version."""
        if version == self.id:  # its chain may be empty
            return []
        return self.chain[self.chain.index(version) + 1 :]


class OwnedRecord(Record, frozen=True, kw_only=True):
    """Base class of records that identify the process which wrote them; see `liveness`."""

    host: str
    pid: Count
    boot: _Boot
    """Boot id of the process's host. Together with the next two fields, it identifies the process
    among all hosts and containers."""
    pid_namespace: Count
    started: Count


@decodable
class WriterRecord(OwnedRecord, frozen=True, kw_only=True):
    """Contents of ``writer.json``: describes the last process that opened the store for writing."""

    NAME: ClassVar = "writer record"

    epoch: Count
    token: Token
    """Token of the writer; a sender's token is its run id. A writer that reads another token here
    has lost the store to another writer."""
    started_at: float


@decodable
class ReceiverRecord(OwnedRecord, frozen=True, kw_only=True):
    """Contents of ``receivers/ID.TOKEN.json``: describes the state of a receiver."""

    NAME: ClassVar = "receiver record"

    receiver: ReceiverId
    token: Token
    """Token that distinguishes receivers with one id. The token of an engine and of its ranks is a
    digest that identifies this start of the engine. Any other receiver has a random token."""
    updated_at: float
    applied: VersionId | None
    runs: Annotated[list[Run], Meta(max_length=MAX_RUNS)]
    held: VersionId | None
    metadata: dict[str, Any]
    """Metadata of the ``applied`` version, as :func:`metadata_for_record` returns it. Empty if the
    receiver has applied no version."""
    part_of: ReceiverId | None
    """Id of the engine if the receiver is one of the engine's ranks. Only the engine's own receiver
    acknowledges versions."""
    staged: VersionId | None
    problem: str | None
    problem_version: VersionId | None
    """Version that ``problem`` is about, or None if the problem is with the store."""
    unreadable: VersionId | None
    """Version whose deltas the receiver could not read. The sender then publishes a whole
    version."""
    stats: dict[str, int | float]
    state: Literal["serving", "on_trial", "broken"] | None
    """State of an engine. ``serving``: all ranks serve the ``applied`` version. ``on_trial``: all
    ranks serve that version, but the engine's test of it (its canary) has not passed yet.
    ``broken``: the engine refuses to serve, because a rank is half loaded. None if unknown, or if
    the receiver is no engine."""
    attested_at: float | None
    """Time at which all ranks of an engine had compared their weights with the ``applied`` version
    and found them equal. None until then."""
    is_attestable: bool
    """Whether ``attested_at`` can still be set: the engine compares its weights with each version
    that it applies, and has not finished this for the version ``applied``."""
    only_version: Count | None
    """Number of the only version that the engine serves, or None if the engine follows the newest
    version."""
    every: Positive
    """Divisor: the engine takes a version only if the version's number is a multiple of it."""
    when: dict[str, Positive]
    """Divisors by metadata key: the engine takes a version only if its metadata has, under each of
    these keys, a multiple of the key's divisor."""
    attempt: Token | None
    is_ephemeral: bool
    """Whether no later receiver will have this id, because it was generated or belongs to a
    rank."""
    is_relayed: bool
    """Whether a mirror wrote this record for a receiver of the mirror's local store."""
    has_ended: bool
    """Whether the receiver was closed or its process has ended. If so, the record never changes
    again."""

    def __post_init__(self) -> None:
        if self.applied is not None:
            require_runs(self.NAME, self.applied, self.runs)

    @property
    def applied_version(self) -> int | None:
        return None if self.applied is None else self.applied.number

    @property
    def lineage(self) -> Lineage | None:
        return None if self.applied is None else Lineage(self.applied, self.runs)

    @property
    def copied(self) -> VersionId | None:
        """Newest version that a mirror has copied.

        None if the receiver is not a mirror, or has copied no version.
        """
        # Another receiver's id can look like a mirror's, but a mirror never applies a version.
        is_mirror = self.applied is None and _MIRROR_ID.fullmatch(self.receiver)
        return self.staged if is_mirror else None

    @property
    def is_broken(self) -> bool:
        """Whether the receiver is an engine that refuses to serve: a rank of it is half loaded."""
        return self.state == "broken"

    def lag_behind(self, newest: Lineage, metadata: Mapping[str, Any]) -> Lag | None:
        """Return the receiver's lag behind the newest version, whose metadata is ``metadata``.

        Return None if the receiver has no version, stays on one version on purpose, or skips the
        newest version on purpose.
        """
        if self.lineage is None or self.only_version is not None:
            return None
        lag = lag_between(self.lineage, self.metadata, newest, metadata)
        return lag if not lag.versions or self.takes(newest.id.number, metadata) else None

    def takes(self, number: int, metadata: Mapping[str, Any]) -> bool:
        """Whether the receiver takes, and does not skip, a version of this number and metadata."""
        return is_multiple(number, metadata, self.every, self.when)

    def has_problem_with(self, number: int, newest: Lineage | None) -> bool:
        """Whether the receiver reports a problem with the store, or with a relevant version.

        Versions numbered ``number`` or higher are relevant if they lead to ``newest``.
        """
        if self.problem is None or self.problem_version is None:
            return self.problem is not None  # a problem with the store
        return newest is not None and newest.has_since(number, self.problem_version)

    def stays_below(self, version: int) -> bool:
        return self.only_version is not None and self.only_version < version


def lag_between(
    version: Lineage | None,
    metadata: Mapping[str, Any],
    newest: Lineage,
    newest_metadata: Mapping[str, Any],
) -> Lag:
    """Return how far ``version`` lags behind the newest version.

    If ``version`` is None or has forked, the lag in versions is the newest version's number.
    """
    if version is None or (related := relation(version, newest)) is Relation.FORKED:
        return Lag(newest.id.number, None)
    if related is Relation.AHEAD or version.id.run != newest.id.run:
        return Lag(max(0, newest.id.number - version.id.number), None)
    first, last = step_in(metadata), step_in(newest_metadata)
    steps = None if first is None or last is None else last - first
    return Lag(newest.id.number - version.id.number, steps)


def metadata_for_record(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata for a receiver's record: all of it or, if too long, only ``step``."""
    step = {name: value for name, value in metadata.items() if name == "step"}
    for kept in (metadata, step):
        text = json.dumps(kept, separators=(",", ":"))
        if len(text) <= MAX_APPLIED_METADATA_BYTES:
            return dict(json.loads(text))
    return {}


def step_in(metadata: Mapping[str, Any]) -> int | float | None:
    """Return the trainer's step from a version's metadata, or None if ``step`` is not a number.

    An integer too large for a float also gives None, because steps are converted to floats.
    """
    step = metadata.get("step")
    return step if _is_number(step) and abs(step) <= sys.float_info.max else None


def is_multiple(
    number: int, metadata: Mapping[str, Any], every: int, when: Mapping[str, int]
) -> bool:
    """Whether an engine with the options ``every`` and ``when`` takes a version.

    The version's number must be a multiple of ``every``. For each key of ``when``, the version's
    metadata must have a multiple of the key's value in ``when``.
    """

    def matches(key: str) -> bool:
        value = metadata.get(key)
        return _is_number(value) and value % when[key] == 0

    return number % every == 0 and all(map(matches, when))


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_receiver_id(text: str) -> bool:
    """Whether ``text`` is a valid receiver id, which is part of a file name."""
    return _RECEIVER_ID.fullmatch(text) is not None


def host_in_id() -> str:
    """Return this host's name without the characters that a receiver id cannot have."""
    host = "".join(c if c.isascii() and c.isalnum() else "-" for c in socket.gethostname())
    return host[:64]


def encode(record: Record) -> bytes:
    """Encode a record as one line of JSON. Raise if readers would refuse the record."""
    fields = fields_of(record)
    made_of(type(record), fields)
    data = {"format": FORMAT, **fields}
    return json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n"


def fields_of(record: Record) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(record)
    return fields


def made_of(kind: type[RecordT], values: Any) -> RecordT:
    """Make a record from JSON values, and check its fields."""
    try:
        return msgspec.convert(values, kind)
    except UnicodeEncodeError as error:  # a lone surrogate, which only text fields may have
        text = error.object
        raise StoreCorruptError(f"{kind.NAME}: invalid characters in {text!r:.80}") from None
    except (msgspec.ValidationError, OverflowError) as error:  # an integer is too large for a float
        raise StoreCorruptError(f"{kind.NAME}: {error!s:.200}") from None


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text:.40} is not a finite number")
    return number


def decode(kind: type[RecordT], data: bytes) -> RecordT:
    """Decode and check a record. Raise one of the `UNDECODABLE` errors if the data is bad."""
    name = kind.NAME
    try:
        # Don't use msgspec's parser, which refuses lone surrogates: names of tensors can have them.
        # Python's parser accepts numbers that JSON does not have, such as NaN: refuse them.
        values = json.loads(data, parse_float=_finite, parse_constant=_finite)
    # A ValueError can also mean bad UTF-8 or a huge integer, a RecursionError many open brackets.
    except (ValueError, RecursionError) as error:
        raise StoreCorruptError(f"{name}: not JSON ({error!s:.80})") from None
    if not isinstance(values, dict):
        raise StoreCorruptError(f"{name}: not a JSON object")
    number = values.pop("format", None)
    if type(number) is not int or number != FORMAT:
        raise UnsupportedError(
            f"{name}: format {number!r:.40}, and this dbuffer reads format {FORMAT}; "
            "use the same version of dbuffer at both ends"
        )
    return made_of(kind, values)
