"""`StoreView`: a follower's view of the store: its newest version, and the records of the engine.

It lives from one start of the engine to the next.
"""

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
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime.messages import described
from dbuffer.runtime.timing import TIMING
from dbuffer.store import kept
from dbuffer.store.buffer import DoubleBuffer

logger = logging.getLogger(__name__)

_READY_CHECK_MIN_S, _READY_CHECK_MAX_S = 0.002, 0.1
"""Bounds of the pause between two looks at ranks' records until all ranks are ready; it grows with
the time that was waited already."""


class StoreView:
    """The store as the follower of one engine sees it."""

    def __init__(self, facts: EngineFacts, options: EngineOptions) -> None:
        self.facts = facts
        self.options = options
        self.engine_id = engine_id_of(facts, options)
        self._token = options.record_token
        self._mirror = options.start_mirror()
        is_trusted = options.allow_shared_store
        self._store = DoubleBuffer(options.read_store, allow_shared_store=is_trusted)
        self._origin = self._store
        """Source of the versions; a local store may be behind it."""
        if options.store != options.read_store:
            self._origin = DoubleBuffer(options.store, allow_shared_store=is_trusted)
        # It only waits for the pointer, holds nothing, and so leaves no record.
        self._receiver = WeightReceiver(
            options.read_store,
            poll_interval_s=options.poll_interval_s,
            allow_shared_store=is_trusted,
        )
        self._rank_ids = [rank_id(self.engine_id, rank) for rank in range(facts.num_ranks)]
        self._seen: set[str] = set()
        self._logged_fork: str | None = None
        self.is_kept = False
        """Whether the engine keeps its version until its user is done with it."""

    def close(self) -> None:
        self._receiver.close()
        if self._mirror is not None:
            self._mirror.close()

    # Records of the engine and its ranks

    def note_ranks(self) -> None:
        """Remember the ranks that look at the store, so that any that leave it are missed."""
        self._seen |= {rank for rank in self._rank_ids if self._record(rank) is not None}

    def has_lost_ranks(self) -> bool:
        """Whether a rank that looked at the store seems to do so no more."""
        return any(self._record(rank) is None for rank in self._seen)

    def engine_record(self) -> ReceiverRecord | None:
        """Return the record of this very engine, and of no other one of its id."""
        return self._record(self.engine_id)

    def readable_record(self) -> ReceiverRecord | None:
        """Return the engine's record, or None if there is none, or it cannot be read just now."""
        with contextlib.suppress(errors.DBufferError, OSError):
            return self.engine_record()
        return None

    def _record(self, receiver_id: str) -> ReceiverRecord | None:
        return self._store.record(receiver_id, self._token)

    def _rank_records(self) -> dict[str, ReceiverRecord | None]:
        return {rank: self._record(rank) for rank in self._rank_ids}

    # Versions

    def leads_on(self, version: Lineage) -> bool:
        """Whether the store has not forked from a version, as far as it can be read just now."""
        newest = _newest_in(self._store)
        return newest is None or relation(version, newest) is not Relation.FORKED

    def require_version(self) -> None:
        """Refuse to stay on a version that is gone from the store, unless the engine has it.

        Raises:
            VersionError: the store holds later versions, and not this one.
        """
        if self.options.version is not None:
            self.newer_than(served_by(self.engine_record()))

    def newer_than(
        self, served: Lineage | None, at_least: int | None = None
    ) -> int | VersionId | None:
        """Return the newest version, or ``at_least``, or None if the engine is to keep its own.

        A version that the store does not have yet is returned as its number. For an engine that
        stays on a version, it is that one, once it is published. With ``every`` it is at least that
        far above the engine's, or of another run.

        Raises:
            VersionError: that one is gone from the store.
            EngineUpdateError: the local store gets no more versions: its mirror has ended.
        """
        if self._mirror is not None and (error := self._mirror.error) is not None:
            raise errors.EngineUpdateError(
                f"{self.options.local_store} gets no more versions of {self.options.store}, whose "
                f"mirror has ended: {described(error)}; end this, and follow again"
            )
        only = self.options.version
        if only is not None and at_least is not None and at_least > only:
            raise errors.OptionError(f"at_least is {at_least}, and the engine stays on {only}")
        if only is not None and served is not None and served.id.number == only:
            return None
        if served is None and not self._store.exists():
            return at_least if only is None else None
        if only is not None:
            newest = self._newest_in(self._store, served)
            is_published = newest is not None and newest.id.number >= only
            return kept.require(self._store, only) if is_published else None
        # A version that is known to be published may be on its way to a local store.
        store = self._origin if at_least is not None and self._origin.exists() else self._store
        newest = self._newest_in(store, served)
        due = 0
        if newest and served and relation(served, newest) is not Relation.FORKED:
            due = served.id.number + self.options.every
            if at_least is not None:
                at_least = max(at_least, due) if at_least > served.id.number else None
            elif self.is_kept:
                return None
        if at_least is not None and (newest is None or newest.id.number < at_least):
            return at_least
        return None if newest is None or newest.id.number < due else newest.id

    def _newest_in(self, store: DoubleBuffer, served: Lineage | None) -> Lineage | None:
        """Return a store's newest version, or None if it has none.

        Raises:
            VersionRegressedError: the engine's does not lead to it, and it is not followed.
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
                message = "%s: %s has the former, and follows the latter"
                logger.warning(message, fork, self.engine_id)
        elif newest is None or relation(served, newest) is Relation.AHEAD:
            raise errors.VersionRegressedError(
                f"{store.root} went back from version {served.id.number} to "
                f"{newest.id.number if newest else 'none'}: the next version is followed"
            )
        return newest

    def manifest_of(self, goal: int | VersionId) -> Manifest | None:
        """Return the manifest of a version, or None if this store does not have it now."""
        return self._store.manifest_of(goal) if isinstance(goal, VersionId) else None

    def wait_for_version(
        self, newer_than: int | None, timeout_s: float, stop_event: threading.Event
    ) -> int | None:
        """Wait until the store holds a version above this one, or a fork.

        :meth:`newer_than` decides whether that is followed. An engine that stays on a version
        ignores every other one.
        """
        only = self.options.version
        if only is not None:
            if newer_than == only:
                stop_event.wait(timeout_s)
                return None
            newer_than = only - 1
        elif newer_than is not None:
            if self.is_kept:
                stop_event.wait(timeout_s)
                return None
            newer_than += self.options.every - 1
        return self._receiver.wait_or_follow_fork(newer_than, timeout_s, stop_event)

    # Whether the ranks are ready, and the engine has switched

    def has_applied(self, record: ReceiverRecord, goal: int | VersionId) -> bool:
        """Whether a record says that the engine has this version, or a later one if any will do."""
        if record.lineage is None:
            return False
        if self.options.version is not None and record.applied_version != number_of(goal):
            return False
        if isinstance(goal, VersionId):
            return record.lineage.reaches(goal)
        return record.lineage.id.number >= goal

    def wait_ready(
        self,
        goal: int | VersionId,
        served: Lineage | None,
        timeout_s: float,
        stop_event: threading.Event | None,
        *,
        require_alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until every rank has this version or a later one ready.

        Or until the engine has it: another process may have switched a server meanwhile.

        Raises:
            EngineUpdateError: some rank says that it cannot, or has left the store.
            EngineUnreachableError: some rank's process has ended, and does not follow after another
                start.
            VersionRegressedError: the store forked from it, or lost it.
            WaitTimeoutError: some rank did not have it in time.
            ClosedError: the stop event was set.
            DBufferError: of ``require_alive``.
        """
        started = time.monotonic()
        complete_s = 0.0
        serves_on = f"the engine serves on with {describe_weights(served)}"
        at_start = self._rank_records()
        while True:
            records = self._rank_records()
            newest = _newest_in(self._store)  # read after the records, so it covers their versions
            named = newest.at(goal) if newest is not None and isinstance(goal, int) else goal
            behind = list(records)
            if newest is not None and isinstance(named, VersionId):
                behind = [
                    rank
                    for rank, record in records.items()
                    if record is None or not newest.has_since(named.number, record.staged)
                ]
            engine = self.engine_record()
            if not behind or (engine is not None and self.has_applied(engine, goal)):
                return
            if isinstance(named, VersionId):
                self._require_possible(named, newest, records, at_start, serves_on)
            absent = sorted(rank for rank in self._seen if records[rank] is None)
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
            # Each look opens files of each rank, maybe over a network: ever fewer looks, for a wait
            # that is a tenth longer at most.
            pause_s = min(waited_s / 10, _READY_CHECK_MAX_S)
            time.sleep(max(pause_s, _READY_CHECK_MIN_S))

    def _lost(
        self, goal: int | VersionId, absent: Sequence[str], ended: Sequence[str]
    ) -> errors.DBufferError:
        """Make the error about ranks that left the store, or whose processes ended."""
        if ended:
            return errors.EngineUnreachableError(
                f"{', '.join(ended)} ended before version {number_of(goal)} of "
                f"{self.options.store} was ready: start the engine again"
            )
        return errors.EngineUpdateError(
            f"{', '.join(absent)} left {self.options.store}: another follower let the engine "
            "follow another store, or none. An engine has one follower: close one of them, and "
            "make the other one again"
        )

    def _require_possible(
        self,
        goal: VersionId,
        newest: Lineage | None,
        records: dict[str, ReceiverRecord | None],
        at_start: dict[str, ReceiverRecord | None],
        serves_on: str,
    ) -> None:
        """Raise if some rank cannot have this version, or no rank can have it any more."""
        for rank, record in records.items():
            if record is not None and _is_hindered(record, goal, newest, at_start[rank]):
                raise errors.EngineUpdateError(
                    f"{record.receiver} cannot get version {goal.number} ready: {record.problem}; "
                    f"{serves_on}"
                )
        if self._has_lost(goal, newest):
            raise errors.VersionRegressedError(
                f"version {goal.number} of {self.options.store} was lost before it was ready on "
                f"all ranks: it does not lead to the store's newest; {serves_on}"
            )

    def _has_lost(self, version: VersionId, newest: Lineage | None) -> bool:
        """Whether a version leads neither to ``newest`` nor to the mirrored store's newest."""
        if newest is None or newest.reaches(version):
            return False
        if self._origin is self._store:
            return True
        origin = _newest_in(self._origin)
        return origin is not None and not origin.reaches(version)


def engine_id_of(facts: EngineFacts, options: EngineOptions) -> str:
    """Return the name of an engine, or of its replica, among the store's receivers."""
    return f"{options.engine_id}{facts.replica}"


def _newest_in(store: DoubleBuffer) -> Lineage | None:
    """Return a store's newest version, or None if it has none or cannot be read just now."""
    with contextlib.suppress(errors.DBufferError, OSError):
        pointer = store.newest_pointer()
        return None if pointer is None else pointer.lineage
    return None


def _is_hindered(
    record: ReceiverRecord,
    goal: VersionId,
    newest: Lineage | None,
    at_start: ReceiverRecord | None,
) -> bool:
    """Whether a rank says that it cannot have this version, now.

    A problem with the store itself that it had at the start of the wait may be over since.
    """
    is_of_the_store = record.problem is not None and record.problem_version is None
    is_old = at_start is not None and at_start.updated_at == record.updated_at
    return record.has_problem_with(goal.number, newest) and not (is_of_the_store and is_old)
