"""``dbuffer pin``, ``dbuffer unpin`` and ``dbuffer rollback``."""

from __future__ import annotations

from typing import Annotated

import dbuffer
from dbuffer.format.places import BUFFERS
from dbuffer.store import kept
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.tools.arguments import Argument
from dbuffer.tools.commands import shared
from dbuffer.tools.terminal import print_line, status_line

VersionArgument = Annotated[int, Argument("One that `dbuffer status` lists.")]


def pin(
    store: shared.StoreArgument,
    version: VersionArgument,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Keep a version until it is unpinned, whatever the store's sender keeps.

    No byte is copied: the weights file gets a second name below `kept`.
    """
    kept.pin(DoubleBuffer(store, allow_shared_store=allow_shared_store), version)
    print_line(f"version {version} of {store} is pinned")


def unpin(
    store: shared.StoreArgument,
    version: VersionArgument,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Unpin a version: the store's sender drops it, unless it keeps so many."""
    kept.unpin(DoubleBuffer(store, allow_shared_store=allow_shared_store), version)
    print_line(f"version {version} of {store} is not pinned any more")


def rollback(
    store: shared.StoreArgument,
    version: VersionArgument,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Publish an earlier version's weights again, as the newest version.

    Its metadata comes along, with the number as `republished_version`. A trainer that has the store
    open calls `sender.republish(VERSION)` instead.
    """
    view = DoubleBuffer(store, allow_shared_store=allow_shared_store)
    view.check()
    manifests = [*map(view.manifest, BUFFERS), *view.kept().values()]
    has_checksums = any(
        manifest.checksums_xxh3 is not None
        for manifest in manifests
        if manifest is not None and manifest.version == version
    )
    status_line.show(f"publishing version {version} of {store} again")
    sender = dbuffer.WeightSender(
        store,
        checksum=has_checksums,
        keep=len(manifests),  # this drops none
        allow_shared_store=allow_shared_store,
    )
    with sender:
        publication = sender.republish(version)
    text = f"version {publication.version} has the weights of version {version}"
    shared.report(publication, text, as_json=as_json)
