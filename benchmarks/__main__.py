"""Command ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark that the command line names; return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["fleet"]:  # it has its own options
        return _main_of("fleet")(arguments[1:])
    options = _parse(arguments)
    # Raise an exception for SIGTERM, so that the benchmark deletes its files in shared memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    for package in _NEEDS.get(options.what, ()):
        if importlib.util.find_spec(package) is None:
            print(f"nothing to measure: {package} is not installed")
            return 0
    return _main_of(options.what)(options)


def _main_of(what: str) -> Callable[[Any], int]:
    main: Callable[[Any], int] = importlib.import_module(f"benchmarks.{_MODULES[what]}").main
    return main


_MODULES = {
    "cpu": "cpu",
    "gpu": "gpu",
    "pause": "pause",
    "quantized": "quantized",
    "latency": "latency",
    "served": "served",
    "sharded": "sharded",
    "torchrl": "torchrl",
    "delta": "deltas",
    "objects": "objects",
    "links": "links",
    "fleet": "fleet",
}
"""Module of each benchmark. It is imported only if it runs, because each needs other packages."""

_NEEDS = {
    **dict.fromkeys(("pause", "quantized", "latency", "served"), ("vllm",)),
    "torchrl": ("torchrl",),
    **dict.fromkeys(("objects", "links"), ("obstore",)),
}
"""Packages that a benchmark needs. Without them, it prints that there is nothing to measure."""


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure dbuffer. By default, compare it with memcpy, TorchRL, tensordict, "
        "safetensors, torch.save and DCP: this takes about 5 minutes and 16 GB of memory.",
    )
    parser.add_argument(
        "what",
        nargs="?",
        choices=_MODULES,
        default="cpu",
        help="cpu (default): publish and receive in main memory; gpu: from and to a GPU; pause: "
        "pauses of a vLLM engine for new weights (4 minutes, 10 GB), quantized: the same with "
        "quantized weights (4 minutes, 8 GB); latency: inter-token latency during updates (3 "
        "minutes, 4 GB); served: time from a publish to the first token (6 minutes, 12 GB); "
        "sharded: a trainer of four ranks (2 minutes, 6 GB); torchrl: TorchRL's double buffer "
        "and dbuffer's: speed, torn reads and killed writers (3 minutes, 14 GB); delta: size and "
        "time of deltas (a minute, 6 GB); objects: versions through a bucket (10 minutes, 6 GB, "
        "and 10 GB of disk), links: the same over slow and lossy links (15 minutes, 6 GB; as "
        "root); fleet: a publish to many nodes (see fleet --help)",
    )
    parser.add_argument(
        "--dir",
        nargs="+",
        action="extend",
        type=Path,
        help="directories for the files: targets apply to the first, and a bucket's server uses "
        "the last (default: /dev/shm and the directory for temporary files)",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, under 40 seconds")
    parser.add_argument("--cpu", action="store_true", help="for gpu: try the program without a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw a chart to this file")
    options = parser.parse_args(arguments)
    # Don't set this as the parser's default: `extend` would add the given directories to it.
    options.dir = options.dir or [Path("/dev/shm"), Path(tempfile.gettempdir())]
    return options


if __name__ == "__main__":
    sys.exit(main())
