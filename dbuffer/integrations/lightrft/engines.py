"""Engine that a rank of a LightRFT trainer switches, and the follower that switches it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.follower import Follower
from dbuffer.errors import UnsupportedError

if TYPE_CHECKING:
    from dbuffer.integrations.vllm.launched import LaunchedFollower

EngineFollower: TypeAlias = "Follower | LaunchedFollower"
"""Follower that switches an engine."""


def engine_of_rank(inference_engine: Any) -> Any:
    """Return this rank's engine, or None; SGLang's is in LightRFT's wrapper, on one rank of it."""
    if not hasattr(inference_engine, "tp_group_cpu"):
        return inference_engine
    is_first = inference_engine._tp_rank == 0  # noqa: SLF001 - no other way to it
    return inference_engine._engine if is_first else None  # noqa: SLF001


def start_follower(engine_type: str, engine: Any, options: EngineOptions) -> EngineFollower:
    """Let an engine follow a store; it switches on demand, by ``sync``."""
    if isinstance(engine, str):
        raise UnsupportedError(
            f"{engine!r} is no engine of this rank: let a server follow the store by itself, with "
            "the middleware dbuffer.integrations.vllm.FollowStore"
        )
    # Not by the integrations' `follow`: that lets an engine switch in the background, at any time.
    follower: EngineFollower
    if engine_type == "sglang":
        from dbuffer.integrations.sglang.sglang_engine import sglang_engine_of

        follower = Follower(sglang_engine_of(engine), options)
    else:
        from dbuffer.integrations.vllm import launched, vllm_engine

        if vllm_engine.is_one_of_several(engine):
            follower = launched.LaunchedFollower(engine, options)
        else:
            follower = Follower(vllm_engine.vllm_engine_of(engine), options)
    follower.start()
    return follower
