"""Commands ``dbuffer pin``, ``unpin``, ``rollback`` and ``export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import dbuffer
from dbuffer.errors import OptionError
from dbuffer.format.places import BUFFERS
from dbuffer.store import kept
from dbuffer.store.open_version import open_version
from dbuffer.tools.commands import shared
from dbuffer.tools.terminal import progress


def pin(
    store: shared.StoreArgument,
    version: shared.VersionArgument,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Keep a version until it is unpinned, however many versions the sender keeps.

    Nothing is copied: the weights file is hard-linked below `kept`.
    """
    pinned = kept.pin(shared.view_of(store, allow_shared_store=allow_shared_store), version)
    text = f"version {version} of {store} is pinned"
    shared.show({"id": pinned, "is_pinned": True}, text, as_json=as_json)


def unpin(
    store: shared.StoreArgument,
    version: shared.VersionArgument,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Unpin a version. The next publish drops it, unless the sender's `keep=` includes it."""
    unpinned = kept.unpin(shared.view_of(store, allow_shared_store=allow_shared_store), version)
    text = f"version {version} of {store} is not pinned any more"
    shared.show({"id": unpinned, "is_pinned": False}, text, as_json=as_json)


def rollback(
    store: shared.StoreArgument,
    version: shared.VersionArgument,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Publish an earlier version's weights again, as the newest version.

    The new version has the earlier version's metadata, with the earlier version's number as
    `republished_version`. On a local disk nothing is flushed, so a power cut may undo the
    rollback. If a trainer has the store open, call `sender.republish(VERSION)` in the trainer
    instead.
    """
    view = shared.view_of(store, allow_shared_store=allow_shared_store)
    # Refuse a version that cannot be read, before the sender below takes over the store.
    opened = open_version(view, version)
    if opened is None:
        raise kept.missing(view, version)
    with opened:
        if opened.manifest.is_copy:
            raise OptionError(f"{store} is a mirror's copy: roll back the original store")
        has_checksums = opened.manifest.checksums_xxh3 is not None
    sender = dbuffer.WeightSender(
        store,
        checksum=has_checksums,
        keep=len(BUFFERS) + len(view.kept()),  # so that this sender drops no kept version
        allow_shared_store=allow_shared_store,
    )
    with sender, progress(f"publishing version {version} of {store} again"):
        publication = sender.republish(version)
    text = f"version {publication.version} has the weights of version {version}"
    shared.show(publication, text, as_json=as_json)


def export(
    store: shared.StoreArgument,
    directory: Annotated[
        Path,
        typer.Argument(
            help="Directory for the checkpoint. Must be empty or not exist yet.",
            metavar="DIR",
            parser=shared.parse_path,
        ),
    ],
    version: shared.VersionOption = None,
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
    """Save the newest version, or another version, as a HuggingFace checkpoint.

    `vllm serve` and transformers load the checkpoint. DIR appears once all files are written.
    """
    receiver = dbuffer.WeightReceiver(store, allow_shared_store=allow_shared_store)
    with receiver, progress(f"saving {store}", in_bytes=True) as on_bytes:
        saved = receiver.save_pretrained(directory, version=version, model=model, on_bytes=on_bytes)
    text = f"version {saved.number} of {store} is saved in {directory}"
    shared.show({"id": saved, "directory": str(directory)}, text, as_json=as_json)
