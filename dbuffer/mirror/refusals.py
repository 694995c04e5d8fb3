"""Refusals: local stores that a mirror of a remote one must not publish into."""

from __future__ import annotations

import shlex

from dbuffer.errors import OptionError
from dbuffer.store.buffer import DoubleBuffer


def require_not_stale(remote: DoubleBuffer, local: DoubleBuffer) -> None:
    """Refuse a local store that :func:`is_stale`.

    Raises:
        OptionError: it holds another store's versions.
    """
    if is_stale(remote, local):
        is_away = "" if remote.exists() else ", which is not there"
        raise refusal(local, f"versions of another store than {remote.root}{is_away}")


def is_stale(remote: DoubleBuffer, local: DoubleBuffer) -> bool:
    """Whether a mirror has left versions in the local store that the remote one never held.

    Without a remote store this is unknown: they count as stale unless a process uses them, as the
    network may be away.
    """
    pointer = local.pointer()
    if pointer is None:
        return False
    is_there = remote.exists()
    if is_there:
        source, copy = remote.writer(), local.writer()
        if source is not None and copy is not None and source.history == copy.history:
            return False
    # The newest decides: where a sender has taken a mirror over, the older one may be a copy.
    manifest = local.manifest(pointer.buffer)
    if manifest is None or manifest.origin is None:
        return False
    return is_there or not _users(local)


def require_not_put_back(remote: DoubleBuffer, local: DoubleBuffer, published: int) -> None:
    """Refuse a remote store that an older copy has replaced since ``published`` was copied.

    Raises:
        OptionError: it holds no version as new as that.
    """
    newest = remote.newest_pointer()
    if newest is None or newest.version < published:
        raise OptionError(
            f"{remote.root} went back to version {newest and newest.version}, and {local.root} "
            f"holds version {published} of it: was it put back from a copy? Give another "
            "directory, or remove the local one"
        )


def refusal(local: DoubleBuffer, what: str) -> OptionError:
    """Return the error for a local store that holds ``what``, with the command to remove it."""
    users = _users(local)
    stop = f"stop {', '.join(users)}, which read it, and " if users else ""
    command = f"rm -r {shlex.quote(str(local.root))}"
    return OptionError(f"{local.root} holds {what}: {stop}remove it ({command}), or name another")


def _users(local: DoubleBuffer) -> list[str]:
    return [record.receiver for record in local.receivers() if local.may_live(record)]
