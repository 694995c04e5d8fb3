"""The ratios to memcpy as bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.measure import median
from benchmarks.report import filesystem
from benchmarks.transfers import Times, Transfer

_OURS, _OTHERS, _TEXT = "#1f6f8b", "#c3c9cd", "#333333"


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
        sharex=True,
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
