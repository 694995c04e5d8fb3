"""The ratios to memcpy as bars."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.measure import median
from benchmarks.report import filesystem
from benchmarks.steps import FINALISING, INITIALISING, LOADING, PAUSING, REPACKING
from benchmarks.switches import Pauses
from benchmarks.transfers import Times, Transfer

_OURS, _OTHERS, _TEXT = "#1f6f8b", "#c3c9cd", "#333333"

# What shows in a bar; all other steps are drawn as one.
_STEP_COLORS = {
    PAUSING: "#7a5195",
    INITIALISING: "#8fb8c8",
    LOADING: "#1f6f8b",
    FINALISING: "#5b8c5a",
    REPACKING: "#e08e45",
}


def save(transfers: list[Transfer], path: Path, caption: str) -> None:
    """Draw a row of two panels, publish and receive, for each case."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = [len(transfer.publish) for transfer in transfers]
    figure, axes = pyplot.subplots(
        len(transfers),
        2,
        figsize=(10, 1.4 + 0.24 * sum(heights) + 0.75 * len(transfers)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for row, transfer in zip(axes, transfers, strict=True):
        _panel(row[0], transfer, transfer.publish, names=True)
        _panel(row[1], transfer, transfer.receive, names=False)
        row[0].set_title(_title(transfer), loc="left", fontsize=9, color=_TEXT)
    axes[0][0].set_xlim(0, 1.3)
    figure.suptitle("Speed as a share of memcpy: publish (left), receive (right)", fontsize=12)
    figure.supxlabel(caption, fontsize=7.5, color=_TEXT)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def save_pauses(results: list[Pauses], path: Path, caption: str) -> None:
    """Draw a panel for each engine, and in it what each way's pause consists of."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(results),
        1,
        figsize=(10, 1.3 + 1.6 * len(results)),
        squeeze=False,
        layout="constrained",
    )
    for [axis], pauses in zip(axes, results, strict=True):
        _steps_panel(axis, pauses)
        axis.set_title(pauses.title, loc="left", fontsize=9, color=_TEXT)
    axes[-1][0].set_xlabel("median ms", fontsize=8, color=_TEXT)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    figure.suptitle("How long an engine stands still for new weights", fontsize=12)
    figure.supxlabel(caption, fontsize=7.5, color=_TEXT)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def save_latencies(gaps_s: dict[str, list[float]], path: Path, caption: str) -> None:
    """Draw how many tokens came how long after the one before, both on logarithmic axes."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(10, 3.6), layout="constrained")
    least, most = (
        math.floor(4 * math.log2(1e3 * end(end(gaps) for gaps in gaps_s.values())))
        for end in (min, max)
    )
    edges = [2 ** (step / 4) for step in range(least, most + 2)]
    for (way, gaps), color in zip(gaps_s.items(), (_TEXT, _OURS, "#e08e45"), strict=True):
        gaps_ms = [1e3 * gap for gap in gaps]
        axis.hist(gaps_ms, edges, histtype="step", linewidth=1.5, color=color, label=way)
    axis.set(xscale="log", yscale="log", xlabel="ms to the next token", ylabel="tokens")
    axis.legend(fontsize=8, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("How long streams wait for a token while new weights come", fontsize=12)
    figure.supxlabel(caption, fontsize=7.5, color=_TEXT)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _steps_panel(axis: Any, pauses: Pauses) -> None:
    ways = sorted(pauses.samples)
    drawn = [0.0] * len(ways)
    totals = [1e3 * pauses.pause_s(way) for way in ways]
    for step, color in (*_STEP_COLORS.items(), ("all else", _OTHERS)):
        widths = [
            1e3 * pauses.step_s(way, step) if step in _STEP_COLORS else max(0, total - left)
            for way, total, left in zip(ways, totals, drawn, strict=True)
        ]
        axis.barh(ways, widths, left=drawn, color=color, height=0.72, label=step)
        drawn = [left + width for left, width in zip(drawn, widths, strict=True)]
    for index, (left, total) in enumerate(zip(drawn, totals, strict=True)):
        axis.annotate(f" {total:.0f}", (left, index), va="center", fontsize=8, color=_TEXT)
    axis.margins(x=0.08)
    axis.invert_yaxis()
    axis.tick_params(labelsize=8, length=0)
    axis.spines[["top", "right", "bottom"]].set_visible(False)


def _panel(axis: Any, transfer: Transfer, times: Times, *, names: bool) -> None:
    ratios = {peer: transfer.limit_s / median(times_s) for peer, times_s in times.items()}
    colors = [_OURS if peer.startswith("dbuffer") else _OTHERS for peer in ratios]
    bars = axis.barh(list(ratios), list(ratios.values()), color=colors, height=0.72)
    labels = [f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.3f}" for ratio in ratios.values()]
    axis.axvline(1, color=_TEXT, linewidth=0.8, linestyle=":")
    plain = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over the line at 1
    axis.bar_label(bars, labels, padding=3, fontsize=8, color=_TEXT, bbox=plain)
    axis.invert_yaxis()
    axis.tick_params(labelsize=8, length=0, labelleft=names)
    axis.spines[["top", "right", "bottom"]].set_visible(False)


def _title(transfer: Transfer) -> str:
    case = transfer.case
    size = f"{transfer.num_bytes / 1e9:.1f} GB in {len(case.shapes):,} tensors"
    return f"{case.model}, {size}, {filesystem(case.directory)}"
