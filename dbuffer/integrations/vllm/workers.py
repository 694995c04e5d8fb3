"""vLLM's workers: their draft models, and calls that write or discard weights without dbuffer.

A draft model of speculative decoding is EAGLE, Medusa, MTP, or a small model. The worker has the
draft model, but vLLM does not pass the worker to a weight transfer backend. So dbuffer records the
worker that is loading its models, and the backend gets the draft from this worker.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from dbuffer.engine.contract import WEIGHTS
from dbuffer.engine.endpoint import falling_asleep, loading, waking_up, watch
from dbuffer.engine.shape_check import is_multi_token_prediction
from dbuffer.integrations.vllm.config import has_backend
from dbuffer.integrations.vllm.core import KEEPS_WEIGHTS, RELOADS, TRANSFERS

_loading: ContextVar[Any] = ContextVar("worker that loads its models", default=None)


_PARTS = (WEIGHTS, "kv_cache")
"""vLLM's tags of the memory that sleeps."""

_Context = AbstractContextManager[None]


@dataclass(frozen=True)
class Draft:
    """Draft model of an engine, with the settings that vLLM made it from."""

    model: torch.nn.Module
    make_config: Callable[[], Any]
    """Function that returns the draft model's ``VllmConfig``."""
    model_config: Any
    prefix: str
    """Prefix of the names of the draft model's attention layers."""
    target_config: Any
    """Config of the target model if the draft is in its checkpoint (MTP); otherwise None."""

    def is_in_target(self, name: str) -> bool:
        """Whether a tensor in the target model's checkpoint belongs to the draft model."""
        config = self.target_config
        return config is not None and is_multi_token_prediction(name, config)


@contextlib.contextmanager
def loading_models(wrapper: Any, *_: Any, **__: Any) -> Iterator[None]:
    """Record which worker is loading its models inside the ``with`` block.

    ``wrapper`` is vLLM's ``WorkerWrapperBase``, which contains the worker.
    """
    token = _loading.set(wrapper.worker)
    try:
        yield
    finally:
        _loading.reset(token)


def draft_of(worker: Any = None) -> Draft | None:
    """Return a worker's draft model. Default: the worker that is loading its models now.

    Return None if the worker has no draft model, or if the draft model cannot follow a store. A
    draft model cannot follow with pipeline parallelism, in vLLM's second model runner, or in a
    release of vLLM that makes draft models differently. It then keeps its weights.
    """
    worker = worker or _loading.get()
    drafter = getattr(getattr(worker, "model_runner", None), "drafter", None)
    model: Any = getattr(drafter, "model", None)
    if hasattr(model, "unwrap"):  # a wrapper for CUDA graphs
        model = model.unwrap()
    if not isinstance(model, torch.nn.Module):
        return None
    config = worker.vllm_config
    speculative = config.speculative_config
    if config.parallel_config.pipeline_parallel_size > 1 or speculative.draft_model_config is None:
        return None
    make_config = getattr(drafter, "_create_draft_vllm_config", None)
    if make_config is None and speculative.method != "medusa":
        return None
    return Draft(
        model,
        make_config or (lambda: config),
        speculative.draft_model_config,
        "draft_model" if speculative.method == "draft_model" else "",
        config.model_config.hf_text_config if "mtp" in str(speculative.method) else None,
    )


def watch_workers(wrapper: type) -> None:
    """Wrap the methods that load, write or discard weights, so that dbuffer notices each call.

    ``wrapper`` is vLLM's ``WorkerWrapperBase``, the class around a worker.
    """
    around: dict[str, Callable[..., _Context]] = {
        "load_model": loading_models,
        "sleep": _sleeping,
        "wake_up": _waking_up,
        "discard": _discarding,
        **{name: functools.partial(_noting_load, name) for name in (*RELOADS, *TRANSFERS)},
    }
    for name, context in around.items():
        watch(wrapper, name, context, _method_of_worker(name))


def _method_of_worker(name: str) -> Callable[..., Any]:
    def call(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(wrapper.worker, name)(*args, **kwargs)

    call.__name__ = name
    return call


def _sleeping(wrapper: Any, level: int = 1, **_: Any) -> _Context:
    return falling_asleep(wrapper.worker.get_model(), _PARTS, is_lost=level > KEEPS_WEIGHTS)


def _discarding(wrapper: Any, tags: Collection[str]) -> _Context:
    return falling_asleep(wrapper.worker.get_model(), tags, is_lost=WEIGHTS in tags)


def _waking_up(wrapper: Any, tags: Collection[str] | None = None) -> _Context:
    return waking_up(wrapper.worker.get_model, tags)


def _noting_load(name: str, wrapper: Any, *_: Any, **__: Any) -> _Context:
    worker = wrapper.worker
    is_ours = name in TRANSFERS and has_backend(worker.vllm_config)
    return nullcontext() if is_ours else loading(worker.get_model, name)
