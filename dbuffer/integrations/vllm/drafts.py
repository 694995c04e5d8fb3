"""The draft model of a vLLM engine that speculates: EAGLE's and Medusa's heads, MTP, draft models.

A backend of vLLM's weight transfer is made without the worker that has the draft. So dbuffer notes
the worker that is loading its models, and makes the backend's rank with this worker's draft.
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
    """A draft model, and how vLLM made it."""

    model: torch.nn.Module
    make_config: Callable[[], Any]
    """Returns the configuration of the engine as the draft sees it."""
    model_config: Any
    prefix: str
    """Prefix of the names of the draft's attention layers."""
    target_config: Any
    """Configuration of the target if its checkpoint has the draft's layers (MTP), or None."""

    def is_in_target(self, name: str) -> bool:
        """Whether a tensor of the target's checkpoint belongs to the draft."""
        config = self.target_config
        return config is not None and is_multi_token_prediction(name, config)


@contextlib.contextmanager
def loading_models(wrapper: Any, *_: Any, **__: Any) -> Iterator[None]:
    """Note the worker of vLLM's wrapper, which loads its models in the block."""
    token = _loading.set(wrapper.worker)
    try:
        yield
    finally:
        _loading.reset(token)


def draft_of(worker: Any = None) -> Draft | None:
    """Return the draft of a worker, by default the one that is loading its models now.

    Return None without a draft, and for a draft that cannot follow: in a pipeline, in vLLM's second
    model runner, or in a release that makes drafts in another way. Such a draft keeps its weights.
    """
    worker = worker or _loading.get()
    drafter = getattr(getattr(worker, "model_runner", None), "drafter", None)
    model: Any = getattr(drafter, "model", None)
    model = model.unwrap() if hasattr(model, "unwrap") else model  # out of captured graphs
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
