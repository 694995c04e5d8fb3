"""`LaunchedFollower`: an engine of which each rank is an ``LLM``, in a process of torchrun's.

With ``distributed_executor_backend="external_launcher"`` an engine has no front end that reaches
all of its workers: each rank has one of its own, and all make the same calls. To follow a store
they must also decide alike, though each sees the store, its errors and the clock by itself. So the
engine's first rank decides, with a plain :class:`Follower`; its calls of the engine go to all
ranks, which make them of their own part and return the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from dbuffer import errors
from dbuffer.errors import DBufferError, EngineUpdateError
from dbuffer.integrations.engine.engine_options import EngineOptions
from dbuffer.integrations.engine.follower import Follower
from dbuffer.integrations.engine.messages import (
    RankAnswer,
    RankRequest,
    decode_answer,
    encode_answer,
)
from dbuffer.integrations.engine.protocol import PauseMode
from dbuffer.integrations.engine.rank_channel import RANK_TIMEOUT_S
from dbuffer.integrations.engine.reporting import Switch
from dbuffer.integrations.vllm.rank import worker_group
from dbuffer.integrations.vllm.vllm_engine import OfflineVllm
from dbuffer.ranks.agreement import Agreement

_NEXT = "get the first rank's order"
"""The step in which the first rank gives all ranks an order, or the outcome of a call."""


@dataclass(frozen=True, slots=True)
class _PartOutcome:
    """Outcome of an order on a rank, or of a whole call on the first one; its value is JSON's."""

    value: Any = None
    error: Exception | None = None

    @classmethod
    def of(cls, action: Callable[[], Any]) -> Self:
        """Do something; return its value or its error."""
        try:
            return cls(action())
        except DBufferError as error:
            return cls(error=error)
        except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it
            return cls(error=EngineUpdateError(f"{type(error).__name__}: {error}"))

    def as_json(self) -> dict[str, Any]:
        error = self.error and [type(self.error).__name__, str(self.error)]
        return {"value": self.value, "error": error}

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Self:
        if values["error"] is None:
            return cls(values["value"])
        kind, message = values["error"]
        return cls(error=getattr(errors, kind)(message))


class LaunchedFollower:
    """Switches one engine on demand, as :class:`Follower` does. Every rank makes each call.

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
        group = worker_group(llm.llm_engine.vllm_config.parallel_config)
        timeout_s = RANK_TIMEOUT_S + (options.timeout_s if options is not None else 0.0)
        self._agreement = Agreement(group.cpu_group, timeout_s=timeout_s)
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
        """Switch as :meth:`Follower.sync` does, on all ranks; the first rank's arguments count."""
        return self._lead(
            lambda follower: follower.sync(at_least=at_least, timeout_s=timeout_s, force=force)
        )

    def stop_workers(self) -> None:
        """Let this rank's worker stop following; to follow again, make another follower.

        Here, and in `close`, no rank waits for another. The engine keeps its weights.
        """
        self._mine.do(RankRequest("end"))

    def close(self) -> None:
        if self._leader is not None:
            self._leader.close()
        self._agreement.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _lead(self, call: Callable[[Follower], Switch | None]) -> Switch | None:
        """Let the first rank make a call, while all carry out its orders; return its result."""
        leader = self._leader
        if leader is None:
            outcome = self._follow_orders()
        else:
            try:
                outcome = _PartOutcome.of(lambda: _led(leader, call))
            except BaseException:  # interrupted: the others must not wait for what comes next
                self._agreement.close()
                raise
            if self._agreement.is_open:
                self._agreement.first(_NEXT, lambda: {"outcome": outcome.as_json()})
        if outcome.error is not None:
            raise outcome.error
        self.applied = outcome.value["applied"]
        switch = outcome.value["switch"]
        return None if switch is None else Switch(**switch)

    def _follow_orders(self) -> _PartOutcome:
        while True:
            order: dict[str, Any] = self._agreement.first(_NEXT, dict)  # the first rank's
            if "outcome" in order:
                return _PartOutcome.of_json(order["outcome"])
            _carry_out(self._agreement, self._mine, order)


def _led(leader: Follower, call: Callable[[Follower], Switch | None]) -> dict[str, Any]:
    switch = call(leader)
    return {"switch": None if switch is None else asdict(switch), "applied": leader.applied}


class _AllRanks(OfflineVllm):
    """All parts of an engine, as the first rank's follower sees them.

    All ranks are in the same state, so calls that need only one of them go to this rank's own.
    """

    def __init__(self, agreement: Agreement, llm: Any) -> None:
        super().__init__(llm)
        self._agreement = agreement

    def call(self, request: RankRequest) -> list[RankAnswer]:
        answers = self._order("call", request.as_json())
        return [decode_answer(answer) for of_rank in answers for answer in of_rank]

    def pause(self, mode: PauseMode) -> None:
        self._order("pause", mode)

    def set_weight_version(self, version: str) -> None:
        self._order("set_weight_version", version)

    def _order(self, call: str, argument: Any) -> list[Any]:
        """Let every rank make a call of its part; return each one's value."""
        order = {"call": call, "argument": argument}
        self._agreement.first(_NEXT, lambda: order)
        # super(): the methods of this rank's own part, and not those of this class.
        outcomes = _carry_out(self._agreement, super(), order)
        if any(outcome.error is not None for outcome in outcomes):
            raise _joint(outcomes)
        return [outcome.value for outcome in outcomes]


def _carry_out(agreement: Agreement, mine: Any, order: dict[str, Any]) -> list[_PartOutcome]:
    """Carry out an order on this rank, as all ranks do; return the outcome on each."""

    def do() -> Any:
        match order["call"], order["argument"]:
            case "call", request:
                return [encode_answer(answer) for answer in mine.call(RankRequest.parse(request))]
            case "pause", mode:
                return mine.pause(mode)
            case _, version:
                return mine.set_weight_version(version)

    what = f"do {order['call']}"
    outcomes = agreement.each(what, lambda: _PartOutcome.of(do).as_json())
    return [_PartOutcome.of_json(outcome) for outcome in outcomes]


def _joint(outcomes: Sequence[_PartOutcome]) -> Exception:
    """Make one error for all ranks: the common one, or the first with its rank's number."""
    errors = {rank: one.error for rank, one in enumerate(outcomes) if one.error is not None}
    rank, first = next(iter(errors.items()))
    if len(errors) == len(outcomes) and len({str(error) for error in errors.values()}) == 1:
        return first
    return type(first)(f"rank {rank}: {first}")
