"""`RayFollower`: switches an engine in a Ray actor (of any class) to a store's newer versions.

Ray can run any function inside an actor. So a :class:`Follower` runs in the actor, beside the
engine. Each switch is a single task of the actor, so no request can run between flushing the caches
and loading.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from dbuffer.engine.contract import Engine, Switch
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.follower import Follower
from dbuffer.errors import (
    ClosedError,
    DBufferError,
    EngineEndedError,
    EngineUnreachableError,
    UnsupportedError,
    WaitTimeoutError,
)
from dbuffer.format.layout import TensorSpec
from dbuffer.integrations.vllm.vllm_engine import vllm_engine_of

_ASK_AGAIN_S = 0.02

_FOLLOWER_IN_ACTOR = "_dbuffer_follower"

T = TypeVar("T")
P = ParamSpec("P")


def is_ray_actor(target: Any) -> bool:
    """Whether an object is a Ray actor's handle. Does not import Ray."""
    return any(
        base.__module__ == "ray.actor" and base.__qualname__ == "ActorHandle"
        for base in type(target).__mro__
    )


class RayFollower:
    """Switches an ``LLM`` or ``AsyncLLM`` in a Ray actor to newer versions, on demand.

    ``actor`` is the handle of a Ray actor. The actor's object is the engine, or has the engine as
    an attribute. If the actor runs one task at a time, a switch waits for the current task.
    """

    def __init__(self, actor: Any, options: EngineOptions) -> None:
        self._actor = actor
        self._options = options

    def sync(
        self, *, at_least: int | None = None, stop_event: threading.Event | None = None
    ) -> Switch | None:
        timeout_s = self._options.timeout_s
        deadline = time.monotonic() + timeout_s
        while not self._call(Follower.is_ready, at_least):
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"the newest version of {self._options.store} was not ready on all ranks "
                    f"within {timeout_s:g} s; the engine continues with its weights"
                )
            if stop_event is not None and stop_event.is_set():
                raise ClosedError("following was stopped")
            time.sleep(_ASK_AGAIN_S)
        return self._call(Follower.sync, at_least=at_least)

    def apply_once(self, store: str) -> None:
        self._call(Follower.apply_once, store)

    def mismatches(self, tensors: Sequence[TensorSpec]) -> list[str]:
        return self._call(Follower.mismatches, tensors)

    def stop_workers(self) -> None:
        self._call(Follower.stop_workers)

    def close(self) -> None:
        """Do nothing: the follower runs in the actor, and ends when the actor ends."""

    def _call(
        self, call: Callable[Concatenate[Follower, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        import ray

        try:
            task = self._actor.__ray_call__.remote(
                lambda actor, options: call(_follower_in(actor, options), *args, **kwargs),
                self._options,
            )
            result: T = ray.get(task)
            return result
        except ray.exceptions.ActorUnavailableError as error:
            raise EngineUnreachableError(f"the engine's actor does not answer: {error}") from error
        except ray.exceptions.RayActorError as error:
            raise EngineEndedError(f"the engine's actor has ended: {error}") from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, DBufferError):
                raise error.cause from error
            raise


# The functions below run in the Ray actor. `instance` is the object of the actor's class.


def _follower_in(instance: Any, options: EngineOptions) -> Follower:
    made: tuple[EngineOptions, Follower] | None = getattr(instance, _FOLLOWER_IN_ACTOR, None)
    if made is not None and made[0] == options:
        return made[1]
    if made is not None:
        made[1].close()
    follower = Follower(_engine_in(instance), options)
    setattr(instance, _FOLLOWER_IN_ACTOR, (options, follower))
    return follower


def _engine_in(instance: Any) -> Engine:
    import vllm
    from vllm.v1.engine.async_llm import AsyncLLM

    for candidate in (instance, *vars(instance).values()):
        if isinstance(candidate, vllm.LLM | AsyncLLM):
            return vllm_engine_of(candidate)
    raise UnsupportedError(
        f"an actor of {type(instance).__name__} has no attribute that is a vllm.LLM or AsyncLLM"
    )
