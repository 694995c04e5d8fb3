"""``dbuffer follow`` and ``dbuffer exec``: print each new version, or run a command for it."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import dbuffer
from dbuffer import errors
from dbuffer.receive.follow_loop import FollowLoop
from dbuffer.runtime import options
from dbuffer.runtime.messages import counted, format_bytes
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.filesystem import path_of
from dbuffer.tools.commands import shared
from dbuffer.tools.terminal import progress

if TYPE_CHECKING:
    from dbuffer.receive.snapshot import Snapshot

logger = logging.getLogger(__name__)

_LOOK_S = 0.05
"""Interval at which it looks whether a command has ended."""


TimeoutOption = Annotated[
    float | None,
    typer.Option(
        help="Stop with exit code 3 if no version comes for this many seconds.",
        metavar="SECONDS",
    ),
]


def follow(
    store: shared.StoreArgument,
    count: shared.CountOption = None,
    timeout_s: TimeoutOption = None,
    as_json: shared.JsonLinesOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Print each new version. Nothing is acknowledged: no sender waits for this command."""

    def use(snapshot: Snapshot, _: threading.Event) -> None:
        _report(snapshot, as_json=as_json)

    receiver = dbuffer.WeightReceiver(store, allow_shared_store=allow_shared_store)
    _follow(receiver, count, timeout_s, use, acknowledge=False)


def run_for_each(
    store: shared.StoreArgument,
    command: Annotated[str, typer.Argument(help="The shell command.", metavar="COMMAND")],
    count: shared.CountOption = None,
    timeout_s: TimeoutOption = None,
    receiver_id: Annotated[
        str | None,
        typer.Option(
            help="Acknowledge versions under this name, not a generated one.", metavar="ID"
        ),
    ] = None,
    as_json: shared.JsonLinesOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Run a shell command for each new version, then acknowledge the version.

    Its environment holds DBUFFER_VERSION, DBUFFER_STORE, DBUFFER_METADATA_FILE (JSON) and
    DBUFFER_WEIGHTS (a file that stays readable until the command ends; on a network mount a copy in
    TMPDIR). A command that fails ends `exec` with exit code 1, and its version is not acknowledged.
    """
    if not command.strip():
        raise typer.BadParameter("an empty command; is a variable not set?", param_hint="COMMAND")

    def use(snapshot: Snapshot, stop: threading.Event) -> None:
        _report(snapshot, as_json=as_json)
        _run(command, store, snapshot, stop)

    receiver = dbuffer.WeightReceiver(
        store, receiver_id=receiver_id, allow_shared_store=allow_shared_store
    )
    _follow(receiver, count, timeout_s, use, acknowledge=True)


def _follow(
    receiver: dbuffer.WeightReceiver,
    count: int | None,
    timeout_s: float | None,
    use: Callable[[Snapshot, threading.Event], None],
    *,
    acknowledge: bool,
) -> None:
    """Use each new version, at most ``count``; acknowledge it, or leave no record."""
    version = None
    if timeout_s is not None:
        options.seconds("timeout_s", timeout_s)
    with shared.stopped_by_signals() as stop, receiver, contextlib.ExitStack() as at_end:
        final = (errors.WaitTimeoutError,)
        loop = FollowLoop(receiver, "following", logger, forked="follow", final=final, stop=stop)
        if not acknowledge:
            at_end.callback(receiver.record.remove)
        receiver.wait_for_version(None, 0.0)  # raise errors that exist from the start
        for _ in itertools.count() if count is None else range(count):
            held = contextlib.ExitStack()
            above = "" if version is None else f" above {version}"
            with progress(f"waiting for a version{above} in {receiver.store}"):
                snapshot = _hold_next(receiver, loop, held, version, timeout_s, stop, acknowledge)
            if snapshot is None:
                return
            try:
                # If another run comes meanwhile, the next wait follows it.
                with contextlib.suppress(errors.VersionRegressedError), held:
                    use(snapshot, stop)
            except errors.SnapshotEvictedError as error:
                logger.warning("version %d is not acknowledged: %s", snapshot.version, str(error))
            if not acknowledge:
                receiver.record.remove()
            version = snapshot.version


def _hold_next(
    receiver: dbuffer.WeightReceiver,
    loop: FollowLoop,
    held: contextlib.ExitStack,
    newer_than: int | None,
    timeout_s: float | None,
    stop: threading.Event,
    acknowledge: bool,
) -> Snapshot | None:
    """Wait for the next version, also while the store cannot be read; return None if stopped."""
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while not stop.is_set():
        left_s = None if timeout_s is None else max(0.0, deadline - time.monotonic())
        with loop.attempt():
            version = loop.wait(newer_than, timeout_s=left_s)
            if version is not None:
                snapshot = held.enter_context(receiver.open(newer_than, acknowledge=acknowledge))
                loop.used()
                return snapshot
            if not stop.is_set():
                there = DoubleBuffer(receiver.store).state_without_version()
                raise errors.WaitTimeoutError(
                    f"no new version within {timeout_s:g} s in {receiver.store}{there}"
                )
        if loop.has_forked:
            newer_than = None
        if loop.error is not None and time.monotonic() >= deadline:
            raise loop.error
    return None


def _report(snapshot: Snapshot, *, as_json: bool) -> None:
    """Print a version's number, size and metadata."""
    num_tensors, num_bytes = len(snapshot.specs), sum(spec.num_bytes for spec in snapshot.specs)
    metadata = f"  {json.dumps(snapshot.metadata)}" if snapshot.metadata else ""
    fields = {
        "id": snapshot.id,
        "num_tensors": num_tensors,
        "num_bytes": num_bytes,
        "metadata": snapshot.metadata,
    }
    size = f"{counted(num_tensors, 'tensor')}, {format_bytes(num_bytes)}"
    shared.report(fields, f"version {snapshot.version}: {size}{metadata}", as_json=as_json)


def _run(command: str, store: Path, snapshot: Snapshot, stop: threading.Event) -> None:
    """Run a shell command; all processes of the command get SIGTERM if ``stop`` is set meanwhile.

    A shell that ignores it is waited for. The shell gets the descriptor that locks the weights, and
    so keeps the lock if `exec` is killed.
    """
    with snapshot.as_file() as weights, tempfile.TemporaryFile("w") as metadata_file:
        json.dump(snapshot.metadata, metadata_file)
        metadata_file.flush()
        environment = {
            **os.environ,
            "DBUFFER_VERSION": str(snapshot.version),
            "DBUFFER_STORE": str(store),
            "DBUFFER_WEIGHTS": str(weights),
            "DBUFFER_METADATA_FILE": str(path_of(metadata_file.fileno())),
        }
        # At a terminal, Ctrl-C reaches all processes, and processes in a group of their own could
        # not read from it.
        group = None if os.isatty(0) else 0
        # The argument is a shell command by contract.
        with subprocess.Popen(  # noqa: S602
            command,
            shell=True,
            env=environment,
            pass_fds=[int(weights.name)],
            process_group=group,
        ) as shell:
            while shell.poll() is None and not stop.wait(_LOOK_S):
                pass
            if shell.returncode is None:
                os.kill(shell.pid if group is None else -shell.pid, signal.SIGTERM)
    if shell.returncode:
        if stop.wait(_LOOK_S):  # at a terminal, Ctrl-C ends the command as well
            raise KeyboardInterrupt
        raise errors.DBufferError(
            f"the command for version {snapshot.version} ended with {shell.returncode}: {command}"
        )
