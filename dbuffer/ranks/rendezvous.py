"""Ranks meet in a store of torch.distributed; an error names the missing ranks, where and how long.

torch.distributed itself says ``Wait timeout``. So every rank leaves word first that it is there,
and makes connections when all have.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from dbuffer.errors import RankFailedError, RankTimeoutError
from dbuffer.runtime.messages import first_line, listed

_HERE, _CAME = "here", "came"
"""Words that a rank leaves: as long as it waits, and for good."""

_REMEDY = (
    "check that each of them runs, makes the same calls, and has the same address and number of "
    "ranks; rank_timeout_s is how long ranks wait"
)


def meet(store: Store, rank: int, size: int, *, timeout_s: float) -> None:
    """Wait until all ranks are here, this one of so many.

    They can meet once in a store, and try again if they do not.

    Raises:
        RankTimeoutError: not all of them came.
        RankFailedError: the store is not there any more; its process has ended, most likely.
    """
    where = place_of(store)
    try:
        for word in (_CAME, _HERE):
            store.set(f"{word} {rank}", "")
        store.wait([f"{_HERE} {one}" for one in range(size)], _seconds(timeout_s))
    except RuntimeError as error:
        away = _who_is_not(_HERE, store, range(size))
        never = _who_is_not(_CAME, store, away or [])
        if away is None or never is None:
            raise RankFailedError(
                f"rank {rank} of {size} cannot meet the others at {where}, which does not answer "
                f"({first_line(error)}): has the process that hosts it ended?"
            ) from error
        if not away:
            return  # the last one came at the last moment
        # A rank that comes later must not see this one here, and go on.
        store.delete_key(f"{_HERE} {rank}")
        what = "did not come" if never else "came, but did not wait that long"
        raise RankTimeoutError(
            f"rank {rank} of {size} waited {timeout_s:g} s at {where} for "
            f"{_named(never or away)}, which {what}; {_REMEDY}"
        ) from error


def place_of(store: Store) -> str:
    """Return the place of a store, for a message."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return f"{store.host}:{store.port}"
    if isinstance(store, FileStore):
        return str(store.path)  # type: ignore[attr-defined]  # it has
    return f"a {type(store).__name__}"


def _who_is_not(word: str, store: Store, ranks: Iterable[int]) -> list[int] | None:
    """Return the ranks that have not left this word; None if the store does not answer."""
    try:
        return [rank for rank in ranks if not store.check([f"{word} {rank}"])]
    except RuntimeError:
        return None


def _seconds(duration_s: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=duration_s)


def _named(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)}"
