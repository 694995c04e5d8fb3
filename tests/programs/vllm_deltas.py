"""Program of `test_deltas.py`, which says what it shows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import dbuffer
from dbuffer.integrations.vllm import follow
from tests.support.engines.tiny_models import save_mixed, save_model, weights_in
from tests.support.engines.vllm_engines import greedy, leave, set_packing, start_llm

NUM_SWITCHES = 200
NUM_BETWEEN = 50
"""Switches from one comparison with a fresh engine to the next."""
CHANGED = 0.01
"""Of all elements, with each version."""


def run(directory: Path, model: str) -> dict[str, Any]:
    family, dtype, packing = model.split()
    set_packing(packed=packing == "packed")
    base = save_model(family, 0, directory)
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights_in(base).items()}
    llm = start_llm(base, dtype=dtype)
    seen: dict[str, Any] = {"at first": greedy(llm), "switched": [], "fresh": [], "deltas": 0}
    patched = counted_patches()
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
                seen["fresh"].append(greedy(start_llm(now, dtype=dtype)))
    return seen | {"patched": len(patched)}


def counted_patches() -> list[int]:
    """The number of patches of each switch from now on that writes some."""
    from dbuffer.integrations.engine.plan import prepared_switch

    patched: list[int] = []
    apply_patches = prepared_switch.apply_patches

    def counted(patches: Any, copier: Any) -> None:
        patched.append(sum(map(len, patches.by_parameter.values())))
        apply_patches(patches, copier)

    prepared_switch.apply_patches = counted
    return patched


def change(weights: dict[str, torch.Tensor], generator: torch.Generator) -> None:
    for tensor in weights.values():
        flat = tensor.view(-1)
        count = max(1, round(CHANGED * flat.numel()))
        places = torch.randint(flat.numel(), (count,), generator=generator)
        flat[places] += 0.2 * torch.randn(count, generator=generator).to(flat.dtype)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    leave(target, run(target, sys.argv[2]))
