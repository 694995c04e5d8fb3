"""Program of `test_sglang.py`: LightRFT's trainer on two ranks, which share an SGLang engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from dbuffer.integrations.lightrft import BroadcastManager
from tests.support.engines.sglang_engines import ENGINE, LOADER, greedy
from tests.support.engines.tiny_models import make_model
from tests.support.lightrft_parts import Actor, by_rank, run_ranks, strategy_for


def as_vision_language_model(model: Any) -> nn.Module:
    """A language model's parameters, called as they are in a vision-language model."""
    whole, inner = nn.Module(), nn.Module()
    inner.language_model = model.model
    inner.language_model.lm_head = model.lm_head
    whole.model = inner
    return whole


class Wrapper:
    tp_group_cpu = "a group"

    def __init__(self, engine: Any) -> None:
        self._tp_rank = distributed.get_rank()
        self._engine = engine


def start_engine(checkpoint: Path) -> Any:
    import sglang

    # torchrun's, as LightRFT does: the engine's own process group would look for torchrun's store.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    return sglang.Engine(model_path=str(checkpoint), custom_weight_loader=[LOADER], **ENGINE)


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    is_first = distributed.get_rank() == 0
    for seed in (0, 1):  # transformers does it on one rank
        make_model("qwen3", seed).to(torch.bfloat16).save_pretrained(directory / str(seed))
    engine = start_engine(directory / "0") if is_first else None
    before = greedy(engine) if is_first else []
    module = as_vision_language_model(make_model("qwen3", 1))
    names = [name for name, _ in module.named_parameters()]
    assert all(name.startswith("model.language_model.") for name in names), "not the engine's"
    fully_shard(module)
    strategy = strategy_for("fsdp2 bf16", "sglang")
    store = directory / "store"
    with BroadcastManager(Actor(module), strategy, Wrapper(engine), store=store) as manager:
        manager.broadcast_to_engine()
        after = greedy(engine) if is_first else []
        assert by_rank(manager.version) == [1, 1]
    if engine is not None:
        engine.shutdown()
        fresh = start_engine(directory / "1")
        assert after == greedy(fresh) != before
        fresh.shutdown()
        (directory / "observed.json").write_text("null")
    distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    run_ranks(__file__, main)
