"""Command ``dbuffer doctor``."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

from dbuffer.tools.commands import shared
from dbuffer.tools.doctor.peer import measure_with_peers, wait_for_host
from dbuffer.tools.doctor.probes import examine
from dbuffer.tools.tables import line, table
from dbuffer.tools.terminal import progress


def doctor(
    store: Annotated[
        str,
        typer.Argument(
            help="Store directory (may not exist yet), or URL of a bucket.", metavar="STORE"
        ),
    ],
    peer: Annotated[
        bool,
        typer.Option(
            "--peer",
            help="Be the second host: wait up to 10 minutes for a `dbuffer doctor STORE` on "
            "another host.",
        ),
    ] = False,
    as_json: shared.JsonOption = False,
) -> None:
    """Probe a mount or a bucket: show what works on it, and how dbuffer adapts.

    The probes work in temporary directories in STORE, and do not change a store in STORE. If
    `dbuffer doctor STORE --peer` runs on another host, this command also publishes to that host,
    and measures when the host sees each version, and whether the clocks agree. Exit code 1 if a
    store in STORE would not be safe, or needs --allow-shared-store.

    In a bucket (s3://BUCKET/PREFIX), the command tests the rights and features that mirrors need.
    """
    place = shared.parse_place(store)
    if isinstance(place, str):
        shared.refuse_for_bucket(peer=peer)
        from dbuffer.tools.doctor.bucket import examine_bucket

        with progress(f"trying {place}"):
            findings = examine_bucket(place)
    elif peer:
        with progress(f"waiting for 'dbuffer doctor {place}' on another host"):
            num_seen = wait_for_host(place)
        text = f"saw {num_seen} versions from the other host, which prints the results"
        shared.show({"num_seen": num_seen}, text, as_json=as_json)
        return
    else:
        with progress(f"probing {place}, and each host that runs 'dbuffer doctor --peer' on it"):
            findings = examine(place) + measure_with_peers(place)
    is_sound, host = all(it["verdict"] != "broken" for it in findings), socket.gethostname()
    result = {"is_sound": is_sound, "path": str(place), "host": host, "findings": findings}
    shared.show(result, [line(f"{place}, on {host}"), table(findings)], as_json=as_json)
    if not is_sound:
        raise typer.Exit(shared.EXIT_FAILED)
