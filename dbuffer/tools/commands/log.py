"""``dbuffer log``."""

from __future__ import annotations

from dbuffer.tools.commands import shared
from dbuffer.tools.render import log_parts, print_parts
from dbuffer.tools.status import read_log


def log(
    store: shared.StoreArgument,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Show the runs of a store's senders and their versions, newest first.

    Each start of a sender is a run, which goes on from the version that it began upon. Of each
    version that is there, or that a receiver has: when it was published, with what metadata,
    whether it is kept, and who has applied it.
    """
    status = read_log(shared.view_of(store, allow_shared_store=allow_shared_store))
    if as_json:
        shared.print_json(status)
    else:
        print_parts(log_parts(status))
