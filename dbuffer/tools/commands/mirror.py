"""Command ``dbuffer mirror``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

import dbuffer
from dbuffer.errors import DBufferError
from dbuffer.runtime.extras import needed_for
from dbuffer.tools.commands import shared
from dbuffer.tools.terminal import progress

if TYPE_CHECKING:
    from dbuffer.format.lineage import VersionId
    from dbuffer.mirror.mirror import Mirror
    from dbuffer.publish.publisher import Publication


def mirror(
    source: Annotated[
        str, typer.Argument(help="Store to copy from, or URL of a bucket.", metavar="SOURCE")
    ],
    target: Annotated[
        str, typer.Argument(help="Store to copy to, or URL of a bucket.", metavar="TARGET")
    ],
    count: shared.CountOption = None,
    poll_interval_s: Annotated[
        float,
        typer.Option(help="How often to check the source for a new version.", metavar="SECONDS"),
    ] = 0.5,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            help="Serve Prometheus metrics on this port (needs prometheus-client).",
            metavar="PORT",
            min=1,
            max=65535,
        ),
    ] = None,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Copy each new version into a local store, for all workers of this node.

    Between clusters, use a bucket (s3://BUCKET/PREFIX): one mirror copies versions into the
    bucket, and a mirror on each node copies the versions out of the bucket.

    Start one mirror on each node. If a node has several mirrors, one mirror copies and the
    others stand by. You can stop and start a mirror at any time, and a mirror can copy from another
    mirror's target.

    With --count, a version that TARGET already has when the command starts counts as copied.
    """
    remote, local = shared.parse_place(source), shared.parse_place(target)
    num_shown = 0

    def show(version: Any, text: str) -> None:
        nonlocal num_shown
        shared.show(version, text, as_json=as_json)
        num_shown += 1
        if num_shown == count:
            stop.set()

    def report(copied: Publication) -> None:
        show(copied, shared.describe_copy(copied))

    def report_current(version: VersionId) -> None:
        unknown = dict.fromkeys(("num_tensors", "num_bytes", "duration_s", "delta_bytes"))
        show({"id": version, **unknown}, f"version {version.number}: {target} already has it")

    with shared.stopped_by_signals() as stop, progress(f"mirroring {remote}"):
        copying = dbuffer.Mirror(
            remote,
            local,
            poll_interval_s=poll_interval_s,
            allow_shared_store=allow_shared_store,
            on_copied=report,
        )
        with copying:
            if count is not None:
                copying.on_current = report_current
            if metrics_port is not None:
                _serve_metrics(copying, metrics_port)
            copying.run(stop)


def _serve_metrics(copying: Mirror, port: int) -> None:
    with needed_for("--metrics-port"):
        from prometheus_client import start_http_server

        from dbuffer.integrations.metrics import register
    try:
        start_http_server(port)
    except OSError as error:
        raise DBufferError(
            f"cannot serve metrics on port {port} ({error.strerror}): "
            "choose a different --metrics-port"
        ) from error
    register(copying)
