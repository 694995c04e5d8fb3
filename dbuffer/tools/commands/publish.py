"""Command ``dbuffer publish``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dbuffer
from dbuffer.errors import OptionError
from dbuffer.runtime import options
from dbuffer.store.buffer import Contents, DoubleBuffer, is_store
from dbuffer.tools.commands import shared
from dbuffer.tools.terminal import progress
from dbuffer.weights.names import NameMap

if TYPE_CHECKING:
    import torch

    from dbuffer.publish.publisher import SenderKeywords

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}

_METADATA = """write it as '{"step": 80}', with the single quotes for the shell"""


def _parse_metadata(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}; {_METADATA}") from None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"not a JSON object; {_METADATA}")
    return value


def publish(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="Directory of a HuggingFace checkpoint, or a .safetensors file.",
            metavar="CHECKPOINT",
            parser=shared.parse_path,
        ),
    ],
    store: shared.StoreArgument,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Watch the directory CHECKPOINT, and publish each checkpoint as soon as it is "
            "completely saved: in the directory itself, or in checkpoint-STEP, step_STEP or "
            "global_step_STEP.",
        ),
    ] = False,
    count: shared.CountOption = None,
    version: Annotated[
        int | None,
        typer.Option(
            help="Number of the version, above the store's last. Default: the last + 1.",
            metavar="VERSION",
        ),
    ] = None,
    metadata: Annotated[
        dict[str, Any] | None,
        typer.Option(
            help="JSON object to publish with the version, such as '{\"step\": 80}'. With a "
            "`step`, `dbuffer status` also shows lags in steps.",
            metavar="JSON",
            parser=_parse_metadata,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Cast floating-point tensors to this dtype: bf16, fp16, fp32, or torch's "
            "name of another dtype.",
            metavar="DTYPE",
        ),
    ] = None,
    rename: Annotated[
        Path | None,
        typer.Option(
            help="Rename tensors by the rules in this JSON file, such as "
            '{"rules": [{"prefix": "actor.", "to": ""}]}.',
            metavar="FILE",
            parser=shared.parse_path,
        ),
    ] = None,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Publish a checkpoint as the store's newest version."""
    if is_store(checkpoint):
        raise OptionError(
            f"{checkpoint} is a store, not a checkpoint: did you swap CHECKPOINT and STORE?"
        )
    if watch and version is not None:
        raise OptionError("--watch and --version cannot be combined")
    if watch and checkpoint.is_file():
        raise OptionError(f"--watch needs a directory, and {checkpoint} is a file")
    if count is not None and not watch:
        raise OptionError("--count needs --watch")
    from dbuffer.publish.draft import checked_metadata
    from dbuffer.publish.publisher import SenderOptions

    # Refuse invalid input before the sender makes the store, or takes it over.
    metadata = checked_metadata(metadata)
    chosen: SenderKeywords = {
        "checksum": True,
        "dtype": _parse_dtype(dtype),
        "rename": None if rename is None else NameMap.read(rename),
        "allow_shared_store": allow_shared_store,
    }
    view = DoubleBuffer(store, allow_shared_store=allow_shared_store)
    if not watch:
        SenderOptions(**chosen).make_describer().describe(checkpoint)
        Contents(view).next_version(version)

    def send(saved: os.PathLike[str], metadata: dict[str, Any]) -> None:
        with progress(f"publishing {os.fspath(saved)}", in_bytes=True) as on_bytes:
            publication = sender.send(saved, version=version, metadata=metadata, progress=on_bytes)
        of = f", from {os.fspath(saved)}" if watch else ""
        shared.show(publication, shared.describe_copy(publication) + of, as_json=as_json)

    with dbuffer.WeightSender(store, **chosen) as sender:
        if not watch:
            send(checkpoint, metadata)
            return
        from dbuffer.weights.checkpoint_directory import send_saved

        with shared.stopped_by_signals() as stop:
            send_saved(
                checkpoint, view, lambda saved, its: send(saved, metadata | its), stop, count=count
            )


def _parse_dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    from dbuffer.io.tensors import DTYPES, can_cast_to

    dtype = DTYPES.get(_SHORT_DTYPES.get(name, name))
    if dtype is None or not can_cast_to(dtype):
        possible = [name for name, its_dtype in DTYPES.items() if can_cast_to(its_dtype)]
        options.refuse("--dtype", name, ", ".join((*_SHORT_DTYPES, *possible)))
    return dtype
