"""Engines that a rank of a LightRFT trainer switches, and the followers that switch them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.follower import Follower
from dbuffer.engine.messages import raise_worst
from dbuffer.errors import DBufferError

if TYPE_CHECKING:
    from dbuffer.integrations.vllm.launched import LaunchedFollower

EngineFollower: TypeAlias = "Follower | LaunchedFollower"
"""Follower that switches an engine."""


def engines_of_rank(inference_engine: Any, rank: int) -> list[Any]:
    """Return the engines that this rank switches: those in its process, and URLs on rank 0."""
    is_several = isinstance(inference_engine, list | tuple)
    given = inference_engine if is_several else [inference_engine]
    here = [_without_wrapper(engine) for engine in given]
    return [one for one in here if one is not None and (rank == 0 or not isinstance(one, str))]


def _without_wrapper(engine: Any) -> Any:
    """Return SGLang's engine in LightRFT's wrapper; None on ranks whose wrapper holds none."""
    if not hasattr(engine, "tp_group_cpu"):
        return engine
    return engine._engine if engine._tp_rank == 0 else None  # noqa: SLF001 - no other way to it


def start_follower(
    engine_type: str, engine: Any, api_key: str | None, options: EngineOptions
) -> EngineFollower:
    """Let an engine follow a store; it switches on demand, by :func:`switch_all`."""
    # Not by the integrations' `follow`: that lets servers switch in the background, at any time.
    follower: EngineFollower
    if engine_type == "sglang":
        from dbuffer.integrations.sglang.sglang_engine import sglang_engine_of

        follower = Follower(sglang_engine_of(engine, api_key=api_key), options)
    else:
        from dbuffer.integrations.vllm import launched, vllm_engine

        if vllm_engine.is_one_of_several(engine):
            follower = launched.LaunchedFollower(engine, options)
        else:
            follower = Follower(vllm_engine.vllm_engine_of(engine, api_key=api_key), options)
    follower.start()
    return follower


def switch_all(followers: Sequence[EngineFollower], version: int, *, timeout_s: float) -> None:
    """Switch each engine to a version or a later one; raise after all were tried."""
    failures = []
    for follower in followers:
        try:
            follower.sync(at_least=version, timeout_s=timeout_s)
        except DBufferError as error:
            failures.append(error)
    raise_worst(failures)
