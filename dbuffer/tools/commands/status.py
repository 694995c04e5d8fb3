"""``dbuffer status``."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Annotated, Any

import typer

from dbuffer.errors import OptionError, StoreNotFoundError
from dbuffer.format.manifest import UNDECODABLE, Pointer, ReceiverRecord
from dbuffer.format.places import BUFFERS, is_kept
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.kept import is_pinned
from dbuffer.tools.commands import shared
from dbuffer.tools.render import print_parts, status_parts, watch_screen

_REFRESH_S = 0.5
_OPEN_SCREEN, _CLOSE_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Terminal's other screen, without a cursor: what was on the first one comes back."""


def status(
    store: shared.StoreArgument,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Refresh twice a second, until Ctrl-C: problems first, then the receivers with "
            "the longest lag.",
        ),
    ] = False,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Show the versions, buffers, sender and receivers of a store, and each receiver's lag."""
    if watch and as_json:
        raise OptionError("--watch and --json exclude each other")
    if watch and not sys.stdout.isatty():
        raise OptionError("--watch needs a terminal; in a pipe, call `dbuffer status` repeatedly")
    view = DoubleBuffer(store, allow_shared_store=allow_shared_store)
    now = read_status(view)
    if now["version"] is None and now["writer"] is None and not now["receivers"]:
        raise StoreNotFoundError(f"there is no store at {store}: the directory has nothing of one")
    if as_json:
        shared.print_json(now)
    elif watch:
        _watch(view)
    else:
        print_parts(status_parts(now))


def _watch(store: DoubleBuffer) -> None:
    with shared.exit_on_sigterm():
        try:
            sys.stdout.write(_OPEN_SCREEN)
            while True:
                columns, rows = shutil.get_terminal_size()
                lines = watch_screen(read_status(store), columns, rows)
                rest = "\r\n\x1b[J" if len(lines) < rows else ""
                sys.stdout.write("\x1b[H" + "\r\n".join(f"\x1b[K{line}" for line in lines) + rest)
                sys.stdout.flush()
                time.sleep(_REFRESH_S)
        finally:
            sys.stdout.write(_CLOSE_SCREEN)
            sys.stdout.flush()


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
        "receivers": [_receiver_status(store, record, pointer, metadata) for record in receivers],
    }


def _buffer_status(
    store: DoubleBuffer, name: str, newest: str | None, receivers: list[ReceiverRecord]
) -> dict[str, Any]:
    empty: dict[str, Any] = {
        "buffer": name,
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
    try:
        manifest = store.manifest(name)
    except UNDECODABLE:
        return empty | {"state": "damaged"}
    if manifest is None:
        return empty
    age = "newest" if name == newest else "previous"
    if is_kept(name):
        age = "pinned" if is_pinned(store, name) else "kept"
    return empty | {
        "state": age if manifest.state == "complete" else manifest.state,
        "version": manifest.version,
        "num_tensors": manifest.num_tensors,
        "file_bytes": manifest.file_bytes,
        "age_s": time.time() - manifest.published_at if manifest.published_at else None,
        "has_checksums": manifest.checksums_xxh3 is not None,
        "num_deltas": max(0, len(manifest.chain) - 1),
        "delta_bytes": store.delta_bytes(manifest),
        "is_whole": manifest.anchor is None,
        "held_by": [
            record.receiver
            for record in receivers
            if record.held_version == manifest.version and store.may_live(record)
        ],
    }


def _receiver_status(
    store: DoubleBuffer, record: ReceiverRecord, newest: Pointer | None, metadata: dict[str, Any]
) -> dict[str, Any]:
    lag = None if newest is None else record.lag_behind(newest, metadata)
    return {
        "receiver": record.receiver,
        "host": record.host,
        "pid": record.pid,
        "is_alive": store.may_live(record),
        "applied_version": record.applied_version,
        "metadata": record.metadata,
        "lag_versions": None if lag is None else lag.versions,
        "lag_steps": None if lag is None else lag.steps,
        "updated_age_s": time.time() - record.updated_at,
        "part_of": record.part_of,
        "staged_version": record.staged_version,
        "only_version": record.only_version,
        "problem": record.problem,
    }
