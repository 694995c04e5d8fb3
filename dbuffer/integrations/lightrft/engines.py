"""Which engines a rank of a LightRFT trainer switches, and what does it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from dbuffer.errors import DBufferError


class Follower(Protocol):
    """What switches an engine."""

    def sync(self, *, at_least: int | None = None, timeout_s: float | None = None) -> object:
        """Switch to this version or a later one."""
        ...

    def stop_workers(self) -> None:
        """Let the engine look at the store no more."""
        ...

    def close(self) -> None:
        """Stop following."""
        ...


def mine_of(inference_engine: Any, rank: int) -> list[Any]:
    """The engines that this rank has to do with, of one or a list of several.

    Args:
        inference_engine: engines in this process, of which each rank has its own, or its part of
            one; None, where another rank has it; and servers' URLs, the same on all ranks, of
            which the first rank takes care.
        rank: this one.
    """
    is_several = isinstance(inference_engine, list | tuple)
    given = inference_engine if is_several else [inference_engine]
    here = [_without_wrapper(engine) for engine in given]
    return [one for one in here if one is not None and (rank == 0 or not isinstance(one, str))]


def _without_wrapper(engine: Any) -> Any:
    """SGLang's engine in LightRFT's wrapper round it; None on ranks whose wrapper holds none."""
    if not hasattr(engine, "tp_group_cpu"):
        return engine
    return engine._engine if engine._tp_rank == 0 else None  # noqa: SLF001 - no other way to it


def _follow_vllm(engine: Any, store: Path, api_key: str | None, timeout_s: float) -> Follower:
    from dbuffer.integrations.engine.follower import Follower as PlainFollower
    from dbuffer.integrations.engine.options import EngineOptions
    from dbuffer.integrations.vllm.engines import engine_of, is_one_of_several

    options = EngineOptions(store=str(store), timeout_s=timeout_s)
    if is_one_of_several(engine):
        from dbuffer.integrations.vllm.launched import LaunchedFollower

        follower: PlainFollower | LaunchedFollower = LaunchedFollower(engine, options)
    else:
        # Not `follow`: that lets servers switch in the background, whenever they like.
        follower = PlainFollower(engine_of(engine, api_key=api_key), options)
    follower.start()
    return follower


def _follow_sglang(engine: Any, store: Path, api_key: str | None, timeout_s: float) -> Follower:
    from dbuffer.integrations.engine.follower import Follower as PlainFollower
    from dbuffer.integrations.engine.options import EngineOptions
    from dbuffer.integrations.sglang.engines import engine_of

    options = EngineOptions(store=str(store), timeout_s=timeout_s)
    follower = PlainFollower(engine_of(engine, api_key=api_key), options)
    follower.start()
    return follower


FOLLOW = {"vllm": _follow_vllm, "sglang": _follow_sglang}
"""How to let an engine of a type follow a store; it switches when told to. Arguments: the engine,
the store, the key that a server wants, and how long it may take to have a version ready.

Each raises:
    EngineUnsupportedError: it was not started in a way that lets it follow.
    EngineUnreachableError: (a server) it does not answer.
"""


def switch_all(followers: Sequence[Follower], version: int, *, timeout_s: float) -> None:
    """Switch each to a version or a later one; all are tried, also when one of them fails.

    Raises:
        DBufferError: of the first that failed, with what the others say.
    """
    errors = []
    for follower in followers:
        try:
            follower.sync(at_least=version, timeout_s=timeout_s)
        except DBufferError as error:
            errors.append(error)
    if errors:
        raise type(errors[0])("; ".join(str(error) for error in errors)) from errors[0]
