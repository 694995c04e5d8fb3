"""A store's weights in real SGLang engines, offline, against fresh engines on those weights.

One program (this file, run by SGLang's Python) for a model of tied embeddings in bfloat16, one for
two ranks in float32; each leaves what it saw, and the tests judge that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_engines import NEEDS_SGLANG, WAIT_S, greedy, observe, start_engine
from tiny_models import make_model, save_model

import dbuffer

pytestmark = [*NEEDS_SGLANG, pytest.mark.timeout(3 * WAIT_S)]

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
NORM = "model.norm.weight"
MISFITS: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "one part of a fused parameter missing": lambda weights: weights.pop(K_PROJ),
    "embedding missing": lambda weights: weights.pop("model.embed_tokens.weight"),
    "unknown name": lambda weights: weights.update({"model.layers.0.bogus": torch.ones(2)}),
    "layer too many": lambda weights: weights.update(
        {K_PROJ.replace("layers.1", "layers.2"): weights[K_PROJ].clone()}
    ),
    "too many rows": lambda weights: weights.update({Q_PROJ: weights[Q_PROJ].repeat(2, 1)}),
    "too few columns": lambda weights: weights.update({Q_PROJ: weights[Q_PROJ][:, :-1]}),
    "wrong length": lambda weights: weights.update({NORM: weights[NORM][:-1]}),
    "integers": lambda weights: weights.update({NORM: weights[NORM].long()}),
}


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was seen of an engine with tied embeddings, in bfloat16."""
    return dict(observe(__file__, tmp_path_factory.mktemp("tied"), "tied"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was seen of an engine of two ranks, in float32."""
    return dict(observe(__file__, tmp_path_factory.mktemp("ranks"), "ranks"))


def test_switched_engine_answers_as_a_fresh_one(tied: dict[str, Any]) -> None:
    assert tied["switched"] == tied["fresh B"]
    assert tied["fresh A"] != tied["fresh B"]


def test_switching_back_restores_every_token(tied: dict[str, Any]) -> None:
    assert tied["switched back"] == tied["fresh A"]


def test_two_ranks_answer_as_transformers_does(ranks: dict[str, Any]) -> None:
    assert ranks["switched"] == ranks["transformers B"]
    assert ranks["fresh A"] == ranks["transformers A"]


def test_engine_reports_the_version(tied: dict[str, Any], ranks: dict[str, Any]) -> None:
    assert tied["reported"] == ["default", "1", "2"]
    assert ranks["reported"] == "1"


def test_engine_acknowledges_and_its_ranks_do_not(ranks: dict[str, Any]) -> None:
    assert ranks["receivers"] == {
        "engine": [None, 1],
        "engine.rank-0": ["engine", None],
        "engine.rank-1": ["engine", None],
    }


def test_names_are_mapped_on_the_way(tied: dict[str, Any]) -> None:
    assert tied["renamed"] == tied["fresh B"]


@pytest.mark.parametrize("misfit", MISFITS)
def test_misfit_is_refused_and_the_engine_serves_on(tied: dict[str, Any], misfit: str) -> None:
    error, message, tokens = tied["misfits"][misfit]
    assert error == "EngineUpdateError"
    assert "the engine serves on with version 2" in message
    assert tokens == tied["fresh A"]


def test_refusal_names_the_tensor(tied: dict[str, Any]) -> None:
    assert "model.layers.0.bogus" in tied["misfits"]["unknown name"][1]
    assert "qkv_proj" in tied["misfits"]["one part of a fused parameter missing"][1]
    assert NORM in tied["misfits"]["wrong length"][1]


def test_version_after_misfits_is_followed(tied: dict[str, Any]) -> None:
    assert tied["after misfits"] == tied["fresh B"]


def test_failed_load_of_one_rank_is_taken_back_on_all(ranks: dict[str, Any]) -> None:
    error, message, tokens, label = ranks["failed once"]
    assert error == "EngineUpdateError"
    assert "rank 1: RuntimeError: the disk is on fire" in message
    assert "the engine serves on with version 1" in message
    assert tokens == ranks["transformers B"]
    assert label == "1"


def test_next_update_after_a_failure_succeeds(ranks: dict[str, Any]) -> None:
    assert ranks["after a failure"] == ranks["transformers A"]


def test_failure_before_any_version_goes_back_to_the_checkpoint(ranks: dict[str, Any]) -> None:
    error, message, tokens, label = ranks["failed at first"]
    assert error == "EngineUpdateError"
    assert "the engine serves on with version None" in message
    assert tokens == ranks["transformers A"]
    assert label == "default"


def test_engine_that_cannot_go_back_is_made_whole_by_an_update(ranks: dict[str, Any]) -> None:
    error, message = ranks["broken"]
    assert error == "EngineBrokenError"
    assert "half-loaded weights" in message
    assert ranks["mended"] == ranks["transformers B"]


def test_broken_engine_answers_no_request(ranks: dict[str, Any]) -> None:
    assert ranks["request to a broken engine"] != "answered"


# The programs.


def main(directory: str, role: str) -> None:
    path = Path(directory)
    seen = {"tied": see_tied, "ranks": see_ranks}[role](path)
    (path / "observed.json").write_text(json.dumps(seen))


def see_tied(path: Path) -> dict[str, Any]:
    from dbuffer import NameMap, Prefix
    from dbuffer.integrations.sglang import follow

    seen: dict[str, Any] = {"misfits": {}}
    checkpoints = [save_model("tied-qwen2", seed, path) for seed in (1, 2)]
    weights = [dict(make_model("tied-qwen2", seed).named_parameters()) for seed in (1, 2)]
    fresh = start_engine(checkpoints[1], dtype="bfloat16")
    seen["fresh B"] = greedy(fresh)
    fresh.shutdown()
    engine = start_engine(checkpoints[0], dtype="bfloat16")
    seen["fresh A"] = greedy(engine)
    with (
        dbuffer.WeightSender(path / "store", dtype=torch.bfloat16) as sender,
        follow(engine, path / "store", engine_id="engine") as follower,
    ):
        seen["reported"] = [label(engine)]
        for name, index in (("switched", 1), ("switched back", 0)):
            sender.send(weights[index])
            follower.sync()
            seen[name] = greedy(engine)
            seen["reported"].append(label(engine))
        for name, change in MISFITS.items():
            bad = {key: tensor.detach() for key, tensor in weights[1].items()}
            change(bad)
            sender.send(bad)
            seen["misfits"][name] = [*outcome(follower), greedy(engine)]
        sender.send(weights[1])
        follower.sync()
        seen["after misfits"] = greedy(engine)
        sender.send(weights[0])
        follower.sync()
    names = NameMap([Prefix("actor.", "model.")])
    with (
        dbuffer.WeightSender(
            path / "other", rename=lambda name: name.replace("model.", "actor.")
        ) as sender,
        follow(engine, path / "other", engine_id="engine", rename=names) as follower,
    ):
        sender.send(weights[1])
        follower.sync()
        seen["renamed"] = greedy(engine)
    engine.shutdown()
    return seen


def see_ranks(path: Path) -> dict[str, Any]:
    from sglang_faults import order

    from dbuffer.buffer import DoubleBuffer
    from dbuffer.integrations.sglang import follow

    models = [make_model("qwen3", seed) for seed in (1, 2)]
    seen: dict[str, Any] = {
        f"transformers {name}": transformers_greedy(model)
        for name, model in zip("AB", models, strict=True)
    }
    engine = start_engine(save_model("qwen3", 1, path), dtype="float32", tp_size=2)
    seen["fresh A"] = greedy(engine)
    store = path / "store"
    fault = {"rank": 1, "times": 1, "after_tensors": 7, "why": "the disk is on fire"}
    with dbuffer.WeightSender(path / "first") as sender:
        sender.send(models[1])
        with follow(engine, path / "first", engine_id="engine") as follower:
            order(engine, **fault)
            seen["failed at first"] = [*outcome(follower), greedy(engine), label(engine)]
    with (
        dbuffer.WeightSender(store) as sender,
        follow(engine, store, engine_id="engine") as follower,
    ):
        sender.send(models[1])
        follower.sync()
        seen["switched"], seen["reported"] = greedy(engine), label(engine)
        seen["receivers"] = {
            record.receiver: [record.part_of, record.applied_version]
            for record in DoubleBuffer(store).receivers()
        }
        order(engine, **fault)
        sender.send(models[0])
        seen["failed once"] = [*outcome(follower), greedy(engine), label(engine)]
        follower.sync()
        seen["after a failure"] = greedy(engine)
        order(engine, **{**fault, "times": 3})
        sender.send(models[1])
        seen["broken"] = outcome(follower)
        follower.sync()
        seen["mended"] = greedy(engine)
        order(engine, **{**fault, "times": 3})
        sender.send(models[0])
        outcome(follower)
    seen["request to a broken engine"] = "nothing came"
    (path / "observed.json").write_text(json.dumps(seen))
    greedy(engine)  # its scheduler dies of it, and this process with it
    seen["request to a broken engine"] = "answered"
    return seen


def outcome(follower: Any) -> list[str]:
    try:
        return ["switched", str(follower.sync())]
    except dbuffer.DBufferError as error:
        return [type(error).__name__, str(error)]


def label(engine: Any) -> str:
    return str(engine.get_model_info()["weight_version"])


def transformers_greedy(model: Any) -> list[list[int]]:
    from sglang_engines import PROMPTS

    found = []
    for prompt in PROMPTS:
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        found.append(output[0][len(prompt) :].tolist())
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
