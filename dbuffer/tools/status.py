"""`read_status`: a store's status, and the parts of it that a bucket's status shares."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from dbuffer.format.manifest import UNDECODABLE, Manifest, Pointer, ReceiverRecord
from dbuffer.format.objects import BucketPointer
from dbuffer.format.places import BUFFERS, is_kept
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.contents import Contents
from dbuffer.store.kept import is_pinned


def read_status(store: DoubleBuffer) -> dict[str, Any]:
    """Return a store's status, as `dbuffer status --json` prints it; nothing is written.

    Raises:
        StoreNotFoundError, StoreAccessError: it does not exist, or others can write to it.
        StoreCorruptError: its pointer or one of its records is damaged.
    """
    store.check()
    pointer = store.newest_pointer()
    version = newest = manifest = None
    if pointer is not None:
        version, newest = pointer.version, pointer.buffer
        manifest = store.manifest_of(pointer.version, pointer.history)
    metadata = {} if manifest is None else manifest.metadata
    receivers = in_order(store.receivers())
    writer = store.writer()
    return {
        "store": str(store.root),
        "filesystem": store.medium.filesystem,
        "version": version,
        "writer": None
        if writer is None
        else {
            "host": writer.host,
            "pid": writer.pid,
            "epoch": writer.epoch,
            "is_alive": store.may_live(writer),
        },
        "buffers": [
            _buffer_status(store, name, newest, receivers) for name in (*BUFFERS, *store.kept())
        ],
        "receivers": [
            receiver_status(record, pointer, metadata, is_alive=store.may_live(record))
            for record in receivers
        ],
    }


def in_order(receivers: Iterable[ReceiverRecord]) -> list[ReceiverRecord]:
    """Sort records: receivers of one id side by side, and an engine's ranks below it."""
    return sorted(
        receivers,
        key=lambda record: (
            record.part_of or record.receiver,
            record.token,
            record.part_of is not None,
            record.receiver,
        ),
    )


def receiver_status(
    record: ReceiverRecord,
    newest: Pointer | BucketPointer | None,
    metadata: dict[str, Any],
    *,
    is_alive: bool,
) -> dict[str, Any]:
    """Return the status of a receiver; ``metadata`` is that of the newest version."""
    copied = record.copied_version
    has = record if copied is None else replace(record, applied_version=copied)
    lag = None if newest is None else has.lag_behind(newest.version, newest.history, metadata)
    return {
        "receiver": record.receiver,
        "host": record.host,
        "pid": record.pid,
        "is_alive": is_alive,
        "applied_version": record.applied_version,
        "copied_version": copied,
        "metadata": record.metadata,
        "lag_versions": None if lag is None else lag.versions,
        "lag_steps": None if lag is None else lag.steps,
        "updated_age_s": time.time() - record.updated_at,
        "part_of": record.part_of,
        "staged_version": record.staged_version if copied is None else None,
        "only_version": record.only_version,
        "problem": record.problem,
    }


EMPTY_BUFFER: dict[str, Any] = {
    "buffer": "",
    "state": "empty",
    "version": None,
    "num_tensors": 0,
    "file_bytes": 0,
    "age_s": None,
    "has_checksums": False,
    "num_deltas": 0,
    "delta_bytes": 0,
    "is_whole": True,
    "held_by": [],
}


def version_status(manifest: Manifest) -> dict[str, Any]:
    """Return the part of a buffer's status that is in its manifest."""
    return {
        "version": manifest.version,
        "num_tensors": manifest.num_tensors,
        "file_bytes": manifest.file_bytes,
        "age_s": time.time() - manifest.published_at if manifest.published_at else None,
        "has_checksums": manifest.checksums_xxh3 is not None,
        "num_deltas": max(0, len(manifest.chain) - 1),
        "is_whole": manifest.anchor is None,
    }


def _buffer_status(
    store: DoubleBuffer, name: str, newest: str | None, receivers: list[ReceiverRecord]
) -> dict[str, Any]:
    empty = EMPTY_BUFFER | {"buffer": name}
    try:
        manifest = store.manifest(name)
    except UNDECODABLE:
        return empty | {"state": "damaged"}
    if manifest is None:
        return empty
    age = "newest" if name == newest else "previous"
    if is_kept(name):
        age = "pinned" if is_pinned(store, name) else "kept"
    return (
        empty
        | version_status(manifest)
        | {
            "state": age if is_kept(name) or Contents(store).has_published(manifest) else "writing",
            "delta_bytes": store.delta_bytes(manifest),
            "held_by": [
                record.receiver
                for record in receivers
                if record.held_version == manifest.version and store.may_live(record)
            ],
        }
    )
