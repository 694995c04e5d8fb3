"""`LaunchedFollower`: follows a store with an engine whose ranks torchrun started.

With ``distributed_executor_backend="external_launcher"``, each rank of an engine has its own
``LLM``, which reaches only the worker of this rank. If each rank read the store itself, ranks could
see different versions. So the first rank decides with a plain :class:`Follower`, and sends the
follower's calls as orders to all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from dbuffer import errors
from dbuffer.engine.contract import PauseMode, WeightLabel
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.follower import Follower
from dbuffer.engine.messages import RankRequest
from dbuffer.engine.rank_channel import RANK_TIMEOUT_S
from dbuffer.engine.reporting import Switch
from dbuffer.errors import DBufferError, EngineUpdateError
from dbuffer.integrations.vllm.rank import worker_group
from dbuffer.integrations.vllm.vllm_engine import OfflineVllm
from dbuffer.ranks.agreement import Agreement
from dbuffer.runtime.closing import Closing
from dbuffer.runtime.messages import described

_NEXT = "get the first rank's order"


class LaunchedFollower(Closing):
    """Switches, on demand, an engine whose ranks are ``LLM`` objects that torchrun started.

    All ranks must make the same calls, with equal options. Do not use the engine after a
    ``RankFailedError``: vLLM's collectives have lost the failed rank too.
    """

    def __init__(self, llm: Any, options: EngineOptions | None) -> None:
        self._part = OfflineVllm(llm)
        group = worker_group(llm.llm_engine.vllm_config.parallel_config)
        timeout_s = RANK_TIMEOUT_S + (options.timeout_s if options is not None else 0.0)
        self._agreement = Agreement(group.cpu_group, timeout_s=timeout_s)
        self._leader: Follower | None = None
        if self._agreement.rank == 0:
            self._leader = Follower(_AllRanks(self._agreement, llm), options)
        self.applied: int | None = None
        """Version that the engine serves, or None if its weights did not come from the store."""

    def start(self) -> None:
        self._lead(lambda follower: follower.start())

    def sync(
        self, *, at_least: int | None = None, timeout_s: float | None = None, force: bool = False
    ) -> Switch | None:
        return self._lead(
            lambda follower: follower.sync(at_least=at_least, timeout_s=timeout_s, force=force)
        )

    def stop_workers(self) -> None:
        """Make this rank's worker stop following, without waiting for other ranks."""
        self._part.do(RankRequest("end"))

    def close(self) -> None:
        if self._leader is not None:
            self._leader.close()
        self._agreement.close()

    def _lead(self, call: Callable[[Follower], Switch | None]) -> Switch | None:
        if self._leader is None:
            return self._follow_orders()
        try:
            switch = call(self._leader)
        except DBufferError as error:
            self._announce(self._leader, error=[type(error).__name__, str(error)])
            raise
        except BaseException:  # other ranks would wait for the next order
            self._agreement.close()
            raise
        self._announce(self._leader, switch=switch and asdict(switch))
        return switch

    def _announce(self, leader: Follower, **outcome: Any) -> None:
        self.applied = leader.applied
        if self._agreement.is_open:
            self._agreement.share(_NEXT, {"applied": self.applied, **outcome})

    def _follow_orders(self) -> Switch | None:
        while "applied" not in (order := self._agreement.share(_NEXT, {})[0]):
            try:
                _carry_out(self._agreement, self._part, order)
            except DBufferError:  # the first rank raises it too, and sends the outcome
                if not self._agreement.is_open:
                    raise
        self.applied = order["applied"]
        if "error" in order:
            kind, message = order["error"]
            raise getattr(errors, kind)(message)
        return order["switch"] and Switch(**order["switch"])


class _AllRanks(OfflineVllm):
    """Engine of all ranks, driven by the first rank's follower.

    All ranks have the same state, so calls that read state use this rank only.
    """

    def __init__(self, agreement: Agreement, llm: Any) -> None:
        super().__init__(llm)
        self._agreement = agreement

    def send(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        return list(itertools.chain.from_iterable(self._order("send", request)))

    def pause(self, mode: PauseMode) -> None:
        self._order("pause", mode)

    def set_weight_version(self, label: WeightLabel) -> None:
        self._order("set_weight_version", label.encode())

    def _order(self, call: str, argument: Any) -> list[Any]:
        order = {"call": call, "argument": argument}
        self._agreement.share(_NEXT, order)
        # super() executes the call on this rank.
        return _carry_out(self._agreement, super(), order)


def _carry_out(agreement: Agreement, part: Any, order: dict[str, Any]) -> list[Any]:
    """Execute an order on this rank, together with all ranks; return the results by rank.

    If the order fails on any rank, all ranks raise the error of the first rank that failed.
    """
    with agreement.step(f"do {order['call']}") as step:
        try:
            match order["call"], order["argument"]:
                case "set_weight_version", label:
                    part.set_weight_version(WeightLabel.decode(label))
                case call, argument:
                    step.result = getattr(part, call)(argument)
        except DBufferError:
            raise
        except Exception as error:
            raise EngineUpdateError(described(error)) from error
    return step.results
