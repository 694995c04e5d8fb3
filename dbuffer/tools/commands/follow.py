"""``dbuffer follow``: print each new version."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import dbuffer
from dbuffer import errors
from dbuffer.receive.follow_loop import FollowLoop
from dbuffer.runtime.messages import counted, format_bytes
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.tools.commands import shared
from dbuffer.tools.terminal import print_line

if TYPE_CHECKING:
    from dbuffer.receive.snapshot import Snapshot

logger = logging.getLogger(__name__)


@shared.with_follow_options
def follow(
    store: shared.StoreArgument,
    newer_than: shared.NewerThanOption = None,
    *,
    follow_options: shared.FollowOptions,
) -> None:
    """Print each new version.

    With --receiver-id, also acknowledge it: a sender that waits for receivers counts this one.
    """
    acknowledge = follow_options.receiver_id is not None
    follow_versions(store, newer_than, follow_options, acknowledge=acknowledge)


def follow_versions(
    store: Path,
    newer_than: int | None,
    follow_options: shared.FollowOptions,
    on_version: Callable[[Snapshot], None] = lambda _: None,
    *,
    acknowledge: bool,
) -> None:
    """Print each new version and call ``on_version``; ``acknowledge`` it, or leave no record.

    Raises:
        OptionError: an option is invalid.
        WaitTimeoutError: no version came for ``timeout_s``.
    """
    count = follow_options.count
    receiver = dbuffer.WeightReceiver(
        store,
        receiver_id=follow_options.receiver_id,
        verify=follow_options.verify or "auto",
        allow_shared_store=follow_options.allow_shared_store,
    )
    with receiver, contextlib.ExitStack() as at_end:
        if not acknowledge:
            at_end.callback(receiver.record.remove)
        receiver.wait_for_version(newer_than, 0.0)  # raise errors that exist from the start
        shared.explain_wait(store)
        policy: Literal["follow", "raise"] = (
            "follow" if follow_options.forked == "follow" else "raise"
        )
        loop = FollowLoop(
            receiver, "following", logger, forked=policy, final=(errors.WaitTimeoutError,)
        )
        while count is None or count > 0:
            held = contextlib.ExitStack()
            timeout_s = follow_options.timeout_s
            snapshot = _hold_next(
                receiver, loop, held, newer_than, timeout_s, acknowledge=acknowledge
            )
            try:
                # If another run comes meanwhile, the next wait applies `forked`.
                with contextlib.suppress(errors.VersionRegressedError), held:
                    _report(snapshot, as_json=follow_options.as_json)
                    on_version(snapshot)
            except errors.SnapshotEvictedError as error:
                logger.warning("version %d is not acknowledged: %s", snapshot.version, str(error))
            if not acknowledge:
                receiver.record.remove()
            newer_than = snapshot.version
            count = None if count is None else count - 1


def _hold_next(
    receiver: dbuffer.WeightReceiver,
    loop: FollowLoop,
    held: contextlib.ExitStack,
    newer_than: int | None,
    timeout_s: float | None,
    *,
    acknowledge: bool,
) -> Snapshot:
    """Wait for the next version, also while the store cannot be read."""
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while True:
        shared.show_wait(receiver.store, newer_than)
        left_s = None if timeout_s is None else max(0.0, deadline - time.monotonic())
        with loop.attempt():
            if loop.wait(newer_than, timeout_s=left_s) is None:
                there = DoubleBuffer(receiver.store).state_without_version()
                raise errors.WaitTimeoutError(
                    f"nothing new for {timeout_s:g} s in {receiver.store}{there}"
                )
            snapshot = held.enter_context(receiver.open(newer_than, acknowledge=acknowledge))
            loop.used()
            return snapshot
        if loop.has_forked:
            newer_than = None
        if loop.error is not None and time.monotonic() >= deadline:
            raise loop.error


def _report(snapshot: Snapshot, *, as_json: bool) -> None:
    """Print a version's number, size and metadata."""
    num_tensors = len(snapshot.specs)
    num_bytes = sum(spec.num_bytes for spec in snapshot.specs)
    version = {"version": snapshot.version, "run": snapshot.id.run}
    counts = {**version, "num_tensors": num_tensors, "num_bytes": num_bytes}
    if as_json:
        shared.print_json({**counts, "metadata": snapshot.metadata})
        return
    metadata = f"  {json.dumps(snapshot.metadata)}" if snapshot.metadata else ""
    print_line(
        f"version {snapshot.version}: {counted(num_tensors, 'tensor')}, {format_bytes(num_bytes)}"
        f"{metadata}"
    )
