"""Functions on receivers' acknowledgements: wait for them, and measure the receivers' lag."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dbuffer.errors import ReceiverFailedError, WaitTimeoutError
from dbuffer.format.lineage import Lineage
from dbuffer.format.manifest import Lag, ReceiverRecord, is_receiver_id
from dbuffer.runtime import options
from dbuffer.runtime.timing import TIMING, doubling
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.liveness import Process
from dbuffer.store.writer import BufferWriter

_PAUSES_S = (0.001, 0.05)


def wait_applied(
    writer: BufferWriter, version: int, receivers: int | str | Collection[str], timeout_s: float
) -> None:
    """Wait until receivers have applied ``version`` or a later version.

    ``docs/design.md`` ("Acknowledging") says which receivers' records count, and when the wait
    fails. A problem in a record that has not changed since the writer opened the store is ignored.
    """
    options.whole_number("version", version, at_least=0)
    deadline = time.monotonic() + options.seconds("timeout_s", timeout_s)
    pauses_s = doubling(*_PAUSES_S)
    expected = options.names("receivers", receivers)
    names = None if isinstance(expected, int) else set(expected)
    for name in names or ():
        if not is_receiver_id(name):
            options.refuse("receivers", receivers, f"no receiver can be named {name!r:.80}")
    needed = expected if isinstance(expected, int) else len(expected)
    wait = _Wait(writer, version, names)
    while (num_applied := wait.look()) < needed:
        wait.require_able()
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise WaitTimeoutError(
                f"{num_applied} of {needed} receivers applied version {version} of {writer.root} "
                f"within {timeout_s:g} s ({wait.states() or 'no receiver has connected'})"
            )
        time.sleep(min(next(pauses_s), left_s))


def receiver_lags(store: DoubleBuffer) -> dict[str, Lag]:
    """Return the lag of each living receiver, keyed by its id.

    If several receivers share an id, the longest lag counts.
    """
    pointer = store.newest_pointer() if store.exists() else None
    if pointer is None:
        return {}
    newest = store.manifest_of(pointer.id)
    metadata = {} if newest is None else newest.metadata
    lags: dict[str, Lag] = {}
    for record in store.receivers():
        lag = record.lag_behind(pointer.lineage, metadata)
        if lag is None or record.part_of is not None or not store.may_live(record):
            continue
        longest = max(lags.get(record.receiver, lag), lag, key=lambda pair: pair.versions)
        lags[record.receiver] = longest
    return lags


@dataclass(slots=True)
class _Wait:
    writer: BufferWriter
    version: int
    names: set[str] | None
    """Ids of the receivers to wait for, or None to count all receivers."""
    newest: Lineage | None = None
    counted: dict[str, list[ReceiverRecord]] = field(default_factory=dict)
    ranks: Mapping[tuple[str, str], Sequence[ReceiverRecord]] = field(default_factory=dict)
    noted_at: dict[tuple[str, str, str], float] = field(default_factory=dict)
    """Time at which a receiver was first seen in a state, keyed by its id, its token and the
    state."""

    @property
    def store(self) -> DoubleBuffer:
        return self.writer.store

    def look(self) -> int:
        """Read all receivers' records; return how many receivers have applied the version."""
        records = self.store.receivers()
        # Read the pointer last: then no record names a version newer than the pointer's.
        pointer = self.store.newest_pointer()
        self.newest = None if pointer is None else pointer.lineage
        # Raise if another writer took the store over: records could name that writer's versions.
        self.store.require_writer(self.writer.record)
        # Don't count the records of an engine's ranks: they name staged versions, not applied ones.
        by_id: defaultdict[str, list[ReceiverRecord]] = defaultdict(list)
        ranks: defaultdict[tuple[str, str], list[ReceiverRecord]] = defaultdict(list)
        for record in records:
            if record.part_of is not None:
                ranks[record.part_of, record.token].append(record)
            elif self.names is None or record.receiver in self.names:
                by_id[record.receiver].append(record)
        self.ranks = ranks
        self.counted = {name: self._counting(of_id) for name, of_id in by_id.items()}
        applied = [list(map(self._has_applied, of_id)) for of_id in self.counted.values()]
        return sum(map(sum, applied)) if self.names is None else sum(map(all, applied))

    def _has_applied(self, record: ReceiverRecord) -> bool:
        if self.version == 0:
            return True
        newest, is_on_trial = self.newest, record.state == "on_trial"
        has = newest is not None and newest.has_since(self.version, record.applied)
        return has and not is_on_trial

    def _counting(self, records: list[ReceiverRecord]) -> list[ReceiverRecord]:
        if len(records) == 1:
            return records

        def written_at(record: ReceiverRecord) -> float:
            return filesystem.touched_at(self.store.record_path(record.receiver, record.token))

        living = [record for record in records if self.store.may_live(record)]
        return living or [max(records, key=written_at)]

    def states(self) -> str:
        states = [
            f"{record.receiver} {self._state(record)}"
            for records in self.counted.values()
            for record in records
        ]
        missing = sorted((self.names or set()) - self.counted.keys())
        return ", ".join([*states, *(f"{name} has not connected" for name in missing)])

    def _state(self, record: ReceiverRecord) -> str:
        applied = record.applied_version
        at = "at no version" if applied is None else f"at version {applied}"
        state = f"is {at}"
        if record.stays_below(self.version):
            state = f"stays on version {record.only_version}"
        elif self._is_skipped_by(record):
            every = [("number", record.every)] if record.every > 1 else []
            multiples = (
                f"{name:.100} is a multiple of {n}" for name, n in (*every, *record.when.items())
            )
            state = (
                f"skips version {self.version} and is {at}: it takes a version only if its "
                f"{' and its '.join(multiples)}"
            )
        if not self.store.may_live(record):
            state = f"has ended {at}" if _is_certain_of_end(record) else f"seems dead, and was {at}"
        for part in self._parts_of(record):
            if part.has_problem_with(self.version, self.newest):
                return f"{state}, because of: {part.problem}"
        return state

    def _parts_of(self, record: ReceiverRecord) -> list[ReceiverRecord]:
        return [record, *self.ranks.get((record.receiver, record.token), ())]

    def require_able(self) -> None:
        """Raise if a canary engine refused the version, or a given receiver cannot apply it."""
        version = None if self.newest is None else self.newest.at(self.version)
        if version is not None and (refusal := self.store.refusal(version)) is not None:
            raise ReceiverFailedError(f"version {version.number} of {self.store.root} {refusal}")
        for records in () if self.names is None else self.counted.values():
            for record in records:
                if not self._has_applied(record):
                    self._require_able(record)

    def _require_able(self, record: ReceiverRecord) -> None:
        if record.stays_below(self.version) or self._is_skipped_by(record):
            raise ReceiverFailedError(f"{_process_of(record)} {self._state(record)}")
        for part in self._parts_of(record):
            if self._is_old(part) or not part.has_problem_with(self.version, self.newest):
                continue
            problem = part.problem_version
            if problem or self._has_lasted(part, str(part.problem), TIMING.last_word_s):
                number = problem.number if problem else self.version
                raise ReceiverFailedError(
                    f"{_process_of(part)} could not apply version {number}: {part.problem}"
                )
        may_live = self._is_old(record) or self.store.may_live(record)
        is_certain = _is_certain_of_end(record)
        limit_s = TIMING.last_word_s if is_certain else TIMING.bucket_presumed_dead_after_s
        if not may_live and self._has_lasted(record, "ended", limit_s):
            raise ReceiverFailedError(f"{_process_of(record)} {self._state(record)}")

    def _is_skipped_by(self, record: ReceiverRecord) -> bool:
        if record.every == 1 and not record.when:
            return False
        version = None if self.newest is None else self.newest.at(self.version)
        manifest = None if version is None else self.store.manifest_of(version)
        return manifest is not None and not record.takes(manifest.version, manifest.metadata)

    def _is_old(self, record: ReceiverRecord) -> bool:
        # If the times are equal, the receiver has not written its record since this writer began.
        # Don't check which time is later: two hosts' clocks may differ.
        before = self.writer.written_before.get((record.receiver, record.token))
        return before == record.updated_at

    def _has_lasted(self, record: ReceiverRecord, state: str, limit_s: float) -> bool:
        now_s = time.monotonic()
        noted_at = self.noted_at.setdefault((record.receiver, record.token, state), now_s)
        return now_s - noted_at >= limit_s


def _is_certain_of_end(record: ReceiverRecord) -> bool:
    """Whether a receiver that shows no sign of life has certainly ended.

    If a mirror relays the receiver's record, perhaps only the mirror has ended.
    """
    return not record.is_relayed or record.has_ended or Process.of(record).can_be_seen


def _process_of(record: ReceiverRecord) -> str:
    return f"{record.receiver} (process {record.pid} on {record.host})"
