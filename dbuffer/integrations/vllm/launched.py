"""`LaunchedFollower`: an engine of which each rank is an ``LLM``, in a process of torchrun's.

With ``distributed_executor_backend="external_launcher"`` an engine has no front end that reaches
all of its workers: each rank has one of its own, and all make the same calls. To follow a store
they must also decide alike, though each sees the store, its errors and the clock by itself. So the
engine's first rank decides, with a plain :class:`Follower`; what that wants of its engine is told
to all ranks, which do it to theirs and say how it went.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from dbuffer.errors import DBufferError, EngineUpdateError
from dbuffer.integrations.engine.follower import Follower
from dbuffer.integrations.engine.messages import EndRequest, RankAnswer, RankRequest
from dbuffer.integrations.engine.options import EngineOptions
from dbuffer.integrations.engine.protocol import PauseMode
from dbuffer.integrations.engine.ranks import RANK_TIMEOUT_S
from dbuffer.integrations.engine.reporting import Switch
from dbuffer.integrations.vllm.engines import OfflineVllm
from dbuffer.integrations.vllm.rank import WorkerRanks
from dbuffer.ranks.agreement import Agreement

T = TypeVar("T")
ArgumentT = TypeVar("ArgumentT")


_Order = tuple[Callable[..., Any], Any]
"""What all ranks are to do to their part of the engine: one of its methods, and its argument."""


@dataclass(frozen=True, slots=True)
class _PartOutcome:
    """What came of it on a rank, or of all of it on the first one."""

    value: Any = None
    error: Exception | None = None

    @classmethod
    def of(cls, action: Callable[[], Any]) -> Self:
        """Do something; what it returned or raised."""
        try:
            return cls(action())
        except DBufferError as error:
            return cls(error=error)
        except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it
            # vLLM's own may not pickle.
            return cls(error=EngineUpdateError(f"{type(error).__name__}: {error}"))


class LaunchedFollower:
    """Switches one engine when told to, as :class:`Follower` does. Every rank makes each call.

    Args:
        llm: this rank's.
        options: the store and so on; the same on all ranks.

    Raises:
        RankTimeoutError: a rank has not made one of these.
        RankFailedError: from any call: a rank was lost. The others must not be used any more
            either: vLLM's own collectives have lost it too.
    """

    def __init__(self, llm: Any, options: EngineOptions | None) -> None:
        self._mine = OfflineVllm(llm)
        ranks = WorkerRanks(llm.llm_engine.vllm_config)
        timeout_s = RANK_TIMEOUT_S + (options.timeout_s if options is not None else 0.0)
        self._agreement = Agreement(ranks.process_group, timeout_s=timeout_s)
        self._leader: Follower | None = None
        if self._agreement.rank == 0:
            self._leader = Follower(_AllRanks(self._agreement, llm), options)
        self.applied: int | None = None
        """The version that the engine serves; None: what it was started with."""

    def start(self) -> None:
        self._lead(lambda follower: follower.start())

    def sync(
        self, *, at_least: int | None = None, timeout_s: float | None = None, force: bool = False
    ) -> Switch | None:
        """As :meth:`Follower.sync`, on all ranks; of the arguments the first rank's count."""
        return self._lead(
            lambda follower: follower.sync(at_least=at_least, timeout_s=timeout_s, force=force)
        )

    def stop_workers(self) -> None:
        """Let this rank's worker look at the store no more; to follow again, make another of these.

        Here, and in `close`, no rank waits for another. The engine keeps its weights.
        """
        self._mine.do(EndRequest())

    def close(self) -> None:
        if self._leader is not None:
            self._leader.close()
        self._agreement.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _lead(self, call: Callable[[Follower], T]) -> T:
        """Let the first rank make a call, while all do what it asks for; what came of it."""
        leader = self._leader
        if leader is None:
            outcome = self._do_as_told()
        else:
            try:
                outcome = _PartOutcome.of(lambda: (call(leader), leader.applied))
            except BaseException:  # interrupted: the others must not wait for what comes next
                self._agreement.close()
                raise
            if self._agreement.is_open:
                self._agreement.first("end a call", lambda: outcome)
        if outcome.error is not None:
            raise outcome.error
        value, self.applied = outcome.value
        return value  # type: ignore[no-any-return]  # what `call` returned, if on another rank

    def _do_as_told(self) -> _PartOutcome:
        while True:
            told: _Order | _PartOutcome = self._agreement.first("hear what to do", _wait_for_first)
            if isinstance(told, _PartOutcome):
                return told
            _carry_out(self._agreement, self._mine, told)


class _AllRanks(OfflineVllm):
    """All parts of an engine, as the first rank's follower sees them.

    All ranks are in the same state, and what can be asked of one is asked of this rank's own.
    """

    def __init__(self, agreement: Agreement, llm: Any) -> None:
        super().__init__(llm)
        self._agreement = agreement

    def ask(self, request: RankRequest) -> list[RankAnswer]:
        answers = self._order(OfflineVllm.ask, request)
        return [answer for of_rank in answers for answer in of_rank]

    def pause(self, mode: PauseMode) -> None:
        self._order(OfflineVllm.pause, mode)

    def set_weight_version(self, version: str) -> None:
        self._order(OfflineVllm.set_weight_version, version)

    def _order(self, call: Callable[[OfflineVllm, ArgumentT], T], argument: ArgumentT) -> list[T]:
        """Let every rank make a call of its part; what each returned."""
        order = call, argument
        self._agreement.first("hear what to do", lambda: order)
        outcomes = _carry_out(self._agreement, self, order)
        if any(outcome.error is not None for outcome in outcomes):
            raise _joint(outcomes)
        return [outcome.value for outcome in outcomes]


def _carry_out(agreement: Agreement, mine: OfflineVllm, order: _Order) -> list[_PartOutcome]:
    call, argument = order
    return agreement.each(
        f"do {call.__name__}", lambda: _PartOutcome.of(lambda: call(mine, argument))
    )


def _joint(outcomes: Sequence[_PartOutcome]) -> Exception:
    """One error for all ranks: the common one, or the first with its rank's number."""
    errors = {rank: one.error for rank, one in enumerate(outcomes) if one.error is not None}
    rank, first = next(iter(errors.items()))
    if len(errors) == len(outcomes) and len({str(error) for error in errors.values()}) == 1:
        return first
    return type(first)(f"rank {rank}: {first}")


def _wait_for_first() -> Any:
    """What the first rank says is what counts."""
