"""`verify_store`: checks a store's records, layouts, sizes and checksums."""

from __future__ import annotations

from typing import Any

from dbuffer.errors import StoreNotFoundError, WaitTimeoutError
from dbuffer.format.manifest import UNDECODABLE
from dbuffer.format.places import BUFFERS
from dbuffer.io.copier import Copier
from dbuffer.receive.reader import map_file, read_whole, wrong_tensors
from dbuffer.store.buffer import Contents, DoubleBuffer
from dbuffer.store.open_version import (
    OpenStoreVersion,
    OvertakenError,
    Patience,
    open_buffer,
    open_newest,
)


def verify_store(store: DoubleBuffer) -> list[dict[str, Any]]:
    """Check all versions of a store; return the results of `dbuffer verify --json`, newest first.

    A version is locked while it is read, so a publish can be delayed.
    """
    store.check()
    pointer = store.newest_pointer()
    if pointer is None:
        raise WaitTimeoutError(f"nothing was published in {store.root} yet")

    newest = _verify_buffer(store, pointer.buffer, pointer.version)
    idle = [name for name in BUFFERS if name != newest["buffer"] and _has_version(store, name)]
    return [newest, *(_verify_buffer(store, name, None) for name in (*idle, *store.kept()))]


def _has_version(store: DoubleBuffer, buffer: str) -> bool:
    try:
        manifest = store.manifest(buffer)
    except UNDECODABLE:
        return True
    return manifest is not None and Contents(store).has_published(manifest)


def _verify_buffer(store: DoubleBuffer, buffer: str, newest: int | None) -> dict[str, Any]:
    """Check the version in a buffer.

    ``newest``: number of this version if it is the newest, or None.
    """
    check: dict[str, Any] = {
        "buffer": buffer,
        "version": newest,
        "is_newest": newest is not None,
        "has_checksums": False,
        "problems": [],
    }
    patience = Patience()
    while True:
        try:
            opened = open_newest(store, newer_than=None) if newest else open_buffer(store, buffer)
            if opened is None:
                return check
            check["buffer"] = opened.buffer  # differs if a newer version was published
            check["version"] = opened.manifest.version
            check["has_checksums"] = opened.manifest.checksums_xxh3 is not None
            try:
                with opened:
                    check["problems"] = _find_damage(opened)
            except StoreNotFoundError as error:
                opened.wait_after_loss(error, patience)
        except OvertakenError:  # on a network, a newer version's publish removed the file
            store.check()
            continue
        except UNDECODABLE as error:
            check["problems"] = [str(error)]
        return check


def _find_damage(opened: OpenStoreVersion) -> list[str]:
    """Return a version's damaged tensors.

    Without checksums, check only the layout (the table of tensors).
    """
    copier = Copier()
    try:
        layout = opened.read_layout()
        if opened.manifest.checksums_xxh3 is None:
            return []
        if not layout.is_in_parts and opened.store.medium.maps_files:
            checksums: list[int] | None = copier.checksums(map_file(opened))
        else:
            _, checksums = read_whole(opened, copier, hashed=True)
        return [] if checksums is None else wrong_tensors(opened, layout, checksums)
    except UNDECODABLE as error:
        return [str(error)]
    finally:
        copier.close()
