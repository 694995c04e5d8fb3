"""What a step of TRL's trainer waits for its engine to have the weights: TRL's own way, and ours.

In colocate mode, TRL's only way that runs without a GPU: the engine is in the trainer's process.
TRL hands it one parameter after the other; ``over_store`` publishes the model, and lets the engine
switch to it.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks import engines, models, report
from benchmarks.copying import HalvesCopy, memcpy_variants
from benchmarks.engines import Checkpoint, Model
from benchmarks.measure import median, timed

_ROUNDS, _QUICK_ROUNDS = 7, 3
_SEEN = "model.layers.0.mlp.down_proj.weight"
"""A parameter that is whole in the trainer and in the engine."""


def main(options: Namespace) -> int:
    """Measure and print."""
    report.begin(options.dir[:1], engines.versions() | {"trl": version("trl")})
    if options.quick:
        model = Model("Qwen2.5-0.5B, narrowed", models.qwen2_0_5b(width=0.5), head_size=64)
    else:
        model = Model("Qwen2.5-0.5B", models.qwen2_0_5b(), head_size=64)
    with tempfile.TemporaryDirectory(prefix="dbuffer-benchmark-", dir=options.dir[0]) as place:
        times = _times_s(model, Path(place), _QUICK_ROUNDS if options.quick else _ROUNDS)
    theirs, copy = median(times["TRL's own"]), median(times["memcpy"])
    rows = [
        (name, f"{1e3 * median(s):.0f}", f"{median(s) / theirs:.2f}", f"{median(s) / copy:.1f}")
        for name, s in times.items()
    ]
    header = ("", "ms, median", "of TRL's", "of memcpy")
    print(f"\n{model.title}, layers live\n\n{report.table(header, rows)}")
    return 0


def _times_s(model: Model, place: Path, rounds: int) -> dict[str, list[float]]:
    """By way: how long a step waits, each time for other weights."""
    trainer = _make_trainer(model, place)
    generation = trainer.vllm_generation
    served = dict(_served_model(generation).named_parameters())[_SEEN]
    trained = dict(trainer.model.named_parameters())
    destination = {name: torch.empty_like(tensor) for name, tensor in trained.items()}
    copy = memcpy_variants(trained, HalvesCopy(destination))["_foreach_copy_, 2 threads"]
    ways: dict[str, Callable[[], object]] = {
        "TRL's own": lambda: type(generation).sync_weights(generation),
        "over_store": generation.sync_weights,
    }
    times: dict[str, list[float]] = defaultdict(list)
    for round_ in range(rounds + 2):  # the first switches are proven, and go another way
        for name, sync in ways.items():
            with torch.no_grad():
                for tensor in trained.values():
                    tensor.neg_()
            took_s = timed(sync)
            if not torch.equal(served, trained[_SEEN]):
                raise RuntimeError(f"{name}: the engine has other weights than the trainer")
            if round_ > 1:
                times[name].append(took_s)
        times["memcpy"].append(timed(copy))
    trainer.weight_sync.close()
    return times


def _make_trainer(model: Model, place: Path) -> Any:
    engines.import_vllm(live=True)  # past vLLM's packing of weights TRL's way loads
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from dbuffer.integrations.trl import over_store

    checkpoint = Checkpoint(place / "checkpoint", model)
    checkpoint.save(model.weights(seed=0))
    _make_tokenizer().save_pretrained(checkpoint.directory)
    configuration = GRPOConfig(
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=256,
        vllm_gpu_memory_utilization=0.1,
        output_dir=str(place / "trainer"),
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=2,
        num_generations=2,
        bf16=False,
        report_to=[],
        model_init_kwargs={"dtype": "bfloat16"},
    )
    return over_store(GRPOTrainer, place / "store")(
        model=str(checkpoint.directory),
        reward_funcs=lambda completion_ids, **_: [0.0] * len(completion_ids),
        args=configuration,
        train_dataset=Dataset.from_dict({"prompt": ["word-1"]}),
    )


def _make_tokenizer() -> Any:
    """One of two words, which is all that the trainer asks for."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({"word-0": 0, "word-1": 1}, unk_token="word-0"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="word-0", eos_token="word-1"
    )


def _served_model(generation: Any) -> torch.nn.Module:
    model: torch.nn.Module = (
        generation.llm.llm_engine.model_executor.driver_worker.model_runner.model
    )
    return model
