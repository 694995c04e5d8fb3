"""Charts of results. ``python -m benchmarks.plot`` redraws the charts in ``benchmarks/results``."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.measure import median

RESULTS = Path(__file__).parent / "results"

OURS = "#0b62c4"
"""Color of dbuffer and of nothing else, as in docs/make_pictures.py."""
_OTHERS, _TEXT = "#b3bac1", "#333333"
_MEMCPY, _NOTHING = "#6e7781", "#dfe3e6"


def save(transfers: Sequence[Mapping[str, Any]], path: Path, caption: str) -> None:
    """Draw a row of two panels, publish and receive, for each of the transfers in ``cpu.json``."""
    pyplot = _pyplot()
    heights = [len(transfer["publish_of_memcpy"]) for transfer in transfers]
    figure, axes = pyplot.subplots(
        len(transfers),
        2,
        figsize=(10, 1.4 + 0.24 * sum(heights) + 0.75 * len(transfers)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for row, transfer in zip(axes, transfers, strict=True):
        _ratios_panel(row[0], transfer["publish_of_memcpy"], names=True)
        _ratios_panel(row[1], transfer["receive_of_memcpy"], names=False)
        row[0].set_title(_title(transfer), loc="left", fontsize=9, color=_TEXT)
    figure.suptitle("Speed as a share of memcpy: publish (left), receive (right)", fontsize=12)
    _finish(figure, path, caption)


def save_pauses(engines: Sequence[Mapping[str, Any]], path: Path, caption: str) -> None:
    """Draw the pause of each way, in a panel for each of the engines in ``pause.json``."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        len(engines),
        1,
        figsize=(10, 1.3 + 1.6 * len(engines)),
        squeeze=False,
        layout="constrained",
    )
    for [axis], engine in zip(axes, engines, strict=True):
        _pauses_panel(axis, engine)
        axis.set_title(f"{engine['model']}, {engine['engine']}", loc="left", fontsize=10)
    axes[-1][0].set_xlabel("ms: median (bar), and each update (dots)", fontsize=9)
    figure.suptitle("Generation pause per update (shorter is better)", fontsize=12)
    _finish(figure, path, caption)


