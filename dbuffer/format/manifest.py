"""The small records of a store, and the strict codec that reads them.

A record is one JSON object with exactly the fields of its class. A field that is missing, unknown,
of another type or out of range is refused with the record's name: these files come from a
shared disk, and decide which bytes a model is made of.
"""

from __future__ import annotations

import json
import math
import re
import socket
import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from dbuffer.errors import StoreCorruptError, UnsupportedError
from dbuffer.format.lineage import (
    MAX_NUMBER,
    MAX_RUNS,
    RUN,
    Count,
    Lineage,
    Relation,
    Run,
    Token,
    VersionId,
    relation,
)
from dbuffer.format.places import BUFFERS, WEIGHTS_FILE

FORMAT = 1
"""Version of the on-disk format. No other version is read."""

UNDECODABLE = (StoreCorruptError, UnsupportedError)
"""Errors of a file that cannot be decoded: it is damaged, or of another format."""

MAX_RECORD_BYTES = 1 << 20
"""No record is larger. Limits the bytes that a damaged or hostile store can make a reader load."""

MAX_APPLIED_METADATA_BYTES = 1024
"""Size of the longest metadata, as JSON, that a receiver's record repeats in full. Each
acknowledgement writes the record again, and a sender that waits reads the records of all
receivers."""

MAX_INTEGER = MAX_NUMBER

ATTEMPT = RUN
"""Pattern of an attempt to switch an engine."""
_RECEIVER_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_MIRROR_ID = re.compile(r"mirror-.*-[0-9a-f]{16}")

_BufferName = Annotated[str, Meta(pattern=rf"^({'|'.join(BUFFERS)})\Z")]
_ReceiverId = Annotated[str, Meta(pattern=rf"^{_RECEIVER_ID.pattern}\Z")]
_Boot = Annotated[str, Meta(pattern=r"^[0-9a-f-]{0,36}\Z")]
_WeightsFile = Annotated[str, Meta(pattern=rf"^{WEIGHTS_FILE.pattern}\Z")]

RecordT = TypeVar("RecordT", bound="Record")

_FILE_FIELDS = (
    *("file", "file_bytes", "num_tensors", "num_bytes", "layout_offset", "layout_bytes"),
    *("layout_xxh3", "checksums_offset", "checksums_xxh3"),
)
"""Fields of a manifest that describe a weights file, whichever version that holds."""


class Lag(NamedTuple):
    """Lag of a receiver behind the newest version: how stale its weights are."""

    versions: int
    """Difference of the two versions' numbers."""
    steps: int | float | None
    """Difference of their trainer's steps, the numbers ``step`` in their metadata; negative after
    an earlier version was published again. None if a version has no such number, or if the two
    belong to different runs, whose steps are not compared."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of all records; msgspec checks the types and ranges of their fields.

    No field has a default: msgspec would take it for a field that is missing in a file.
    """

    NAME: ClassVar[str]


def decodable(kind: type[RecordT]) -> type[RecordT]:
    """Let msgspec read the types of a record's fields now.

    Two threads that make it do so at once, with the first records that they decode, crash it.
    """
    msgspec.json.Decoder(kind)
    return kind


class Versioned(Record, frozen=True, kw_only=True):
    """Base class of records that name a version, by an ``id`` and the ``runs`` that lead to it."""

    id: VersionId
    runs: Annotated[list[Run], Meta(max_length=MAX_RUNS)]

    def __post_init__(self) -> None:
        require_runs(self.NAME, self.id, self.runs)

    @property
    def version(self) -> int:
        """The version's number."""
        return self.id.number

    @property
    def lineage(self) -> Lineage:
        """The version, for `relation`."""
        return Lineage(self.id, self.runs)


def require_runs(name: str, version: VersionId, runs: list[Run]) -> None:
    """Raise unless the first of these runs published a version."""
    if not runs or runs[0].id != version.run:
        raise StoreCorruptError(f"{name}: its runs do not lead to {version}: {runs!r:.200}")


@decodable
class Pointer(Versioned, frozen=True, kw_only=True):
    """``CURRENT``: which buffer holds the newest version."""

    NAME: ClassVar = "version pointer"

    buffer: _BufferName
    generation: Count
    """Generation of the buffer's manifest; a manifest with another one was rewritten since."""
    writer: Token
    """Token of the writer: of a sender, its run; of a mirror, another."""


