"""``dbuffer mirror``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import dbuffer
from dbuffer.errors import DBufferError
from dbuffer.tools.commands import shared
from dbuffer.tools.render import printable

if TYPE_CHECKING:
    from dbuffer.mirror.mirror import Mirror
    from dbuffer.publish.publication import Publication


def mirror(
    remote: Annotated[Path, shared.path_argument("Store to copy from, on a network mount.")],
    local: Annotated[Path, shared.path_argument("Store to copy to, on /dev/shm.")],
    count: shared.CountOption = None,
    poll_interval_s: Annotated[
        float, typer.Option(help="Seconds between checks of the remote store.")
    ] = 1.0,
    metrics_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Serve Prometheus metrics on this port.")
    ] = None,
    as_json: shared.JsonLinesOption = False,
    allow_shared_store: shared.SharedOption = False,
    move_torchrl_aside: shared.AsideOption = False,
) -> None:
    """Copy each new version into a local store, for all workers of this node.

    Start one per node, or several: one of them copies, the others stand by. A mirror can be stopped
    and started at any time, and can follow another mirror.
    """
    num_copied = 0

    def report(copied: Publication) -> None:
        nonlocal num_copied
        bars.update(task, visible=False)
        shared.report(copied, shared.describe_copy(copied), as_json=as_json)
        num_copied += 1
        if num_copied == count:
            stop.set()

    with shared.stopped_by_signals() as stop, shared.byte_progress(hidden=as_json) as bars:
        task = bars.add_task(printable(remote), total=None, visible=False)
        copying = dbuffer.Mirror(
            remote,
            local,
            poll_interval_s=poll_interval_s,
            allow_shared_store=allow_shared_store,
            move_torchrl_aside=move_torchrl_aside,
            on_copied=report,
            progress=lambda done, total: bars.update(
                task, completed=done, total=total, visible=True
            ),
        )
        with copying:
            if metrics_port is not None:
                _serve_metrics(copying, metrics_port)
            shared.explain_wait(remote)
            copying.run(stop)


def _serve_metrics(copying: Mirror, port: int) -> None:
    try:
        from prometheus_client import start_http_server

        from dbuffer.integrations.metrics import register
    except ModuleNotFoundError as error:
        raise DBufferError(
            f"--metrics-port needs {error.name}: pip install 'prometheus-client'"
        ) from error
    register(copying)
    start_http_server(port)
