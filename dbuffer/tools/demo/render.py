"""A demo run on the terminal: a line per step, then a summary; and the picture that it leaves."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from dbuffer.tools.demo.loop import DemoResult, TrainingStep, run_demo
from dbuffer.tools.demo.policy import TARGET_SHARE
from dbuffer.tools.render import cell, printable

_COLUMNS: dict[str, Callable[[TrainingStep], str]] = {
    "step": lambda step: str(step.step),
    "version trained": lambda step: str(step.version_trained),
    "version sampling": lambda step: str(step.version_sampled),
    "reward": lambda step: f"{step.reward:.3f}",
    "publish ms": lambda step: f"{step.publish_ms:.1f}",
    "stage ms": lambda step: f"{step.stage_ms:.1f}",
    "pause ms": lambda step: f"{step.pause_ms:.1f}",
    "lag": lambda step: str(step.lag),
}


def show_demo(console: Console, output: Path, **options: Any) -> DemoResult:
    """Run the demo, a line per step on ``console``; draw ``result.plot``, and print a summary."""
    with console.status("") as spinner:  # which only a terminal shows

        def report(what: str | TrainingStep) -> None:
            if isinstance(what, str):
                spinner.update(cell(what))
                _print_line(console, what)
                return
            if what.step == 1:
                _print_line(console, "  ".join(_COLUMNS))
            cells = (render(what).rjust(len(name)) for name, render in _COLUMNS.items())
            _print_line(console, "  ".join(cells))

        result = run_demo(output, report=report, **options)
        save_plot(result)
    print_summary(result, console)
    return result


def _print_line(console: Console, line: str) -> None:
    console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def print_summary(result: DemoResult, console: Console) -> None:
    """What the run showed, in a few lines."""
    moved = [step for step in result.steps if step.version_sampled > 0]

    def median_ms(name: str) -> str:
        return f"{statistics.median(getattr(step, name) for step in moved):.1f} ms"

    table = Table(show_header=False, box=None)
    table.add_row("sampled by", cell(result.engine))
    table.add_row(
        "reward",
        f"{result.reward_first:.3f} to {result.reward_last:.3f} in {len(result.steps)} steps: "
        + _verdict(result.reward_climbed, "climbed", "did not climb"),
    )
    table.add_row(
        "final check",
        f"greedy tokens of {result.num_prompts_compared} prompts, against a fresh engine on the "
        "final checkpoint: " + _verdict(result.tokens_match, "equal", "different"),
    )
    if not result.tokens_changed:
        table.add_row("", "[red]and still those of the initial checkpoint")
    if moved:
        table.add_row(
            "medians",
            f"publish {median_ms('publish_ms')}, stage {median_ms('stage_ms')}, "
            f"pause {median_ms('pause_ms')}, lag {statistics.median(s.lag for s in moved):g}",
        )
    table.add_row("plot", cell(result.plot))
    table.add_row("took", f"{result.duration_s:.0f} s")
    console.print(table, soft_wrap=True)
    console.print(
        "[bold green]success: the engine followed the trainer"
        if result.success
        else "[bold red]failed: the weights did not reach the engine as they should"
    )


def _verdict(good: bool, yes: str, no: str) -> str:
    return f"[green]{yes}[/]" if good else f"[red]{no}[/]"


def save_plot(result: DemoResult) -> None:
    """Draw reward, latencies and lag over the steps into ``result.plot``, a PNG."""
    figure = Figure(figsize=(8, 8), layout="constrained")
    FigureCanvasAgg(figure)
    rewards, latencies, lags = figure.subplots(3, sharex=True, height_ratios=(3, 3, 1))
    steps = [step.step for step in result.steps]

    rewards.plot(steps, [step.reward for step in result.steps], color="tab:green")
    rewards.axhline(TARGET_SHARE, color="tab:gray", linestyle="--", label="an untrained policy")
    rewards.set(ylabel="reward", ylim=(0, 1), title=f"sampled by {result.engine}")
    rewards.legend(loc="lower right")

    latencies.plot(steps, [step.publish_ms for step in result.steps], label="publish")
    moved = [step for step in result.steps if step.version_sampled > 0]
    for name in ("stage", "pause"):
        values = [getattr(step, f"{name}_ms") for step in moved]
        if any(values):
            latencies.plot([step.step for step in moved], values, label=name)
    latencies.set(ylabel="ms", ylim=(0, None))
    latencies.legend(loc="upper right", ncols=3)

    lags.step(steps, [step.lag for step in result.steps], where="mid", color="tab:purple")
    lags.set(ylabel="lag\n(versions)", xlabel="step", ylim=(-0.2, None))
    for axes in (rewards, latencies, lags):
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(result.plot, dpi=120)
