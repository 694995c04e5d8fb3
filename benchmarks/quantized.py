"""Pause of an engine that quantizes as it loads: by images, and by vLLM's reload."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import dbuffer
from benchmarks import engines, models, report
from benchmarks.engines import Checkpoint, Model
from benchmarks.measure import median, timed
from benchmarks.models import Weights
from benchmarks.processes import scratch_folder
from benchmarks.steps import synchronize

_QUANTIZATIONS = ("fp8_per_channel", "fp8")
"""Forms to measure. vLLM's CPU build has kernels for the first one only."""

_ROUNDS = 10
_IMAGES, _RELOAD, _MEMCPY = "images", "vLLM's reload", "memcpy of the engine's parameters"


def main(options: Namespace) -> int:
    """Measure and print."""
    report.begin(options.dir[:1], engines.versions())
    width, head_size = (0.25, 32) if options.quick else (1.0, 64)
    model = Model("Qwen2.5-0.5B's shape", models.qwen2_0_5b(width=width), head_size)
    for quantization in _QUANTIZATIONS[: None if torch.cuda.is_available() else 1]:
        with scratch_folder(options.dir[0]) as folder:
            _measure_engine(folder, model, quantization, 1 if options.quick else _ROUNDS)
    return 0


def _measure_engine(folder: Path, model: Model, quantization: str, rounds: int) -> None:
    checkpoint = Checkpoint(folder / "checkpoint", model)
    weights = model.weights(seed=0)
    checkpoint.save(weights)
    llm = engines.start_engine(checkpoint, live=False, quantization=quantization)
    samples = _measure(llm, folder / "store", weights, rounds)
    served_gb = sum(tensor.nbytes for tensor in _parameters(llm)) / 1e9
    print(f"\n{model.title}, {quantization}: {served_gb:.2f} GB in the engine\n")
    rows = [
        [name, *(f"{1e3 * median(times):.1f}" for times in zip(*each, strict=True)), str(len(each))]
        for name, each in samples.items()
    ]
    print(report.table(["", "pause ms", "stage ms", "samples"], rows), flush=True)


def _measure(
    llm: Any, store: Path, weights: Weights, rounds: int
) -> Mapping[str, list[tuple[float, float]]]:
    """Return the times of the pause and of staging in seconds, by way."""
    samples: dict[str, list[tuple[float, float]]] = {_IMAGES: [], _RELOAD: [], _MEMCPY: []}
    parameters = _parameters(llm)
    copies = [tensor.clone() for tensor in parameters]

    def copy() -> None:
        torch._foreach_copy_(copies, parameters)
        synchronize()

    with dbuffer.WeightSender(store) as sender:
        for _ in range(rounds):
            for way in (_IMAGES, _RELOAD):
                switch = _last_switch(llm, store, sender, weights, plan=way == _IMAGES)
                samples[way].append((switch.pause_s, switch.stage_s))
            memcpy_s = timed(copy)
            samples[_MEMCPY].append((memcpy_s, 0.0))
    return samples


def _last_switch(
    llm: Any, store: Path, sender: dbuffer.WeightSender, weights: Weights, *, plan: bool
) -> Any:
    """Follow a store for two versions; return the second switch. The first verifies the plan."""
    from dbuffer.integrations.vllm import follow

    switch = None
    with follow(llm, store, plan=plan) as follower:
        for _ in range(2):
            for tensor in weights.values():
                tensor.mul_(0.99)
            sender.send(weights)
            switch = follower.sync()
    return switch


def _parameters(llm: Any) -> list[torch.Tensor]:
    model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    return [parameter.detach() for parameter in model.parameters() if parameter.numel()]
