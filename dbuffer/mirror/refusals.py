"""Refusals: local stores that a mirror of a remote one must not publish into."""

from __future__ import annotations

import shlex

from dbuffer.errors import OptionError
from dbuffer.mirror.ends import Source
from dbuffer.store.buffer import DoubleBuffer


def require_not_stale(source: Source, local: DoubleBuffer) -> None:
    """Refuse a local store that :func:`is_stale`.

    Raises:
        OptionError: it holds another store's versions.
    """
    if is_stale(source, local):
        is_away = "" if source.exists() else ", which is not there"
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


def require_not_put_back(source: Source, target_name: str, published: int) -> None:
    """Refuse a source that an older copy has replaced since ``published`` was copied.

    Raises:
        OptionError: it holds no version as new as that.
    """
    newest = source.newest()
    if newest is None or newest.version < published:
        raise OptionError(
            f"{source.name} went back to version {newest and newest.version}, and {target_name} "
            f"holds version {published} of it: was it put back from a copy? Give another "
            "target, or remove that one"
        )


def refusal(local: DoubleBuffer, what: str) -> OptionError:
    """Return the error for a local store that holds ``what``, with the command to remove it."""
    users = _users(local)
    stop = f"stop {', '.join(users)}, which read it, and " if users else ""
    command = f"rm -r {shlex.quote(str(local.root))}"
    return OptionError(f"{local.root} holds {what}: {stop}remove it ({command}), or name another")


def _users(local: DoubleBuffer) -> list[str]:
    return [record.receiver for record in local.receivers() if local.may_live(record)]
