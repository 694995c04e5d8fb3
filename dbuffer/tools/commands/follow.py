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
from dbuffer.receive.follow_loop import NEW_HISTORIES, FollowLoop
from dbuffer.runtime import options
from dbuffer.runtime.messages import format_bytes
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.tools.commands import shared

if TYPE_CHECKING:
    from dbuffer.receive.snapshot import Snapshot

logger = logging.getLogger(__name__)


def follow(
    store: shared.StoreArgument,
    newer_than: shared.NewerThanOption = None,
    count: shared.CountOption = None,
    timeout_s: shared.TimeoutOption = None,
    receiver_id: shared.ReceiverOption = None,
    verify: shared.VerifyOption = False,
    new_history: shared.NewHistoryOption = "follow",
    as_json: shared.JsonLinesOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Print each new version, and acknowledge it."""
    follow_versions(
        store,
        lambda snapshot: report_version(snapshot, as_json=as_json),
        newer_than=newer_than,
        count=count,
        timeout_s=timeout_s,
        receiver_id=receiver_id,
        verify=verify,
        new_history=new_history,
        allow_shared_store=allow_shared_store,
    )


def follow_versions(
    store: Path,
    on_version: Callable[[Snapshot], None],
    *,
    newer_than: int | None,
    count: int | None,
    timeout_s: float | None,
    receiver_id: str | None,
    verify: bool,
    new_history: str,
    allow_shared_store: bool,
) -> None:
    """Call ``on_version`` with each new version, which is acknowledged when it returns.

    Raises:
        OptionError: an option is invalid.
        WaitTimeoutError: no version came for ``timeout_s``.
    """
    if timeout_s is not None:
        options.seconds("timeout_s", timeout_s)
    options.choice("new_history", new_history, NEW_HISTORIES)
    receiver = dbuffer.WeightReceiver(
        store,
        receiver_id=receiver_id,
        verify=verify or "auto",
        allow_shared_store=allow_shared_store,
    )
    with receiver:
        receiver.wait_for_version(newer_than, 0.0)  # raise errors that exist from the start
        shared.explain_wait(store)
        policy: Literal["follow", "raise"] = "follow" if new_history == "follow" else "raise"
        loop = FollowLoop(
            receiver, "following", logger, new_history=policy, final=(errors.WaitTimeoutError,)
        )
        while count is None or count > 0:
            held = contextlib.ExitStack()
            snapshot = _hold_next(receiver, loop, held, newer_than, timeout_s)
            # If the store is emptied meanwhile, the next wait applies `new_history`.
            with contextlib.suppress(errors.VersionRegressedError), held:
                on_version(snapshot)
            newer_than = snapshot.version
            count = None if count is None else count - 1


def _hold_next(
    receiver: dbuffer.WeightReceiver,
    loop: FollowLoop,
    held: contextlib.ExitStack,
    newer_than: int | None,
    timeout_s: float | None,
) -> Snapshot:
    """Wait for the next version, also while the store cannot be read."""
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = None if timeout_s is None else max(0.0, deadline - time.monotonic())
        with loop.attempt():
            if loop.wait(newer_than, timeout_s=left_s) is None:
                there = DoubleBuffer(receiver.store).state_without_version()
                raise errors.WaitTimeoutError(
                    f"nothing new for {timeout_s:g} s in {receiver.store}{there}"
                )
            snapshot = held.enter_context(receiver.open(newer_than))
            loop.used()
            return snapshot
        if loop.has_started_over:
            newer_than = None
        if loop.error is not None and time.monotonic() >= deadline:
            raise loop.error


def report_version(snapshot: Snapshot, *, as_json: bool) -> None:
    """Print a version's number, size and metadata."""
    num_tensors = len(snapshot.specs)
    num_bytes = sum(spec.num_bytes for spec in snapshot.specs)
    counts = {"version": snapshot.version, "num_tensors": num_tensors, "num_bytes": num_bytes}
    if as_json:
        shared.print_json({**counts, "metadata": snapshot.metadata})
        return
    metadata = f"  {json.dumps(snapshot.metadata)}" if snapshot.metadata else ""
    shared.print_line(
        f"version {snapshot.version}: {num_tensors} tensors, {format_bytes(num_bytes)}{metadata}"
    )
