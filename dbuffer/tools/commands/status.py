"""``dbuffer status``."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated

import typer
from rich.live import Live

from dbuffer.store.buffer import DoubleBuffer
from dbuffer.tools.commands import shared
from dbuffer.tools.render import status_tables
from dbuffer.tools.status import read_status


def status(
    store: shared.StoreArgument,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh twice a second.")] = False,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Show the versions, buffers, sender and receivers of a store, and each receiver's lag."""
    if watch and as_json:
        raise typer.BadParameter("not together with --json", param_hint="--watch")
    view = DoubleBuffer(store, allow_shared_store=allow_shared_store)
    now = read_status(view)
    if as_json:
        shared.print_json(dataclasses.asdict(now))
    elif not watch:
        shared.console.print(status_tables(now))
    else:
        with Live(status_tables(now), console=shared.console) as live:
            while True:
                time.sleep(0.5)
                live.update(status_tables(read_status(view)))
