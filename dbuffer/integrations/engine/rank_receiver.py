"""`RankReceiver`: the receiver in one worker, and how all ranks of an engine switch as one.

A switch has two halves. *Prepare*: every rank takes the version from its stager, where it has been
held, checked against its checksums and against the model's shapes while the engine served; then
all ranks tell each other. If one cannot, none goes on, and the engine serves on as it was.
*Commit*: every rank loads; then all tell each other again. If one failed there, all go back to the
version before; if that fails too, all refuse to serve.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch

from dbuffer.buffer import DoubleBuffer
from dbuffer.errors import (
    DBufferError,
    EngineBrokenError,
    EngineUnsupportedError,
    EngineUpdateError,
    OptionError,
    VersionError,
)
from dbuffer.integrations.engine.options import HALF_LOADED, SERVES_ON, EngineOptions, UpdateRequest
from dbuffer.integrations.engine.ranks import Ranks
from dbuffer.layout import Layout, TensorSpec
from dbuffer.mirror import Mirror
from dbuffer.records import RecordFile
from dbuffer.snapshot import Snapshot
from dbuffer.stager import Staged, Stager
from dbuffer.targets import Brought, refuse_adapter

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_ROUNDS = 5
"""How often ranks that found different versions may try to meet in the newest of them."""


class ServingModel(Protocol):
    """The model of one rank, as it serves; called between two steps of the engine."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Swap in the weights of one version. A failure leaves a mix, to be repaired at once."""
        ...

    def load_checkpoint(self) -> None:
        """Swap in the weights that the engine was started with, from where it read them."""
        ...

    def refuse_to_serve(self, reason: str) -> None:
        """Let every step of this model fail, and say why, until :meth:`serve_again`."""
        ...

    def serve_again(self) -> None:
        """Take :meth:`refuse_to_serve` back, after whole weights were loaded."""
        ...


class EngineRank(Protocol):
    """What a receiver needs to know of the rank that it is in."""

    @property
    def ranks(self) -> Ranks:
        """All ranks of the engine."""
        ...

    @property
    def on_device(self) -> bool:
        """Its weights are not in main memory."""
        ...

    def engine_id(self, options: EngineOptions) -> str:
        """The engine's name among the store's receivers; the same on all of its ranks."""
        ...

    def make_model(self, before: ServingModel | None) -> ServingModel:
        """The model, to swap weights in; ``before`` is what an earlier receiver swapped them in."""
        ...

    def make_check(self, *, partial: bool) -> Callable[[Sequence[TensorSpec]], None]:
        """What tells, while the model serves, whether weights fit it, all or a part of them."""
        ...


class Serving(NamedTuple):
    """What one rank's model has, from one receiver to the next."""

    model: ServingModel
    version: int | None = None
    """Out of the store; None: what the engine was started with."""
    broken: str | None = None
    """Why it refuses to serve."""
    brought: Brought | None = None
    """What versions have brought, of whichever store."""


