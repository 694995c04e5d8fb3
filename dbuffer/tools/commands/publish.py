"""``dbuffer publish``."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dbuffer
from dbuffer.errors import InvalidWeightsError, OptionError
from dbuffer.runtime import options
from dbuffer.runtime.timing import TIMING
from dbuffer.store.buffer import DoubleBuffer, is_store
from dbuffer.store.contents import Contents
from dbuffer.store.watcher import Watcher
from dbuffer.tools.commands import shared
from dbuffer.tools.terminal import progress
from dbuffer.weights.names import NameMap

if TYPE_CHECKING:
    import torch

    from dbuffer.publish.sender_options import SenderKeywords

logger = logging.getLogger(__name__)

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
            help="Publish each checkpoint that is saved into the directory CHECKPOINT, over the "
            "last one or into checkpoint-STEP, step_STEP or global_step_STEP, once all of it has "
            "been saved.",
        ),
    ] = False,
    count: shared.CountOption = None,
    version: Annotated[
        int | None,
        typer.Option(
            help="Version, above the last one. Default: the last one + 1.", metavar="VERSION"
        ),
    ] = None,
    metadata: Annotated[
        dict[str, Any] | None,
        typer.Option(
            help="JSON object to publish with the version, such as '{\"step\": 80}'. `step` is the "
            "trainer's: `dbuffer status` then shows lags in steps, too.",
            metavar="JSON",
            parser=_parse_metadata,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Cast floating-point tensors to this dtype: bf16, fp16, fp32, or torch's name "
            "of one.",
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
    as_json: shared.JsonLinesOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Publish a checkpoint as the store's newest version."""
    if is_store(checkpoint):
        raise OptionError(
            f"{checkpoint} is a store, not a checkpoint: did you swap CHECKPOINT and STORE?"
        )
    if watch and version is not None:
        raise OptionError("--watch excludes --version")
    if count is not None and not watch:
        raise OptionError("--count needs --watch")
    from dbuffer.publish.draft import checked_metadata
    from dbuffer.publish.sender_options import SenderOptions

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
    with dbuffer.WeightSender(store, **chosen) as sender:
        send = functools.partial(_send, sender, as_json=as_json)
        if watch:
            _publish_saved(checkpoint, view, count, send, metadata)
        else:
            send(checkpoint, metadata, version)


def _send(
    sender: dbuffer.WeightSender,
    checkpoint: Path,
    metadata: dict[str, Any],
    version: int | None = None,
    *,
    as_json: bool,
) -> None:
    with progress(f"publishing {checkpoint}", in_bytes=True) as on_bytes:
        publication = sender.send(checkpoint, version=version, metadata=metadata, progress=on_bytes)
    shared.show(publication, shared.describe_copy(publication), as_json=as_json)


def _publish_saved(
    directory: Path,
    store: DoubleBuffer,
    count: int | None,
    send: Callable[[Path, dict[str, Any]], None],
    metadata: dict[str, Any],
) -> None:
    """Publish each checkpoint that is saved into a directory, until a signal or ``count``."""
    from dbuffer.weights.checkpoint_directory import CheckpointDirectory, order_of

    saves, num_sent = CheckpointDirectory(directory), 0
    published = [manifest.metadata for _, manifest in Contents(store).published()]
    last = max(map(order_of, published), default=order_of({}))
    logger.info("publishing each checkpoint that is saved into %s", directory)
    with shared.stopped_by_signals() as stop, contextlib.closing(Watcher(directory)) as watcher:
        while not stop.is_set():
            for checkpoint in saves.settled(last):
                try:
                    checkpoint.require_one_save(last)
                    send(checkpoint.path, metadata | checkpoint.metadata)
                except InvalidWeightsError as error:
                    logger.warning("%s is not published: %s", checkpoint.path, str(error))
                    continue
                last, num_sent = checkpoint.order, num_sent + 1
                if stop.is_set() or num_sent == count:
                    return
            watcher.wait(TIMING.settle_s / 2)


def _parse_dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    from dbuffer.io.tensors import DTYPES, can_cast_to

    dtype = DTYPES.get(_SHORT_DTYPES.get(name, name))
    if dtype is None or not can_cast_to(dtype):
        possible = [one for one, its_dtype in DTYPES.items() if can_cast_to(its_dtype)]
        options.refuse("--dtype", name, ", ".join((*_SHORT_DTYPES, *possible)))
    return dtype
