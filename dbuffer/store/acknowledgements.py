"""Waiting for receivers to have applied a version."""

from __future__ import annotations

import time
from collections.abc import Collection

from dbuffer.errors import ReceiverFailedError, WaitTimeoutError
from dbuffer.format.manifest import ReceiverRecord, WriterRecord, is_receiver_id
from dbuffer.runtime import options
from dbuffer.store.buffer import DoubleBuffer

_POLL_MIN_S = 0.001
_POLL_MAX_S = 0.05

_LAST_WORD_S = 1.0
"""How long the last word of a process that has ended may take to arrive: it acknowledged and ended
between our look at its record and our look at it, or a network still carries it. A mirror carries
the end and the last word together. A problem with the store itself may be over as well, until the
receiver looks at the store again."""


def wait_applied(
    store: DoubleBuffer,
    version: int,
    receivers: int | str | Collection[str],
    *,
    timeout_s: float,
    writer: WriterRecord,
) -> None:
    """Wait until receivers have applied ``version`` or a later one; see `WeightSender`.

    That one has ended is learned at once (a second for its last word) of one of this host, or on a
    local mount; else after :data:`~dbuffer.store.liveness.PRESUMED_DEAD_AFTER_S`. Records older
    than ``writer``, which published the version, are of an earlier run, whose processes have ended.

    Raises:
        StoreNotFoundError, WriterSupersededError: the store is not this writer's any more, so
            receivers apply something else.
    """
    options.whole_number("version", version, at_least=0)
    deadline = time.monotonic() + options.seconds("timeout_s", timeout_s)
    pause_s = _POLL_MIN_S
    wanted = options.names("receivers", receivers)
    names, needed = (None, wanted) if isinstance(wanted, int) else (wanted, len(wanted))
    for name in names or ():
        if not is_receiver_id(name):
            options.refuse("receivers", receivers, f"no receiver can be named {name!r:.80}")
    noted_at: dict[tuple[str, str], float] = {}
    while True:
        everybody = store.receivers()
        # An engine acknowledges as one; its ranks only say what they have ready.
        records = [record for record in everybody if record.part_of is None]
        if names is not None:
            records = [record for record in records if record.receiver in names]
        waiting = [record for record in records if not record.has_applied(version, writer.history)]
        num_applied = len(records) - len(waiting)
        if num_applied >= needed:
            return
        store.require_writer(writer)
        if names is not None:
            for record in waiting:
                ranks = [rank for rank in everybody if rank.part_of == record.receiver]
                for each in (record, *ranks):
                    if each.updated_at >= writer.started_at:
                        _require_able(each, version, writer.history, noted_at)
                if record.updated_at >= writer.started_at:
                    _require_running(store, record, noted_at)
        left = deadline - time.monotonic()
        if left <= 0:
            states = ", ".join(_state(record, version, writer.history) for record in records)
            raise WaitTimeoutError(
                f"{num_applied} of {needed} receivers applied version {version} of "
                f"{store.root} within {timeout_s:g} s ({states or 'no receiver came yet'})"
            )
        time.sleep(min(pause_s, left))
        pause_s = min(2 * pause_s, _POLL_MAX_S)


def _state(record: ReceiverRecord, version: int, history: str | None) -> str:
    """In a few words, with what keeps it from the version."""
    state = f"{record.receiver} is at {record.applied_version}"
    if record.has_problem_with(version, history):
        return f"{state}, because of: {record.problem}"
    return state


def _require_able(
    record: ReceiverRecord,
    version: int,
    history: str | None,
    noted_at: dict[tuple[str, str], float],
) -> None:
    if not record.has_problem_with(version, history):
        return
    problem = str(record.problem)
    if record.problem_version is not None or _has_lasted(noted_at, record, problem):
        raise ReceiverFailedError(
            f"{_who(record)} could not apply version {record.problem_version or version}: {problem}"
        )


def _require_running(
    store: DoubleBuffer, record: ReceiverRecord, noted_at: dict[tuple[str, str], float]
) -> None:
    if not store.may_live(record) and _has_lasted(noted_at, record, "ended"):
        raise ReceiverFailedError(f"{_who(record)} has ended, at version {record.applied_version}")


def _has_lasted(noted_at: dict[tuple[str, str], float], record: ReceiverRecord, state: str) -> bool:
    """Whether a receiver was in a state before; ``noted_at``: when that was first seen."""
    now = time.monotonic()
    return now - noted_at.setdefault((record.receiver, state), now) >= _LAST_WORD_S


def _who(record: ReceiverRecord) -> str:
    return f"{record.receiver} (process {record.pid} on {record.host})"
