"""Program of `test_sglang.py`, run by SGLang's Python: it asserts what the test shows."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import dbuffer
from dbuffer.store.buffer import DoubleBuffer
from tests.support.engines.misfits import MISFITS, NORM
from tests.support.engines.sglang_engines import (
    PROMPTS,
    greedy,
    label,
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
NAMED = {
    "unknown name": r"model\.layers\.0\.bogus",
    "one part of a fused parameter missing": "qkv_proj",
    "wrong length": re.escape(NORM),
}
FAULT = {"rank": 1, "times": 1, "after_tensors": 7, "why": "the disk is on fire"}


def main(directory: str) -> None:
    path = Path(directory)
    checkpoint = save_model("tied-qwen2", 1, path)
    models = [make_model("tied-qwen2", seed) for seed in (1, 2)]
    scene = Scene(
        engine=start_engine(checkpoint, dtype="float32", tp_size=2),
        weights=[dict(model.named_parameters()) for model in models],
        expected=[transformers_greedy(model, PROMPTS, 12) for model in models],
    )
    assert greedy(scene.engine) == scene.expected[0] != scene.expected[1]
    assert (label(scene.engine), version_told(scene.engine)) == ("default", None)
    require_forms()
    ask_what_cannot_be_read(scene.engine)
    assert greedy(scene.engine) == scene.expected[0]
    fail_at_first(scene, path / "first")
    lose_weights(scene, path / "lost")
    switch(scene, path / "store")
    fail(scene, path / "store")
    leave(path, "nothing came")
    greedy(scene.engine)  # its schedulers die of it, and this process with them
    leave(path, "answered")


def leave(path: Path, request_to_a_broken_engine: str) -> None:
    (path / "observed.json").write_text(json.dumps(request_to_a_broken_engine))


class Scene(NamedTuple):
    engine: Any
    weights: list[dict[str, torch.Tensor]]
    expected: list[list[list[int]]]


def require_forms() -> None:
    """Weights in another form than they are loaded in are refused: SGLang leaves quantized ones so.

    `test_breadth.py` has an engine of them.
    """
    from dbuffer.integrations.sglang.rank import require_as_loaded

    for change in (None, *FORMS.values()):
        copy, serving = (torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16) for _ in range(2))
        for layer in (copy, serving):
            layer.weight.weight_loader = print  # as SGLang marks what it can load
        if change is None:
            require_as_loaded(copy, serving)
            continue
        change(serving)
        words = r"weight was loaded as torch\.bfloat16 \(4, 4\), and SGLang then changed its form"
        with pytest.raises(dbuffer.UnsupportedError, match=words):
            require_as_loaded(copy, serving)


def ask_what_cannot_be_read(engine: Any) -> None:
    from dbuffer.integrations.sglang import LOADER

    bad = json.dumps({"request": {"call": "begin"}})
    engine.begin_weight_update(selector="draft")
    tensors = [(bad, torch.empty(0, dtype=torch.uint8))]
    engine.update_weights_from_tensor(tensors, load_format=LOADER, flush_cache=False)
    engine.end_weight_update()


def fail_at_first(scene: Scene, store: Path) -> None:
    """A failure before any version goes back to the checkpoint."""
    engine = scene.engine
    with dbuffer.WeightSender(store) as sender, following(engine, store) as follower:
        sender.send(scene.weights[1])
        order(engine, **FAULT)
        words = "the engine serves on with weights from outside the store"
        with pytest.raises(dbuffer.EngineUpdateError, match=words):
            follower.sync()
        assert (greedy(engine), label(engine)) == (scene.expected[0], "default")


def lose_weights(scene: Scene, store: Path) -> None:
    """Release the weights' memory, which this SGLang does not; load others; sync after each."""
    engine = scene.engine
    with dbuffer.WeightSender(store) as sender, following(engine, store) as follower:
        sender.send(scene.weights[0])
        follower.sync()
        engine.release_memory_occupation(tags=["weights"])
        with pytest.raises(dbuffer.EngineUpdateError, match="wake the engine up"):
            follower.sync()
        assert label(engine) == "unknown"
        engine.resume_memory_occupation(tags=["weights"])
        follower.start()  # as a trainer that was restarted
        follower.sync()
        assert (greedy(engine), label(engine)) == (scene.expected[0], "1")
        others = [(name, tensor.detach()) for name, tensor in scene.weights[1].items()]
        engine.begin_weight_update()
        engine.update_weights_from_tensor(others)
        engine.end_weight_update()
        assert greedy(engine) == scene.expected[1]
        follower.sync()
        assert (greedy(engine), label(engine)) == (scene.expected[0], "1")


def switch(scene: Scene, store: Path) -> None:
    engine, weights, expected = scene
    with dbuffer.WeightSender(store) as sender, following(engine, store) as follower:
        for version, index in ((1, 1), (2, 0)):
            sender.send(weights[index])
            follower.sync()
            assert greedy(engine) == expected[index]
            assert (label(engine), version_told(engine)) == (str(version), version)
        receivers = DoubleBuffer(store).receivers()
        assert {
            record.receiver: (record.part_of, record.applied_version) for record in receivers
        } == {
            "engine": (None, 2),
            "engine.rank-0": ("engine", None),
            "engine.rank-1": ("engine", None),
        }
        for name, change in MISFITS.items():
            bad = {key: tensor.detach() for key, tensor in weights[1].items()}
            change(bad)
            sender.send(bad)
            with pytest.raises(dbuffer.EngineUpdateError, match=NAMED.get(name)) as refusal:
                follower.sync()
            assert "the engine serves on with version 2" in str(refusal.value)
            assert greedy(engine) == expected[0]


def fail(scene: Scene, store: Path) -> None:
    """Take back a load that fails on one rank, and leave the engine broken.

    Loaders get each version where there is no fast path.
    """
    engine, weights, expected = scene
    with (
        dbuffer.WeightSender(store) as sender,
        following(engine, store, plan=False) as follower,
    ):
        before = sender.send(weights[1]).version
        follower.sync()
        assert greedy(engine) == expected[1]
        order(engine, **FAULT)
        sender.send(weights[0])
        with pytest.raises(dbuffer.EngineUpdateError) as failure:
            follower.sync()
        assert "rank 1: RuntimeError: the disk is on fire" in str(failure.value)
        assert f"the engine serves on with version {before}" in str(failure.value)
        assert (greedy(engine), label(engine)) == (expected[1], str(before))
        follower.sync()
        assert greedy(engine) == expected[0]
        sender.send({name: tensor.bfloat16() for name, tensor in weights[1].items()})
        follower.sync()
        rounded = make_model("tied-qwen2", 2).bfloat16().float()
        assert greedy(engine) == transformers_greedy(rounded, PROMPTS, 12)
        # Neither the version nor the way back can be loaded; the next update mends it.
        for index in (1, 0):
            order(engine, **{**FAULT, "times": 3})
            sender.send(weights[index])
            with pytest.raises(dbuffer.EngineBrokenError, match="half-loaded weights"):
                follower.sync()
            if index:
                follower.sync()
                assert greedy(engine) == expected[1]


def following(engine: Any, store: Path, **options: Any) -> Any:
    from dbuffer.integrations.sglang import follow

    return follow(engine, store, engine_id="engine", **options)


def order(engine: Any, **fault: Any) -> None:
    import sglang_faults

    sglang_faults.order(engine, **fault)


if __name__ == "__main__":
    prefork()
    main(*sys.argv[1:])
