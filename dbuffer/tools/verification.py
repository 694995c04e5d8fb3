"""`verify_store`: check a store's records, layouts, sizes and checksums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dbuffer.errors import StoreNotFoundError, WaitTimeoutError
from dbuffer.format.manifest import UNDECODABLE
from dbuffer.format.places import BUFFERS
from dbuffer.io.copier import Copier
from dbuffer.receive.reader import map_privately, read_whole, wrong_tensors
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.hold import Held, Patience, hold_buffer, hold_newest


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferCheck:
    """Result of checking a buffer."""

    buffer: str
    version: int | None
    is_newest: bool
    has_checksums: bool
    problems: list[str]
    """Names of damaged tensors, or descriptions of other damage; empty if there is none."""


def verify_store(
    store: DoubleBuffer, progress: Callable[[str], None] = lambda _: None
) -> list[BufferCheck]:
    """Read and check the newest version, and the one before it if the store still has it.

    Both are held while they are read: a publish may wait for that. ``progress`` is called with a
    text before each.

    Raises:
        StoreNotFoundError, StoreAccessError: the store does not exist, or others can write to it.
        StoreCorruptError: the pointer is damaged.
        WaitTimeoutError: nothing was published yet.
    """
    store.check()
    pointer = store.newest_pointer()
    if pointer is None:
        raise WaitTimeoutError(
            f"nothing was published in {store.root} yet{store.state_without_version()}"
        )
    others = [name for name in BUFFERS if name != pointer.buffer and _has_version(store, name)]
    checks = []
    for buffer in (pointer.buffer, *others, *store.kept()):
        progress(f"verifying buffer {buffer} of {store.root}")
        newest = pointer.version if buffer == pointer.buffer else None
        checks.append(_verify_buffer(store, buffer, newest))
    return checks


def _has_version(store: DoubleBuffer, buffer: str) -> bool:
    try:
        manifest = store.manifest(buffer)
    except UNDECODABLE:
        return True
    return manifest is not None and manifest.state == "complete"


def _verify_buffer(store: DoubleBuffer, buffer: str, newest: int | None) -> BufferCheck:
    """Check a buffer; ``newest`` is the version that it must hold, None for the other buffer."""
    patience = Patience()
    while (check := _verify_once(store, buffer, newest, patience)) is None:
        store.check()
    return check


def _verify_once(
    store: DoubleBuffer, buffer: str, newest: int | None, patience: Patience
) -> BufferCheck | None:
    """Check a buffer; None if its file was removed meanwhile, for a newer version on a network."""
    version, has_checksums, problems = newest, False, []
    try:
        held = hold_newest(store, newer_than=None) if newest else hold_buffer(store, buffer)
        if held is not None:
            version = held.manifest.version
            has_checksums = held.manifest.checksums_xxh3 is not None
            try:
                with held:
                    problems = _find_damage(held)
            except StoreNotFoundError as error:
                held.wait_after_loss(error, patience)
                return None
    except UNDECODABLE as error:
        problems = [str(error)]
    return BufferCheck(
        buffer=buffer,
        version=version,
        is_newest=newest is not None,
        has_checksums=has_checksums,
        problems=problems,
    )


def _find_damage(held: Held) -> list[str]:
    copier = Copier()
    try:
        layout = held.read_layout()
        if held.manifest.checksums_xxh3 is None:
            return []
        if layout.is_in_parts or not held.store.medium.maps_files:
            _, checksums = read_whole(held, copier, hashed=True)
            assert checksums is not None  # noqa: S101 - hashed=True
        else:
            checksums = copier.checksums(map_privately(held))
        return wrong_tensors(held, layout, checksums)
    except UNDECODABLE as error:
        return [str(error)]
    finally:
        copier.close()
