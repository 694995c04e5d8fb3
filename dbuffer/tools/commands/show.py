"""Commands ``dbuffer status``, ``verify`` and ``ls``."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Never

import typer
from rich.console import Group, RenderableType
from rich.live import Live

from dbuffer.errors import (
    EngineUnreachableError,
    OptionError,
    UnsupportedError,
    WaitTimeoutError,
)
from dbuffer.format.lineage import Lineage, VersionId
from dbuffer.runtime import options
from dbuffer.runtime.extras import needed_for
from dbuffer.runtime.timing import TIMING
from dbuffer.store import kept
from dbuffer.store.buffer import Contents, DoubleBuffer
from dbuffer.store.open_version import open_newest
from dbuffer.tools import tables
from dbuffer.tools.commands import shared
from dbuffer.tools.status import read_status
from dbuffer.tools.terminal import print_parts, progress

_REFRESH_S = 0.5
_ANSWER_S = 30.0


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
    """Show a store's problems, its versions and sender, and each receiver with its lag.

    A killed sender is a problem, a closed sender is not. For a bucket: the newest version, and the
    receivers whose records the mirrors have put there.
    """
    if watch and (as_json or check):
        raise OptionError("--watch cannot be combined with --json or --check")
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
            help="Instead, ask the vLLM server at this address whether it serves the store's "
            "newest version (or --version), and has compared its weights with it. Exit code 3 if "
            "not, 1 if its weights are not of this store.",
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
        answer = _ask_server(view, engine, version)
        shared.show(answer, tables.server_parts(answer), as_json=as_json)
        if not answer["is_verified"]:
            are_of_store = all(replica["is_of_store"] for replica in answer["replicas"])
            raise typer.Exit(shared.EXIT_TIMEOUT if are_of_store else shared.EXIT_FAILED)
        return
    if version is not None:
        raise OptionError("--version needs --engine")
    from dbuffer.receive.reader import verify_store

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


def _ask_server(store: DoubleBuffer, url: str, version: int | VersionId | None) -> dict[str, Any]:
    """Ask a server whether its replicas serve a version, by default the store's newest version.

    Return the object that `dbuffer verify --engine --json` prints. The server must answer
    `GET /ready` as :class:`~dbuffer.integrations.vllm.FollowStore` does. If the newest version
    changes while the server answers, a replica may serve either of the two versions.
    """
    before = _newest(store)
    answers = _ask(options.server_url("--engine", url))
    newest = _newest(store)
    expected = [newest.id, before.id]
    if version is not None:
        if (version_id := Contents(store).id_of(version)) is None:
            raise kept.missing(store, version)
        expected = [version_id]
    replicas = [_compare(answer, expected, newest) for answer in answers]
    is_verified = all(replica["problem"] is None for replica in replicas)
    return {"id": expected[0], "engine": url, "is_verified": is_verified, "replicas": replicas}


def _newest(store: DoubleBuffer) -> Lineage:
    store.check()
    if (newest := Contents(store).newest) is None:
        raise WaitTimeoutError(f"nothing was published in {store.root} yet")
    return newest


def _ask(url: str) -> list[dict[str, Any]]:
    with needed_for("--engine"):
        import httpx
    try:
        response = httpx.get(f"{url}/ready", timeout=_ANSWER_S)
        answer = response.json()
        replicas, reason = list(map(dict, answer["replicas"])), answer["reason"]
    except httpx.HTTPError as error:
        raise EngineUnreachableError(
            f"{url} does not answer: {type(error).__name__} {error}"
        ) from error
    except (LookupError, TypeError, ValueError):
        raise UnsupportedError(
            f"{url} does not say which weights it serves (GET /ready: {response.status_code}): "
            "give the address, without /v1, of a vLLM server with FollowStore"
        ) from None
    if not replicas:
        raise EngineUnreachableError(f"{url} has no weights: {reason}")
    return replicas


def _compare(answer: dict[str, Any], expected: list[VersionId], newest: Lineage) -> dict[str, Any]:
    number, run = str(answer.get("version")), answer.get("run")
    served = VersionId(str(run), int(number)) if number.isdecimal() else None
    is_of_store = served is not None and newest.reaches(served)
    is_attested = answer.get("attested") is True
    problem = None
    if not is_of_store:
        problem = "it serves no version that leads to the newest one: does it follow another store?"
    elif served not in expected:
        problem = f"it does not serve version {expected[0].number}"
    elif not is_attested:
        problem = "it has not compared its weights with the version: set its option `attest`"
    return {
        "version": number,
        "run": run,
        "is_of_store": is_of_store,
        "is_attested": is_attested,
        "problem": problem,
    }
