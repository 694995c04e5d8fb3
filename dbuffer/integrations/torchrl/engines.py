"""Find the vLLM engines in what TorchRL's users have at hand."""

from __future__ import annotations

from typing import Any

from dbuffer.integrations.engine.follower import Follower
from dbuffer.integrations.engine.options import EngineOptions
from dbuffer.integrations.vllm.engines import vllm_engine_of
from dbuffer.integrations.vllm.ray_follower import RayFollower, is_ray_actor

_HOLDERS = ("llm_instance", "ray_actor", "model")
"""Where TorchRL's ``LocalLLMWrapper``, ``RayLLMWorker`` and ``vLLMWrapper`` have theirs."""


def followers_of(target: Any, options: EngineOptions) -> list[Follower | RayFollower]:
    """What switches each engine in ``target``.

    Args:
        target: a ``vllm.LLM``, an ``AsyncLLM``, a server's URL, a Ray actor that has one of the
            first two; or TorchRL's ``AsyncVLLM``, which has several, ``RayLLMWorker``,
            ``LocalLLMWrapper`` or ``vLLMWrapper``.
        options: the store and so on.

    Raises:
        EngineUnsupportedError: there is no engine in it.
    """
    if is_ray_actor(target):
        return [RayFollower(target, options)]
    if actors := getattr(target, "actors", None):
        return [RayFollower(actor, options) for actor in actors]
    for name in _HOLDERS:
        held = getattr(target, name, None)
        if held is not None:
            return followers_of(held, options)
    return [Follower(vllm_engine_of(target), options)]
