"""Refusals: local stores that a mirror of a remote one must not publish into."""

from __future__ import annotations

import shlex

from dbuffer.errors import OptionError
from dbuffer.format import places
from dbuffer.format.manifest import Pointer
from dbuffer.format.objects import BucketPointer
from dbuffer.mirror.ends import Source
from dbuffer.store import kept
from dbuffer.store.buffer import DoubleBuffer, has_reached
from dbuffer.store.filesystem import is_locked

SWAPPED = "did you swap source and target? If not, name another target"


def require_no_senders(source: Source, local: DoubleBuffer) -> None:
    """Refuse a local store that a sender has open, or published in last.

    Raises:
        OptionError: it is a sender's.
    """
    of_sender = state_of_senders(local)
    if of_sender is not None:
        raise OptionError(
            f"{local.root} {of_sender}, and {source.name} was to be copied into it: {SWAPPED}"
        )


def state_of_senders(local: DoubleBuffer) -> str | None:
    """Say how a store is a sender's; None: it is a mirror's, or new."""
    pointer = local.undamaged_pointer()
    manifest = None if pointer is None else local.undamaged_manifest(pointer.buffer)
    if manifest is not None and manifest.origin is None:
        return f"holds version {manifest.version} of a sender, which is no mirror's copy"
    return "is open for writing by a sender" if _has_sender(local) else None


def _has_sender(local: DoubleBuffer) -> bool:
    """Whether a process other than a mirror has the writer's lock.

    A mirror takes its own lock before it takes the writer's, and gives it back after it.
    """
    writers = local.root / places.WRITER_LOCK_FILE
    mirrors = local.root / places.MIRROR_LOCK_FILE
    # Looked at once more, because a mirror may have ended between the first two looks.
    return is_locked(writers) and not is_locked(mirrors) and is_locked(writers)


def require_not_stale(source: Source, local: DoubleBuffer) -> None:
    """Refuse a local store that :func:`is_stale`.

    Raises:
        OptionError: it holds another store's versions.
    """
    if is_stale(source, local):
        is_away = "" if source.exists() else ", which is not there (is its path right?)"
        raise refusal(local, f"versions of another store than {source.name}{is_away}")


def is_stale(source: Source, local: DoubleBuffer) -> bool:
    """Whether a mirror has left versions in the local store that the source never held.

    Without a source this is unknown: they count as stale unless a process uses them, as the
    network may be away.
    """
    pointer = local.pointer()
    if pointer is None:
        return False
    is_there = source.exists()
    if is_there:
        copy = local.writer()
        if copy is not None and source.history() == copy.history:
            return False
    # The newest decides: where a sender has taken a mirror over, the older one may be a copy.
    manifest = local.manifest(pointer.buffer)
    if manifest is None or manifest.origin is None:
        return False
    return is_there or not _users(local)


def require_not_put_back(
    source: Source, target_name: str, published: Pointer | BucketPointer
) -> None:
    """Refuse a source that has lost the version that was ``published`` in a target.

    Raises:
        OptionError: it holds no version as new as that, or another one under its number.
    """
    newest = source.newest()
    if newest is None or not has_reached(newest, published):
        raise OptionError(
            f"{source.name} went back, and its newest version is {newest and newest.version} now; "
            f"{target_name} holds a version {published.version} of it that may be in no other "
            "place. Was the source put back from a copy, or cut off from power? Name another target"
        )


def refusal(local: DoubleBuffer, what: str) -> OptionError:
    """Return the error for a local store that holds ``what``, copied by a mirror.

    It names the command that removes the store, unless a version in it is pinned.
    """
    users = _users(local)
    stop = f"stop {', '.join(users)}, which read it, and " if users else ""
    remedy = "name another target"
    if not any(kept.is_pinned(local, buffer) for buffer in local.kept()):
        remedy = f"{stop}remove it (rm -r {shlex.quote(str(local.root))}), or {remedy}"
    return OptionError(f"{local.root} holds {what}: {remedy}")


def _users(local: DoubleBuffer) -> list[str]:
    return [record.receiver for record in local.receivers() if local.may_live(record)]
