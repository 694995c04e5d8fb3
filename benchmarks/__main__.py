"""``python -m benchmarks``, alone or with one of the words in ``_parse``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import (
    deltas,
    engine_ranks,
    fleet,
    gpu,
    latency,
    models,
    objects,
    pause,
    plot,
    publishing,
    report,
    responses,
    served,
    sharded,
    targets,
    torchrl,
    transfers,
    trl,
)
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
# DCP takes half a minute for so many tensors.
_PEERS = (*_PEERS_FOR_EXPERTS, DistributedCheckpoint)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["fleet"]:  # which has options of its own
        return fleet.main(arguments[1:])
    options = _parse(arguments)
    # Unwinding deletes gigabytes of files in shared memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    for package in _NEEDS.get(options.what, ()):
        if importlib.util.find_spec(package) is None:
            print(f"There is no {package} here, nothing to measure.")
            return 0
    return _MAINS[options.what](options)


def _measure_cpu(options: argparse.Namespace) -> int:
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


_MAINS = {
    "cpu": _measure_cpu,
    "gpu": gpu.main,
    "pause": pause.main,
    "ranks": engine_ranks.main,
    "latency": latency.main,
    "served": served.main,
    "responses": responses.main,
    "sharded": sharded.main,
    "torchrl": torchrl.main,
    "trl": trl.main,
    "delta": deltas.main,
    "objects": objects.main,
}
_NEEDS = {
    **dict.fromkeys(("pause", "latency", "served", "responses"), ("vllm",)),
    "torchrl": ("torchrl",),
    "trl": ("trl", "vllm"),
}
"""Packages without which there is nothing to measure."""


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure dbuffer against memcpy, TorchRL, tensordict, safetensors, "
        "torch.save and DCP. Takes about 5 minutes and 16 GB of memory.",
    )
    parser.add_argument(
        "what",
        nargs="?",
        choices=(*_MAINS, "fleet"),
        default="cpu",
        help="where the tensors are (default: cpu); or how long an engine of vLLM pauses for new "
        "weights (4 minutes, 10 GB), or what its four ranks read on a network mount (a minute, "
        "6 GB), or the streams that it answers wait (3 minutes, 4 GB), or how soon it serves what "
        "was published (6 minutes, 12 GB), or its "
        "server takes for a response (5 minutes, 2 GB); or a trainer of four ranks (2 minutes, "
        "6 GB); or TorchRL's double buffer next to ours: speed, torn reads and killed writers "
        "(3 minutes, 14 GB); or how long a step of TRL's trainer waits for its engine (2 minutes, "
        "8 GB); or what a delta takes (a minute, 6 GB); or versions through a "
        "bucket (10 minutes, 6 GB, and 10 GB of disk); or how a publish reaches a fleet of nodes "
        "(fleet --help)",
    )
    parser.add_argument(
        "--dir",
        nargs="+",
        action="extend",
        type=Path,
        help="directories to put the files in; the targets are judged by the first, and a bucket's "
        "server has the last (default: /dev/shm and the directory for temporary files)",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, under 40 seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples here")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the ratios here")
    options = parser.parse_args(arguments)
    # Not the parser's default, which would be extended.
    options.dir = options.dir or [Path("/dev/shm"), Path(tempfile.gettempdir())]
    return options


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
    for directory in others:  # smaller: a disk that cannot keep up with the writes slows them all
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


if __name__ == "__main__":
    sys.exit(main())
