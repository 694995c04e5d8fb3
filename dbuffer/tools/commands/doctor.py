"""``dbuffer doctor``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from dbuffer.errors import WaitTimeoutError
from dbuffer.tools.commands import shared
from dbuffer.tools.doctor import examine
from dbuffer.tools.doctor.peer import wait_for_host
from dbuffer.tools.render import doctor_table


def doctor(
    directory: Annotated[
        Path, shared.path_argument("A store, or where one is to be.", metavar="DIR")
    ],
    peer: Annotated[
        bool,
        typer.Option(
            "--peer", help="Be the second host: wait for a `doctor DIR` on another, and answer it."
        ),
    ] = False,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            help="How long to wait for the other host, before exit code 3.  "
            "[default: 600 with --peer; without, only a peer that already waits is used]"
        ),
    ] = None,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Show what a mount is, what works on it, and what dbuffer does about that.

    Probes in a directory of its own inside DIR, and removes it; a store that is there is not
    touched. With `dbuffer doctor DIR --peer` on another host, it also publishes to that one, and
    measures how late it sees each version. Exit code 1 if a guarantee cannot hold there.
    """
    if peer:
        _be_peer(directory, 600.0 if timeout_s is None else timeout_s, as_json=as_json)
        return
    with shared.exit_on_sigterm(), shared.status_line(hidden=as_json) as progress:
        found = examine(
            directory,
            timeout_s=timeout_s or 0.0,
            allow_shared_store=allow_shared_store,
            progress=progress,
        )
    if as_json:
        shared.print_json({"is_sound": not found.broken, **dataclasses.asdict(found)})
    else:
        shared.console.print(doctor_table(found))
    if found.broken:
        raise typer.Exit(shared.EXIT_FAILED)
    if timeout_s and not found.peers:
        raise typer.Exit(shared.EXIT_TIMEOUT)


def _be_peer(directory: Path, timeout_s: float, *, as_json: bool) -> None:
    with shared.exit_on_sigterm(), shared.status_line(hidden=as_json) as progress:
        report = wait_for_host(directory, timeout_s=timeout_s, progress=progress)
    if report is None:
        raise WaitTimeoutError(f"no 'dbuffer doctor {directory}' came within {timeout_s:g} s")
    text = f"measured with process {report.pid} on {report.host}, which has the results"
    shared.report(report, text, as_json=as_json)
