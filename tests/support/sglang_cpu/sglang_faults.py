"""A ``custom_weight_loader`` through which one rank of an engine, and no other, meets failures."""

from __future__ import annotations

import json
from typing import Any

import torch


def make(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Let the model's next loads fail on this rank, when that many tensors have gone in."""
    from sglang.srt.runtime_context import get_parallel

    from dbuffer.engine.endpoint import RankEndpoint
    from tests.support.engines.in_workers import fail_loads_of

    [(text, _)] = named_tensors
    fault = json.loads(text)
    times = fault["times"] if fault["rank"] == get_parallel().tp_rank else 0
    fail_loads_of(model, times, fault["after_tensors"], fault["why"])
    # This brings no weights: the load that dbuffer would note is ignored, once.
    endpoint = RankEndpoint.of(model)
    endpoint.note_foreign_load = lambda _: delattr(endpoint, "note_foreign_load")


def order(engine: Any, **fault: Any) -> None:
    """Tell all ranks of an offline engine."""
    engine.begin_weight_update(selector="draft")
    tensors = [(json.dumps(fault), torch.empty(0, dtype=torch.uint8))]
    engine.update_weights_from_tensor(tensors, load_format="sglang_faults.make", flush_cache=False)
    engine.end_weight_update()
