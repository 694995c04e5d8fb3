"""The small records of a store, and the strict codec that reads them.

A record is one JSON object with exactly the fields of its class. What is missing, left over,
of another type or out of range is refused with the record's name: these files come from a
shared disk, and decide which bytes a model is made of.
"""

from __future__ import annotations

import json
import re
import socket
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar

from dbuffer.errors import StoreCorruptError, StoreFormatError

FORMAT = 1
"""Version of the on-disk format. Raised when an older reader would misread a newer store."""

MAX_RECORD_BYTES = 1 << 20
"""No record is larger. Bounds what a damaged or hostile store can make a reader load."""

MAX_INTEGER = 2**63 - 1

BUFFERS = ("A", "B")

_RUN = re.compile(r"[0-9a-f]{16}")
_DIGEST = re.compile(r"[0-9a-f]{16}")
_WEIGHTS_FILE = re.compile(r"weights-[0-9a-f]{16}-[0-9]{1,19}\.td")
_IDENTITY = re.compile(r"[0-9a-f]{16}-[0-9]{1,19}")
_RECEIVER_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")

RecordT = TypeVar("RecordT", bound="Record")


class Record:
    """What all records share: a field ``format`` and a check of every field's type."""

    NAME: ClassVar[str]
    TYPES: ClassVar[dict[str, tuple[type, ...]]]

    def __post_init__(self) -> None:
        """Check types and ranges, for records that are read and for those that are made."""
        for item in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, item.name)
            types = self.TYPES[item.name]
            # bool is an int to isinstance, and no count of anything.
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise StoreCorruptError(f"{self.NAME}: field {item.name!r} is {value!r:.80}")
            if isinstance(value, int) and not 0 <= value <= MAX_INTEGER:
                raise StoreCorruptError(f"{self.NAME}: field {item.name!r} is out of range")

    def _matches(self, name: str, pattern: re.Pattern[str]) -> None:
        value = getattr(self, name)
        if value is not None and not pattern.fullmatch(value):
            raise StoreCorruptError(f"{self.NAME}: field {name!r} is {value!r:.80}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer(Record):
    """``CURRENT``: which buffer holds the newest version."""

    NAME: ClassVar = "version pointer"
    TYPES: ClassVar = {"version": (int,), "buffer": (str,), "generation": (int,), "run": (str,)}

    version: int
    buffer: str
    """``"A"`` or ``"B"``."""
    generation: int
    """That of the buffer's manifest; a manifest with another one was rewritten since."""
    run: str
    """Identity of the writer's run."""

    def __post_init__(self) -> None:
        """Check the fields."""
        Record.__post_init__(self)
        self._matches("run", _RUN)
        if self.buffer not in BUFFERS:
            raise StoreCorruptError(f"{self.NAME}: there is no buffer {self.buffer!r:.80}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Record):
    """``A/manifest.json``: what a buffer holds, or that it is being rewritten."""

    NAME: ClassVar = "manifest"
    TYPES: ClassVar = {
        "state": (str,),
        "version": (int,),
        "generation": (int,),
        "run": (str,),
        "file": (str,),
        "file_bytes": (int,),
        "num_tensors": (int,),
        "num_bytes": (int,),
        "layout_offset": (int,),
        "layout_bytes": (int,),
        "layout_xxh3": (str, type(None)),
        "checksums_offset": (int,),
        "checksums_xxh3": (str, type(None)),
        "is_final": (bool,),
        "origin": (str, type(None)),
        "published_at": (float,),
        "metadata": (dict,),
    }

    state: Literal["writing", "complete"]
    version: int
    generation: int
    """Changes before the first byte of a rewrite and after its last; never repeats."""
    run: str
    file: str
    """Name of the weights file, in the same directory."""
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
    """For a version that was mirrored: its :attr:`identity` in the store where it was published."""
    published_at: float = 0.0
    """Seconds since the epoch on the writer's clock; for people, never compared."""
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the fields, alone and against each other."""
        Record.__post_init__(self)
        self._matches("run", _RUN)
        self._matches("file", _WEIGHTS_FILE)
        self._matches("layout_xxh3", _DIGEST)
        self._matches("checksums_xxh3", _DIGEST)
        self._matches("origin", _IDENTITY)
        if self.state not in ("writing", "complete"):
            raise StoreCorruptError(f"{self.NAME}: unknown state {self.state!r:.80}")
        if self.state == "complete":
            table_end = self.checksums_offset + 8 * self.num_tensors
            if self.layout_xxh3 is None or table_end > self.layout_offset:
                raise StoreCorruptError(f"{self.NAME}: its checksums and its layout overlap")
            if self.layout_offset + self.layout_bytes > self.file_bytes:
                raise StoreCorruptError(f"{self.NAME}: its layout lies beyond the end of the file")

    @property
    def identity(self) -> str:
        """What no other version has, of this store or of another; a mirror's has the same."""
        return self.origin or f"{self.run}-{self.generation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterRecord(Record):
    """``writer.json``: who has the store open for writing, or had it last."""

    NAME: ClassVar = "writer record"
    TYPES: ClassVar = {
        "epoch": (int,),
        "run": (str,),
        "host": (str,),
        "pid": (int,),
        "started_at": (float,),
        "history": (str,),
    }

    epoch: int
    """Goes up by one with each writer; a writer that reads another run than its own has lost."""
    run: str
    host: str
    pid: int
    started_at: float
    history: str
    """The run of the store's first writer: two stores with one history hold the same versions."""

    def __post_init__(self) -> None:
        """Check the fields."""
        Record.__post_init__(self)
        self._matches("run", _RUN)
        self._matches("history", _RUN)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverRecord(Record):
    """``receivers/ID.json``: what one receiver has applied, and what it holds now."""

    NAME: ClassVar = "receiver record"
    TYPES: ClassVar = {
        "receiver": (str,),
        "host": (str,),
        "pid": (int,),
        "applied_version": (int, type(None)),
        "held_version": (int, type(None)),
        "updated_at": (float,),
        "part_of": (str, type(None)),
        "staged_version": (int, type(None)),
        "problem": (str, type(None)),
        "problem_version": (int, type(None)),
        "in_session": (bool,),
        "stats": (dict,),
    }

    receiver: str
    host: str
    pid: int
    applied_version: int | None
    held_version: int | None
    updated_at: float
    part_of: str | None = None
    """For one rank of an engine: the engine's receiver, the one that acknowledges."""
    staged_version: int | None = None
    """What it has ready, checked and not yet applied."""
    problem: str | None = None
    """Why it cannot have a version ready."""
    problem_version: int | None = None
    """Which one; None: the store itself is the problem."""
    in_session: bool = False
    """For an engine: it has been told to begin an update, and not yet to finish it."""
    stats: dict[str, float] = field(default_factory=dict)
    """Counts and durations since it started."""

    def __post_init__(self) -> None:
        """Check the fields."""
        Record.__post_init__(self)
        self._matches("receiver", _RECEIVER_ID)
        self._matches("part_of", _RECEIVER_ID)
        if not all(type(value) in (int, float) for value in self.stats.values()):
            raise StoreCorruptError(f"{self.NAME}: field 'stats' holds something else than numbers")

    def has_problem_with(self, version: int) -> bool:
        """Whether it cannot have ``version``; what was wrong with one before says nothing of it."""
        return self.problem is not None and (self.problem_version or version) >= version


def part_name(file: str, part: int) -> str:
    """Name of a part of the weights file of this name; see `layout`."""
    return f"{file.removesuffix('.td')}.r{part}.td"


def is_part_of(name: str, file: str) -> bool:
    """Whether ``name`` is that of a part of the weights file ``file``."""
    return name.startswith(f"{file.removesuffix('.td')}.r") and name.endswith(".td")


def is_receiver_id(text: str) -> bool:
    """Whether ``text`` can name a receiver, and with it a file."""
    return _RECEIVER_ID.fullmatch(text) is not None


def host_in_id() -> str:
    """This host's name, as far as a receiver's id can hold it."""
    host = "".join(c if c.isascii() and c.isalnum() else "-" for c in socket.gethostname())
    return host[:64]


def encode(record: Record) -> bytes:
    """One line of JSON, ASCII only."""
    names = [item.name for item in fields(record)]  # type: ignore[arg-type]
    data = {"format": FORMAT, **{name: getattr(record, name) for name in names}}
    return json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n"


def decode(kind: type[RecordT], data: bytes) -> RecordT:
    """Read a record, strictly.

    Raises:
        StoreFormatError: it was written in a format that this version does not know.
        StoreCorruptError: it is not such a record.
    """
    values = parse_object(data, kind.NAME)
    names = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    if wrong := names ^ values.keys():
        raise StoreCorruptError(f"{kind.NAME}: missing or unknown fields {sorted(wrong)!r:.200}")
    return kind(**values)


def parse_object(data: bytes, name: str) -> dict[str, Any]:
    """Parse a JSON object that carries our ``format``, and take that field off."""
    try:
        values = json.loads(data)
    # ValueError covers bad UTF-8 and huge integers too; RecursionError, a tower of brackets.
    except (ValueError, RecursionError) as error:
        raise StoreCorruptError(f"{name}: not JSON ({error!s:.80})") from None
    if not isinstance(values, dict):
        raise StoreCorruptError(f"{name}: not a JSON object")
    found = values.pop("format", None)
    if type(found) is not int or found != FORMAT:
        raise StoreFormatError(
            f"{name}: format {found!r:.40}, and this dbuffer reads format {FORMAT}; "
            "use the same version of dbuffer at both ends"
        )
    return values
