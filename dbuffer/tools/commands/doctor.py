"""``dbuffer doctor``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from dbuffer.errors import OptionError, WaitTimeoutError
from dbuffer.tools.commands import shared
from dbuffer.tools.doctor import Examination, examine, examine_bucket
from dbuffer.tools.doctor.peer import wait_for_host
from dbuffer.tools.render import doctor_parts, print_parts
from dbuffer.tools.terminal import print_line, status_line


def doctor(
    directory: Annotated[
        str,
        typer.Argument(
            help="Store directory (may not exist yet), or URL of a bucket.", metavar="DIR"
        ),
    ],
    peer: Annotated[
        bool,
        typer.Option("--peer", help="Be the second host: wait for a `doctor DIR` on another host."),
    ] = False,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            help="Stop with exit code 3 if no other host joins within this many seconds.",
            show_default="600 with --peer; without it, measure only with peers that already wait",
        ),
    ] = None,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Probe a mount or a bucket: show what works on it, and how dbuffer adapts.

    The probes run in a directory inside DIR that is removed afterwards; a store in DIR is not
    touched. With `dbuffer doctor DIR --peer` on another host, it also publishes to that host and
    measures when the host sees each version. Exit code 1 if a guarantee cannot hold.

    Of a bucket (s3://BUCKET/PREFIX) it probes rights, consistency, conditional requests and speed,
    by some 80 requests and 64 MiB, on objects below PREFIX that it removes afterwards.
    """
    place = shared.parse_place(directory)
    if isinstance(place, str):
        shared.refuse_for_bucket(
            peer=peer, timeout_s=timeout_s is not None, allow_shared_store=allow_shared_store
        )
        with shared.exit_on_sigterm():
            examination = examine_bucket(place, progress=status_line.show)
        _report(examination, as_json=as_json)
        return
    if peer:
        if allow_shared_store:
            raise OptionError("--allow-shared-store has no effect with --peer")
        _be_peer(place, 600.0 if timeout_s is None else timeout_s, as_json=as_json)
        return
    with shared.exit_on_sigterm():
        examination = examine(
            place,
            timeout_s=timeout_s or 0.0,
            allow_shared_store=allow_shared_store,
            progress=status_line.show,
        )
    _report(examination, as_json=as_json)
    if timeout_s and not examination.peers:
        raise typer.Exit(shared.EXIT_TIMEOUT)


def _report(examination: Examination, *, as_json: bool) -> None:
    if as_json:
        shared.print_json({"is_sound": not examination.broken, **dataclasses.asdict(examination)})
    else:
        print_parts(doctor_parts(examination))
    if examination.broken:
        raise typer.Exit(shared.EXIT_FAILED)


def _be_peer(directory: Path, timeout_s: float, *, as_json: bool) -> None:
    with shared.exit_on_sigterm():
        report = wait_for_host(directory, timeout_s=timeout_s, progress=status_line.show)
    if report is None:
        raise WaitTimeoutError(f"no 'dbuffer doctor {directory}' came within {timeout_s:g} s")
    if as_json:
        shared.print_json(report)
    else:
        print_line(
            f"measured with process {report['pid']} on {report['host']}, which has the results"
        )
