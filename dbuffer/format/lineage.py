"""`VersionId`, and `relation`, which compares a reader's version with a store's newest version.

Each start of a sender begins a *run*, which continues from the store's newest version. A version
has the ids of its run and of the runs that led to it. A comparison of two versions uses only these
ids and the versions' numbers. The result is which version is later, or that they have forked.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import Annotated, NamedTuple, Self

from msgspec import Meta

MAX_RUNS = 64
"""Largest number of runs (starts of a sender) that a version names. If a reader's version is of a
run that the newest version no longer names, the two versions count as forked."""

MAX_NUMBER = 2**63 - 1

RUN = re.compile(r"[0-9a-f]{16}")
VERSION_ID = re.compile(r"([0-9a-f]{16})-([0-9]{1,19})")

Count = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
Positive = Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
Token = Annotated[str, Meta(pattern=rf"^{RUN.pattern}\Z")]
"""Text of 16 hexadecimal digits: the id of a run, another random token, or a digest."""


class VersionId(NamedTuple):
    """Id of a version, unique across all stores. Its text is ``RUN-NUMBER``."""

    run: Token
    number: Positive

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a version's id from its text.

        Raises:
            ValueError: the text is not a version's id.
        """
        match = VERSION_ID.fullmatch(text)
        if match is None or not 0 < int(match[2]) <= MAX_NUMBER:
            raise ValueError(f"{text!r:.80} is no version's id: an id has the form RUN-NUMBER")
        return cls(match[1], int(match[2]))

    def __str__(self) -> str:
        return f"{self.run}-{self.number}"


class Run(NamedTuple):
    id: Token
    name: str | None
    host: str
    pid: Count
    started_at: float
    """Start of the run by its host's clock, in seconds since the epoch. It is only for display."""
    upon: Positive | None
    """Number of the version that the run continued, or None if the store was empty."""


class Relation(enum.Enum):
    """Relation of a reader's version to the newest version of a store."""

    BEHIND = enum.auto()
    """The reader's version is the newest version, or leads to it."""
    AHEAD = enum.auto()
    """The newest version leads to the reader's version: the store lost later versions, or shows
    them late."""
    FORKED = enum.auto()
    """The two versions forked: another run (start of a sender) replaced the store, or continued
    after the store lost its last versions."""


class Lineage(NamedTuple):
    """Version, and the runs (starts of a sender) that lead to it, the version's own run first."""

    id: VersionId
    runs: Sequence[Run]

    def reaches(self, version: VersionId) -> bool:
        last: int | None = self.id.number
        for run in self.runs:
            if last is None or run.id == version.run:
                return last is not None and version.number <= last
            last = run.upon
        return False

    def to(self, version: VersionId) -> Lineage:
        runs = list(self.runs)
        while runs[0].id != version.run:
            del runs[0]
        return Lineage(version, runs)

    def has_since(self, number: int, version: VersionId | None) -> bool:
        """Whether ``version`` is one of this lineage's versions from number ``number`` on."""
        return version is not None and version.number >= number and self.reaches(version)

    def at(self, number: int) -> VersionId | None:
        """Return the version with this number in the lineage, or None if it records none."""
        if number > self.id.number:
            return None
        for run in self.runs:
            if number > (run.upon or 0):
                return VersionId(run.id, number)
        return None


def number_of(version: int | VersionId) -> int:
    return version.number if isinstance(version, VersionId) else version


def describe_fork(store: object, before: VersionId, newest: VersionId) -> str:
    return (
        f"{store} held version {before.number} of run {before.run}, which does not lead to the "
        f"newest one, version {newest.number} of run {newest.run}"
    )


def relation(version: Lineage, newest: Lineage) -> Relation:
    if newest.reaches(version.id):
        return Relation.BEHIND
    return Relation.AHEAD if version.reaches(newest.id) else Relation.FORKED
