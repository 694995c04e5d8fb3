"""Engines that follow deltas for long, against fresh ones on what the trainer has by then.

Each case is a program of its own. They run in soaks; by hand,
`DBUFFER_SOAK=1 python3 dev.py test tests/integrations/vllm/test_deltas.py`.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from tests.integrations.vllm.test_vllm import set_packing
from tests.support.engines.tiny_models import save_mixed, save_model, weights_in
from tests.support.engines.vllm_engines import (
    NEEDS_VLLM,
    engine_arguments,
    environment,
    greedy,
    kept,
    leave,
    observe,
)
from tests.support.soak import Record, in_soaks_alone

pytestmark = NEEDS_VLLM

NUM_SWITCHES = 200
NUM_BETWEEN = 50
"""Switches from one comparison with a fresh engine to the next."""
CHANGED = 0.01
"""Of all elements, with each version."""

MOUNTS = ["local", "network"]
MODELS = ["qwen3 float32 live", "qwen3 bfloat16 packed", "tied-qwen2 float32 live"]


@in_soaks_alone
@pytest.mark.parametrize("mount", MOUNTS)
@pytest.mark.parametrize("model", MODELS)
def test_after_many_deltas_an_engine_answers_as_a_fresh_one(
    tmp_path: Path, model: str, mount: str, record_property: Record
) -> None:
    env = environment(processes=False, DBUFFER_MOUNT=mount)
    seen = observe(__file__, tmp_path, model, env=env)
    assert seen["switched"] == seen["fresh"]
    answers = [seen["at first"], *seen["fresh"]]
    assert all(one != other for one, other in itertools.pairwise(answers))
    # The first version is whole, and so is one in 64 on a network.
    assert seen["deltas"] >= NUM_SWITCHES - 1 - NUM_SWITCHES // 64
    assert seen["patched"] > NUM_SWITCHES // 2
    record_property("switches of engines to deltas", NUM_SWITCHES)


# From here on, the program that runs in the subprocess.


def run(directory: Path, model: str) -> dict[str, Any]:
    import vllm

    from dbuffer.integrations.engine.plan import copy_plan
    from dbuffer.integrations.vllm import follow

    family, dtype, packing = model.split()
    set_packing(packed=packing == "packed")
    base = save_model(family, 0, directory)
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights_in(base).items()}
    llm = vllm.LLM(**engine_arguments(base, dtype=dtype))
    kept.append(llm)
    seen: dict[str, Any] = {"at first": greedy(llm), "switched": [], "fresh": [], "deltas": 0}
    patched: list[int] = []
    apply_patches = copy_plan.apply_patches

    def counted(patches: Any, copier: Any) -> None:
        patched.append(len(patches))
        apply_patches(patches, copier)

    copy_plan.apply_patches = counted
    generator = torch.Generator().manual_seed(1)
    store = directory / "store"
    with (
        dbuffer.WeightSender(store, delta=True) as sender,
        follow(llm, store, poll_interval_s=0.01) as follower,
    ):
        for number in range(1, NUM_SWITCHES + 1):
            change(weights, generator)
            seen["deltas"] += sender.send(weights).delta_bytes is not None
            assert follower.sync().version == number
            if number % NUM_BETWEEN == 0:
                seen["switched"].append(greedy(llm))
                now = save_mixed(base, weights, directory / f"at-{number}")
                kept.append(vllm.LLM(**engine_arguments(now, dtype=dtype)))
                seen["fresh"].append(greedy(kept[-1]))
    return seen | {"patched": len(patched)}


def change(weights: dict[str, torch.Tensor], generator: torch.Generator) -> None:
    for tensor in weights.values():
        flat = tensor.view(-1)
        count = max(1, round(CHANGED * flat.numel()))
        places = torch.randint(flat.numel(), (count,), generator=generator)
        flat[places] += 0.2 * torch.randn(count, generator=generator).to(flat.dtype)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    leave(target, run(target, sys.argv[2]))
