"""``dbuffer exec``: run a command for each new version."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dbuffer.errors import DBufferError
from dbuffer.store.filesystem import path_of
from dbuffer.tools.commands import shared
from dbuffer.tools.commands.follow import follow_versions

if TYPE_CHECKING:
    from dbuffer.receive.snapshot import Snapshot

logger = logging.getLogger(__name__)

_MAX_VARIABLE_BYTES = 128 << 10
"""Linux's limit for one variable of an environment, with its name and the zero at its end."""


@shared.with_follow_options
def run_for_each(
    store: shared.StoreArgument,
    command: Annotated[str, typer.Argument(help="The shell command.", metavar="COMMAND")],
    newer_than: shared.NewerThanOption = None,
    *,
    follow_options: shared.FollowOptions,
) -> None:
    """Run a shell command for each new version, then acknowledge the version.

    Its environment holds DBUFFER_VERSION, DBUFFER_STORE, DBUFFER_WEIGHTS (a file, safe to read
    until the command ends, and once open also if `exec` is killed; on a network mount a copy in
    TMPDIR), DBUFFER_METADATA_FILE (JSON), and the same JSON in DBUFFER_METADATA if it is below
    128 KB. A command that fails ends `exec` with exit code 1, and its version is not acknowledged.
    """
    if not command.strip():
        raise typer.BadParameter("an empty command; is a variable not set?", param_hint="COMMAND")
    run = functools.partial(_run, command, store)
    with shared.exit_on_sigterm():
        follow_versions(store, newer_than, follow_options, run, acknowledge=True)


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
        raise DBufferError(
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
