"""A ``custom_weight_loader`` through which one rank of an engine, and no other, meets failures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch

Pairs = Iterable[tuple[str, torch.Tensor]]


def make(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Let the model's next loads fail on this rank, when that many tensors have gone in."""
    from sglang.srt.runtime_context import get_parallel

    from dbuffer.engine.endpoint import RankEndpoint

    [(text, _)] = named_tensors
    fault = json.loads(text)
    left = fault["times"] if fault["rank"] == get_parallel().tp_rank else 0
    load_weights = type(model).load_weights

    def failing(weights: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal left
        for count, pair in enumerate(weights):
            # Where a failure of what stands in for a version passes, nobody hears of it.
            if left and count == fault["after_tensors"] and pair[1].is_contiguous():
                left -= 1
                raise RuntimeError(fault["why"])
            yield pair

    model.load_weights = lambda weights: load_weights(model, failing(weights))
    # This brings no weights: the load that dbuffer would note is ignored, once.
    endpoint = RankEndpoint.of(model)
    endpoint.note_foreign_load = lambda _: delattr(endpoint, "note_foreign_load")


def order(engine: Any, **fault: Any) -> None:
    """Tell all ranks of an offline engine."""
    engine.begin_weight_update(selector="draft")
    tensors = [(json.dumps(fault), torch.empty(0, dtype=torch.uint8))]
    engine.update_weights_from_tensor(tensors, load_format="sglang_faults.make", flush_cache=False)
    engine.end_weight_update()
