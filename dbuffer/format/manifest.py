"""The small records of a store, and the strict codec that reads them.

A record is one JSON object with exactly the fields of its class. What is missing, left over,
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
from dataclasses import dataclass, field
from types import UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from dbuffer.errors import StoreCorruptError, UnsupportedError
from dbuffer.format.places import BUFFERS, WEIGHTS_FILE

FORMAT = 1
"""Version of the on-disk format, and the only one that is read."""

UNDECODABLE = (StoreCorruptError, UnsupportedError)
"""Errors of a file that cannot be decoded: it is damaged, or of another format."""

MAX_RECORD_BYTES = 1 << 20
"""No record is larger. Bounds what a damaged or hostile store can make a reader load."""

MAX_APPLIED_METADATA_BYTES = 1024
"""Size of the longest metadata, as JSON, that a receiver's record repeats in full. Each
acknowledgement writes the record again, and a sender that waits reads the records of all
receivers."""

MAX_INTEGER = 2**63 - 1

_RUN = DIGEST = ATTEMPT = re.compile(r"[0-9a-f]{16}")
"""Pattern of runs, digests, tokens, and attempts to switch an engine."""
IDENTITY = re.compile(r"[0-9a-f]{16}-[0-9]{1,19}")
_BOOT = re.compile(r"[0-9a-f-]{0,36}")
_RECEIVER_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_MIRROR_ID = re.compile(r"mirror-.*-[0-9a-f]{16}")

RecordT = TypeVar("RecordT", bound="Record")


_FILE_FIELDS = (
    *("file", "file_bytes", "num_tensors", "num_bytes", "layout_offset", "layout_bytes"),
    *("layout_xxh3", "checksums_offset", "checksums_xxh3"),
)
"""Fields of a manifest that describe a weights file, whichever version that holds."""


def _types_in(hint: Any) -> tuple[type, ...]:
    if get_origin(hint) in (Union, UnionType):
        return tuple(each for choice in get_args(hint) for each in _types_in(choice))
    if get_origin(hint) is Literal:
        return tuple({type(choice) for choice in get_args(hint)})
    return (get_origin(hint) or hint,)


class Lag(NamedTuple):
    """Lag of a receiver behind the newest version: how stale its weights are."""

    versions: int
    """Difference of the two versions' numbers."""
    steps: int | float | None
    """Difference of their trainer's steps, the numbers ``step`` in their metadata; negative after
    an earlier version was published again. None: one of them has no such number."""


