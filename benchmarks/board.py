"""Panels of the dashboard for a run of the tutorial: ``python -m benchmarks.board``.

This program runs the tutorial, as docs/make_tutorial.py does. Meanwhile a real Prometheus (Debian's
package, unpacked in a temporary directory) scrapes servers, trainer and mirror each second. The
program then sends Prometheus each query of docs/grafana.json for the time of the run, writes
docs/tutorial.md and benchmarks/results/board.json, and draws board.png with matplotlib, without
Grafana.
"""

from __future__ import annotations

import contextlib
import json
import runpy
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import httpx

from benchmarks import plot
from benchmarks.report import environment

ROOT = Path(__file__).parents[1]
BOARD = ROOT / "docs" / "grafana.json"
SCRAPED = ROOT / "examples" / "tutorial" / "prometheus.yml"
URL = "http://localhost:9090"
STEP_S = 2
RATE_INTERVAL = "10s"
"""Value for Grafana's `$__rate_interval`."""


@contextlib.contextmanager
def prometheus(directory: Path) -> Iterator[httpx.Client]:
    """Run Prometheus until the ``with`` block ends. Yield a client of Prometheus."""
    subprocess.run(["apt-get", "download", "-qq", "prometheus"], cwd=directory, check=True)
    (package,) = directory.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", package, directory], check=True)
    command: list[str | Path] = [directory / "usr/bin/prometheus", f"--config.file={SCRAPED}"]
    command += [f"--storage.tsdb.path={directory / 'data'}"]
    log = (directory / "log").open("wb")
    with log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            with httpx.Client(base_url=URL, timeout=60) as client:
                yield client
        finally:
            process.terminate()


def read_panels(client: httpx.Client, begin_s: float, end_s: float) -> list[dict[str, Any]]:
    """Return the board's panels that have data, with Prometheus' series for their queries."""
    panels = []
    for panel in json.loads(BOARD.read_text(encoding="utf-8"))["panels"]:
        if panel["type"] == "row":
            continue
        queries = [target["expr"] for target in panel["targets"]]
        series = []
        for number, target in enumerate(panel["targets"]):
            query = target["expr"].replace("$__rate_interval", RATE_INTERVAL)
            asked = {"query": query, "start": begin_s, "end": end_s, "step": STEP_S}
            answer = client.get("/api/v1/query_range", params=asked).raise_for_status().json()
            for found in answer["data"]["result"]:
                values = ((round(at - begin_s), float(value)) for at, value in found["values"])
                points = [(at, float(f"{value:.4g}")) for at, value in values if isfinite(value)]
                name = label(target["legendFormat"], found["metric"])
                series.append({"name": name, "query": number, "points": points})
        about = {"title": panel["title"], "unit": panel["fieldConfig"]["defaults"]["unit"]}
        if series:
            panels.append(about | {"queries": queries, "series": series})
    return panels


def label(template: str, labels: Mapping[str, str]) -> str:
    """Return a legend's entry: its template with the labels filled in."""
    for name, value in labels.items():
        template = template.replace(f"{{{{{name}}}}}", value)
    return template


def main() -> None:
    """Run the tutorial, and write Prometheus' series of the run."""
    tutorial = runpy.run_path(str(ROOT / "docs" / "make_tutorial.py"))
    page = tutorial["PAGE"].read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as directory, prometheus(Path(directory)) as client:
        begin_s = time.time()
        followed = tutorial["follow"](page, {}, print)
        panels = read_panels(client, begin_s, time.time())
    tutorial["PAGE"].write_text(followed, encoding="utf-8")
    machine = environment([Path("/dev/shm")])
    kept = {"environment": machine, "panels": panels}
    (plot.RESULTS / "board.json").write_text(json.dumps(kept) + "\n", encoding="utf-8")
    plot.save_board(panels, plot.RESULTS / "board.png", plot.caption(machine))


if __name__ == "__main__":
    shutil.rmtree("/dev/shm/tutorial", ignore_errors=True)
    main()
