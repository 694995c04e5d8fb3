"""`StoreView`: a follower's view of the store's versions, and of its engine's records."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

from dbuffer import errors
from dbuffer.engine.contract import EngineFacts, describe_weights, served_by
from dbuffer.engine.engine_options import EngineOptions, rank_id
from dbuffer.format.lineage import Lineage, Relation, VersionId, describe_fork, number_of, relation
from dbuffer.format.manifest import Manifest, ReceiverRecord
from dbuffer.runtime.messages import described
from dbuffer.runtime.timing import TIMING, doubling
from dbuffer.runtime.trouble import log_once
from dbuffer.store import kept
from dbuffer.store.buffer import DoubleBuffer

logger = logging.getLogger(__name__)

_READY_CHECK_MIN_S, _READY_CHECK_MAX_S = 0.002, 0.1
"""Shortest and longest pause between two reads of the ranks' records, while ranks are not ready.
The pause grows with the time waited."""

_BEGIN_PAUSE_MAX_S = 300.0
"""Longest pause between two begins of ranks that write no records."""


class StoreView:
    """A store's versions, and the records that an engine and its ranks wrote since their start."""

    def __init__(self, facts: EngineFacts, options: EngineOptions) -> None:
        self.facts = facts
        self.options = options
        self.engine_id = engine_id_of(facts, options)
        self._token = options.record_token
        self._mirror = options.start_mirror()
        self._store = options.buffer_of(options.read_store)
        self._origin = self._store
        """Store that the sender publishes in. A local store, its mirror, may be behind."""
        if options.store != options.read_store:
            self._origin = options.buffer_of(options.store)
        # This receiver only waits for new versions. It opens no version, so it writes no record.
        self._receiver = options.make_receiver()
        self._rank_ids = [rank_id(self.engine_id, rank) for rank in range(facts.num_ranks)]
        self._seen: set[str] = set()
        """Ids of the records that this view has read."""
        self._begin_pauses_s = doubling(TIMING.rank_gone_s, _BEGIN_PAUSE_MAX_S)
        self._begin_at = time.monotonic() + next(self._begin_pauses_s)
        """Time after which ranks that have not written their records must begin again."""
        self._logged_fork: str | None = None
        self._choice: tuple[VersionId, Lineage | None] | None = None
        """Newest version seen, and the newest version that the engine does not skip."""
        self.is_kept = False
        """Whether the engine must stay on its version until ``done()``: see ``until_done``."""

    def close(self) -> None:
        self._receiver.close()
        if self._mirror is not None:
            self._mirror.close()

    # Records of the engine and its ranks

    def has_lost_records(self) -> bool:
        """Whether a store with a version lacks a record, so that ranks must begin again."""
        ids = (self.engine_id, *self._rank_ids)
        missing = {name for name in ids if self._record(name) is None}
        if not missing or _readable_newest(self._store) is None:
            return False
        if missing.isdisjoint(self._seen):
            # Ranks may be about to write their first records, NFS may show them later, or ranks
            # cannot write at all. A begin can pause the engine, so make it ever more rarely.
            if time.monotonic() < self._begin_at:
                return False
            self._begin_at = time.monotonic() + next(self._begin_pauses_s)
        return True

    def engine_record(self) -> ReceiverRecord | None:
        """Return the record that the engine has written since its start, or None.

        Ignore records of other starts.
        """
        return self._record(self.engine_id)

    def readable_record(self) -> ReceiverRecord | None:
        """Return the engine's record, or None if no record can be read now."""
        with contextlib.suppress(errors.DBufferError, OSError):
            return self.engine_record()
        return None

    def _record(self, receiver_id: str) -> ReceiverRecord | None:
        record = self._store.record(receiver_id, self._token)
        if record is not None:
            self._seen.add(receiver_id)
        return record

    def _rank_records(self) -> dict[str, ReceiverRecord | None]:
        return {rank: self._record(rank) for rank in self._rank_ids}

    # Versions

    def leads_on(self, version: Lineage) -> bool:
        """Whether no fork separates ``version`` from the store's newest version.

        Return True if the newest version cannot be read now.
        """
        newest = _readable_newest(self._store)
        return newest is None or relation(version, newest) is not Relation.FORKED

    def require_version(self) -> None:
        """Raise :class:`VersionError` if the option ``version`` names a version that is gone.

        If the engine has this version, do nothing.
        """
        if self.options.version is not None:
            self.newer_than(served_by(self.engine_record()))

    def has_replaced(self, served: Lineage | None) -> bool:
        """Whether the version of the option ``version`` is now of another run than ``served``.

        If the store is started over, the engine stays on its version until a new follower begins.
        """
        if self.options.forked != "follow":
            return False
        if served is None or served.id.number != self.options.version:
            return False
        # If the store cannot be read now, the engine stays on its version.
        with contextlib.suppress(errors.DBufferError, OSError):
            return self.newer_than(None) not in (None, served.id)
        return False

    def newer_than(
        self, served: Lineage | None, at_least: int | None = None
    ) -> int | VersionId | None:
        """Return the version to switch to, or None if the engine is to keep its version.

        It is the newest version that the engine does not skip, or version ``at_least`` if that is
        higher. The engine's options can change this: ``version`` allows only that version. With
        ``until_done``, the engine keeps its version, unless the store has forked, or ``at_least``
        is above the engine's version. Raise an error if the version of the option ``version`` is
        gone, or if the mirror has ended.
        """
        if self._mirror is not None and (error := self._mirror.error) is not None:
            raise errors.EngineUpdateError(
                f"{self.options.local_store} gets no more versions of {self.options.store}, as the "
                f"mirror has ended: {described(error)}; close this follower, and follow again"
            )
        only = self.options.version
        if only is not None and at_least is not None and at_least > only:
            raise errors.OptionError(
                f"at_least is {at_least}, but the engine stays on version {only}"
            )
        if only is not None and served is not None and served.id.number == only:
            return None
        if served is None and not self._store.exists():
            return at_least if only is None else None
        if only is not None:
            newest = self._newest_in(self._store, served)
            is_published = newest is not None and newest.id.number >= only
            return kept.require(self._store, only) if is_published else None
        # The version ``at_least`` may still be missing in the local store: ask the sender's store.
        store = self._origin if at_least is not None and self._origin.exists() else self._store
        newest = self._newest_in(store, served)
        goal = None if newest is None else self._taken_in(store, newest)
        is_lacking = newest is not None and newest.id.number == at_least and newest != served
        if newest and is_lacking and (refusal := self.options.refusal(newest.id)) is not None:
            raise errors.EngineUpdateError(f"version {at_least} of {self.options.store} {refusal}")
        if served is not None and (refusal := self.options.refusal(served.id)) is not None:
            message = "%s serves version %d of %s, which %s, and will take the next version"
            number = served.id.number
            log_once(logger, message, self.engine_id, number, self.options.store, refusal)
        leads_on = newest and served and relation(served, newest) is not Relation.FORKED
        if served and leads_on and (at_least is None or at_least <= served.id.number):
            if self.is_kept or goal is None or goal.id.number <= served.id.number:
                return None
            at_least = None
        if at_least is not None and (goal is None or goal.id.number < at_least):
            return at_least
        return None if goal is None else goal.id

    def _taken_in(self, store: DoubleBuffer, newest: Lineage) -> Lineage | None:
        """Return the newest of a store's versions that the engine does not skip, or None."""
        options = self.options
        if store is not self._store:
            return options.choose(newest, store)
        newest_before, taken = self._choice or (None, None)
        if newest.id != newest_before or (taken and options.refusal(taken.id)):
            taken = options.choose(newest, store)
            if taken is newest:
                self._choice = None
                return taken
            self._choice = newest.id, taken
        # If all ranks have staged a later version, switch to it, even if it left the store.
        records = self._rank_records().values()
        staged = [record.staged for record in records if record is not None and record.staged]
        staged = [version for version in staged if options.refusal(version) is None]
        ready = min(staged, key=number_of, default=None)
        is_ready = ready is not None and len(staged) == len(records) and newest.reaches(ready)
        if ready is not None and is_ready and (taken is None or ready.number > taken.id.number):
            return newest.to(ready)
        return taken

    def _newest_in(self, store: DoubleBuffer, served: Lineage | None) -> Lineage | None:
        """Return a store's newest version, or None if it has none.

        Raise :class:`VersionRegressedError` if the store went back to a version before ``served``,
        or if the store has forked and the option ``forked`` is ``"refuse"``.
        """
        if self._store.exists():
            self._store.check()
        pointer = store.newest_pointer()
        newest = None if pointer is None else pointer.lineage
        if served is None:
            return newest
        if newest is not None and self.options.has_forked(served, newest):
            if self._logged_fork != newest.id.run:
                self._logged_fork = newest.id.run
                fork = describe_fork(self.options.store, served.id, newest.id)
                logger.warning("%s: %s follows the newest version", fork, self.engine_id)
        elif newest is None or relation(served, newest) is Relation.AHEAD:
            raise errors.VersionRegressedError(
                f"{store.root} went back from version {served.id.number} to "
                f"{newest.id.number if newest else 'none'}: the engine waits for the next publish"
            )
        return newest

    def refuse(self, version: VersionId, refusal: str) -> None:
        self._origin.refuse(version, refusal)

    def manifest_of(self, goal: int | VersionId) -> Manifest | None:
        return self._store.manifest_of(goal) if isinstance(goal, VersionId) else None

    def wait_for_version(
        self, newer_than: int | None, timeout_s: float, stop_event: threading.Event
    ) -> int | None:
        """Wait until the store has a version above ``newer_than``, or a fork; return its number.

        A fork is a newest version that does not descend from the engine's version. Return None if
        no such version came in time, or if an option makes the engine stay on its version.
        """
        only = self.options.version
        if only is not None:
            if newer_than == only:
                stop_event.wait(timeout_s)
                return None
            newer_than = only - 1
        elif newer_than is not None and self.is_kept:
            stop_event.wait(timeout_s)
            return None
        if self._choice is not None:
            newer_than = max(newer_than or 0, self._choice[0].number)
        return self._receiver.wait_or_follow_fork(newer_than, timeout_s, stop_event)

    # States of the ranks and of the engine

    def has_applied(self, record: ReceiverRecord, goal: VersionId) -> bool:
        """Whether a record says that the engine has ``goal``, or a later version.

        With the option ``version``, a later version does not count.
        """
        return record.lineage is not None and self.options.has(record.lineage, goal)

    def wait_ready(
        self,
        goal: int | VersionId,
        served: Lineage | None,
        timeout_s: float,
        stop_event: threading.Event | None,
        *,
        require_alive: Callable[[], None] = lambda: None,
    ) -> VersionId:
        """Wait until every rank has ``goal`` or a later version ready, or the engine has it.

        Return the id of ``goal``, which can be the number of a version that is not there yet.

        Raises:
            EngineUpdateError: a rank cannot get the version ready, or no longer follows the store.
            EngineUnreachableError: a rank's process has ended and was not started again.
            VersionRegressedError: the store has forked from the version, or lost it.
            WaitTimeoutError, ClosedError: the wait took too long, or ``stop_event`` was set.
        """
        started = time.monotonic()
        complete_s = 0.0
        serves_on = f"the engine serves on with {describe_weights(served)}"
        at_start = self._rank_records()
        while True:
            records = self._rank_records()
            newest = _readable_newest(self._store)  # read last, so no record names a newer version
            named = newest.at(goal) if newest is not None and isinstance(goal, int) else goal
            behind = list(records)
            if isinstance(named, VersionId):
                behind = [
                    rank
                    for rank, record in records.items()
                    if record is None
                    or newest is None
                    or not newest.has_since(named.number, record.staged)
                ]
                engine = self.engine_record()
                if not behind or (engine is not None and self.has_applied(engine, named)):
                    return named
                self._require_possible(named, newest, records, at_start, serves_on)
            absent = sorted(
                rank for rank, record in records.items() if record is None and rank in self._seen
            )
            ended = [
                rank
                for rank in behind
                if (record := records[rank]) is not None and not self._store.may_live(record)
            ]
            waited_s = time.monotonic() - started
            if not (absent or ended):
                complete_s = waited_s
            elif waited_s - complete_s > TIMING.rank_gone_s:
                raise self._lost(goal, absent, ended)
            require_alive()
            if stop_event is not None and stop_event.is_set():
                raise errors.ClosedError("following was stopped")
            if waited_s > timeout_s:
                raise errors.WaitTimeoutError(
                    f"version {number_of(goal)} of {self.options.store} was not ready within "
                    f"{timeout_s:g} s on {', '.join(behind)}; {serves_on}"
                )
            # Each round opens a file for each rank, maybe over a network. Growing pauses limit the
            # rounds, and make the wait longer by a tenth at most.
            pause_s = min(waited_s / 10, _READY_CHECK_MAX_S)
            time.sleep(max(pause_s, _READY_CHECK_MIN_S))

    def _lost(
        self, goal: int | VersionId, absent: Sequence[str], ended: Sequence[str]
    ) -> errors.DBufferError:
        if ended:
            return errors.EngineUnreachableError(
                f"{', '.join(ended)} ended before version {number_of(goal)} of "
                f"{self.options.store} was ready: restart the engine"
            )
        return errors.EngineUpdateError(
            f"{', '.join(absent)} left {self.options.store}: another follower made the engine "
            "follow another store, or no store. An engine must have only one follower: close one "
            "of the two, and make the other again"
        )

    def _require_possible(
        self,
        goal: VersionId,
        newest: Lineage | None,
        records: dict[str, ReceiverRecord | None],
        at_start: dict[str, ReceiverRecord | None],
        serves_on: str,
    ) -> None:
        """Raise an error if a rank cannot get this version ready, or if the store has lost it."""
        for rank, record in records.items():
            before = at_start[rank]
            is_old = before and record and before.updated_at == record.updated_at
            # A problem with the store that was recorded before this wait may be over: skip it. A
            # problem with a version remains.
            if record is None or (is_old and record.problem_version is None):
                continue
            if record.has_problem_with(goal.number, newest):
                raise errors.EngineUpdateError(
                    f"{record.receiver} cannot get version {goal.number} ready: {record.problem}; "
                    f"{serves_on}"
                )
        if self._has_lost(goal, newest):
            raise errors.VersionRegressedError(
                f"version {goal.number} of {self.options.store} was lost before all ranks had it "
                f"ready: the store's newest version does not descend from it; {serves_on}"
            )

    def _has_lost(self, version: VersionId, newest: Lineage | None) -> bool:
        """Whether ``version`` is lost, so that waiting for it is in vain.

        A version is lost if neither ``newest`` nor the newest version of the sender's store
        descends from it (the engine may read a local mirror of that store). Return False if one of
        the two newest versions cannot be read now.
        """
        if newest is None or newest.reaches(version):
            return False
        if self._origin is self._store:
            return True
        origin = _readable_newest(self._origin)
        return origin is not None and not origin.reaches(version)


def engine_id_of(facts: EngineFacts, options: EngineOptions) -> str:
    """Return the name of an engine, or of one of its replicas, among the store's receivers."""
    return f"{options.engine_id}{facts.replica}"


def _readable_newest(store: DoubleBuffer) -> Lineage | None:
    """Return a store's newest version, or None if no version can be read now."""
    with contextlib.suppress(errors.DBufferError, OSError):
        pointer = store.newest_pointer()
        return None if pointer is None else pointer.lineage
    return None
