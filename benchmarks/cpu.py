"""Publish and receive in main memory, compared with memcpy and with other transports."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import models, plot, publishing, report, targets, transfers
from benchmarks.peers import (
    Dbuffer,
    DbufferChecksums,
    DistributedCheckpoint,
    Safetensors,
    TensorDictMemmap,
    TorchRL,
    TorchSave,
)
from benchmarks.targets import Results
from benchmarks.transfers import Case

_PLAIN = (Dbuffer,)
_BOTH = (Dbuffer, DbufferChecksums)
_PEERS_FOR_EXPERTS = (TorchRL, TensorDictMemmap, Safetensors, TorchSave)
# Leave out DCP for experts: it takes half a minute for so many tensors.
_PEERS = (*_PEERS_FOR_EXPERTS, DistributedCheckpoint)


def main(options: Namespace) -> int:
    """Measure, print the results, and compare them with the targets."""
    environment = report.begin(options.dir)
    results = _measure(options.dir, quick=options.quick)
    checks = targets.check(results)
    note = ", sizes too small to judge by" if options.quick else ""
    print(f"\nTargets{note}\n\n{report.targets_table(checks, reference=report.LIMIT)}")
    found = report.as_json(environment, results, checks)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    if options.plot:
        plot.save(found["transfers"], options.plot, plot.caption(environment))
    print(f"\n{report.elapsed_s():.0f} s in all")
    return 0


def _measure(directories: Sequence[Path], *, quick: bool) -> Results:
    first = directories[0]
    results = Results()
    for case in _quick_cases(directories) if quick else _cases(directories):
        results.transfers[case.key] = transfer = transfers.run(case)
        print(f"\n{report.transfer_table(transfer)}", flush=True)
    sent = results.transfers["dense"].case.shapes
    results.extra_memory_bytes = publishing.extra_memory_bytes(sent, first)
    fanned = models.qwen2_0_5b(width=0.25 if quick else 0.75)
    results.fan_out_s = publishing.publish_times_s(
        fanned, first, publishes=5 if quick else 12, receivers=(1, 4)
    )
    results.sends_s, results.returns_s = publishing.return_times_s(
        fanned, first, rounds=3 if quick else 7
    )
    results.flips_s = publishing.flip_latencies_s(first, flips=200 if quick else 300)
    return results


def _cases(directories: Sequence[Path]) -> Iterator[Case]:
    first, *others = directories
    wide = ("Qwen2.5-0.5B, widened", models.qwen2_0_5b(width=1.5))
    many = ("Qwen3-30B-A3B, narrowed", models.qwen3_30b_a3b(narrowing=8))
    yield Case("dense", *wide, first, _BOTH, _PEERS, slow_samples=3)
    yield Case("experts", *many, first, _PLAIN, _PEERS_FOR_EXPERTS, slow_samples=1)
    for directory in others:  # smaller models, because a disk that cannot keep up slows all peers
        narrow = ("Qwen2.5-0.5B, narrowed", models.qwen2_0_5b(width=0.5))
        few = ("Qwen3-30B-A3B, narrowed, 8 layers", models.qwen3_30b_a3b(narrowing=8, layers=8))
        yield Case(f"dense, {directory}", *narrow, directory, _BOTH, _PEERS, slow_samples=2)
        yield Case(
            f"experts, {directory}", *few, directory, _PLAIN, _PEERS_FOR_EXPERTS, slow_samples=1
        )


def _quick_cases(directories: Sequence[Path]) -> Iterator[Case]:
    first, *others = directories
    dense = ("Qwen2.5-0.5B, narrowed", models.qwen2_0_5b(width=0.25))
    many = ("Qwen3-30B-A3B, 4 layers", models.qwen3_30b_a3b(narrowing=16, layers=4))
    yield Case("dense", *dense, first, _BOTH, _PEERS, slow_samples=1)
    yield Case("experts", *many, first, _PLAIN, _PEERS_FOR_EXPERTS, slow_samples=1)
    for directory in others:
        yield Case(f"dense, {directory}", *dense, directory, _PLAIN, _PEERS, slow_samples=1)
