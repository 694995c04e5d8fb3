"""``dbuffer demo``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from dbuffer.errors import DBufferError
from dbuffer.tools.commands import shared


def demo(
    engine: Annotated[
        str, typer.Option(help="'vllm', or 'torch' for the same loop with a plain torch policy.")
    ] = "vllm",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 40,
    output: Annotated[
        Path, typer.Option(help="Directory for the plot and the engine's log.")
    ] = Path("dbuffer-demo"),
    seed: Annotated[int, typer.Option(help="Seed of weights and sampling.")] = 0,
    as_json: shared.JsonOption = False,
) -> None:
    """Train a tiny model by reinforcement learning, sampled by a real vLLM engine.

    The engine, in a process of its own, follows the trainer through a store. The reward can only
    climb if the weights reach it; at the end its greedy tokens are compared with those of a fresh
    engine on the trainer's final checkpoint.
    """
    console = shared.errors if as_json else shared.console
    try:
        from dbuffer.tools.demo.render import show_demo

        result = show_demo(console, output, engine=engine, steps=steps, seed=seed)
    except ModuleNotFoundError as error:
        raise DBufferError(
            f"the demo needs {error.name}: pip install '.[demo]' in a clone of dbuffer"
        ) from error
    if as_json:
        shared.print_json(dataclasses.asdict(result))
    if not result.success:
        raise typer.Exit(shared.EXIT_FAILED)