def save_latencies(shares_ms: Mapping[str, Mapping[str, float]], path: Path, caption: str) -> None:
    """Draw percentiles of the time to the next token, by way and by share of the tokens."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(10, 3.8), layout="constrained")
    width = 0.8 / len(shares_ms)
    for index, (way, shares) in enumerate(shares_ms.items()):
        places = [place + width * index for place in range(len(shares))]
        bars = axis.bar(places, list(shares.values()), width, color=_color(way), label=way)
        axis.bar_label(bars, fmt="%.0f", padding=2, fontsize=9, color=_TEXT)
    labels = [_percentile(share) for share in next(iter(shares_ms.values()))]
    middle = width * (len(shares_ms) - 1) / 2
    axis.set_xticks([place + middle for place in range(len(labels))], labels)
    axis.tick_params(length=0)
    axis.set_ylabel("ms to the next token")
    axis.legend(fontsize=10, frameon=False, loc="upper left")
    axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Inter-token latency while new weights come (lower is better)", fontsize=12)
    _finish(figure, path, caption)


def save_board(panels: Sequence[Mapping[str, Any]], path: Path, caption: str) -> None:
    """Draw the dashboard's panels over the seconds of a run, three in a row."""
    pyplot = _pyplot()
    rows = -(-len(panels) // 3)
    figure, axes = pyplot.subplots(
        rows, 3, figsize=(13, 2.1 * rows), sharex=True, layout="constrained"
    )
    for axis, panel in itertools.zip_longest(axes.flat, panels):
        if panel is None:
            axis.set_visible(False)
            continue
        for series in panel["series"]:
            axis.plot(*_with_gaps(series["points"]), ".-", markersize=3, label=series["name"])
        axis.set_title(f"{panel['title']} ({UNITS[panel['unit']]})", loc="left", fontsize=9)
        axis.legend(fontsize=6, frameon=False, loc="best")
        top = axis.get_ylim()[1]
        axis.set_ylim(-0.03 * top, top)  # shows a line at 0
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("The board's panels, drawn by matplotlib from a run's metrics", fontsize=12)
    _finish(figure, path, f"seconds of the run; {caption}")


def _with_gaps(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return times and values, with a value of NaN wherever points are missing."""
    times_s: list[float] = []
    values: list[float] = []
    for at_s, value in points:
        if times_s and at_s - times_s[-1] > 3:
            times_s.append(at_s)
            values.append(math.nan)
        times_s.append(at_s)
        values.append(value)
    return times_s, values


UNITS = {
    "none": "number",
    "s": "s",
    "ops": "per s",
    "Bps": "bytes/s",
    "percentunit": "share",
}
"""Units in a chart, by Grafana's names."""


def caption(environment: Mapping[str, str]) -> str:
    """Return the machine and the versions that a chart names."""
    engines = [f"{name} {at}" for name, at in environment.items() if name.startswith("vllm")]
    machine = environment.get("GPU", environment["cpu"])
    return ", ".join([machine, environment["kernel"], f"torch {environment['torch']}", *engines])


def _pauses_panel(axis: Any, engine: Mapping[str, Any]) -> None:
    for place, (way, samples) in enumerate(sorted(engine["samples"].items())):
        pauses_ms = [1e3 * sample["pause_s"] for sample in samples]
        middle_ms = median(pauses_ms)
        axis.barh(way, middle_ms, color=_color(way), height=0.72)
        axis.plot(pauses_ms, [place] * len(pauses_ms), "o", color=_TEXT, markersize=3, alpha=0.6)
        is_wrong = engine["is_right"].get(way) is False
        axis.text(
            1,
            place,
            f"{middle_ms:.0f} ms{', wrong tokens' if is_wrong else ''}",
            transform=axis.get_yaxis_transform(),
            fontsize=10,
            fontweight="bold" if _color(way) == OURS else "normal",
            va="center",
        )
    axis.margins(x=0.03)
    axis.set_xlim(left=0)
    _plain(axis)


def _ratios_panel(axis: Any, ratios: Mapping[str, float], *, names: bool) -> None:
    bars = axis.barh(
        list(ratios), list(ratios.values()), color=list(map(_color, ratios)), height=0.72
    )
    labels = [f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.3f}" for ratio in ratios.values()]
    axis.axvline(1, color=_TEXT, linewidth=0.8, linestyle=":")
    plain = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over the line at 1
    axis.bar_label(bars, labels, padding=3, fontsize=8, color=_TEXT, bbox=plain)
    axis.set_xlim(0, 1.3)
    axis.tick_params(labelleft=names)
    _plain(axis)


def _plain(axis: Any) -> None:
    axis.invert_yaxis()
    axis.tick_params(labelsize=9, length=0)
    axis.spines[["top", "right", "bottom"]].set_visible(False)


def _color(way: str) -> str:
    if way.startswith("dbuffer"):
        return OURS
    return {"memcpy of the same bytes": _MEMCPY, "no new weights": _NOTHING}.get(way, _OTHERS)


def _title(transfer: Mapping[str, Any]) -> str:
    size = f"{transfer['bytes'] / 1e9:.1f} GB in {transfer['tensors']:,} tensors"
    return f"{transfer['model']}, {size}, {transfer['filesystem']}"


def _percentile(share: str) -> str:
    return "max" if share == "most" else f"p{float(share.rstrip('%')):g}"


def _pyplot() -> Any:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _finish(figure: Any, path: Path, caption: str) -> None:
    figure.supxlabel(caption, fontsize=8, color=_TEXT)
    figure.savefig(path, dpi=150)
    _pyplot().close(figure)


def read_latencies(text: str) -> tuple[dict[str, dict[str, float]], str]:
    """Read percentiles and caption from a run's printed tables. The samples are not saved."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    environment = {row[0]: row[1] for row in rows if len(row) == 2}
    header = next(row for row in rows if row[0] == "ms to the next token")
    start = rows.index(header)
    [model] = rows[start - 2]
    shares = {row[0]: row for row in rows[start + 2 : start + 5]}
    columns = [index for index, name in enumerate(header) if re.search("%|most", name)]
    shares_ms = {
        way: {header[index]: float(row[index]) for index in columns} for way, row in shares.items()
    }
    return shares_ms, f"{model}\n{caption(environment)}"


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Redraw all charts whose data is in the saved results."""
    cpu, pause = _read("cpu.json"), _read("pause.json")
    save(cpu["transfers"], RESULTS / "cpu.png", caption(cpu["environment"]))
    save_pauses(pause["engines"], RESULTS / "pause.png", caption(pause["environment"]))
    latencies = read_latencies((RESULTS / "latency.txt").read_text(encoding="utf-8"))
    save_latencies(latencies[0], RESULTS / "latency.png", latencies[1])
    board = _read("board.json")
    save_board(board["panels"], RESULTS / "board.png", caption(board["environment"]))


if __name__ == "__main__":
    main()
