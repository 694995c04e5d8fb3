"""``dbuffer status``."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from dbuffer.errors import OptionError
from dbuffer.runtime.timing import TIMING
from dbuffer.tools.commands import shared
from dbuffer.tools.render import print_parts, status_parts, watch_screen
from dbuffer.tools.status import read_status
from dbuffer.tools.terminal import status_line

_REFRESH_S = 0.5

_Read = Callable[[], dict[str, Any]]


def status(
    store: shared.PlaceArgument,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Refresh twice a second (a bucket: every 15 s), until Ctrl-C: problems first, "
            "then the receivers with the longest lag.",
        ),
    ] = False,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Show the versions, buffers, sender and receivers of a store, and each receiver's lag.

    Of a bucket: the newest version and what it consists of, what is kept, and the receivers whose
    mirrors have put records there.
    """
    if watch and as_json:
        raise OptionError("--watch and --json exclude each other")
    if watch and not sys.stdout.isatty():
        raise OptionError("--watch needs a terminal; in a pipe, call `dbuffer status` repeatedly")
    place = shared.parse_place(store)
    if isinstance(place, str):
        shared.refuse_for_bucket(allow_shared_store=allow_shared_store)
        status_line.show(f"reading {store}")
        from dbuffer.mirror.bucket import Bucket
        from dbuffer.tools.bucket_status import BucketStatus

        with Bucket(place) as bucket:
            read = BucketStatus(bucket).read
            _show(read(), read, TIMING.bucket_watch_s, watch=watch, as_json=as_json)
        return
    view = shared.view_of(place, allow_shared_store=allow_shared_store)
    read = functools.partial(read_status, view)
    _show(read(), read, _REFRESH_S, watch=watch, as_json=as_json)


def _show(
    status: dict[str, Any], read: _Read, refresh_s: float, *, watch: bool, as_json: bool
) -> None:
    """Print a status; or, with ``watch``, show it and then each later one."""
    if as_json:
        shared.print_json(status)
    elif watch:
        _watch(status, read, refresh_s)
    else:
        print_parts(status_parts(status))


def _watch(status: dict[str, Any], read: _Read, refresh_s: float) -> None:
    from rich.live import Live
    from rich.text import Text

    with shared.exit_on_sigterm(), Live(screen=True, auto_refresh=False) as live:
        while True:
            lines = watch_screen(status, *live.console.size)
            live.update(Text.from_ansi("\n".join(lines)), refresh=True)
            time.sleep(refresh_s)
            status = read()
