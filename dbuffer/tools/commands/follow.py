"""``dbuffer follow`` and ``dbuffer exec``: print each new version, or run a command for it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import dbuffer
from dbuffer import errors
from dbuffer.receive.follow_loop import FollowLoop, Forked
from dbuffer.runtime.messages import counted, format_bytes
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.filesystem import path_of
from dbuffer.tools.commands import shared
from dbuffer.tools.terminal import progress

if TYPE_CHECKING:
    from dbuffer.receive.snapshot import Snapshot

logger = logging.getLogger(__name__)

_MAX_VARIABLE_BYTES = 128 << 10
"""Linux's limit for one variable of an environment, with its name and the zero at its end."""


def follow(
    store: shared.StoreArgument,
    count: shared.CountOption = None,
    timeout_s: shared.TimeoutOption = None,
    receiver_id: shared.ReceiverOption = None,
    verify: shared.VerifyOption = False,
    forked: shared.ForkedOption = "follow",
    as_json: shared.JsonLinesOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Print each new version.

    With --receiver-id, also acknowledge it: a sender that waits for receivers counts this one.
    """
    use = functools.partial(_report, as_json=as_json)
    receiver = _receiver(store, receiver_id, verify, allow_shared_store)
    _follow(receiver, count, timeout_s, forked, use, acknowledge=receiver_id is not None)


def run_for_each(
    store: shared.StoreArgument,
    command: Annotated[str, typer.Argument(help="The shell command.", metavar="COMMAND")],
    count: shared.CountOption = None,
    timeout_s: shared.TimeoutOption = None,
    receiver_id: shared.ReceiverOption = None,
    verify: shared.VerifyOption = False,
    forked: shared.ForkedOption = "follow",
    as_json: shared.JsonLinesOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Run a shell command for each new version, then acknowledge the version.

    Its environment holds DBUFFER_VERSION, DBUFFER_STORE, DBUFFER_WEIGHTS (a file, safe to read
    until the command ends, and once open also if `exec` is killed; on a network mount a copy in
    TMPDIR), DBUFFER_METADATA_FILE (JSON), and the same JSON in DBUFFER_METADATA if it is below
    128 KB. A command that fails ends `exec` with exit code 1, and its version is not acknowledged.
    """
    if not command.strip():
        raise typer.BadParameter("an empty command; is a variable not set?", param_hint="COMMAND")

    def use(snapshot: Snapshot) -> None:
        _report(snapshot, as_json=as_json)
        _run(command, store, snapshot)

    receiver = _receiver(store, receiver_id, verify, allow_shared_store)
    _follow(receiver, count, timeout_s, forked, use, acknowledge=True)


def _receiver(
    store: Path, receiver_id: str | None, verify: bool, allow_shared_store: bool
) -> dbuffer.WeightReceiver:
    return dbuffer.WeightReceiver(
        store,
        receiver_id=receiver_id,
        verify=verify or "auto",
        allow_shared_store=allow_shared_store,
    )


def _follow(
    receiver: dbuffer.WeightReceiver,
    count: int | None,
    timeout_s: float | None,
    forked: Forked,
    use: Callable[[Snapshot], None],
    *,
    acknowledge: bool,
) -> None:
    """Use each new version, at most ``count``; acknowledge it, or leave no record."""
    policy: Literal["follow", "raise"] = "follow" if forked == "follow" else "raise"
    final, version = (errors.WaitTimeoutError,), None
    with receiver, contextlib.ExitStack() as at_end:
        noted, received = at_end.enter_context(shared.noting_signals(raises=True))
        loop = FollowLoop(receiver, "following", logger, forked=policy, final=final, stop=noted)
        if not acknowledge:
            at_end.callback(receiver.record.remove)
        receiver.wait_for_version(None, 0.0)  # raise errors that exist from the start
        shared.explain_wait(receiver.store)
        for _ in itertools.count() if count is None else range(count):
            held = contextlib.ExitStack()
            with progress(shared.describe_wait(receiver.store, version)):
                snapshot = _hold_next(
                    receiver, loop, held, version, timeout_s, received, acknowledge
                )
            try:
                # If another run comes meanwhile, the next wait applies `forked`.
                with contextlib.suppress(errors.VersionRegressedError), held:
                    use(snapshot)
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
    received: list[int],
    acknowledge: bool,
) -> Snapshot:
    """Wait for the next version, also while the store cannot be read.

    ``received``: numbers of signals that end the wait.
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = None if timeout_s is None else max(0.0, deadline - time.monotonic())
        with loop.attempt():
            version = loop.wait(newer_than, timeout_s=left_s)
            if received:  # Python has dropped the exception of this signal
                signal.raise_signal(received[-1])
            if version is None:
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


def _run(command: str, store: Path, snapshot: Snapshot) -> None:
    metadata = json.dumps(snapshot.metadata)
    with snapshot.as_file() as weights, tempfile.TemporaryFile("w") as metadata_file:
        metadata_file.write(metadata)
        metadata_file.flush()
        environment = {
            **os.environ,
            "DBUFFER_VERSION": str(snapshot.version),
            "DBUFFER_STORE": str(store),
            "DBUFFER_WEIGHTS": str(weights),
            "DBUFFER_METADATA": metadata,
            "DBUFFER_METADATA_FILE": str(path_of(metadata_file.fileno())),
        }
        if len(f"DBUFFER_METADATA={metadata}") >= _MAX_VARIABLE_BYTES:
            del environment["DBUFFER_METADATA"]
            logger.warning(
                "metadata of %d bytes does not fit into DBUFFER_METADATA; read it from the file "
                "that DBUFFER_METADATA_FILE names",
                len(metadata),
            )
        code = _exit_code(command, environment, locked=int(weights.name))
    if code:
        raise errors.DBufferError(
            f"the command for version {snapshot.version} ended with {code}: {command}"
        )


def _exit_code(command: str, environment: dict[str, str], *, locked: int) -> int:
    """Run a shell command and return its exit code; what ends `exec` ends the command first.

    All processes of the command get SIGTERM; a shell that ignores it is waited for. The shell gets
    the descriptor that ``locked`` the weights, and so keeps the lock if `exec` is killed.
    """
    # At a terminal, Ctrl-C reaches all processes, and a process group of their own could not read.
    group = None if os.isatty(0) else 0
    # The argument is a shell command by contract.
    shell = subprocess.Popen(  # noqa: S602
        command, shell=True, env=environment, pass_fds=[locked], process_group=group
    )
    with shell:
        try:
            return shell.wait()
        except BaseException:
            if shell.returncode is None:
                os.kill(shell.pid if group is None else -shell.pid, signal.SIGTERM)
            raise
