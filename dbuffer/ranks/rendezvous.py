"""Ranks meet in a store of torch.distributed; an error names the missing ranks, where and how long.

torch.distributed itself says ``Wait timeout``. So every rank leaves word first that it is there,
and makes connections when all have.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Sequence

from torch import distributed
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from dbuffer.errors import OptionError, RankFailedError, RankTimeoutError
from dbuffer.runtime.messages import first_line, listed

_HERE, _CAME = "here", "came"
"""Words that a rank leaves: as long as it waits, and for good."""

_REMEDY = (
    "check that each of them runs, makes the same calls, and has the same address and number of "
    "ranks; rank_timeout_s is how long ranks wait"
)


def meet(store: Store, rank: int, size: int, *, timeout_s: float, where: str | None = None) -> None:
    """Wait until all ranks are here, this one of so many.

    They can meet once in a store, and try again if they do not. ``where``: the place, for the
    message. Default: the store's own description.

    Raises:
        RankTimeoutError: not all of them came.
        RankFailedError: the store is not there any more; its process has ended, most likely.
    """
    where = where or place_of(store)
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


def leave(store: Store, rank: int) -> None:
    """Take back what `meet` has left there: a launcher's store outlives a group of its ranks."""
    for word in (_CAME, _HERE):
        store.delete_key(f"{word} {rank}")


def join(init_method: str, rank: int, size: int, *, meet_s: float, timeout_s: float) -> None:
    """Make torch.distributed's group of all ranks, over gloo; every rank calls it.

    They wait ``meet_s`` for the last of them, and ``timeout_s`` for each other afterwards.

    Raises:
        OptionError: (a ``ValueError``) ranks cannot meet there.
        RankTimeoutError: (a ``TimeoutError`` and ``RuntimeError``) not all of them came.
        RankFailedError: (a ``RuntimeError``) they came, and could not connect.
    """
    where = init_method
    if init_method.startswith("env://"):
        address = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
        where = f"{init_method} ({':'.join(address)})"
    store = _store_at(init_method, rank, size, meet_s, where)
    meeting = PrefixStore("dbuffer/join", store)
    meet(meeting, rank, size, timeout_s=meet_s, where=where)
    try:
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=_seconds(timeout_s)
        )
    except RuntimeError as error:
        raise RankFailedError(
            f"rank {rank} of {size} met the others at {where}, but cannot connect to them: "
            f"{first_line(error)}"
        ) from error
    leave(meeting, rank)  # they are connected, so that no rank waits there any more


def place_of(store: Store) -> str:
    """Return the place of a store, for a message."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return f"{store.host}:{store.port}"
    if isinstance(store, FileStore):
        return str(store.path)  # type: ignore[attr-defined]  # it has
    return f"a {type(store).__name__}"


def _store_at(init_method: str, rank: int, size: int, timeout_s: float, where: str) -> Store:
    """Over TCP, rank 0 is the server and waits until there are as many as there are ranks."""
    try:
        results = rendezvous(init_method, rank, size, timeout=_seconds(timeout_s))
        store: Store = next(results)[0]
    except distributed.DistError as error:
        if rank == 0 and isinstance(error, distributed.DistNetworkError):
            raise RankFailedError(
                f"rank 0 cannot listen at {where}: {first_line(error)}"
            ) from error
        awaited = list(range(1, size)) if rank == 0 else [0]
        raise RankTimeoutError(
            f"rank {rank} of {size} waited {timeout_s:g} s at {where} for {_named(awaited)}: "
            f"{first_line(error)}; {_REMEDY}"
        ) from error
    except (RuntimeError, ValueError) as error:
        raise OptionError(f"ranks cannot meet at {where!r}: {first_line(error)}") from error
    return store


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
