"""Checks of a mirror's source and target: are they two stores, and which end has a sender?"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TypeAlias

from dbuffer.errors import OptionError, StoreNotFoundError
from dbuffer.format import places
from dbuffer.mirror.bucket import Bucket
from dbuffer.mirror.bucket_source import BucketSource, OpenBucketVersion
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime import options
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.filesystem import is_locked
from dbuffer.store.open_version import OpenStoreVersion

Source: TypeAlias = WeightReceiver | BucketSource
OpenSourceVersion: TypeAlias = OpenStoreVersion | OpenBucketVersion

SWAPPED = "did you swap source and target? If not, name another target"


class OneStoreError(OptionError):
    """Source and target of a mirror are one store, seen through two mounts."""


def require_two_ends(source: Path | Bucket, target: Path | Bucket) -> None:
    if isinstance(source, Bucket) and isinstance(target, Bucket):
        raise OptionError(
            f"{source.url} and {target.url} are both buckets: one must be the directory of a store"
        )
    paths = [filesystem.real_path(end) for end in (source, target) if isinstance(end, Path)]
    if len(paths) < 2:
        return
    if paths[0] == paths[1]:
        raise OptionError(f"{source} and {target} are one directory: there is nothing to mirror")
    if paths[0] in paths[1].parents or paths[1] in paths[0].parents:
        raise OptionError(
            f"one of {source} and {target} is inside the other: name a target outside of the source"
        )


def require_no_sender(source: Source, target: DoubleBuffer) -> None:
    """Refuse a target that a sender publishes in, or that is the source itself.

    Raises:
        OptionError: the target must not be copied into.
    """
    if isinstance(source.store, Path):
        remote = DoubleBuffer(source.store, allow_shared_store=True).undamaged_writer()
        local = target.undamaged_writer()
        if remote is not None and local is not None and local.token == remote.token:
            raise OneStoreError(
                f"{source.store} and {target.root} are one store under two names: there is "
                "nothing to mirror"
            )
    of_sender = state_of_senders(target)
    if of_sender is not None:
        raise OptionError(
            f"{target.root} {of_sender}, so {source.store} cannot be copied into it: {SWAPPED}"
        )


def source_of_mirror(store: DoubleBuffer) -> str | None:
    """Return the source of the mirror that was elected last for a store, or None if unknown."""
    with contextlib.suppress(OSError):
        return os.fsdecode((store.root / places.MIRROR_LOCK_FILE).read_bytes()) or None
    return None


def is_copy_of(store: DoubleBuffer, url: str) -> bool:
    """Whether a store's newest version comes from the bucket at ``url``, through any mirrors.

    This host can follow a chain of mirrors only as far as it can read their targets.
    """
    roots = set[Path]()
    while store.root not in roots:
        roots.add(store.root)
        pointer = store.undamaged_pointer()
        manifest = None if pointer is None else store.undamaged_manifest(pointer.buffer)
        if manifest is None or not manifest.is_copy:
            return False
        source = source_of_mirror(store)
        if source is None or options.is_url(source):
            return source == url
        store = DoubleBuffer(source, allow_shared_store=True)
    return False


def has_source_at_local(remote: Path, local: Path) -> bool:
    """Whether ``local`` is a sender's store, and no store exists at ``remote``.

    If so, this process probably runs on the sender's host, where the sender's store is at
    ``local``. ``remote`` is then the path of the same store on other hosts.
    """
    remote_store, store = (DoubleBuffer(p, allow_shared_store=True) for p in (remote, local))
    return not remote_store.exists() and store.exists() and state_of_senders(store) is not None


def state_of_senders(local: DoubleBuffer) -> str | None:
    """Return words such as "is open for writing by a sender", or None if no sender uses a store."""
    pointer = local.undamaged_pointer()
    manifest = None if pointer is None else local.undamaged_manifest(pointer.buffer)
    if manifest is not None and not manifest.is_copy:
        return f"holds version {manifest.version}, which a sender published there"
    return "is open for writing by a sender" if _has_sender(local) else None


def _has_sender(local: DoubleBuffer) -> bool:
    """Whether a sender, not a mirror, has the writer's lock.

    A mirror that has the writer's lock also has the store's mirror lock. A sender has only the
    writer's lock. So this function first takes the mirror lock, as a shared lock. Then no mirror
    has either lock, and only a sender can have the writer's lock.
    """
    writers = local.root / places.WRITER_LOCK_FILE
    mirrors = local.root / places.MIRROR_LOCK_FILE
    try:
        lock = filesystem.share_lock(mirrors)
    except StoreNotFoundError:  # look again if a mirror makes its lock's file now
        return is_locked(writers) and (not mirrors.exists() or _has_sender(local))
    if lock is None:
        return False
    with lock:
        return is_locked(writers)
