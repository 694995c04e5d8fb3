"""``dbuffer verify``."""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated

import typer

from dbuffer.tools.commands import shared
from dbuffer.tools.render import describe_check
from dbuffer.tools.terminal import print_line, status_line


def verify(
    store: shared.PlaceArgument,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list of one object per version.")
    ] = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Check all versions in a store, also kept ones: records, layouts, sizes and any checksums.

    Of a bucket the newest version is fetched, and each of its parts checked.

    Exit code 1 if something is damaged; damaged tensors and parts are named.
    """
    place = shared.parse_place(store)
    if isinstance(place, str):
        shared.refuse_for_bucket(allow_shared_store=allow_shared_store)
    status_line.show(f"reading {store}")
    from dbuffer.mirror.bucket import Bucket
    from dbuffer.tools.verification import verify_bucket, verify_store

    if isinstance(place, str):
        progress = functools.partial(status_line.show_bytes, f"verifying {store}")
        with Bucket(place) as bucket:
            checks = [verify_bucket(bucket, progress)]
    else:
        view = shared.view_of(place, allow_shared_store=allow_shared_store)
        checks = verify_store(view, progress=status_line.show)
    if as_json:
        shared.print_json([dataclasses.asdict(check) for check in checks])
    else:
        for check in checks:
            print_line(describe_check(check))
    if any(check.problems for check in checks):
        raise typer.Exit(shared.EXIT_FAILED)