class RankReceiver:
    """Follows a store for one rank of an engine.

    Its methods are called on all ranks, from the worker's main thread.
    """

    def __init__(
        self, rank: EngineRank, options: EngineOptions, serving: Serving, engine_id: str
    ) -> None:
        self.ranks = rank.ranks
        self._options = options
        self._model = serving.model
        self._applied = serving.version
        self._broken = serving.broken
        self._brought = serving.brought or Brought()
        self._fits = rank.make_check(partial=options.partial)
        self.engine_id = engine_id
        # Before anything is read: it puts away what an earlier run may have left there.
        self._mirror = options.start_mirror()
        self._stager = Stager(
            options.read_store,
            receiver_id=f"{self.engine_id}.rank-{self.ranks.rank}",
            part_of=self.engine_id,
            check=self._check,
            copy={"auto": "auto", "map": False, "copy": True}[options.staging],  # type: ignore[arg-type]
            pin_memory=rank.on_device and options.staging != "map",
            poll_interval_s=options.poll_interval_s,
            verify=options.verify,
            num_threads=options.num_threads,
            allow_shared_store=options.allow_shared_store,
        )
        # The engine's own record: what it serves. Its first rank keeps it.
        self._record = RecordFile(self._stager.store, self.engine_id)
        self._record_engine()

    def serving(self, store: str) -> Serving:
        """What the model has, as far as a receiver of ``store`` can go on with it.

        A store that was emptied since knows nothing of it: its record of the engine went too.
        """
        view = DoubleBuffer(self._stager.store, allow_shared_store=True)
        says = None
        with contextlib.suppress(DBufferError):  # every rank must come to the gather
            record = view.receiver(self.engine_id)
            says = None if record is None else record.applied_version
        is_same = self.ranks.gather(says)[0] == self._applied and store == self._options.store
        applied = self._applied if is_same else None
        return Serving(self._model, applied, self._broken, self._brought)

    def catch_up(self) -> None:
        """Switch to the newest version, if there is one; for an engine that is just starting.

        Raises:
            EngineUpdateError, EngineBrokenError: see :meth:`update`.
        """
        if self._mirror is not None:
            problem = self._problem_of_mirror(self._mirror)
            problems = self.ranks.gather(problem)
            if any(problems):
                raise EngineUpdateError(f"the newest weights did not come: {_by_rank(problems)}")
        newest = max(version or 0 for version in self.ranks.gather(self._stager.newest_or_none()))
        if newest:
            self.update(UpdateRequest(at_least=newest))

    def update(self, request: UpdateRequest | OptionError) -> None:
        """Switch the engine to a version. Nothing may be generating.

        A version that the engine already has is no error, and nothing is loaded. A rank that was
        given a bad request comes with what is wrong with it: the others wait to hear of it.

        Raises:
            OptionError: (a ``ValueError``) the request was bad on all ranks.
            EngineUpdateError: the engine serves on with the weights that it had.
            EngineBrokenError: it refuses to serve, until an update succeeds.
        """
        try:
            staged = self._prepare(request)
            if staged is not None:
                self._commit(staged)
        finally:
            self._stager.give_back(applied=self._applied)

    def close(self) -> None:
        """Stop following. What the engine acknowledged stays in the store."""
        self._stager.close()
        if self._mirror is not None:
            self._mirror.close()

    def _check(self, snapshot: Snapshot) -> None:
        """Refuse a version that cannot be loaded; in the stager's thread, while the engine serves.

        Raises:
            WeightsMismatchError: it does not fit, or would leave a mix.
        """
        refuse_adapter(snapshot.metadata)
        layout = snapshot.layout
        self._require_no_mix(layout, snapshot.version)
        offered = self._under_all_names({spec.name: spec for spec in layout.specs}, layout)
        self._fits([spec._replace(name=name) for name, spec in offered])

    def _require_no_mix(self, layout: Layout, version: int) -> None:
        if self._options.partial:
            self._brought.require_all(layout.all_names, version)

    def _under_all_names(self, stored: Mapping[str, T], layout: Layout) -> Iterator[tuple[str, T]]:
        """What a version holds, as it is offered to the model.

        A model takes a tied tensor under one of its names and skips the other; which, is its own
        business. That it skipped what came shows where all must come, and not where less will do.
        """
        yield from stored.items()
        if self._options.partial:
            yield from ((alias, stored[name]) for alias, name in layout.aliases.items())

    def _load(self, staged: Staged) -> None:
        self._brought.note(staged.layout.all_names, staged.version)
        self._model.load(self._under_all_names(staged.tensors, staged.layout))

    def _problem_of_mirror(self, mirror: Mirror) -> str | None:
        try:
            mirror.wait_until_current(self._options.timeout_s)
        except (DBufferError, OSError) as error:  # every rank must come to the gather
            return str(error)
        return None

    def _prepare(self, request: UpdateRequest | OptionError) -> Staged | None:
        """Take the same version on all ranks, or raise on all; None: the engine has it already."""
        for _ in range(_MAX_ROUNDS):
            staged, problem = self._take(request)
            version = staged.version if staged else self._applied
            answers = self.ranks.gather((version, staged.identity if staged else "", problem))
            self._require_no_problem(request, [problem for _, _, problem in answers])
            if len({(version, identity) for version, identity, _ in answers}) == 1:
                return staged
            versions = {version or 0 for version, _, _ in answers}
            highest = max(versions)
            # Some rank holds the highest, so it stays in the store until all do; but a store that
            # was replaced may have two of one number.
            if len(versions) == 1 or version != highest:
                self._stager.give_back()
            if len(versions) > 1:
                request = UpdateRequest(version=highest)
        raise EngineUpdateError(
            f"ranks found different weights {_MAX_ROUNDS} times, versions {versions}; {SERVES_ON} "
            f"{self._applied}"
        )

    def _take(self, request: UpdateRequest | OptionError) -> tuple[Staged | None, str | None]:
        try:
            if isinstance(request, OptionError):
                raise request
            if self._has_already(request):
                return None, None
            staged = self._stager.take(
                request.version, at_least=request.at_least, timeout_s=self._options.timeout_s
            )
            # Once more: it may have been checked before the version before it was loaded.
            self._require_no_mix(staged.layout, staged.version)
        # All ranks must hear of it, whatever it is; else they would wait for this one.
        except Exception as error:  # noqa: BLE001
            logger.warning("rank %d cannot prepare: %s", self.ranks.rank, error)
            return None, f"{type(error).__name__}: {error}"
        return staged, None

    def _has_already(self, request: UpdateRequest) -> bool:
        wanted = request.version or request.at_least or self._stager.newest()
        if wanted is None:
            raise VersionError(f"nothing was published in {self._options.store} yet")
        if self._applied is None or wanted > self._applied:
            return False
        if wanted < self._applied and request.version is not None:
            raise VersionError(
                f"version {wanted} of {self._options.store} is below version {self._applied}, "
                "which the engine has; versions never go back"
            )
        return self._broken is None

    def _commit(self, staged: Staged) -> None:
        started = time.monotonic()
        try:
            failures = self._on_all_ranks(lambda: self._load(staged))
        except BaseException as error:  # Ctrl-C, or ranks that cannot be reached: nobody knows
            self._refuse(f"loading version {staged.version} was interrupted by {error!r}")
            raise
        if any(failures):
            what = self._describe(f"load version {staged.version}", failures)
            staged = self._recover(what, staged)
        self._applied = staged.version
        self._is_whole_again()
        self._record_engine(
            load_s=time.monotonic() - started,
            stage_s=staged.duration_s,
            bytes=staged.num_bytes,
        )

    def _recover(self, what: str, staged: Staged) -> Staged:
        """After a failed load: the version before; or else, where it is gone, this one once more.

        Raises:
            EngineUpdateError: all ranks have the version before.
            EngineBrokenError: some rank has neither.
        """
        logger.error("%s; going back to version %s", what, self._applied)
        failures = self._on_all_ranks(lambda: self._load_again(self._applied))
        if not any(failures):
            self._is_whole_again()
            raise EngineUpdateError(f"{what}; all ranks went back, and {SERVES_ON} {self._applied}")
        why = self._describe(f"go back to version {self._applied}", failures)
        logger.error("%s; loading version %s once more", why, staged.version)
        failures = self._on_all_ranks(lambda: self._load_again(staged.version))
        if not any(failures):
            return staged
        again = self._describe(f"load version {staged.version} once more", failures)
        raise EngineBrokenError(self._refuse(f"{what}; {why}; {again}"))

    def _refuse(self, why: str) -> str:
        self._broken = f"{HALF_LOADED}: {why}; update again, or restart the engine"
        self._model.refuse_to_serve(self._broken)
        self._record_engine()
        return self._broken

    def _load_again(self, version: int | None) -> None:
        self._stager.give_back()
        if version is None or self._options.partial:
            # A partial version does not say what was under what a later one brought in addition.
            self._model.load_checkpoint()
            self._brought.forget()
        if version is not None:
            self._load(self._stager.take(version, timeout_s=self._options.timeout_s))

    def _is_whole_again(self) -> None:
        self._broken = None
        self._model.serve_again()

    def _on_all_ranks(self, action: Callable[[], None]) -> list[str | None]:
        """Do it on every rank; what went wrong on each."""
        problem = None
        try:
            action()
        except Exception as error:
            logger.warning("rank %d failed", self.ranks.rank, exc_info=True)
            problem = f"{type(error).__name__}: {error}"
        return self.ranks.gather(problem)

    def _require_no_problem(
        self, request: UpdateRequest | OptionError, problems: list[str | None]
    ) -> None:
        if not any(problems):
            return
        if isinstance(request, OptionError) and all(problems):
            raise request  # all were told so: a ValueError, as vLLM's contract has it
        what = f"{self._describe('prepare', problems)}; no rank was touched"
        if self._broken is not None:
            raise EngineBrokenError(f"{what}; {self._broken}")
        raise EngineUpdateError(f"{what}, and {SERVES_ON} {self._applied}")

    def _describe(self, step: str, problems: list[str | None]) -> str:
        return f"engine {self.engine_id} could not {step}: {_by_rank(problems)}"

    def record_session(self, is_open: bool) -> None:
        """Leave word of vLLM's own session: who finds it open, after a crash, can end it."""
        if self.ranks.rank == 0:
            self._record.write(in_session=is_open)

    def record_problem(self, problem: str) -> None:
        """Leave word of why an update failed, for who cannot be told in another way."""
        if self.ranks.rank == 0:
            self._record.write(problem=problem)

    def _record_engine(self, **stats: float) -> None:
        if self.ranks.rank == 0:
            self._record.write(applied_version=self._applied, problem=self._broken, stats=stats)


def start_on_all_ranks(
    rank: EngineRank, options: EngineOptions, before: RankReceiver | None = None
) -> RankReceiver:
    """Begin to follow a store on all ranks, or on none; after what was followed before.

    Raises:
        EngineUnsupportedError: some rank cannot.
    """
    receiver, problem = None, None
    engine_id = rank.engine_id(options)
    if before is None:
        serving = Serving(rank.make_model(None))
    else:
        serving = before.serving(options.store)
        serving = serving._replace(model=rank.make_model(serving.model))
        before.close()
    try:
        receiver = RankReceiver(rank, options, serving, engine_id)
    except Exception as error:
        logger.warning("cannot follow %s", options.store, exc_info=True)
        problem = f"{type(error).__name__}: {error}"
    problems = rank.ranks.gather(problem)
    if receiver is not None and not any(problems):
        return receiver
    if receiver is not None:
        receiver.close()
    raise EngineUnsupportedError(f"the engine cannot follow {options.store}: {_by_rank(problems)}")


def _by_rank(problems: list[str | None]) -> str:
    return "; ".join(f"rank {rank}: {why}" for rank, why in enumerate(problems) if why)
