"""Waiting for receivers to have applied a version."""

from __future__ import annotations

import time
from collections.abc import Collection

from dbuffer.buffer import DoubleBuffer
from dbuffer.errors import AcknowledgementTimeoutError, ReceiverFailedError
from dbuffer.manifest import ReceiverRecord
from dbuffer.writer import process_may_live

_POLL_MIN_S = 0.001
_POLL_MAX_S = 0.05


def wait_applied(
    store: DoubleBuffer,
    version: int,
    receivers: int | Collection[str],
    *,
    timeout_s: float,
    since: float,
) -> None:
    """Wait until receivers have applied ``version`` or a later one.

    Args:
        store: where they acknowledge.
        version: a published version.
        receivers: how many of them, whichever; or the ids of those to wait for.
        timeout_s: for how long.
        since: when the sender began (seconds since the epoch); what records said before that is of
            an earlier run, whose processes have ended.

    Raises:
        AcknowledgementTimeoutError: they have not, in time; the message says who has.
        ReceiverFailedError: one of those named cannot apply it, or its process has ended.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = _POLL_MIN_S
    names = None if isinstance(receivers, int) else set(receivers)
    needed = receivers if isinstance(receivers, int) else len(set(receivers))
    while True:
        # An engine acknowledges as one; its ranks only say what they have ready.
        records = [record for record in store.receivers() if record.part_of is None]
        if names is not None:
            records = [record for record in records if record.receiver in names]
        waiting = [record for record in records if (record.applied_version or 0) < version]
        num_applied = len(records) - len(waiting)
        if num_applied >= needed:
            return
        if names is not None:
            _check_can_apply([r for r in waiting if r.updated_at >= since], version)
        left = deadline - time.monotonic()
        if left <= 0:
            states = ", ".join(f"{r.receiver} is at {r.applied_version}" for r in records)
            raise AcknowledgementTimeoutError(
                f"{num_applied} of {needed} receivers applied version {version} of "
                f"{store.root} within {timeout_s:g} s ({states or 'no receiver came yet'})"
            )
        time.sleep(min(pause_s, left))
        pause_s = min(2 * pause_s, _POLL_MAX_S)


def _check_can_apply(records: list[ReceiverRecord], version: int) -> None:
    for record in records:
        if record.has_problem_with(version):
            raise ReceiverFailedError(
                f"{record.receiver} (process {record.pid} on {record.host}) could not apply "
                f"version {record.problem_version or version}: {record.problem}"
            )
        if not process_may_live(record.host, record.pid):
            raise ReceiverFailedError(
                f"{record.receiver} (process {record.pid}) has ended, at version "
                f"{record.applied_version}"
            )
