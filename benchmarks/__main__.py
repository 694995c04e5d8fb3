"""``python -m benchmarks``, alone or with one of the words in ``_parse``."""

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
    """Run what the command line asks for."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["fleet"]:  # which has options of its own
        return _main_of("fleet")(arguments[1:])
    options = _parse(arguments)
    # Unwinding deletes gigabytes of files in shared memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    for package in _NEEDS.get(options.what, ()):
        if importlib.util.find_spec(package) is None:
            print(f"There is no {package} here, nothing to measure.")
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
"""Module of each, which is imported when it is asked for: each needs other packages."""

_NEEDS = {
    **dict.fromkeys(("pause", "quantized", "latency", "served"), ("vllm",)),
    "torchrl": ("torchrl",),
    **dict.fromkeys(("objects", "links"), ("obstore",)),
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
        choices=_MODULES,
        default="cpu",
        help="where the tensors are (default: cpu); or how long an engine of vLLM pauses for new "
        "weights (4 minutes, 10 GB; quantized: 4 minutes, 8 GB), or the streams that it answers "
        "wait (3 minutes, 4 GB), or how soon it serves a published version (6 minutes, 12 GB); or "
        "a trainer of four ranks "
        "(2 minutes, 6 GB); or TorchRL's double buffer next to ours: speed, torn reads and killed "
        "writers (3 minutes, 14 GB); or how long a step of TRL's trainer waits for its engine "
        "(2 minutes, 8 GB); or the time of a delta (a minute, 6 GB); or versions through a bucket "
        "(10 minutes, 6 GB, and 10 GB of disk), or over slow and lossy links (15 minutes, 6 GB; as "
        "root); or how a publish reaches a fleet of nodes "
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
    parser.add_argument("--cpu", action="store_true", help="gpu: try the program, without a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples here")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the ratios here")
    options = parser.parse_args(arguments)
    # Not the parser's default, which would be extended.
    options.dir = options.dir or [Path("/dev/shm"), Path(tempfile.gettempdir())]
    return options


if __name__ == "__main__":
    sys.exit(main())
