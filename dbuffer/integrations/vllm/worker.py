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
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from dbuffer.errors import (
    DBufferError,
    EngineBrokenError,
    EngineUnsupportedError,
    EngineUpdateError,
    VersionError,
)
from dbuffer.integrations.vllm.model import EngineModel, ShapeCheck
from dbuffer.integrations.vllm.options import (
    HALF_LOADED,
    EngineOptions,
    UpdateRequest,
    default_engine_id,
)
from dbuffer.integrations.vllm.ranks import Ranks
from dbuffer.records import RecordFile
from dbuffer.stager import Staged, Stager

logger = logging.getLogger(__name__)

_MAX_ROUNDS = 5
"""How often ranks that found different versions may try to meet in the newest of them."""


def _engine_id(vllm_config: Any, options: EngineOptions) -> str:
    """The engine's name among the store's receivers; the same on all of its ranks."""
    name = options.engine_id or default_engine_id(vllm_config.instance_id)
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1:
        name += f".dp-{parallel.data_parallel_rank}"
    return name


class RankReceiver:
    """Follows a store for one rank of an engine.

    Its methods are called on all ranks, from the worker's main thread.
    """

    def __init__(self, vllm_config: Any, model: Any, device: Any, options: EngineOptions) -> None:
        self.ranks = Ranks(vllm_config)
        self._options = options
        self._model = EngineModel(vllm_config, model)
        self._places = self._model.places()
        self._applied: int | None = None
        self._broken: str | None = None
        self.engine_id = _engine_id(vllm_config, options)
        on_device = device.type != "cpu"
        self._stager = Stager(
            options.store,
            receiver_id=f"{self.engine_id}.rank-{self.ranks.rank}",
            part_of=self.engine_id,
            check=ShapeCheck(vllm_config),
            copy={"auto": "auto", "map": False, "copy": True}[options.staging],  # type: ignore[arg-type]
            pin_memory=on_device and options.staging != "map",
            poll_interval_s=options.poll_interval_s,
            verify=options.verify,
            num_threads=options.num_threads,
            allow_shared_store=options.allow_shared_store,
        )
        # The engine's own record: what it serves. Its first rank keeps it.
        self._record = RecordFile(self._stager.store, self.engine_id)
        self._record_engine()

    @property
    def applied(self) -> int | None:
        """The version that the engine serves; None: what it was started with."""
        return self._applied

    def catch_up(self) -> None:
        """Switch to the newest version, if there is one; for an engine that is just starting.

        Raises:
            EngineUpdateError, EngineBrokenError: see :meth:`update`.
        """
        if any(self.ranks.gather(self._stager.newest_or_none())):
            self.update(UpdateRequest())

    def update(self, request: UpdateRequest) -> None:
        """Switch the engine to a version. Nothing may be generating.

        A version that the engine already has is no error, and nothing is loaded.

        Raises:
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

    def _prepare(self, request: UpdateRequest) -> Staged | None:
        """Take the same version on all ranks, or raise on all; None: the engine has it already."""
        for _ in range(_MAX_ROUNDS):
            staged, problem = self._take(request)
            answers = self.ranks.gather((staged.version if staged else self._applied, problem))
            self._require_no_problem([problem for _, problem in answers], "prepare")
            versions = {version for version, _ in answers}
            if len(versions) == 1:
                return staged
            # Some rank holds the highest, so it stays in the store until all others do as well.
            self._stager.give_back()
            request = UpdateRequest(version=max(version or 0 for version in versions))
        raise EngineUpdateError(f"ranks found different versions {_MAX_ROUNDS} times: {versions}")

    def _take(self, request: UpdateRequest) -> tuple[Staged | None, str | None]:
        try:
            if self._has_already(request):
                return None, None
            staged = self._stager.take(
                request.version, at_least=request.at_least, timeout_s=self._options.timeout_s
            )
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
        failures = self._on_all_ranks(lambda: self._model.load(staged.tensors))
        if any(failures):
            self._go_back(f"load version {staged.version}", failures)
        self._applied = staged.version
        self._is_whole_again()
        self._record_engine(
            load_s=time.monotonic() - started,
            stage_s=staged.duration_s,
            bytes=staged.num_bytes,
        )

    def _go_back(self, step: str, failures: list[str | None]) -> NoReturn:
        """Bring back the version before, after a failed load."""
        what = self._describe(step, failures)
        logger.error("%s; going back to version %s", what, self._applied)
        self._stager.give_back()
        repairs = self._on_all_ranks(self._load_last)
        if any(repairs):
            why = self._describe(f"go back to version {self._applied}", repairs)
            self._broken = f"{HALF_LOADED}: {what}; {why}; update again, or restart the engine"
            self._model.refuse_to_serve(self._broken)
            raise EngineBrokenError(self._broken)
        self._is_whole_again()
        raise EngineUpdateError(f"{what}; the engine has version {self._applied} again")

    def _is_whole_again(self) -> None:
        self._broken = None
        self._model.serve_again()

    def _load_last(self) -> None:
        if self._applied is None:
            self._model.load_checkpoint()
        else:
            last = self._stager.take(self._applied, timeout_s=self._options.timeout_s)
            self._model.load(last.tensors)
        if self._model.places() != self._places:
            raise EngineBrokenError("parameters were left at other places in memory")

    def _on_all_ranks(self, action: Callable[[], None]) -> list[str | None]:
        """Do it on every rank; what went wrong on each."""
        problem = None
        try:
            action()
        except Exception as error:
            logger.warning("rank %d failed", self.ranks.rank, exc_info=True)
            problem = f"{type(error).__name__}: {error}"
        return self.ranks.gather(problem)

    def _require_no_problem(self, problems: list[str | None], step: str) -> None:
        if any(problems):
            raise EngineUpdateError(
                f"{self._describe(step, problems)}; no rank was touched, and the engine serves on "
                f"with version {self._applied}"
            )

    def _describe(self, step: str, problems: list[str | None]) -> str:
        failed = "; ".join(f"rank {rank}: {why}" for rank, why in enumerate(problems) if why)
        return f"engine {self.engine_id} could not {step}: {failed}"

    def _record_engine(self, **stats: float) -> None:
        if self.ranks.rank == 0:
            self._record.set(applied_version=self._applied, stats=stats)
            self._record.write()


def start_on_all_ranks(
    vllm_config: Any, model: Any, device: Any, options: EngineOptions
) -> RankReceiver:
    """Begin to follow a store on all ranks, or on none.

    Raises:
        EngineUnsupportedError: some rank cannot.
    """
    receiver, problem = None, None
    try:
        receiver = RankReceiver(vllm_config, model, device, options)
    except Exception as error:
        logger.warning("cannot follow %s", options.store, exc_info=True)
        problem = f"{type(error).__name__}: {error}"
    problems = Ranks(vllm_config).gather(problem)
    if receiver is not None and not any(problems):
        return receiver
    if receiver is not None:
        receiver.close()
    failed = "; ".join(f"rank {rank}: {why}" for rank, why in enumerate(problems) if why)
    raise EngineUnsupportedError(f"the engine cannot follow {options.store}: {failed}")


@contextlib.contextmanager
def raising_once(may_raise: bool) -> Iterator[None]:
    """Let an error out on one rank only; see :class:`Ranks`. All of them have logged it."""
    try:
        yield
    except DBufferError:
        if may_raise:
            raise