@decodable
class Manifest(Versioned, frozen=True, kw_only=True):
    """``A/manifest.json``: the version in a buffer, or the mark that it is being rewritten."""

    NAME: ClassVar = "manifest"

    state: Literal["writing", "complete"]
    generation: Count
    """Changes before the first byte of a rewrite and after its last; one writer repeats none."""
    writer: Token
    """Token of who wrote it: the version's run, or a mirror's token."""
    file: _WeightsFile
    """Name of the weights file, in the same directory, or in :attr:`anchor_buffer`'s."""
    file_bytes: Count
    num_tensors: Count
    num_bytes: Count
    """Sum of the tensors' own bytes, without padding and footer."""
    layout_offset: Count
    layout_bytes: Count
    layout_xxh3: Token | None
    checksums_offset: Count
    checksums_xxh3: Token | None
    """Digest of the table of checksums in the file; None if it was published without."""
    is_final: bool
    """Whether no byte of the file is ever written again. Without that, and without checksums, other
    hosts cannot tell whether they have read it whole."""
    anchor: VersionId | None
    """Earlier version that the weights file holds; the deltas of :attr:`chain` lead from it to this
    one. None if the file holds this version whole."""
    anchor_buffer: _BufferName | None
    """Buffer in whose directory that file is."""
    chain: list[VersionId]
    """Versions, oldest first and this one last; each but the first has a delta, a
    file that tells what differs from the one before it. Empty: there is none."""
    published_at: float
    """Seconds since the epoch on the writer's clock; for people: it decides nothing."""
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
                f"{self.NAME}: its chain of deltas leads nowhere: {chain!r:.80}"
            )
        if self.anchor is None and self.anchor_buffer is not None:  # a bucket has no buffers
            raise StoreCorruptError(f"{self.NAME}: an anchor_buffer, and no anchor")
        if self.anchor is not None and self.anchor not in chain[:-1]:
            raise StoreCorruptError(f"{self.NAME}: its chain does not begin at its anchor")
        if self.state == "complete" and chain and chain[-1] != self.id:
            raise StoreCorruptError(f"{self.NAME}: its chain of deltas leads to another version")

    @property
    def is_copy(self) -> bool:
        """Whether a mirror wrote it."""
        return self.writer != self.id.run

    @property
    def of_file(self) -> dict[str, Any]:
        """The fields that describe its weights file, by whatever name."""
        return {name: getattr(self, name) for name in _FILE_FIELDS if name != "file"}

    @property
    def file_version(self) -> VersionId:
        """The version that the weights file holds: the anchor, or this one."""
        return self.anchor or self.id

    @property
    def since_anchor(self) -> list[VersionId]:
        """Versions whose deltas, in this order, lead from the weights file to this one."""
        return self.deltas_after(self.file_version)

    def upon(self, buffer: str) -> dict[str, Any]:
        """Return the fields of a version that stands on this one's file, in ``buffer``."""
        fields = self.of_file | {"file": self.file}
        directory = self.anchor_buffer or buffer
        return fields | {"anchor": self.file_version, "anchor_buffer": directory}

    def deltas_after(self, version: VersionId) -> list[VersionId]:
        """Return the deltas that lead from a version of its chain to it, by the version after each.

        There are none from the version itself, which has no chain if there are no deltas.
        """
        if version == self.id:
            return []
        return self.chain[self.chain.index(version) + 1 :]


@decodable
class WriterRecord(Record, frozen=True, kw_only=True):
    """``writer.json``: the process that has the store open for writing, or had it last."""

    NAME: ClassVar = "writer record"

    epoch: Count
    """Number of the writer."""
    token: Token
    """Of a sender, its run. A writer that reads another one than its own has lost the store."""
    host: str
    pid: Count
    started_at: float
    boot: _Boot
    """Identity of the process among all hosts and containers, with the next two; see `liveness`."""
    pid_namespace: Count
    started: Count


