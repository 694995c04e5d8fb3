"""Program of `test_breadth.py`: a family or a feature in an SGLang engine that follows a store."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from dbuffer.integrations.sglang import follow
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing.waiting import until
from tests.support.engines.families import CONFIGURATIONS, save_family
from tests.support.engines.sglang_engines import greedy, label, prefork, start_engine
from tests.support.engines.tiny_models import save_model

ORDER = (1, 0, 1, 0)
"""Of the two checkpoints, as they are published: where switches are copies, the last ones are."""


@dataclass(frozen=True)
class Case:
    family: str
    arguments: dict[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    refused: str = ""


CASES = {
    **{
        name: Case(name)
        for name in (
            "gemma",
            "gemma2",
            "glm4_moe",
            "gpt2",
            "granite",
            "mistral",
            "mixtral",
            "olmoe",
            "opt",
        )
    },
    "cohere": Case("cohere", models=("commandr",)),
    "gemma3_text": Case("gemma3_text", models=("gemma3_causal", "gemma3_mm")),
    "phi3": Case("phi3", models=("llama",)),
    "qwen3": Case("qwen3"),
    "experts on two ranks": Case("qwen3-moe", {"tp_size": 2}, models=("qwen3_moe", "qwen2_moe")),
    "experts in bfloat16": Case(
        "qwen3-moe", {"dtype": "bfloat16"}, models=("qwen3_moe", "qwen2_moe")
    ),
    "two replicas": Case("qwen3", {"dp_size": 2}, refused="dp_size above 1 cannot follow"),
    # On a CPU it lacks the kernel to answer with, but is made and loaded as on a GPU.
    "quantised as it loads": Case(
        "qwen3",
        {"quantization": "w8a8_fp8", "dtype": "bfloat16"},
        refused="changed its form (W8A8Fp8LinearMethod) and cannot load",
    ),
}


def run(directory: Path, case: Case) -> None:
    arguments = {"dtype": "float32"} | case.arguments
    pair = [save(case.family, directory, seed) for seed in (0, 1)]
    store = directory / "store"
    if case.refused:
        with dbuffer.WeightSender(store) as sender:
            sender.send(pair[1])
            engine = start_engine(pair[0], **arguments)
            with pytest.raises(dbuffer.UnsupportedError, match=re.escape(case.refused)):
                follow(engine, store).sync()
        return
    other = start_engine(pair[1], **arguments)
    fresh = [greedy(other)]
    other.shutdown()
    engine = start_engine(pair[0], **arguments)
    fresh.insert(0, greedy(engine))
    assert all(one != other for one, other in zip(*fresh, strict=True))
    with dbuffer.WeightSender(store) as sender, follow(engine, store, attest=True) as follower:
        for version, number in enumerate(ORDER, start=1):
            sender.send(pair[number])
            assert follower.sync() is not None
            assert (greedy(engine), label(engine)) == (fresh[number], str(version))

        def is_compared() -> bool:
            assert follower.sync() is None
            record = DoubleBuffer(store).receiver(follower.engine_id)
            return record is not None and not record.is_attestable

        until("the weights are compared", is_compared)
        record = DoubleBuffer(store).receiver(follower.engine_id)
        assert record.attested_at is not None


def save(family: str, directory: Path, seed: int) -> Path:
    if family in CONFIGURATIONS:
        return save_family(family, directory, seed)
    return save_model(family, seed, directory)


if __name__ == "__main__":
    prefork()
    target = Path(sys.argv[1])
    run(target, CASES[sys.argv[2]])
    (target / "observed.json").write_text("null")
