"""``dbuffer export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import dbuffer
from dbuffer.tools.commands import shared
from dbuffer.tools.commands.keep import parse_version
from dbuffer.tools.terminal import progress


def export(
    store: shared.StoreArgument,
    directory: Annotated[
        Path,
        typer.Argument(
            help="Directory of the checkpoint; made, or empty.",
            metavar="DIR",
            parser=shared.parse_path,
        ),
    ],
    version: Annotated[
        int | None,
        typer.Option(
            help="Number of a version, or RUN-NUMBER, as in `dbuffer status`. Default: the newest.",
            metavar="VERSION",
            parser=parse_version,
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Copy the configuration and the tokenizer of this HuggingFace checkpoint, too.",
            metavar="MODEL_DIR",
            parser=shared.parse_path,
        ),
    ] = None,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Save a version as a HuggingFace checkpoint, which `vllm serve` and transformers load.

    Whole or not at all: it is written beside DIR, and renamed.
    """
    receiver = dbuffer.WeightReceiver(store, allow_shared_store=allow_shared_store)
    with receiver, progress(f"saving {store}", in_bytes=True) as on_bytes:
        saved = receiver.save_pretrained(directory, version=version, model=model, on_bytes=on_bytes)
    text = f"version {saved.number} of {store} is saved in {directory}"
    shared.show(
        {"version": saved.number, "run": saved.run, "directory": str(directory)},
        text,
        as_json=as_json,
    )
