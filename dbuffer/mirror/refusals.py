"""Refusals: local stores that a mirror of a remote one must not publish into."""

from __future__ import annotations

import contextlib
import shlex

from dbuffer.errors import OptionError, StoreCorruptError
from dbuffer.format import places
from dbuffer.format.lineage import Relation, relation
from dbuffer.format.manifest import Pointer
from dbuffer.mirror.ends import Source
from dbuffer.store import kept
from dbuffer.store.buffer import DoubleBuffer
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
    if manifest is not None and not manifest.is_copy:
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


def has_forked(source: Source, local: DoubleBuffer) -> bool:
    """Whether the version that a mirror left in the local store does not lead to the source's."""
    pointer, newest = _newest(local), source.newest()
    if pointer is None or newest is None:
        return False
    return relation(pointer.lineage, newest.lineage) is Relation.FORKED


def _newest(local: DoubleBuffer) -> Pointer | None:
    """Return the version that a local store's readers find, or None if its pointer is damaged."""
    with contextlib.suppress(StoreCorruptError):
        return local.newest_pointer()
    return None


def require_source(source: Source, local: DoubleBuffer) -> None:
    """Refuse a local store with versions while the source has none, if no process reads it.

    If one does, the network may be away.

    Raises:
        OptionError: the source holds no version, and the local store does.
    """
    if _newest(local) is not None and source.newest() is None and not _users(local):
        state = "holds none yet" if source.exists() else "is not there (is its path right?)"
        raise refusal(local, f"versions of an earlier run, and {source.name} {state}")


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
