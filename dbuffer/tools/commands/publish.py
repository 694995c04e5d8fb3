"""``dbuffer publish``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dbuffer
from dbuffer.tools.commands import shared
from dbuffer.tools.render import printable
from dbuffer.weights.names import NameMap

if TYPE_CHECKING:
    import torch


def publish(
    checkpoint: Annotated[
        Path, shared.path_argument("HuggingFace checkpoint directory, or a .safetensors file.")
    ],
    store: shared.StoreArgument,
    version: Annotated[
        int | None,
        typer.Option(help="Version, above the last one.  [default: the last one + 1]"),
    ] = None,
    metadata: Annotated[
        str,
        typer.Option(help="""JSON object to publish with the version, such as '{"step": 80}'."""),
    ] = "{}",
    dtype: Annotated[
        str | None,
        typer.Option(help="Cast floating-point tensors to this dtype, such as 'bfloat16'."),
    ] = None,
    checksum: Annotated[
        bool, typer.Option(help="Write checksums, so that `dbuffer verify` can check every byte.")
    ] = True,
    delta: Annotated[
        bool, typer.Option("--delta", help="Publish only what changed since the last version.")
    ] = False,
    durable: Annotated[
        bool, typer.Option("--durable", help="Flush to stable storage before publishing.")
    ] = False,
    rename: shared.RenameOption = None,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
    move_torchrl_aside: shared.AsideOption = False,
) -> None:
    """Publish a checkpoint as the store's newest version.

    With --delta the last version is read back and compared; all weights are then in memory.
    """
    from dbuffer.publish.draft import checked_metadata
    from dbuffer.weights.checkpoint import read_checkpoint
    from dbuffer.weights.sources import Describer

    # Refuse invalid input before the sender makes the store.
    parsed_metadata, parsed_dtype = checked_metadata(_parse_metadata(metadata)), _parse_dtype(dtype)
    names = None if rename is None else NameMap.read(rename)
    weights = list(zip(*read_checkpoint(checkpoint), strict=True))
    Describer(dtype=parsed_dtype, rename=names).describe(weights)
    sender = dbuffer.WeightSender(
        store,
        checksum=checksum,
        delta=delta,
        durable=durable,
        dtype=parsed_dtype,
        rename=names,
        allow_shared_store=allow_shared_store,
        move_torchrl_aside=move_torchrl_aside,
    )
    with sender, shared.byte_progress(hidden=as_json) as progress:
        task = progress.add_task(printable(checkpoint), total=None)
        publication = sender.send(
            weights,
            version=version,
            metadata=parsed_metadata,
            progress=lambda done, total: progress.update(task, completed=done, total=total or None),
        )
    shared.report(publication, shared.describe_copy(publication), as_json=as_json)


def _parse_dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    from dbuffer.io.tensors import DTYPES

    if name not in DTYPES:
        raise typer.BadParameter(
            f"unknown dtype {name!r}: use one of {', '.join(DTYPES)}", param_hint="--dtype"
        )
    return DTYPES[name]


def _parse_metadata(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--metadata") from None
    if not isinstance(value, dict):
        raise typer.BadParameter("not a JSON object", param_hint="--metadata")
    return value
