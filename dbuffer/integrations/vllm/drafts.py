"""Draft model of a vLLM engine with speculative decoding: EAGLE, Medusa, MTP, or a small model.

vLLM makes a weight transfer backend without the worker, which has the draft model. So dbuffer
records the worker that is loading its models, and the backend gets the draft from this worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from dbuffer.engine.shape_check import is_multi_token_prediction

_loading: ContextVar[Any] = ContextVar("worker that loads its models", default=None)


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
    model = (
        model.unwrap() if hasattr(model, "unwrap") else model
    )  # the model inside the wrapper for CUDA graphs
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
