"""A demo run on the terminal: a live table, then a summary."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from dbuffer.demo.loop import run_demo
from dbuffer.demo.records import DemoOptions, DemoResult, Step

_ROWS = 12

_COLUMNS: dict[str, Callable[[Step], str]] = {
    "step": lambda step: str(step.step),
    "version trained": lambda step: str(step.version_trained),
    "version sampling": lambda step: str(step.version_sampled),
    "reward": lambda step: f"{step.reward:.3f}",
    "publish ms": lambda step: f"{step.publish_ms:.1f}",
    "stage ms": lambda step: f"{step.stage_ms:.1f}",
    "pause ms": lambda step: f"{step.pause_ms:.1f}",
    "lag": lambda step: str(step.lag),
}


def show_demo(options: DemoOptions, console: Console) -> DemoResult:
    """Run the demo with a live table on ``console``, then print a summary.

    Raises:
        DemoError: as :func:`run_demo`.
    """
    if console.is_terminal:
        reporter = LiveReporter(console)
        with reporter:
            result = run_demo(options, reporter)
    else:
        result = run_demo(options, LineReporter(console))
    print_summary(result, console)
    return result


class LiveReporter:
    """The last steps as a table that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._steps: deque[Step] = deque(maxlen=_ROWS)
        self._spinner = Spinner("dots", "")
        self._live = Live(self._draw(), console=console, refresh_per_second=8)

    def phase(self, text: str) -> None:
        """Something else begins."""
        self._spinner.update(text=text)
        self._live.update(self._draw())

    def step(self, step: Step) -> None:
        """A training step is done."""
        self._steps.append(step)
        self._live.update(self._draw())

    def _draw(self) -> RenderableType:
        return Group(self._table(), self._spinner) if self._steps else self._spinner

    def _table(self) -> Table:
        table = Table()
        for name in _COLUMNS:
            table.add_column(name, justify="right")
        for step in self._steps:
            table.add_row(*(render(step) for render in _COLUMNS.values()))
        return table

    def __enter__(self) -> LiveReporter:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._steps:
            # What stays on the terminal needs no spinner.
            self._live.update(self._table())
        self._live.stop()


class LineReporter:
    """One line a step, for a log."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def phase(self, text: str) -> None:
        """Something else begins."""
        self._print(text)

    def step(self, step: Step) -> None:
        """A training step is done."""
        if step.step == 1:
            self._print("  ".join(_COLUMNS))
        cells = (render(step).rjust(len(name)) for name, render in _COLUMNS.items())
        self._print("  ".join(cells))

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)


def print_summary(result: DemoResult, console: Console) -> None:
    """What the run showed, in a few lines."""
    moved = [step for step in result.steps if step.version_sampled > 0]

    def median_ms(name: str) -> str:
        return f"{statistics.median(getattr(step, name) for step in moved):.1f} ms"

    table = Table(show_header=False, box=None)
    table.add_row("sampled by", result.engine)
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
    table.add_row("plot", str(result.plot))
    table.add_row("took", f"{result.duration_s:.0f} s")
    console.print(table, soft_wrap=True)
    console.print(
        "[bold green]success: the engine followed the trainer"
        if result.success
        else "[bold red]failed: the weights did not reach the engine as they should"
    )


def _verdict(good: bool, yes: str, no: str) -> str:
    return f"[green]{yes}[/]" if good else f"[red]{no}[/]"
