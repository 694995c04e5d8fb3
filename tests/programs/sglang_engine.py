"""A store's weights in an SGLang engine of two ranks, offline, with tied embeddings."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dbuffer
from tests.support.engines.misfits import MISFITS
from tests.support.engines.sglang_engines import (
    PROMPTS,
    greedy,
    label,
    outcome,
    prefork,
    start_engine,
    version_told,
)
from tests.support.engines.tiny_models import make_model, save_model, transformers_greedy

FORMS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "of eight bits": lambda layer: layer.float().to(torch.float8_e4m3fn),
    "packed": lambda layer: setattr(layer.weight, "data", layer.weight.data.flatten()),
    "another parameter": lambda layer: setattr(
        layer, "weight", torch.nn.Parameter(layer.weight.data.t())
    ),
    "gone": lambda layer: delattr(layer, "weight"),
}
"""What becomes of a layer's weights; its square is still one when it is transposed."""
FAULT = {"rank": 1, "times": 1, "after_tensors": 7, "why": "the disk is on fire"}


def main(directory: str) -> None:
    path = Path(directory)
    models = [make_model("tied-qwen2", seed) for seed in (1, 2)]
    weights = [dict(model.named_parameters()) for model in models]
    engine = start_engine(save_model("tied-qwen2", 1, path), dtype="float32", tp_size=2)
    seen: dict[str, Any] = {
        "fresh A": greedy(engine),
        "reported": [label(engine)],
        "told": [version_told(engine)],
        "transformers A": transformers_greedy(models[0], PROMPTS, 12),
        "transformers B": transformers_greedy(models[1], PROMPTS, 12),
    }
    seen["forms"] = {form: refusal_of(form) for form in ("as it was", *FORMS)}
    ask_what_cannot_be_read(engine)
    seen["after a bad request"] = greedy(engine)
    fail_at_first(engine, path / "first", weights, seen)
    rename(engine, path / "renamed", weights, seen)
    stay(engine, path / "kept", weights, seen)
    lose_weights(engine, path / "lost", weights, seen)
    switch_and_fail(engine, path / "store", weights, seen)
    rounded = make_model("tied-qwen2", 2).bfloat16().float()
    seen["transformers bfloat16 B"] = transformers_greedy(rounded, PROMPTS, 12)
    seen["request to a broken engine"] = "nothing came"
    leave(path, seen)
    greedy(engine)  # its schedulers die of it, and this process with them
    seen["request to a broken engine"] = "answered"
    leave(path, seen)


def refusal_of(form: str) -> str:
    from dbuffer.integrations.sglang.model import require_as_loaded

    copy, serving = (torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16) for _ in range(2))
    for layer in (copy, serving):
        layer.weight.weight_loader = print  # as SGLang marks what it can load
    FORMS.get(form, lambda layer: None)(serving)
    try:
        require_as_loaded(copy, serving)
    except dbuffer.UnsupportedError as error:
        return str(error)
    return ""


def ask_what_cannot_be_read(engine: Any) -> None:
    """As a follower with another version of dbuffer might."""
    import torch

    from dbuffer.integrations.sglang import LOADER

    bad = json.dumps({"request": {"call": "begin"}, "rename": None})
    engine.begin_weight_update(selector="draft")
    tensors = [(bad, torch.empty(0, dtype=torch.uint8))]
    engine.update_weights_from_tensor(tensors, load_format=LOADER, flush_cache=False)
    engine.end_weight_update()


def leave(path: Path, seen: dict[str, Any]) -> None:
    (path / "observed.json").write_text(json.dumps(seen))


def fail_at_first(engine: Any, store: Path, weights: Any, seen: dict[str, Any]) -> None:
    from sglang_faults import order

    with dbuffer.WeightSender(store) as sender, following(engine, store) as follower:
        sender.send(weights[1])
        order(engine, **FAULT)
        seen["failed at first"] = [*outcome(follower), greedy(engine), label(engine)]


def rename(engine: Any, store: Path, weights: Any, seen: dict[str, Any]) -> None:
    names = dbuffer.NameMap().prefix("actor.", "model.")
    with (
        dbuffer.WeightSender(
            store, rename={name: f"actor.{name[6:]}" for name in weights[1]}
        ) as sender,
        following(engine, store, rename=names) as follower,
    ):
        sender.send(weights[1])
        follower.sync()
        seen["renamed"] = greedy(engine)


def stay(engine: Any, store: Path, weights: Any, seen: dict[str, Any]) -> None:
    """Stay on the version before the newest, while others are published."""
    with dbuffer.WeightSender(store) as sender:
        for index in (1, 0):
            sender.send(weights[index])
        with following(engine, store, version=1) as follower:
            follower.sync()
            for _ in range(2):
                sender.send(weights[0])
            seen["stays"] = [follower.sync(), greedy(engine), label(engine)]


def switch_and_fail(engine: Any, store: Path, weights: Any, seen: dict[str, Any]) -> None:
    from sglang_faults import order

    from dbuffer.store.buffer import DoubleBuffer

    with dbuffer.WeightSender(store) as sender, following(engine, store) as follower:
        for name, index in (("switched", 1), ("switched back", 0)):
            sender.send(weights[index])
            follower.sync()
            seen[name] = greedy(engine)
            seen["reported"].append(label(engine))
            seen["told"].append(version_told(engine))
        seen["receivers"] = {
            record.receiver: [record.part_of, record.applied_version]
            for record in DoubleBuffer(store).receivers()
        }
        seen["misfits"] = {}
        for name, change in MISFITS.items():
            bad = {key: tensor.detach() for key, tensor in weights[1].items()}
            change(bad)
            sender.send(bad)
            seen["misfits"][name] = [*outcome(follower), greedy(engine)]
        sender.send(weights[1])
        follower.sync()
        seen["after misfits"] = greedy(engine)
        order(engine, **FAULT)
        sender.send(weights[0])
        seen["failed once"] = [*outcome(follower), greedy(engine), label(engine)]
        follower.sync()
        seen["after a failure"] = greedy(engine)
        sender.send({name: tensor.bfloat16() for name, tensor in weights[1].items()})
        follower.sync()
        seen["bfloat16"] = greedy(engine)
        order(engine, **{**FAULT, "times": 3})
        sender.send(weights[1])
        seen["broken"] = outcome(follower)
        follower.sync()
        seen["mended"] = greedy(engine)
        order(engine, **{**FAULT, "times": 3})
        sender.send(weights[0])
        outcome(follower)


def lose_weights(engine: Any, store: Path, weights: Any, seen: dict[str, Any]) -> None:
    """Release the weights' memory, which this SGLang does not; load others; sync after each."""
    with dbuffer.WeightSender(store) as sender, following(engine, store) as follower:
        sender.send(weights[0])
        follower.sync()
        engine.release_memory_occupation(tags=["weights"])
        seen["asleep"] = [*outcome(follower), label(engine)]
        engine.resume_memory_occupation(tags=["weights"])
        follower.sync()
        seen["awake"] = [greedy(engine), label(engine)]
        others = [(name, tensor.detach()) for name, tensor in weights[1].items()]
        engine.begin_weight_update()
        engine.update_weights_from_tensor(others)
        engine.end_weight_update()
        seen["loaded by others"] = greedy(engine)
        follower.sync()
        seen["after others"] = [greedy(engine), label(engine)]


def following(engine: Any, store: Path, **options: Any) -> Any:
    from dbuffer.integrations.sglang import follow

    return follow(engine, store, engine_id="engine", **options)


if __name__ == "__main__":
    prefork()
    main(*sys.argv[1:])
