"""A store's weights in a real SGLang engine of two ranks, offline, with tied embeddings.

A program (this file, run by SGLang's Python) leaves what it saw, and the tests judge that: tokens
against those of the fresh engine, and of transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from tests.support.engines.misfits import MISFITS, NORM
from tests.support.engines.sglang_engines import NEEDS_SGLANG, WAIT_S, greedy, observe, start_engine
from tests.support.engines.tiny_models import make_model, save_model

pytestmark = [*NEEDS_SGLANG, pytest.mark.timeout(3 * WAIT_S)]


FORMS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "of eight bits": lambda layer: layer.float().to(torch.float8_e4m3fn),
    "packed": lambda layer: setattr(layer.weight, "data", layer.weight.data.flatten()),
    "another parameter": lambda layer: setattr(
        layer, "weight", torch.nn.Parameter(layer.weight.data.t())
    ),
    "gone": lambda layer: delattr(layer, "weight"),
}
"""What becomes of a layer's weights; its square is still one when it is transposed."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program saw."""
    return dict(observe(__file__, tmp_path_factory.mktemp("offline")))


def test_switched_engine_answers_as_transformers_does(seen: dict[str, Any]) -> None:
    assert seen["switched"] == seen["transformers B"]
    assert seen["transformers A"] != seen["transformers B"]


def test_switching_back_restores_every_token_of_the_fresh_engine(seen: dict[str, Any]) -> None:
    assert seen["switched back"] == seen["fresh A"] == seen["transformers A"]


def test_a_request_that_cannot_be_read_ends_no_engine(seen: dict[str, Any]) -> None:
    assert seen["after a bad request"] == seen["fresh A"]


def test_bfloat16_weights_are_loaded(seen: dict[str, Any]) -> None:
    assert seen["bfloat16"] == seen["transformers bfloat16 B"]


def test_engine_reports_the_version(seen: dict[str, Any]) -> None:
    assert seen["reported"] == ["default", "1", "2"]


def test_engine_acknowledges_and_its_ranks_do_not(seen: dict[str, Any]) -> None:
    assert seen["receivers"] == {
        "engine": [None, 2],
        "engine.rank-0": ["engine", None],
        "engine.rank-1": ["engine", None],
    }


def test_names_are_mapped_on_the_way(seen: dict[str, Any]) -> None:
    assert seen["renamed"] == seen["transformers B"]


@pytest.mark.parametrize("misfit", MISFITS)
def test_misfit_is_refused_and_the_engine_serves_on(seen: dict[str, Any], misfit: str) -> None:
    error, message, tokens = seen["misfits"][misfit]
    assert error == "EngineUpdateError"
    assert "the engine serves on with version 2" in message
    assert tokens == seen["fresh A"]


def test_refusal_names_the_tensor(seen: dict[str, Any]) -> None:
    assert "model.layers.0.bogus" in seen["misfits"]["unknown name"][1]
    assert "qkv_proj" in seen["misfits"]["one part of a fused parameter missing"][1]
    assert NORM in seen["misfits"]["wrong length"][1]


def test_version_after_misfits_is_followed(seen: dict[str, Any]) -> None:
    assert seen["after misfits"] == seen["transformers B"]


def test_failed_load_of_one_rank_is_taken_back_on_all(seen: dict[str, Any]) -> None:
    error, message, tokens, label = seen["failed once"]
    assert error == "EngineUpdateError"
    assert "rank 1: RuntimeError: the disk is on fire" in message
    assert f"the engine serves on with version {3 + len(MISFITS)}" in message
    assert tokens == seen["transformers B"]
    assert label == str(3 + len(MISFITS))


def test_next_update_after_a_failure_succeeds(seen: dict[str, Any]) -> None:
    assert seen["after a failure"] == seen["transformers A"]


def test_failure_before_any_version_goes_back_to_the_checkpoint(seen: dict[str, Any]) -> None:
    error, message, tokens, label = seen["failed at first"]
    assert error == "EngineUpdateError"
    assert "the engine serves on with weights that are no version of its store" in message
    assert tokens == seen["fresh A"]
    assert label == "default"


def test_engine_that_cannot_go_back_is_made_whole_by_an_update(seen: dict[str, Any]) -> None:
    error, message = seen["broken"]
    assert error == "EngineBrokenError"
    assert "half-loaded weights" in message
    assert seen["mended"] == seen["transformers B"]


def test_released_weights_are_not_written_to_and_brought_again(seen: dict[str, Any]) -> None:
    error, message, label = seen["asleep"]
    assert error == "EngineUpdateError"
    assert "wake it up first" in message
    assert label == "unknown"
    assert seen["awake"] == [seen["transformers A"], "1"]


def test_weights_that_sglang_loaded_are_replaced_by_the_version(seen: dict[str, Any]) -> None:
    assert seen["loaded by others"] == seen["transformers B"]
    assert seen["after others"] == [seen["transformers A"], "1"]


def test_broken_engine_answers_no_request(seen: dict[str, Any]) -> None:
    assert seen["request to a broken engine"] == "nothing came"


@pytest.mark.parametrize("form", ["as it was", *FORMS])
def test_weights_in_another_form_than_they_are_loaded_in(seen: dict[str, Any], form: str) -> None:
    """As SGLang leaves quantised ones; `test_breadth.py` has an engine of them."""
    refusal = seen["forms"][form]
    if form == "as it was":
        assert refusal == ""
    else:
        assert "weight was loaded as torch.bfloat16 (4, 4) and has been made something" in refusal


# The program.

FAULT = {"rank": 1, "times": 1, "after_tensors": 7, "why": "the disk is on fire"}


def main(directory: str) -> None:
    path = Path(directory)
    models = [make_model("tied-qwen2", seed) for seed in (1, 2)]
    weights = [dict(model.named_parameters()) for model in models]
    engine = start_engine(save_model("tied-qwen2", 1, path), dtype="float32", tp_size=2)
    seen: dict[str, Any] = {
        "fresh A": greedy(engine),
        "reported": [label(engine)],
        "transformers A": transformers_greedy(models[0]),
        "transformers B": transformers_greedy(models[1]),
    }
    seen["forms"] = {form: refusal_of(form) for form in ("as it was", *FORMS)}
    ask_what_cannot_be_read(engine)
    seen["after a bad request"] = greedy(engine)
    fail_at_first(engine, path / "first", weights, seen)
    rename(engine, path / "renamed", weights, seen)
    lose_weights(engine, path / "lost", weights, seen)
    switch_and_fail(engine, path / "store", weights, seen)
    rounded = make_model("tied-qwen2", 2).bfloat16().float()
    seen["transformers bfloat16 B"] = transformers_greedy(rounded)
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


def switch_and_fail(engine: Any, store: Path, weights: Any, seen: dict[str, Any]) -> None:
    from sglang_faults import order

    from dbuffer.store.buffer import DoubleBuffer

    with dbuffer.WeightSender(store) as sender, following(engine, store) as follower:
        for name, index in (("switched", 1), ("switched back", 0)):
            sender.send(weights[index])
            follower.sync()
            seen[name] = greedy(engine)
            seen["reported"].append(label(engine))
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


def outcome(follower: Any) -> list[str]:
    try:
        return ["switched", str(follower.sync())]
    except dbuffer.DBufferError as error:
        return [type(error).__name__, str(error)]


def label(engine: Any) -> str:
    return str(engine.get_model_info()["weight_version"])


def transformers_greedy(model: Any) -> list[list[int]]:
    from tests.support.engines.sglang_engines import PROMPTS

    found = []
    for prompt in PROMPTS:
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        found.append(output[0][len(prompt) :].tolist())
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
