"""`follow`: keep a vLLM engine on a store's newest version.

With ``distributed_executor_backend="external_launcher"``, each rank of an engine has its own
``LLM``, which reaches only the worker of this rank. If each rank read the store itself, ranks could
see different versions. So the first rank decides with a plain :class:`Follower`, and sends the
follower's calls as orders to all ranks (:class:`LaunchedFollower`).
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Protocol, overload

from dbuffer import errors
from dbuffer.engine.background import BackgroundFollower
from dbuffer.engine.contract import Engine, PauseMode, RankRequest, Switch, WeightLabel
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.follower import Follower
from dbuffer.engine.rank_channel import RANK_TIMEOUT_S
from dbuffer.errors import DBufferError, EngineUpdateError, OptionError, UnsupportedError
from dbuffer.integrations.vllm.config import cores_of
from dbuffer.integrations.vllm.vllm_engine import (
    AsyncVllm,
    OfflineVllm,
    is_async,
    is_one_of_several,
    vllm_engine_of,
)
from dbuffer.ranks.agreement import Agreement
from dbuffer.runtime.closing import Closing
from dbuffer.runtime.messages import described

_NEXT = "receive the next call from the first rank"


class LaunchedFollower(Closing):
    """Switches, on demand, an engine whose ranks are ``LLM`` objects that torchrun started.

    All ranks must make the same calls, with equal options. Do not use the engine after a
    ``RankFailedError``: vLLM's own collectives need the failed rank, too.
    """

    def __init__(self, llm: Any, options: EngineOptions | None) -> None:
        # Imported here: only ranks that torchrun started need vLLM's worker in this process.
        from dbuffer.integrations.vllm.rank import worker_group

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
        self.scores_prompts = False

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


class _Offline(Protocol):
    """``vllm.LLM``, for type checkers."""

    llm_engine: Any


class _Asynchronous(Protocol):
    """``AsyncLLM``, for type checkers."""

    engine_core: Any


@overload
def follow(
    engine: str | _Asynchronous,
    store: str | os.PathLike[str] | None = None,
    *,
    pause: PauseMode = "keep",
    api_key: str | None = None,
    canary: Callable[[Any], str | None] | Mapping[str, Any] | None = None,
    **options: Any,
) -> BackgroundFollower: ...


@overload
def follow(
    engine: _Offline,
    store: str | os.PathLike[str] | None = None,
    *,
    pause: PauseMode = "keep",
    canary: Callable[[Any], str | None] | Mapping[str, Any] | None = None,
    **options: Any,
) -> Follower | LaunchedFollower: ...


def follow(
    engine: Any,
    store: str | os.PathLike[str] | None = None,
    *,
    pause: PauseMode = "keep",
    api_key: str | None = None,
    canary: Callable[[Any], str | None] | Mapping[str, Any] | None = None,
    **options: Any,
) -> Follower | BackgroundFollower | LaunchedFollower:
    """Keep a vLLM engine on a store's newest version.

    Args:
        engine: one of

            * a ``vllm.LLM``. Call the follower's ``sync()`` between generations. If torchrun
              started the engine's ranks, every rank must make these calls.
            * an ``AsyncLLM``. Call ``follow`` in its event loop. The engine follows in the
              background until ``aclose()``. Data-parallel replicas of a dense model follow
              independently.
            * the URL of a server in development mode. The server follows in the background until
              ``close()``.
        store: directory of the store, as the engine's workers and this process see it. Default:
            the store in the engine's ``additional_config``.
        pause: treatment of requests in flight during a switch; see :data:`.PauseMode`.
        api_key: API key of the server.
        canary: test of the engine after each switch. Either prompts with a minimum of their mean
            log-probability: ``{"prompts": [...], "min_mean_logprob": -2.5}``. Or a function that
            gets ``engine`` in the thread of the switch, and returns None, or a reason to refuse the
            version. If the mean is lower, or the function returns a reason or raises an error, this
            engine returns to the previous version, and other engines skip the refused version.
        **options: more fields of :class:`EngineOptions`.

    Raises:
        OptionError: (a ``ValueError``) an option is invalid, or no store is given.
        VersionError: the ``version`` to serve is no longer in the store.
        UnsupportedError: the engine, as it was started, cannot follow a store, or does not support
            this ``pause``.
    """
    chosen = None
    probe = functools.partial(canary, engine) if callable(canary) else None
    if canary is not None:
        options["canary"] = canary if probe is None else True
    if store is not None:
        chosen = EngineOptions.parse({"store": store, **options})
    elif options:
        raise OptionError(f"{', '.join(options)}: these options need a store as an argument")
    if is_one_of_several(engine):
        _require_no(canary, "ranks that torchrun started")
        launched = LaunchedFollower(engine, chosen)
        launched.start()
        return launched
    replicas: list[Engine] = []
    if is_async(engine):
        replicas += [AsyncVllm(engine, core) for core in cores_of(engine.vllm_config)]
    else:
        replicas.append(vllm_engine_of(engine, api_key=api_key))
    if len(replicas) > 1:
        _require_no(canary, "data-parallel replicas")
    followers = [Follower(replica, chosen, pause=pause, canary=probe) for replica in replicas]
    if not isinstance(replicas[0], OfflineVllm):
        return BackgroundFollower(*followers)
    followers[0].start()
    return followers[0]


def _require_no(canary: object, kind: str) -> None:
    if canary is not None:
        raise UnsupportedError(f"an engine with {kind} cannot be a canary")
