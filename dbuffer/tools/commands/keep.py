"""``dbuffer pin``, ``dbuffer unpin`` and ``dbuffer rollback``."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

import dbuffer
from dbuffer.errors import OptionError
from dbuffer.format.lineage import VersionId
from dbuffer.format.places import BUFFERS
from dbuffer.store import kept
from dbuffer.store.open_version import open_version
from dbuffer.tools.commands import shared
from dbuffer.tools.terminal import progress


def parse_version(text: str) -> int | VersionId:
    """Parse a version's number, or its id; a path in its place is named."""
    if text.isdecimal():
        return int(text)
    with contextlib.suppress(ValueError):
        return VersionId.parse(text)
    swapped = " (are STORE and VERSION swapped?)" if Path(text).is_dir() else ""
    raise typer.BadParameter(f"{text!r} is not a version number{swapped}")


VersionArgument = Annotated[
    int,
    typer.Argument(
        help="Number of a version, or RUN-NUMBER, as in `dbuffer status`.",
        metavar="VERSION",
        parser=parse_version,
    ),
]


def _as_json(version: int | VersionId) -> int | str:
    return version if isinstance(version, int) else str(version)


def pin(
    store: shared.StoreArgument,
    version: VersionArgument,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Keep a version until it is unpinned, whatever the store's sender keeps.

    Nothing is copied: the weights file is hard-linked below `kept`.
    """
    kept.pin(shared.view_of(store, allow_shared_store=allow_shared_store), version)
    text = f"version {version} of {store} is pinned"
    shared.show({"version": _as_json(version), "is_pinned": True}, text, as_json=as_json)


def unpin(
    store: shared.StoreArgument,
    version: VersionArgument,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Unpin a version: the next publish drops it, unless the sender's `keep=` covers it."""
    kept.unpin(shared.view_of(store, allow_shared_store=allow_shared_store), version)
    text = f"version {version} of {store} is not pinned any more"
    shared.show({"version": _as_json(version), "is_pinned": False}, text, as_json=as_json)


def rollback(
    store: shared.StoreArgument,
    version: VersionArgument,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Publish an earlier version's weights again, as the newest version.

    Its metadata comes along, with the number as `republished_version`. On a local disk nothing is
    flushed: a power cut may undo it. A trainer that has the store open calls
    `sender.republish(VERSION)` instead.
    """
    view = shared.view_of(store, allow_shared_store=allow_shared_store)
    # Refuse a version that cannot be read before the sender takes the store over.
    held = open_version(view, version)
    if held is None:
        raise kept.missing(view, version)
    with held:
        if held.manifest.is_copy:
            raise OptionError(f"{store} is a mirror's copy: roll back where it is published")
        has_checksums = held.manifest.checksums_xxh3 is not None
    sender = dbuffer.WeightSender(
        store,
        checksum=has_checksums,
        keep=len(BUFFERS) + len(view.kept()),  # this drops none
        allow_shared_store=allow_shared_store,
    )
    with sender, progress(f"publishing version {version} of {store} again"):
        publication = sender.republish(version)
    text = f"version {publication.version} has the weights of version {version}"
    shared.show(publication, text, as_json=as_json)
