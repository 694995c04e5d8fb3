"""``dbuffer doctor``."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import Annotated

import typer

from dbuffer.errors import OptionError, WaitTimeoutError
from dbuffer.tools.commands import shared
from dbuffer.tools.doctor import releases
from dbuffer.tools.doctor.peer import measure_with_peers, wait_for_host
from dbuffer.tools.doctor.probes import examine
from dbuffer.tools.tables import line, table
from dbuffer.tools.terminal import print_json, print_parts, progress


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
    touched. With `dbuffer doctor DIR --peer` on another host, it also publishes to that host, and
    measures when the host sees each version, and whether the clocks agree. Exit code 1 if a store
    would not be safe there.

    Of a bucket (s3://BUCKET/PREFIX) it tries the rights that mirrors need.
    """
    place = shared.parse_place(directory)
    if isinstance(place, str):
        shared.refuse_for_bucket(
            peer=peer, timeout_s=timeout_s is not None, allow_shared_store=allow_shared_store
        )
        from dbuffer.tools.doctor.bucket import examine_bucket

        with progress(f"trying {place}"):
            findings = examine_bucket(place)
    elif peer:
        if allow_shared_store:
            raise OptionError("--allow-shared-store has no effect with --peer")
        _be_peer(place, 600.0 if timeout_s is None else timeout_s, as_json=as_json)
        return
    else:
        with progress(f"probing {place}"):
            findings = examine(place, allow_shared_store=allow_shared_store)
        with progress(f"measuring with each 'dbuffer doctor {place} --peer' on another host"):
            of_peers = measure_with_peers(
                place, timeout_s=timeout_s or 0.0, allow_shared_store=allow_shared_store
            )
        findings += [*of_peers, *releases.findings()]
    is_sound = all(finding.verdict != "broken" for finding in findings)
    host, results = socket.gethostname(), list(map(dataclasses.asdict, findings))
    if as_json:
        print_json({"is_sound": is_sound, "path": str(place), "host": host, "findings": results})
    else:
        print_parts([line(f"{place}, on {host}"), table(results)])
    if not is_sound:
        raise typer.Exit(shared.EXIT_FAILED)
    if timeout_s and not of_peers:
        raise typer.Exit(shared.EXIT_TIMEOUT)


def _be_peer(directory: Path, timeout_s: float, *, as_json: bool) -> None:
    with progress(f"waiting for 'dbuffer doctor {directory}' on another host"):
        num_seen = wait_for_host(directory, timeout_s=timeout_s)
    if num_seen is None:
        raise WaitTimeoutError(f"no 'dbuffer doctor {directory}' came within {timeout_s:g} s")
    text = f"saw {num_seen} versions of another host, which has the results"
    shared.report({"num_seen": num_seen}, text, as_json=as_json)