@decodable
class ReceiverRecord(Record, frozen=True, kw_only=True):
    """``receivers/ID.TOKEN.json``: the versions that one receiver has applied and holds."""

    NAME: ClassVar = "receiver record"

    receiver: _ReceiverId
    token: Token
    """Tells receivers of one id apart. For an engine and its ranks: a digest of what tells this
    start of it from all others; else random."""
    host: str
    pid: Count
    updated_at: float
    applied: VersionId | None
    """Version that it has applied last."""
    runs: Annotated[list[Run], Meta(max_length=MAX_RUNS)]
    """Runs that lead to ``applied``."""
    held: VersionId | None
    """Version that it reads at this moment."""
    metadata: dict[str, Any]
    """Metadata of ``applied``, as :func:`metadata_for_record` returns it; empty: there is no such
    version."""
    part_of: _ReceiverId | None
    """Id of the engine whose rank this is; the engine's receiver acknowledges."""
    staged: VersionId | None
    """Version that is ready, checked and not yet applied."""
    problem: str | None
    """Reason why it cannot apply a version, or have it ready."""
    problem_version: VersionId | None
    """Version that cannot be used, or None if the store itself is the problem."""
    unreadable: VersionId | None
    """Version whose deltas could not be read: the next one must be whole."""
    stats: dict[str, int | float]
    """Counts and durations since it started."""
    state: Literal["serving", "broken"] | None
    """State of an engine: it serves ``applied`` on all ranks; or some are half loaded, and it
    refuses to serve. None if that is unknown, or if the receiver is no engine."""
    attested_at: float | None
    """Time at which all ranks of an engine had compared their weights with ``applied`` while it
    served, and found them equal; or None before that."""
    is_attestable: bool
    """Whether that may still come: the engine compares, and has copies to compare with."""
    only_version: Count | None
    """Number of the version that an engine is to serve and stay on; None if it follows the newest.
    """
    every: Count
    """Least distance between the numbers of two versions that an engine serves."""
    attempt: Token | None
    """Last attempt to switch an engine, whose outcome this record tells."""
    boot: _Boot
    """Identity of the process among all hosts and containers, with the next two; see `liveness`."""
    pid_namespace: Count
    started: Count
    is_ephemeral: bool
    """No later receiver has this id: it was generated, or belongs to a rank."""
    is_relayed: bool
    """A mirror writes this record, for a receiver of the mirror's store."""
    has_ended: bool
    """The receiver was closed, or has ended: all other fields are final."""

    def __post_init__(self) -> None:
        if self.applied is not None:
            require_runs(self.NAME, self.applied, self.runs)

    @property
    def applied_version(self) -> int | None:
        """Number of the version that it has applied last."""
        return None if self.applied is None else self.applied.number

    @property
    def lineage(self) -> Lineage | None:
        """The version that it has applied last, for `relation`."""
        return None if self.applied is None else Lineage(self.applied, self.runs)

    @property
    def copied(self) -> VersionId | None:
        """Newest version that a mirror has copied, or None if it is none or has copied none.

        A receiver may have a mirror's form of id; unlike a mirror it applies versions.
        """
        is_mirror = self.applied is None and _MIRROR_ID.fullmatch(self.receiver)
        return self.staged if is_mirror else None

    @property
    def is_broken(self) -> bool:
        """Whether it is an engine with half-loaded ranks."""
        return self.state == "broken"

    def lag_behind(self, newest: Lineage, metadata: Mapping[str, Any]) -> Lag | None:
        """Return its lag behind the newest version.

        It is None if it has no version, or keeps its own on purpose. If its version does not lead
        to the newest, it lacks every version of that line.

        Args:
            newest: that version.
            metadata: its metadata.
        """
        if self.lineage is None or self.only_version is not None:
            return None
        lag = lag_between(self.lineage, self.metadata, newest, metadata)
        is_due = lag.versions >= self.every or relation(self.lineage, newest) is Relation.FORKED
        return lag if is_due or not lag.versions else None

    def has_problem_with(self, number: int, newest: Lineage | None) -> bool:
        """Whether it reports a problem with the store, or with a version from ``number`` on.

        The version must lead to ``newest``. A problem with an earlier version does not count.
        """
        if self.problem is None or self.problem_version is None:
            return self.problem is not None  # of the store itself
        return newest is not None and newest.has_since(number, self.problem_version)

    def stays_below(self, version: int) -> bool:
        """Whether it will never apply the version of this number, nor a later one."""
        return self.only_version is not None and self.only_version < version


