"""Commands ``dbuffer status``, ``verify`` and ``ls``."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Never

import typer
from rich.console import Group, RenderableType
from rich.live import Live

from dbuffer.errors import OptionError, WaitTimeoutError
from dbuffer.runtime.timing import TIMING
from dbuffer.store.open_version import open_newest
from dbuffer.tools import tables
from dbuffer.tools.commands import shared
from dbuffer.tools.status import read_status
from dbuffer.tools.terminal import print_parts, progress

_REFRESH_S = 0.5


def status(
    store: Annotated[
        str,
        typer.Argument(
            help="Store directory, or URL of a bucket (s3://BUCKET/PREFIX).", metavar="STORE"
        ),
    ],
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Refresh twice a second (a bucket: every 15 s), until Ctrl-C."
        ),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with code 1 if there is a problem, for probes.")
    ] = False,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Show problems, and the versions, sender and receivers of a store with their lags.

    A killed sender is a problem, a closed sender is not. For a bucket: the newest version, and the
    receivers whose records the mirrors have put there.
    """
    if watch and (as_json or check):
        raise OptionError("--watch excludes --json and --check")
    if watch and not sys.stdout.isatty():
        raise OptionError("--watch needs a terminal; in a pipe, call `dbuffer status` repeatedly")
    place = shared.parse_place(store)
    with contextlib.ExitStack() as stack:
        if isinstance(place, Path):
            view = shared.view_of(place, allow_shared_store=allow_shared_store)
            read, refresh_s = functools.partial(read_status, view), _REFRESH_S
        else:
            shared.refuse_for_bucket(allow_shared_store=allow_shared_store)
            from dbuffer.mirror.bucket import Bucket
            from dbuffer.tools.bucket_status import read_bucket_status

            bucket = stack.enter_context(Bucket(place))
            read, refresh_s = functools.partial(read_bucket_status, bucket), TIMING.bucket_watch_s
        if watch:
            _watch(lambda: tables.status_parts(read()), refresh_s)
        result = read()
    shared.show(result, tables.status_parts(result), as_json=as_json)
    if check and result["problems"]:
        raise typer.Exit(shared.EXIT_FAILED)


def _watch(read_parts: Callable[[], list[RenderableType]], refresh_s: float) -> Never:
    parts: list[RenderableType] = []
    try:
        with Live(screen=True, auto_refresh=False) as live:
            while True:
                parts = read_parts()
                live.update(Group(*parts), refresh=True)
                time.sleep(refresh_s)
    except KeyboardInterrupt:
        print_parts(parts)
        raise


def verify(
    store: shared.StoreArgument,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Ask the vLLM server at this address whether it has compared its weights with "
            "the store's newest version, or --version, and read no weights. Exit code 3 if it "
            "serves another version or has not compared them, 1 if they are not the store's.",
            metavar="URL",
        ),
    ] = None,
    version: shared.VersionOption = None,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Check all versions in a store, also kept ones: records, layouts, sizes, checksums.

    Exit code 1 if something is damaged. Damaged tensors are named.
    """
    view = shared.view_of(store, allow_shared_store=allow_shared_store)
    if engine is not None:
        from dbuffer.engine.served import ask_server

        answer = ask_server(view, engine, version)
        shared.show(answer, tables.server_parts(answer), as_json=as_json)
        if not answer["is_verified"]:
            are_of_store = all(replica["is_of_store"] for replica in answer["replicas"])
            raise typer.Exit(shared.EXIT_TIMEOUT if are_of_store else shared.EXIT_FAILED)
        return
    if version is not None:
        raise OptionError("--version needs --engine")
    from dbuffer.receive.verification import verify_store

    with progress(f"verifying {store}"):
        checks = verify_store(view)
    shared.show(checks, tables.verification_parts(checks), as_json=as_json)
    if any(check["problems"] for check in checks):
        raise typer.Exit(shared.EXIT_FAILED)


def ls(
    store: shared.StoreArgument,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """List the newest version's tensors: name, dtype, shape, bytes."""
    view = shared.view_of(store, allow_shared_store=allow_shared_store)
    with progress(f"reading {store}"):
        if (opened := open_newest(view, newer_than=None)) is None:
            raise WaitTimeoutError(f"nothing was published in {store} yet")
        with opened:
            version, layout = opened.manifest.version, opened.read_layout()
    tensors = [{**spec._asdict(), "num_bytes": spec.num_bytes} for spec in layout.specs]
    result = {"version": version, "tensors": tensors, "aliases": layout.aliases}
    shared.show(result, tables.layout_parts(result), as_json=as_json)
