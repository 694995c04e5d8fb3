"""`read_status`: the status of a store. The status of a bucket uses the same functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from dbuffer.format.chain import until_anchor
from dbuffer.format.lineage import Relation, VersionId, relation
from dbuffer.format.manifest import (
    UNDECODABLE,
    Lag,
    Manifest,
    ReceiverRecord,
    Versioned,
    WriterRecord,
)
from dbuffer.format.places import BUFFERS, MIRROR_LOCK_FILE, is_kept
from dbuffer.store.buffer import Contents, DoubleBuffer
from dbuffer.store.kept import is_pinned


def read_status(store: DoubleBuffer) -> dict[str, Any]:
    """Return a store's status as `dbuffer status --json` prints it. Do not change the store."""
    store.check()
    pointer = store.newest_pointer()
    newest = manifest = refusal = None
    if pointer is not None:
        newest, refusal = pointer.buffer, store.refusal(pointer.id)
        manifest = store.manifest_of(pointer.id)
    metadata = {} if manifest is None else manifest.metadata
    records, writer, contents = in_order(store.receivers()), store.writer(), Contents(store)
    return make_status(
        str(store.root),
        store.medium.filesystem,
        pointer,
        buffers=[
            _status_in_store(store, contents, name, newest, records)
            for name in (*BUFFERS, *store.kept())
        ],
        receivers=[
            receiver_status(record, pointer, metadata, is_alive=store.may_live(record))
            for record in records
        ],
        problems=[f"version {pointer.version} {refusal}"] if pointer and refusal else [],
        writer=None if writer is None else _writer_status(store, writer, manifest),
    )


def make_status(
    store: str,
    filesystem: str,
    newest: Versioned | None,
    *,
    buffers: list[dict[str, Any]],
    receivers: list[dict[str, Any]],
    problems: list[str],
    writer: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the status of a store or bucket, from the statuses of its parts.

    Problems of the writer, the buffers and the receivers are added to ``problems``.
    """
    killed = []
    if writer is not None and not (writer["is_alive"] or writer["was_closed"]):
        killed = [
            f"the {writer['role']}, process {writer['pid']} on {writer['host']}, ended without "
            "closing the store: killed?"
        ]
    damaged = [
        f"buffer {buffer['buffer']} is damaged: see `dbuffer verify {store}`"
        for buffer in buffers
        if buffer["state"] == "damaged"
    ]
    reported = [
        f"{receiver['receiver']} reports: {receiver['problem']}"
        for receiver in receivers
        if receiver["problem"] is not None
    ]
    return {
        "store": store,
        "filesystem": filesystem,
        "version": None if newest is None else newest.version,
        "run": None if newest is None else newest.id.run,
        "writer": writer,
        "buffers": buffers,
        "receivers": receivers,
        "problems": [*problems, *killed, *damaged, *reported],
    }


def _writer_status(
    store: DoubleBuffer, writer: WriterRecord, newest: Manifest | None
) -> dict[str, Any]:
    was_closed = store.was_closed(writer)
    is_target = (store.root / MIRROR_LOCK_FILE).exists()
    return {
        "role": "mirror" if is_target and (newest is None or newest.is_copy) else "sender",
        "host": writer.host,
        "pid": writer.pid,
        "epoch": writer.epoch,
        "is_alive": not was_closed and store.may_live(writer),
        "was_closed": was_closed,
    }


def in_order(receivers: Iterable[ReceiverRecord]) -> list[ReceiverRecord]:
    """Sort records by receiver id, with an engine's ranks after the engine."""
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
    newest: Versioned | None,
    metadata: dict[str, Any],
    *,
    is_alive: bool,
) -> dict[str, Any]:
    """Return the status of a receiver. ``metadata`` is the metadata of the newest version."""
    copied, lineage = record.copied, None if newest is None else newest.lineage
    lag = None if lineage is None else record.lag_behind(lineage, metadata)
    if lineage is not None and copied is not None and lineage.reaches(copied):
        lag = Lag(lineage.id.number - copied.number, None)
    has = record.applied or copied
    return {
        "receiver": record.receiver,
        "host": record.host,
        "pid": record.pid,
        "is_alive": is_alive,
        "applied_version": record.applied_version,
        "copied_version": None if copied is None else copied.number,
        "run": None if has is None else has.run,
        "has_forked": lineage is not None
        and record.lineage is not None
        and relation(record.lineage, lineage) is Relation.FORKED,
        "metadata": record.metadata,
        "lag_versions": None if lag is None else lag.versions,
        "lag_steps": None if lag is None else lag.steps,
        "updated_age_s": max(0.0, time.time() - record.updated_at),
        "part_of": record.part_of,
        "staged_version": None if record.staged is None or copied else record.staged.number,
        "device_bytes": record.staged and record.stats.get("device_bytes"),
        "memory_bytes": record.staged and record.stats.get("memory_bytes"),
        "is_attested": record.attested_at is not None,
        "attested_age_s": record.attested_at and max(0.0, time.time() - record.attested_at),
        "only_version": record.only_version,
        "every": record.every,
        "when": record.when,
        "problem": record.problem,
    }


