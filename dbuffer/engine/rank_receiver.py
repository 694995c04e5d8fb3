"""`RankReceiver`: the receiver of one rank, which switches in step with all other ranks.

A switch has two phases, and after each the ranks exchange their results. In *prepare*, every rank
takes the version from its stager, a thread that checked the version while the engine served. If a
rank fails, the engine serves its old version. In *commit*, every rank loads the version. If a rank
fails, all ranks load the previous version again. If this fails too, all ranks load the new version
once more. If the third load also fails, all ranks refuse to serve.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from dbuffer.engine.contract import EngineRank, ModelState, describe_weights
from dbuffer.engine.engine_options import EngineOptions, UpdateRequest, rank_id
from dbuffer.engine.rank_channel import RANK_TIMEOUT_S
from dbuffer.engine.rank_model import RankModel
from dbuffer.errors import (
    DBufferError,
    EngineBrokenError,
    EngineBusyError,
    EngineUpdateError,
    OptionError,
    RankFailedError,
    VersionError,
    WeightsMismatchError,
)
from dbuffer.format.lineage import Lineage, VersionId, number_of
from dbuffer.format.manifest import ReceiverRecord
from dbuffer.receive.stager import Staged, Stager
from dbuffer.runtime.messages import described, listed
from dbuffer.runtime.timing import TIMING
from dbuffer.store.records import RecordFile

logger = logging.getLogger(__name__)


_MAX_ROUNDS = 5
_NETWORK_LAG_S = 5.0
"""Longest delay until a host sees the newest version on a network mount."""


class _Offer(NamedTuple):
    """Result of the *prepare* phase on one rank, which the rank sends to all ranks."""

    version: int | None
    """Number of the version that the rank is ready to load, or of its model's version if that is
    recent enough."""
    id: str = ""
    problem: str | None = None
    unused: dict[str, str | None] = {}  # noqa: RUF012 - never changed
    differing: dict[str, str] = {}  # noqa: RUF012


class RankReceiver:
    """Follows a store for one rank of an engine.

    Call the methods on all ranks, in the worker's main thread. Only :meth:`acknowledge` may be
    called in any thread.
    """

    def __init__(self, rank: EngineRank, options: EngineOptions, state: ModelState) -> None:
        self.ranks = rank.ranks
        self.ranks.timeout_s = RANK_TIMEOUT_S + options.timeout_s
        self.options = options
        engine_id, instance_id = options.engine_id, options.instance_id
        assert engine_id is not None  # noqa: S101 - set by the endpoint
        assert instance_id is not None  # noqa: S101
        self._state = state
        self._model = RankModel(rank, options, state)
        self._attempt: str | None = None
        self._is_on_trial = options.canary is not None
        self._attests = options.attests(on_device=rank.on_device)
        # Start the mirror before this receiver reads local_store. The start returns once no version
        # of a replaced run is left there.
        self._mirror = options.start_mirror()
        receiver = options.make_receiver(rank_id(engine_id, self.ranks.rank))
        token = options.record_token
        receiver.record.write(part_of=engine_id, token=token, is_ephemeral=True)
        self._rank_record = receiver.record
        # The engine's record, which only its first rank writes.
        self._record = RecordFile(receiver.store, engine_id)
        self._record.set(
            token=token,
            is_ephemeral=instance_id in engine_id,
            only_version=options.version,
            every=options.every,
            when=dict(options.when or {}),
            problem=state.broken,
        )
        self._write_record()
        copy: bool | Literal["auto"] = "auto"
        if options.staging in ("map", "copy"):
            copy = options.staging == "copy"
        elif options.skips and options.until_done:
            copy = True  # copy: a sender waits for receivers that keep a version mapped
        may_use_device = rank.on_device and rank.reports_sleep and options.staging == "auto"
        self._stager = Stager(
            receiver,
            check=self._model.check,
            prepare=self._model.prepare,
            copy=copy,
            device=rank.device if may_use_device or options.staging == "device" else None,
            pin_memory=rank.device.type == "cuda" and options.staging != "map",
            forked=options.forked,
            version=options.version,
            choose=partial(options.choose, store=options.buffer_of(options.read_store)),
            # If the engine skips versions, or stays on one, do not stage its present version once
            # more: this rank would keep the copy for long, and the sender would wait for it.
            applied=self._id if options.skips or self._version == options.version else None,
            on_found=self._show_engine,
            attest=self._model.attest if self._attests else None,
        )

    def close(self) -> None:
        self._stager.close()
        self._model.close()
        self._record.close()
        if self._mirror is not None:
            self._mirror.close()

    # Weights of this rank

    @property
    def _applied(self) -> Lineage | None:
        return self._state.version_of(self.options.store)

    @property
    def _version(self) -> int | None:
        return None if self._id is None else self._id.number

    @property
    def _id(self) -> VersionId | None:
        return None if self._applied is None else self._applied.id

    @property
    def _serves_on(self) -> str:
        return f"the engine serves on with {describe_weights(self._applied)}"

    # Before a switch

    def catch_up(self) -> None:
        """Switch a starting engine to the version of the option ``version``, or to the newest."""
        # Every rank must take part in the gather, even if it has no mirror.
        if self.options.local_store is not None:
            mirror, timeout_s = self._mirror, self.options.timeout_s
            wait = partial(mirror.wait_until_current, timeout_s) if mirror else lambda: None
            problems = self._on_all_ranks(wait)
            if any(problems):
                raise EngineUpdateError(
                    f"the newest version did not arrive in the local store: {by_rank(problems)}"
                )
        newest = 0
        with contextlib.suppress(DBufferError, OSError):
            goal = self._stager.goal()
            newest = 0 if goal is None else goal.number
        newest = max(self.ranks.gather(newest))
        version = self.options.version or newest
        if newest and newest >= version:
            self.update(UpdateRequest(at_least=version))
            self._stager.leave_device()  # the engine is about to allocate its caches there

    def reserve(self, request: UpdateRequest) -> None:
        """Until the update, which follows in a pause, let no newer version replace the ready one.

        Raise :class:`EngineUpdateError` if this rank is already preparing a newer version instead.
        """
        request = self.options.admit(request)
        if not self._has_already(request) and not self._stager.reserve(request.goal or 1):
            raise EngineUpdateError(f"rank {self.ranks.rank} is staging a newer version")

    # A switch

    def update(self, request: UpdateRequest | OptionError) -> None:
        """Switch the engine to a version, unless it has the version.

        The engine must not be generating.

        If a follower made the request (``request.attempt`` is set), it asks later to write the
        engine's record. For other requests, this method writes the record at once. In place of an
        invalid request, pass its error: all ranks then refuse the request.

        Raises:
            OptionError: (a ``ValueError``) all ranks got an invalid request.
            EngineBusyError: the weights are asleep.
            EngineUpdateError: the switch failed, and the engine serves its old weights.
            EngineBrokenError: the engine refuses to serve until an update succeeds.
        """
        self._attempt = request.attempt if isinstance(request, UpdateRequest) else None
        self._state.is_updating = True
        try:
            staged = self._take_on_all_ranks(request)
            stats = {} if staged is None else self._load_on_all_ranks(staged)
            self._set_record(stats=stats, problem=None, problem_version=None)
            if self._attempt is None:
                self.acknowledge()
        except RankFailedError as error:
            # The failed rank may continue, and load the version alone: ranks would then differ.
            raise EngineBrokenError(self._refuse(str(error))) from None
        except (EngineUpdateError, EngineBrokenError, EngineBusyError, OptionError):
            # All ranks raise this error, so the record is right, and names the attempt. After any
            # other error, the weights of other ranks are unknown: the record must not name it.
            self._write_record()
            raise
        finally:
            self._state.is_updating = False
            self._stager.release(applied=self._id)

    def _take_on_all_ranks(self, request: UpdateRequest | OptionError) -> Staged | None:
        """Take the same staged version on all ranks, or raise an error on all ranks.

        Return None if the engine has the version.
        """
        must_load = False
        for round_ in range(_MAX_ROUNDS):
            staged, error = self._take(request, must_load=must_load, is_first=round_ == 0)
            offers = self._gather_offers(staged, error, begins=round_ == 0)
            versions = {offer.version or 0 for offer in offers}
            ids = {offer.id for offer in offers}
            if len(versions) > 1:
                must_load, highest = False, max(versions)
                named = [offer.id for offer in offers if offer.version == highest and offer.id]
                run = VersionId.parse(named[0]).run if named else None
                request = UpdateRequest(version=highest, run=run)
                # Let all ranks take the highest version. A rank that has staged this version
                # does not release it, so that the version stays in the store.
                if staged is None or staged.version != highest:
                    self._stager.release()
            elif len(ids) > 1:
                # All ranks named the same number, but different ids: take the version again. Either
                # the ids are of two runs, or some ranks sent an empty id, because they have loaded
                # the version already. In the second case, all ranks must load it.
                must_load = "" in ids
                self._stager.release()
            else:
                if staged is not None:
                    self._check_pipeline(staged, offers)
                return staged
        raise EngineUpdateError(
            f"the ranks took different versions {_MAX_ROUNDS} times (at last {versions}); "
            f"{self._serves_on}"
        )

    def _take(
        self, request: UpdateRequest | OptionError, *, must_load: bool, is_first: bool
    ) -> tuple[Staged | None, Exception | None]:
        try:
            if isinstance(request, OptionError):
                raise request
            request = self.options.admit(request)
            self._state.require_awake()
            # The last comparison may have found wrong weights, which the follower may not know yet.
            if self._is_compared and self._stager.differing:
                self._note_other_weights(listed(self._stager.differing))
            if is_first and request.version is not None:
                self._require_published(request.version)
            if self._has_already(request) and not must_load:
                return None, None
            is_exact, goal = request.version is not None, request.goal
            staged = self._stager.take(
                goal if is_exact else None,
                at_least=None if is_exact else goal,
                timeout_s=self.options.timeout_s,
            )
            if not self._model.is_loadable(staged):
                logger.warning(
                    "rank %d reads the whole version %d again, while the engine is paused: the "
                    "rank's parameters have moved, or were lost, since it staged the version",
                    self.ranks.rank,
                    staged.version,
                )
                version = staged.id
                del staged  # never keep two versions in memory at once
                staged = self._take_whole(version)
        # Return any error instead of raising it: all ranks wait for this rank's answer.
        except Exception as error:  # noqa: BLE001
            return None, error
        return staged, None

    def _require_published(self, version: int) -> None:
        """Raise :class:`VersionError` for an unpublished version: the paused engine cannot wait."""
        origin = self.options.buffer_of(self.options.store)
        may_lag_s = 0.0 if origin.medium.maps_files else _NETWORK_LAG_S
        deadline = time.monotonic() + may_lag_s
        while True:
            pointer = origin.newest_pointer() if origin.exists() else None
            newest = 0 if pointer is None else pointer.version
            if newest >= version:
                return
            if time.monotonic() > deadline:
                raise VersionError(
                    f"version {version} was not published in {self.options.store}: the newest is "
                    f"{newest or 'none'}"
                )
            time.sleep(TIMING.stop_check_s)

    def _has_already(self, request: UpdateRequest) -> bool:
        has, goal = self._applied, request.goal or self._stager.goal()
        if goal is None:
            to_take = " that this engine takes" if self.options.skips else ""
            raise VersionError(f"nothing{to_take} was published in {self.options.store} yet")
        if has is None:
            return False
        newest = self._stager.newest() if request.run is None else None
        if newest is not None and self.options.has_forked(has, newest.lineage):
            return False
        if not self.options.has(has, goal):
            return False
        if has.id.number > number_of(goal) and request.version is not None:
            raise VersionError(
                f"version {number_of(goal)} of {self.options.store} is older than version "
                f"{has.id.number}, which the engine has; versions never go back"
            )
        return self._state.broken is None

    def _gather_offers(
        self, staged: Staged | None, error: Exception | None, *, begins: bool
    ) -> list[_Offer]:
        """Exchange offers, the results of *prepare*, with all ranks.

        Return the offers, or raise an error if a rank has a problem. If the request is invalid on
        all ranks, raise :class:`OptionError`: vLLM's contract requires a ``ValueError``.
        """
        offer = _Offer(self._version)
        if staged is not None:
            offer = _Offer(staged.version, str(staged.id), None, *self._model.unread(staged))
        elif error is not None:
            logger.warning("rank %d cannot prepare a version: %s", self.ranks.rank, str(error))
            offer = offer._replace(problem=described(error))
        offers = [_Offer(*answer) for answer in self.ranks.gather(offer, begins=begins)]
        problems = [offer.problem for offer in offers]
        if not any(problems):
            return offers
        if all(problems) and isinstance(error, OptionError | EngineBusyError):
            raise error
        message = f"{self._describe('prepare', problems)}; no rank was touched"
        if self._state.broken is not None:
            raise EngineBrokenError(f"{message}; {self._state.broken}")
        raise EngineUpdateError(f"{message}, and {self._serves_on}")

    def _check_pipeline(self, staged: Staged, offers: Sequence[_Offer]) -> None:
        try:
            unused, differing = zip(*((o.unused, o.differing) for o in offers), strict=True)
            self._model.unused.check_pipeline(staged.layout, unused, differing)
        except WeightsMismatchError as error:
            raise EngineUpdateError(
                f"engine {self.options.engine_id} could not prepare: {error}; no rank was touched, "
                f"and {self._serves_on}"
            ) from None

    def _load_on_all_ranks(self, staged: Staged) -> dict[str, float]:
        started = time.monotonic()
        try:
            failures = self._on_all_ranks(lambda: self._model.load(staged))
        except BaseException as error:  # Ctrl-C, or ranks that cannot be reached
            self._refuse(f"loading version {staged.version} was interrupted by {error!r}")
            raise
        if any(failures):
            failure = self._describe(f"load version {staged.version}", failures)
            staged = self._recover(failure, staged)
        self._state.note_loaded(staged.lineage, self.options.store, staged.metadata)
        self._is_on_trial = self.options.canary is not None
        self._note_unattested()
        self._use_device()
        self._model.serve_again()
        return {
            "load_s": time.monotonic() - started,
            "stage_s": staged.duration_s,
            "bytes": staged.num_bytes,
        }

    def _recover(self, failure: str, staged: Staged) -> Staged:
        """After a failed load, make all ranks load equal weights again.

        First try the previous version or, if the engine had no version of this store, the weights
        of its start. If this works, raise :class:`EngineUpdateError`. If it fails, or the previous
        weights are unknown, load ``staged`` once more. If that works, return ``staged``. If not,
        refuse to serve, and raise :class:`EngineBrokenError`.
        """
        attempts = [failure, "the engine's earlier weights are not a version of this store"]
        if not self._state.must_reload:
            before = self._applied
            goal = "the checkpoint" if before is None else describe_weights(before)
            logger.error("%s; going back to %s", failure, goal)
            failures = self._on_all_ranks(lambda: self._load_again(before and before.id))
            if not any(failures):
                self._model.serve_again()
                problem = f"{failure}; all ranks went back, and {self._serves_on}"
                self._record.set(problem=problem, problem_version=staged.id)
                raise EngineUpdateError(problem)
            attempts[1] = self._describe(f"go back to {goal}", failures)
        logger.error("%s; loading version %s once more", attempts[1], staged.version)
        failures = self._on_all_ranks(lambda: self._load_again(staged.id))
        if not any(failures):
            return staged
        attempts.append(self._describe(f"load version {staged.version} once more", failures))
        raise EngineBrokenError(self._refuse("; ".join(attempts)))

    def _load_again(self, goal: VersionId | None) -> None:
        self._note_unattested()
        if goal is not None:
            self._model.load_again(self._take_whole(goal))
        else:
            self._model.load_checkpoint()
            self._state.note_loaded(None, self.options.store, {})

    def _take_whole(self, version: VersionId) -> Staged:
        self._stager.release()
        return self._stager.take(version, needs_tensors=True, timeout_s=self.options.timeout_s)

    def _refuse(self, reason: str) -> str:
        broken = f"half-loaded weights: {reason}; update again, or restart the engine"
        self._model.refuse_to_serve(broken)
        self._record.set(problem=broken, problem_version=None)
        self._write_record()
        return broken

    def _on_all_ranks(self, action: Callable[[], None]) -> list[str | None]:
        problem = None
        try:
            action()
        except Exception as error:
            logger.warning("rank %d failed", self.ranks.rank, exc_info=True)
            problem = described(error)
        return self.ranks.gather(problem)

    def _describe(self, step: str, problems: list[str | None]) -> str:
        return f"engine {self.options.engine_id} could not {step}: {by_rank(problems)}"

    # After a switch

    def attest(self) -> bool:
        """Note in the engine's record whether all ranks' weights equal the version.

        If a rank has not compared its weights yet, do nothing, and return False. If a rank's
        weights differ, treat the engine's weights as unknown, write the record, and return False.
        Otherwise return True: the caller must write the record.
        """
        result = [self._stager.differing] if self._is_compared else None
        answers = self.ranks.gather(result, begins=True)
        results = [answer[0] for answer in answers if answer is not None]
        if self._id is None or len(results) < self.ranks.size:
            return False
        if any(results):
            by_ranks = by_rank([listed(names) if names else None for names in results])
            self._note_other_weights(by_ranks)
            return False  # the record already has the result
        attested_at = None if None in results else time.time()
        self._set_record(is_attestable=False, attested_at=attested_at)
        return True

    @property
    def _is_compared(self) -> bool:
        """Whether this rank's weights were compared with the version that the rank has loaded."""
        return self._id is not None and self._stager.compared == self._id

    def _note_unattested(self) -> None:
        """Clear the result of the last attestation, because new weights were loaded."""
        self._stager.compared = None
        self._record.set(attested_at=None, is_attestable=self._attests)

    def _note_other_weights(self, differing: str) -> None:
        logger.error(
            "%s served other weights than version %s of %s under the version's label: %s; all "
            "weights are loaded again",
            self.options.engine_id,
            self._version,
            self.options.store,
            differing,
        )
        self.note_foreign_load("an attestation that found other weights")

    def note_foreign_load(self, cause: str) -> None:
        if self._version is not None:
            logger.warning(
                "rank %d no longer has version %d of %s after %s: its weights are unknown until "
                "the next update",
                self.ranks.rank,
                self._version,
                self.options.store,
                cause,
            )
        self._model.note_foreign_load()
        self._record.set(attested_at=None, is_attestable=False)
        self._stager.stage_again()
        self._write_record()

    def note_asleep(self) -> None:
        """Free dbuffer's memory on the device, before a part of the engine's memory falls asleep.

        First, wait until no thread reads the weights.
        """
        with self._model.reading:
            pass
        self._stager.leave_device()

    def note_awake(self, *, weights: bool) -> None:
        """Use the device's memory again, if no part of the engine's memory is asleep.

        If the weights woke, also stage again: during their sleep, no version could be prepared.
        """
        self._use_device()
        if weights:
            self._stager.stage_again(applied=self._id)

    def _use_device(self) -> None:
        if not self._state.asleep:  # a part that sleeps needs its memory again when it wakes
            self._stager.use_device()

    # Records

    @property
    def engine_record(self) -> ReceiverRecord | None:
        """The engine's record, even if it is not in the store yet.

        None on all ranks but the first.
        """
        return self._record.current if self.ranks.rank == 0 else None

    def accept(self) -> None:
        """Note in the engine's record that the canary has accepted the engine's version.

        Call :meth:`acknowledge` to write the record.
        """
        self._is_on_trial = False
        self._set_record()

    def acknowledge(self) -> None:
        """Write the engine's record, which senders wait for. Any thread may call this method."""
        if self.ranks.rank == 0:
            self._record.write()

    def record_problem(self, problem: str) -> None:
        """Record why an update failed, for an engine that does not pass on the ranks' answers."""
        if self.ranks.rank == 0:
            self._record.write(problem=problem)

    def write_records(self) -> None:
        """Write this rank's records again, because the store may have been replaced by a copy.

        Leave out the problem of an earlier request. SGLang passes on no answers, so that its
        follower would take the problem for a refusal to follow.
        """
        self._rank_record.write()
        self._record.set(problem=self._state.broken, problem_version=None)
        self.acknowledge()

    def _show_engine(self) -> None:
        """Write the engine's record, if it was not written when the engine began to follow.

        At that time, the store may not have existed yet. Don't wait for the first update: if no
        version fits the model, there is no update, and senders must see why.
        """
        if not self._record.is_open:
            self.acknowledge()

    def _write_record(self) -> None:
        self._set_record()
        self.acknowledge()

    def _set_record(self, **changes: Any) -> None:
        applied = self._applied
        on_trial = self._is_on_trial and applied is not None
        self._record.set(
            applied=applied and applied.id,
            runs=list(applied.runs) if applied else [],
            metadata=self._state.metadata if applied else {},
            state="broken" if self._state.broken else "on_trial" if on_trial else "serving",
            attempt=self._attempt,
            **changes,
        )


def by_rank(problems: Sequence[str | None]) -> str:
    """Join the problems of all ranks in one line."""
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)
