"""Kept versions: versions that a store holds besides the two versions in its buffers.

Each kept version has its own buffer, ``kept/RUN-NUMBER``, with the version's manifest and with hard
links to its weights file and its parts. The directory is made elsewhere and then renamed, so it is
always complete. To drop a version, a sender removes its manifest first, so that no new reader opens
the version.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable

from dbuffer.errors import VersionError
from dbuffer.format import places
from dbuffer.format.lineage import Lineage, VersionId, number_of
from dbuffer.format.manifest import Manifest, encode
from dbuffer.store import filesystem
from dbuffer.store.buffer import Contents, DoubleBuffer, parts_of
from dbuffer.store.filesystem import os_errors
from dbuffer.store.open_version import OpenStoreVersion, Patience, open_buffer, open_version


def keep(store: DoubleBuffer, buffer: str, manifest: Manifest, *, durable: bool) -> str:
    """Keep the version in a buffer, and return the name of the kept version's buffer.

    Raises:
        StoreNotFoundError: a file of the version was removed meanwhile.
        VersionError: the version was kept and dropped before, and its directory still exists.
    """
    kept = places.kept_buffer(manifest.id)
    if store.undamaged_manifest(kept) is not None:
        return kept
    path = store.root / kept
    filesystem.make_directory(path.parent, durable=durable)
    made = filesystem.make_scratch_directory(store.root / places.SCRATCH_DIRECTORY)
    try:
        for part in parts_of(store.weights_path(buffer, manifest)):
            filesystem.link(part, made / part.name)
        written = made / places.MANIFEST_FILE
        with filesystem.make_file(written, os.O_WRONLY) as file:
            with os_errors("write", written):
                filesystem.write_at(file.number, 0, encode(manifest))
            if durable:
                filesystem.sync_file(file.number, written)
        if durable:
            filesystem.sync_directory(made)
        filesystem.rename_directory(made, path)
        if durable:
            filesystem.sync_directory(path.parent)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    if store.undamaged_manifest(kept) is None:
        raise VersionError(
            f"version {manifest.version} was dropped, and {path} still has files of it; the "
            "sender's next publish removes them"
        )
    return kept


def open_kept(store: DoubleBuffer, version: int | VersionId, *, durable: bool) -> OpenStoreVersion:
    """Keep a version, unless the store keeps it already, and open the kept version.

    Raises:
        VersionError: the store does not have the version, or is dropping it.
    """
    opened = open_version(store, version)
    if opened is not None and not places.is_kept(opened.buffer):
        with opened:
            buffer = keep(store, opened.buffer, opened.manifest, durable=durable)
            opened = open_buffer(store, buffer)
    if opened is None:
        raise missing(store, version)
    return opened


def require(store: DoubleBuffer, version: int) -> VersionId:
    """Return the id of the version with this number; raise a VersionError if the store lacks it."""
    for _, manifest in Contents(store).published():
        if manifest.version == version:
            return manifest.id
    raise missing(store, version)


def newest_taken(store: DoubleBuffer, takes: Callable[[Manifest], bool]) -> Lineage | None:
    """Return the newest version, in a buffer or kept, whose manifest ``takes`` accepts, or None."""
    patience = Patience()
    while (pointer := store.newest_pointer() if store.exists() else None) is not None:
        newest, manifests = pointer.lineage, [m for _, m in Contents(store).published()]
        # On a network mount, a new pointer may be visible here before its manifest. Then wait.
        if newest.id in [m.id for m in manifests] or not patience.wait(newest.id):
            taken = [m.lineage for m in manifests if newest.reaches(m.id) and takes(m)]
            return max(taken, key=lambda lineage: lineage.id.number, default=None)
    return None


def missing(store: DoubleBuffer, version: int | VersionId) -> VersionError:
    published = {manifest.version for _, manifest in Contents(store).published()}
    versions = ", ".join(map(str, sorted(published)))
    of_run = f" of run {version.run}" if isinstance(version, VersionId) else ""
    named = f"version {number_of(version)}{of_run}"
    return VersionError(f"{named} is not in {store.root}, which holds {versions or 'none'}")


def pin(store: DoubleBuffer, version: int | VersionId) -> VersionId:
    """Keep a version until it is unpinned, whatever the sender's ``keep`` is; return its id.

    Raises:
        VersionError: the store does not have the version, or is dropping it.
        StoreNotFoundError, StoreAccessError: the store does not exist, or cannot be written.
    """
    with (
        os_errors("pin a version", store.root),
        open_kept(store, version, durable=store.medium.reaches_other_hosts) as opened,
    ):
        pinned = store.root / opened.buffer / places.PIN_FILE
        # Make the pin, then check the manifest. A sender that drops the version removes the
        # manifest, then checks for the pin. So this function finds no manifest, or the sender
        # finds the pin.
        with contextlib.suppress(FileNotFoundError):
            pinned.touch(mode=0o600)
        if not opened.is_still_named():
            pinned.unlink(missing_ok=True)
            raise VersionError(f"{store.root} is dropping version {version} now")
        return opened.manifest.id


def unpin(store: DoubleBuffer, version: int | VersionId) -> VersionId:
    """Unpin a version, so that the store's sender may drop it; return its id.

    Raises:
        VersionError: the version is not pinned.
        StoreNotFoundError, StoreAccessError: the store does not exist, or other users can write to
            it.
    """
    store.check()
    goal = Contents(store).id_of(version)
    if goal is None or not is_pinned(store, places.kept_buffer(goal)):
        raise VersionError(f"version {version} of {store.root} is not pinned")
    pinned = store.root / places.kept_buffer(goal) / places.PIN_FILE
    with os_errors("unpin a version", pinned):
        pinned.unlink(missing_ok=True)
    return goal


def is_pinned(store: DoubleBuffer, buffer: str) -> bool:
    return (store.root / buffer / places.PIN_FILE).exists()