def buffer_status(
    buffer: str,
    state: str,
    manifest: Manifest | None,
    delta_bytes: Callable[[Iterable[VersionId]], int],
    held_by: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the status of a store's buffer, or of the newest version in a bucket.

    ``delta_bytes`` returns the total size of the delta files that lead to given versions.
    ``held_by`` has the ids of the receivers that are reading the version.
    """
    status: dict[str, Any] = {
        "buffer": buffer,
        "state": state,
        "version": None,
        "run": None,
        "run_name": None,
        "num_tensors": 0,
        "file_bytes": 0,
        "age_s": None,
        "has_checksums": False,
        "num_deltas": 0,
        "delta_bytes": 0,
        "is_whole": True,
        "deltas_until_anchor": None,
        "bytes_until_anchor": None,
        "held_by": list(held_by),
    }
    if manifest is None:
        return status
    if manifest.anchor is not None:
        since_anchor = manifest.since_anchor
        until = until_anchor(len(since_anchor), delta_bytes(since_anchor), manifest.num_bytes)
        status["is_whole"] = False
        status["deltas_until_anchor"], status["bytes_until_anchor"] = (max(0, it) for it in until)
    published_at = manifest.published_at
    return status | {
        "version": manifest.version,
        "run": manifest.id.run,
        "run_name": manifest.runs[0].name,
        "num_tensors": manifest.num_tensors,
        "file_bytes": manifest.file_bytes,
        "age_s": max(0.0, time.time() - published_at) if published_at else None,
        "has_checksums": manifest.checksums_xxh3 is not None,
        "num_deltas": max(0, len(manifest.chain) - 1),
        "delta_bytes": delta_bytes(manifest.chain[1:]),
    }


def _status_in_store(
    store: DoubleBuffer,
    contents: Contents,
    buffer: str,
    newest: str | None,
    receivers: list[ReceiverRecord],
) -> dict[str, Any]:
    manifest = None
    try:
        manifest = store.manifest(buffer)
        state = _state_of(store, contents, buffer, manifest, newest)
    except UNDECODABLE:
        state = "damaged"
    held_by = [
        record.receiver
        for record in receivers
        if manifest is not None and record.held == manifest.id and store.may_live(record)
    ]
    return buffer_status(buffer, state, manifest, store.delta_bytes, held_by)


def _state_of(
    store: DoubleBuffer,
    contents: Contents,
    name: str,
    manifest: Manifest | None,
    newest: str | None,
) -> str:
    """Return a buffer's state in words, such as "newest" or "unfinished"."""
    if manifest is None:
        return "empty"
    is_published = contents.has_published(manifest)
    if is_kept(name):
        kept = "pinned" if is_pinned(store, name) else "kept"
        return kept if is_published else f"{kept}, lost"
    if not is_published:
        return "unfinished"
    return "newest" if name == newest else "previous"
