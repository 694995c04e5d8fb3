"""The picture that a demo leaves."""

from __future__ import annotations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dbuffer.tools.demo.policy import TARGET_SHARE
from dbuffer.tools.demo.records import DemoResult


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