def lag_between(
    version: Lineage | None,
    metadata: Mapping[str, Any],
    newest: Lineage,
    newest_metadata: Mapping[str, Any],
) -> Lag:
    """Return how far a version is behind the newest. A receiver without one is behind all."""
    if version is None or (related := relation(version, newest)) is Relation.FORKED:
        return Lag(newest.id.number, None)
    if related is Relation.AHEAD or version.id.run != newest.id.run:
        return Lag(max(0, newest.id.number - version.id.number), None)
    steps = steps_between(metadata, newest_metadata)
    return Lag(newest.id.number - version.id.number, steps)


def metadata_for_record(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a version's metadata for a receiver's record.

    Of metadata above :data:`MAX_APPLIED_METADATA_BYTES` only the entry ``step`` is kept.
    """
    step = {name: value for name, value in metadata.items() if name == "step"}
    for kept in (metadata, step):
        text = json.dumps(kept, separators=(",", ":"))
        if len(text) <= MAX_APPLIED_METADATA_BYTES:
            return dict(json.loads(text))
    return {}


def step_in(metadata: Mapping[str, Any]) -> int | float | None:
    """Return the trainer's step in a version's metadata, or None without a number ``step``.

    A number that no float can have is none: steps are compared with others, and made floats.
    """
    step = metadata.get("step")
    if not isinstance(step, int | float) or isinstance(step, bool):
        return None
    return step if abs(step) <= sys.float_info.max else None


def steps_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> int | float | None:
    """Return the trainer's steps from one version to another, by their metadata."""
    first, last = step_in(before), step_in(after)
    return None if first is None or last is None else last - first


def is_receiver_id(text: str) -> bool:
    """Whether ``text`` can name a receiver, and with it a file."""
    return _RECEIVER_ID.fullmatch(text) is not None


def is_run(text: object) -> bool:
    """Whether ``text`` can be a run's id."""
    return isinstance(text, str) and RUN.fullmatch(text) is not None


def host_in_id() -> str:
    """This host's name, as far as a receiver's id can hold it."""
    host = "".join(c if c.isascii() and c.isalnum() else "-" for c in socket.gethostname())
    return host[:64]


def encode(record: Record) -> bytes:
    """Return one line of JSON, ASCII only.

    Raises:
        StoreCorruptError: a value is out of range, so that no reader would take it.
    """
    fields = fields_of(record)
    made_of(type(record), fields)
    data = {"format": FORMAT, **fields}
    return json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n"


def fields_of(record: Record) -> dict[str, Any]:
    """Return the fields of a record as JSON has them."""
    fields: dict[str, Any] = msgspec.to_builtins(record)
    return fields


def made_of(kind: type[RecordT], values: Any) -> RecordT:
    """Make a record of such fields, strictly.

    Raises:
        StoreCorruptError: they are no such record's.
    """
    try:
        return msgspec.convert(values, kind)
    except UnicodeEncodeError as error:  # a lone surrogate, which is text at most
        text = error.object
        raise StoreCorruptError(f"{kind.NAME}: no field can have {text!r:.80}") from None
    except (msgspec.ValidationError, OverflowError) as error:  # of an integer above any float
        raise StoreCorruptError(f"{kind.NAME}: {error!s:.200}") from None


def decode(kind: type[RecordT], data: bytes) -> RecordT:
    """Read a record, strictly.

    Raises:
        UnsupportedError: it was written in a format that this version does not know.
        StoreCorruptError: it is not such a record.
    """
    return made_of(kind, parse_object(data, kind.NAME))


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text:.40} is no number")
    return number


def parse_object(data: bytes, name: str) -> dict[str, Any]:
    """Parse a JSON object of this format, and return it without its ``format``."""
    try:
        # Not by msgspec's parser, which refuses lone surrogates: names of tensors may have them.
        # Python reads numbers that are no JSON, and would write them.
        values = json.loads(data, parse_float=_finite, parse_constant=_finite)
    # ValueError covers bad UTF-8 and huge integers too; RecursionError, a tower of brackets.
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
    return values
