"""Generation pause per update: dbuffer beside vLLM's own reload."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict

import torch

from benchmarks import engines, plot, report, switches, targets
from benchmarks.switches import EXPERTS, GPU, LIVE, PACKED


def main(options: Namespace) -> int:
    """Measure and print."""
    environment = report.begin(options.dir[:1], engines.versions())
    results = []
    for engine in _engines(quick=options.quick):
        pauses = switches.run(engine, options.dir[0], quick=options.quick)
        results.append(pauses)
        print(f"\n{report.pauses_tables(pauses)}", flush=True)
    checks = targets.check_pauses(results)
    title = f"Targets{', sizes too small to judge by' if options.quick else ''}"
    found = {
        "engines": [
            asdict(pauses) | {"model": pauses.model.title, "bytes": pauses.num_bytes}
            for pauses in results
        ],
    }
    if options.plot:
        plot.save_pauses(found["engines"], options.plot, plot.caption(environment))
    report.conclude(environment, checks, found, options.json, title=title, reference=report.MEMCPY)
    return 0


def _engines(*, quick: bool) -> Sequence[str]:
    if torch.cuda.is_available():
        return (GPU,)
    return (PACKED, EXPERTS) if quick else (PACKED, LIVE, EXPERTS)