class Record:
    """Base class of all records, which checks the type and range of every field."""

    NAME: ClassVar[str]
    PATTERNS: ClassVar[dict[str, re.Pattern[str]]] = {}
    """Patterns of text fields."""
    TYPES: ClassVar[dict[str, tuple[type, ...]]]
    """Types of each field's value, from its annotation."""

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls).items()
        of_class = [name for name, hint in hints if ClassVar in (hint, get_origin(hint))]
        cls.TYPES = {name: _types_in(hint) for name, hint in hints if name not in of_class}

    def __post_init__(self) -> None:
        """Check types and ranges, for records that are read and for those that are made."""
        for name, types in self.TYPES.items():
            value = getattr(self, name)
            # bool is an int to isinstance, and no count of anything.
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise StoreCorruptError(f"{self.NAME}: field {name!r} is {value!r:.80}")
            if isinstance(value, int) and not 0 <= value <= MAX_INTEGER:
                raise StoreCorruptError(f"{self.NAME}: field {name!r} is out of range")
        for name, pattern in self.PATTERNS.items():
            value = getattr(self, name)
            if value is not None and not pattern.fullmatch(value):
                raise StoreCorruptError(f"{self.NAME}: field {name!r} is {value!r:.80}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer(Record):
    """``CURRENT``: which buffer holds the newest version."""

    NAME: ClassVar = "version pointer"
    PATTERNS: ClassVar = {"run": _RUN, "history": _RUN, "identity": IDENTITY}

    version: int
    identity: str
    """Identity of the version, as in its `Manifest`."""
    buffer: str
    """``"A"`` or ``"B"``."""
    generation: int
    """Generation of the buffer's manifest; a manifest with another one was rewritten since."""
    run: str
    """Identity of the writer's run."""
    history: str
    """History as in :class:`WriterRecord`: versions are comparable within one history only."""

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if self.buffer not in BUFFERS:
            raise StoreCorruptError(f"{self.NAME}: there is no buffer {self.buffer!r:.80}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Record):
    """``A/manifest.json``: what a buffer holds, or that it is being rewritten."""

    NAME: ClassVar = "manifest"
    PATTERNS: ClassVar = {
        "run": _RUN,
        "history": _RUN,
        "file": WEIGHTS_FILE,
        "layout_xxh3": DIGEST,
        "checksums_xxh3": DIGEST,
        "origin": IDENTITY,
        "anchor": IDENTITY,
    }

    state: Literal["writing", "complete"]
    version: int
    generation: int
    """Changes before the first byte of a rewrite and after its last; never repeats."""
    run: str
    file: str
    """Name of the weights file, in the same directory, or in that of :attr:`anchor_buffer`."""
    history: str
    """History of the store: a reader that finds no pointer goes by the manifests."""
    file_bytes: int = 0
    num_tensors: int = 0
    num_bytes: int = 0
    """Sum of the tensors' own bytes, without padding and footer."""
    layout_offset: int = 0
    layout_bytes: int = 0
    layout_xxh3: str | None = None
    checksums_offset: int = 0
    checksums_xxh3: str | None = None
    """Digest of the table of checksums in the file; None if it was published without."""
    is_final: bool = False
    """Whether no byte of the file is ever written again. Without that, and without checksums, other
    hosts cannot tell whether they have read it whole."""
    origin: str | None = None
    """Identity of a mirrored version in the store where it was published."""
    anchor: str | None = None
    """Identity of the earlier version that the weights file holds, from which :attr:`chain` leads
    to this one. None: the file holds this version, whole."""
    anchor_buffer: str | None = None
    """Buffer in whose directory that file is."""
    chain: list[str] = field(default_factory=list)
    """Identities of versions, oldest first and this one last; each but the first has a delta, a
    file that tells what differs from the one before it. Empty: there is none."""
    published_at: float = 0.0
    """Seconds since the epoch on the writer's clock; for people: it decides nothing."""
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if self.state not in ("writing", "complete"):
            raise StoreCorruptError(f"{self.NAME}: unknown state {self.state!r:.80}")
        self._check_chain()
        if self.state == "complete":
            table_end = self.checksums_offset + 8 * self.num_tensors
            if self.layout_xxh3 is None or table_end > self.layout_offset:
                raise StoreCorruptError(f"{self.NAME}: its checksums and its layout overlap")
            if self.layout_offset + self.layout_bytes > self.file_bytes:
                raise StoreCorruptError(f"{self.NAME}: its layout lies beyond the end of the file")

    def _check_chain(self) -> None:
        chain = self.chain
        if not all(isinstance(name, str) and IDENTITY.fullmatch(name) for name in chain):
            raise StoreCorruptError(f"{self.NAME}: field 'chain' is {chain!r:.80}")
        if len(set(chain)) < len(chain) or len(chain) == 1:
            raise StoreCorruptError(
                f"{self.NAME}: its chain of deltas leads nowhere: {chain!r:.80}"
            )
        if self.anchor_buffer not in (None, *BUFFERS):
            raise StoreCorruptError(
                f"{self.NAME}: field 'anchor_buffer' is {self.anchor_buffer!r:.80}"
            )
        if self.anchor is None and self.anchor_buffer is not None:  # a bucket has no buffers
            raise StoreCorruptError(f"{self.NAME}: an anchor_buffer, and no anchor")
        if self.anchor is not None and self.anchor not in chain[:-1]:
            raise StoreCorruptError(f"{self.NAME}: its chain does not begin at its anchor")
        if self.state == "complete" and chain and chain[-1] != self.identity:
            raise StoreCorruptError(f"{self.NAME}: its chain of deltas leads to another version")

    @property
    def identity(self) -> str:
        """Identity that no other version of any store has; a mirror's copy keeps its original's."""
        return self.origin or f"{self.run}-{self.generation}"

    @property
    def of_file(self) -> dict[str, Any]:
        """The fields that describe its weights file, by whatever name."""
        return {name: getattr(self, name) for name in _FILE_FIELDS if name != "file"}

    def upon(self, buffer: str) -> dict[str, Any]:
        """Return the fields of a version that stands on this one's file, in ``buffer``."""
        fields = self.of_file | {"file": self.file}
        anchor, directory = self.anchor or self.identity, self.anchor_buffer or buffer
        return fields | {"anchor": anchor, "anchor_buffer": directory}

    def deltas_after(self, identity: str) -> list[str]:
        """The deltas that lead from a version of its chain to it, by what each leads to.

        None of them from itself, which has no chain if there are no deltas.
        """
        if identity == self.identity:
            return []
        return self.chain[self.chain.index(identity) + 1 :]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterRecord(Record):
    """``writer.json``: who has the store open for writing, or had it last."""

    NAME: ClassVar = "writer record"
    PATTERNS: ClassVar = {"run": _RUN, "history": _RUN, "boot": _BOOT}

    epoch: int
    """Number of the writer; one that reads another run than its own has lost the store."""
    run: str
    host: str
    pid: int
    started_at: float
    history: str
    """Run of the store's first writer: two stores with one history hold the same versions."""
    boot: str = ""
    """Identity of the process among all hosts and containers, with the next two; see `liveness`."""
    pid_namespace: int = 0
    started: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverRecord(Record):
    """``receivers/ID.TOKEN.json``: what one receiver has applied, and what it holds now."""

    NAME: ClassVar = "receiver record"
    PATTERNS: ClassVar = {
        "receiver": _RECEIVER_ID,
        "applied_identity": IDENTITY,
        "part_of": _RECEIVER_ID,
        "history": _RUN,
        "attempt": ATTEMPT,
        "boot": _BOOT,
        "token": _RUN,
    }

    receiver: str
    token: str
    """Tells receivers of one id apart. For an engine and its ranks: a digest of what tells this
    start of it from all others; else random."""
    host: str
    pid: int
    applied_version: int | None
    held_version: int | None
    updated_at: float
    applied_identity: str | None = None
    """Identity of ``applied_version``; None: it is not known."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Metadata of ``applied_version``, as :func:`metadata_for_record` returns it; empty: there is
    no such version."""
    part_of: str | None = None
    """Id of the engine whose rank this is; the engine's receiver is the one that acknowledges."""
    staged_version: int | None = None
    """Version that is ready, checked and not yet applied."""
    problem: str | None = None
    """Reason why it cannot apply a version, or have it ready."""
    problem_version: int | None = None
    """Version that cannot be used; None: the store itself is the problem."""
    unreadable_version: int | None = None
    """Version upon deltas that could not be read: the next is to be whole."""
    stats: dict[str, float] = field(default_factory=dict)
    """Counts and durations since it started."""
    history: str | None = None
    """History of the versions applied and staged. None: there is no such version yet."""
    state: Literal["serving", "broken"] | None = None
    """State of an engine: it serves ``applied_version`` on all ranks; or some are half loaded, and
    it refuses to serve. None: it is not known, or this is no engine."""
    only_version: int | None = None
    """Version that an engine is to serve and stay on. None: it follows the newest."""
    attempt: str | None = None
    """Last attempt to switch an engine, whose outcome this record tells."""
    boot: str = ""
    """Identity of the process among all hosts and containers, with the next two; see `liveness`."""
    pid_namespace: int = 0
    started: int = 0
    is_ephemeral: bool = False
    """No later receiver has this id: it was generated, or it is that of one rank."""
    is_relayed: bool = False
    """A mirror writes this record, for a receiver of the mirror's store."""
    has_ended: bool = False
    """The receiver was closed, or has ended: all other fields are final."""

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if self.state not in (None, "serving", "broken"):
            raise StoreCorruptError(f"{self.NAME}: unknown state {self.state!r:.80}")
        if not all(type(value) in (int, float) for value in self.stats.values()):
            raise StoreCorruptError(f"{self.NAME}: field 'stats' holds something else than numbers")

    @property
    def copied_version(self) -> int | None:
        """Newest version that a mirror has copied, or None if it is none or has copied none.

        A receiver may have a mirror's form of id; unlike a mirror it applies versions.
        """
        is_mirror = self.applied_version is None and _MIRROR_ID.fullmatch(self.receiver)
        return self.staged_version if is_mirror else None

    @property
    def is_broken(self) -> bool:
        """Whether it is an engine some of whose ranks are half loaded."""
        return self.state == "broken"

    def has_applied(self, version: int, history: str | None, identity: str | None = None) -> bool:
        """Whether it has applied ``version`` of this history, or a later one; 0: it has come.

        With history None, which is not known yet where there is no store, the number decides.
        ``identity``: of the version, where it is known: a store that was put back from a copy may
        have published another one under its number.
        """
        applied = self.applied_version if history in (None, self.history) else None
        if applied == version and differ(identity, self.applied_identity):
            return False
        return (applied or 0) >= version

    def lag_behind(self, newest: int, history: str, metadata: Mapping[str, Any]) -> Lag | None:
        """Return its lag behind the newest version; None: it has no version, or stays on one.

        A version of another history counts as version 0.

        Args:
            newest: number of that version.
            history: its history.
            metadata: its metadata.
        """
        if self.applied_version is None or self.only_version is not None:
            return None
        if self.history != history:
            return Lag(newest, None)
        versions = max(0, newest - self.applied_version)
        return Lag(versions, steps_between(self.metadata, metadata))

    def has_staged(self, version: int, history: str | None) -> bool:
        staged = self.staged_version if history in (None, self.history) else None
        return (staged or 0) >= version

    def cannot_read(self, versions: range, history: str) -> bool:
        """Whether it needs one that is whole, to go on from any of these."""
        return self.unreadable_version in versions and self.history in (None, history)

    def has_problem_with(self, version: int, history: str | None) -> bool:
        """Whether it cannot have ``version``; what was wrong with one before says nothing of it."""
        if self.problem is None or self.problem_version is None:
            return self.problem is not None  # of the store itself
        return not differ(history, self.history) and self.problem_version >= version

    def stays_below(self, version: int) -> bool:
        """Whether it will never apply ``version``, nor a later one."""
        return self.only_version is not None and self.only_version < version


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
    """Return the trainer's step in a version's metadata; None: there is no number ``step``.

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


def differ(one: str | None, other: str | None) -> bool:
    """Whether two histories, or identities, are both known, and not the same."""
    return None not in (one, other) and one != other


def is_receiver_id(text: str) -> bool:
    """Whether ``text`` can name a receiver, and with it a file."""
    return _RECEIVER_ID.fullmatch(text) is not None


def is_history(text: object) -> bool:
    """Whether ``text`` can name a history: the run of a store's first writer."""
    return isinstance(text, str) and _RUN.fullmatch(text) is not None


def host_in_id() -> str:
    """This host's name, as far as a receiver's id can hold it."""
    host = "".join(c if c.isascii() and c.isalnum() else "-" for c in socket.gethostname())
    return host[:64]


def encode(record: Record) -> bytes:
    """One line of JSON, ASCII only."""
    data = {"format": FORMAT, **fields_of(record)}
    return json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n"


def fields_of(record: Record) -> dict[str, Any]:
    """Return the fields of a record, as a part of another one."""
    return {name: getattr(record, name) for name in record.TYPES}


def made_of(kind: type[RecordT], values: Any) -> RecordT:
    """Make a record of such fields, strictly.

    Raises:
        StoreCorruptError: they are no such record's.
    """
    if not isinstance(values, dict):
        raise StoreCorruptError(f"{kind.NAME}: not a JSON object")
    if wrong := kind.TYPES.keys() ^ values.keys():
        raise StoreCorruptError(f"{kind.NAME}: missing or unknown fields {sorted(wrong)!r:.200}")
    return kind(**values)


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
