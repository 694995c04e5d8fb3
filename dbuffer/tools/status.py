"""`StoreStatus`: a store's versions, sender and receivers, for people and monitors."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from dbuffer.format.manifest import UNDECODABLE, ReceiverRecord
from dbuffer.format.places import BUFFERS
from dbuffer.store.buffer import DoubleBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStatus:
    """Status of a buffer."""

    buffer: str
    state: str
    """``"newest"``, ``"previous"``, ``"writing"``, ``"empty"`` or ``"damaged"``."""
    version: int | None = None
    num_tensors: int = 0
    file_bytes: int = 0
    age_s: float | None = None
    has_checksums: bool = False
    num_deltas: int = 0
    """Number of deltas in its manifest. A version that has an anchor consists of both."""
    delta_bytes: int = 0
    is_whole: bool = True
    """Whether its weights file holds the version; if not, it holds the anchor, an earlier one."""
    held_by: list[str] = field(default_factory=list)
    """Receivers that hold it now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverStatus:
    """Status of a receiver."""

    receiver: str
    host: str
    pid: int
    is_alive: bool
    """Whether it runs. On another host: whether it locks its record, or has touched it lately."""
    applied_version: int | None
    lag_versions: int | None
    """Versions between the applied and the newest one; None if none is applied."""
    updated_age_s: float
    part_of: str | None
    """Receiver id of its engine, which acknowledges; None unless it is a rank of one."""
    staged_version: int | None
    """Version that it has staged and not yet applied."""
    problem: str | None
    """Reason why it cannot stage or apply a version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterStatus:
    """Status of the sender, or of the last one."""

    host: str
    pid: int
    epoch: int
    is_alive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatus:
    """Status of a store."""

    store: str
    filesystem: str
    version: int | None
    writer: WriterStatus | None
    buffers: list[BufferStatus]
    receivers: list[ReceiverStatus]


def read_status(store: DoubleBuffer) -> StoreStatus:
    """Read a store's status; nothing is written.

    Raises:
        StoreNotFoundError, StoreAccessError: it does not exist, or others can write to it.
        StoreCorruptError: its pointer or one of its records is damaged.
    """
    store.check()
    pointer = store.newest_pointer()
    version = None if pointer is None else pointer.version
    newest = None if pointer is None else pointer.buffer
    # Receivers of one id side by side, and an engine's ranks below it.
    receivers = sorted(
        store.receivers(),
        key=lambda record: (
            record.part_of or record.receiver,
            record.token,
            record.part_of is not None,
            record.receiver,
        ),
    )
    writer = store.writer()
    return StoreStatus(
        store=str(store.root),
        filesystem=store.medium.filesystem,
        version=version,
        writer=None
        if writer is None
        else WriterStatus(
            host=writer.host,
            pid=writer.pid,
            epoch=writer.epoch,
            is_alive=store.may_live(writer),
        ),
        buffers=[_buffer_status(store, name, newest, receivers) for name in BUFFERS],
        receivers=[_receiver_status(store, record, version) for record in receivers],
    )


def _buffer_status(
    store: DoubleBuffer, name: str, newest: str | None, receivers: list[ReceiverRecord]
) -> BufferStatus:
    try:
        manifest = store.manifest(name)
    except UNDECODABLE:
        return BufferStatus(buffer=name, state="damaged")
    if manifest is None:
        return BufferStatus(buffer=name, state="empty")
    age = "newest" if name == newest else "previous"
    return BufferStatus(
        buffer=name,
        state=age if manifest.state == "complete" else manifest.state,
        version=manifest.version,
        num_tensors=manifest.num_tensors,
        file_bytes=manifest.file_bytes,
        age_s=time.time() - manifest.published_at if manifest.published_at else None,
        has_checksums=manifest.checksums_xxh3 is not None,
        num_deltas=max(0, len(manifest.chain) - 1),
        delta_bytes=store.delta_bytes(manifest),
        is_whole=manifest.anchor is None,
        held_by=[
            record.receiver
            for record in receivers
            if record.held_version == manifest.version and store.may_live(record)
        ],
    )


def _receiver_status(
    store: DoubleBuffer, record: ReceiverRecord, newest: int | None
) -> ReceiverStatus:
    applied = record.applied_version
    return ReceiverStatus(
        receiver=record.receiver,
        host=record.host,
        pid=record.pid,
        is_alive=store.may_live(record),
        applied_version=applied,
        lag_versions=None if applied is None or newest is None else max(0, newest - applied),
        updated_age_s=time.time() - record.updated_at,
        part_of=record.part_of,
        staged_version=record.staged_version,
        problem=record.problem,
    )
