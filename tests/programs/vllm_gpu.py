"""Program of `test_gpu.py`, which says what it shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.engine.contract import RankRequest
from dbuffer.engine.engine_options import UpdateRequest
from dbuffer.integrations.vllm import follow
from dbuffer.integrations.vllm.vllm_engine import OfflineVllm
from tests.programs.vllm_dead_core import label_of, tokens
from tests.support.engines.tiny_models import (
    make_model,
    revealing_weights,
    save_mixed,
    save_model,
    save_revealing,
    token_of,
    weights_in,
)
from tests.support.engines.vllm_engines import counted_reloads, greedy, judge, model_of, start_llm

NUM_DELTAS = 20
CHANGED = 0.01
"""Of all elements, with each version."""
CAPTURED: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL"},
}
"""Steps are replayed from CUDA graphs, which read parameters where they were captured."""
COMPILED: dict[str, Any] = {"enforce_eager": False}
"""By torch.compile, in pieces that are captured."""


def switch_families(directory: Path, dtype: str) -> None:
    """Switch an engine of each family to other weights and back, by copies after the first time."""
    for family in ("qwen3-moe", "qwen3", "llama", "tied-qwen2"):
        switch_pair(directory / family, family, dtype=dtype)


def switch_pair(directory: Path, family: str, **more: Any) -> None:
    checkpoints = [save_model(family, seed, directory) for seed in (0, 1)]
    llm, other = (start_llm(checkpoint, **more) for checkpoint in checkpoints)
    fresh = [greedy(llm), greedy(other)]
    assert all(old != new for old, new in zip(*fresh, strict=True))
    store = directory / "store"
    with (
        dbuffer.WeightSender(store, checksum=True) as sender,
        follow(llm, store, verify=True) as follower,
    ):
        for source, seed in ((checkpoints[1], 1), (make_model(family, 0), 0), (checkpoints[1], 1)):
            sender.send(source)
            follower.sync()
            assert greedy(llm) == fresh[seed]
        with counted_reloads(llm) as reloads:
            for seed in (0, 1, 0, 1):
                sender.send(checkpoints[seed])
                follower.sync()
                assert greedy(llm) == fresh[seed]
        assert reloads == [], family


def counted_patches() -> list[int]:
    """The number of patches of each switch from now on that writes some."""
    from dbuffer.engine.plan.prepared_switch import Patches

    patched: list[int] = []
    apply = Patches.apply

    def counted(patches: Patches, copier: Any) -> None:
        patched.append(len(patches.patches))
        apply(patches, copier)

    Patches.apply = counted  # type: ignore[method-assign]
    return patched


def change(weights: dict[str, torch.Tensor], generator: torch.Generator) -> None:
    for tensor in weights.values():
        flat = tensor.view(-1)
        count = max(1, round(CHANGED * flat.numel()))
        places = torch.randint(flat.numel(), (count,), generator=generator)
        flat[places] += 0.2 * torch.randn(count, generator=generator).to(flat.dtype)


def patch_by_deltas(directory: Path) -> None:
    """Patch parameters on the device, under captured graphs, and compare with a fresh engine."""
    base = save_model("qwen3", 0, directory)
    weights = {name: tensor.bfloat16() for name, tensor in weights_in(base).items()}
    llm = start_llm(base, dtype="bfloat16", **CAPTURED)
    generator = torch.Generator().manual_seed(1)
    store, patched = directory / "store", counted_patches()
    with dbuffer.WeightSender(store, delta=True) as sender, follow(llm, store) as follower:
        for number in range(1, NUM_DELTAS + 1):
            change(weights, generator)
            sender.send(weights)
            switch = follower.sync()
            assert switch is not None
            assert switch.version == number
            if number == NUM_DELTAS // 2:  # the next finds it, or the comparison does
                model_of(llm).model.norm.weight.data[3] += 1
        assert len(patched) > NUM_DELTAS // 2
        now = save_mixed(base, weights, directory / "now")
        assert greedy(llm) == greedy(start_llm(now, dtype="bfloat16", **CAPTURED))


def lose_weights_in_sleep(directory: Path) -> None:
    """Sleep with levels that keep the weights in main memory, and nowhere but in the store."""
    llm = start_llm(save_revealing(0, directory), enable_sleep_mode=True)
    engine, store = OfflineVllm(llm), directory / "store"
    with dbuffer.WeightSender(store) as sender, follow(llm, store) as follower:

        def require_served(version: int) -> None:
            assert label_of(llm) == str(version)
            assert tokens(llm) == [token_of(version)]

        version = 0
        for level, publishes in ((1, False), (2, False), (1, True), (2, True)):
            version += 1
            sender.send(revealing_weights(version))
            follower.sync()
            require_served(version)
            free_bytes = torch.cuda.mem_get_info()[0]
            llm.sleep(level)
            assert torch.cuda.mem_get_info()[0] > free_bytes
            with pytest.raises(dbuffer.EngineBusyError, match="the engine's weights are asleep"):
                engine.do(RankRequest("update", update=UpdateRequest()))
            if publishes:
                version += 1
                sender.send(revealing_weights(version))
            llm.wake_up(tags=["weights"])
            follower.sync()
            llm.wake_up(tags=["kv_cache"])
            require_served(version)


def switch_without_room(directory: Path) -> None:
    """Switch while others hold all but half a gigabyte of the device."""
    llm = start_llm(save_revealing(0, directory))
    store = directory / "store"
    with dbuffer.WeightSender(store) as sender, follow(llm, store) as follower:
        free_bytes = torch.cuda.mem_get_info()[0]
        held = torch.empty(free_bytes - (512 << 20), dtype=torch.uint8, device="cuda")
        for version in (1, 2, 3, 4):
            sender.send(revealing_weights(version))
            follower.sync()
            assert tokens(llm) == [token_of(version)]
        del held


CASES: dict[str, Callable[[Path], None]] = {
    "bfloat16": lambda directory: switch_families(directory, "bfloat16"),
    "float16": lambda directory: switch_families(directory, "float16"),
    "captured": lambda directory: switch_pair(directory, "qwen3", dtype="bfloat16", **CAPTURED),
    "compiled": lambda directory: switch_pair(directory, "llama", dtype="bfloat16", **COMPILED),
    "deltas": patch_by_deltas,
    "sleep": lose_weights_in_sleep,
    "no room": switch_without_room,
}


def run(directory: Path, case: str) -> None:
    CASES[case](directory)


if __name__ == "__main__":
    judge(run)
