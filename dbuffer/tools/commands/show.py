"""``dbuffer status``, ``log``, ``verify`` and ``ls``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dbuffer.errors import OptionError, WaitTimeoutError
from dbuffer.format.layout import TensorSpec
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.hold import HeldVersion, hold_newest
from dbuffer.tools import tables
from dbuffer.tools.commands import shared
from dbuffer.tools.status import read_log, read_status
from dbuffer.tools.terminal import print_json, print_parts, progress
from dbuffer.weights.comparison import Comparison, compare
from dbuffer.weights.names import NameMap

if TYPE_CHECKING:
    from dbuffer.mirror.bucket import Bucket

_REFRESH_S = 0.5
_BUCKET_REFRESH_S = 15.0
"""Interval at which `--watch` reads a bucket. A list of up to 1,000 objects is priced as 12 gets;
so the cost is a half of a mirror's poll, which is two gets a second."""


def status(
    store: shared.PlaceArgument,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Refresh twice a second (a bucket: every 15 s), until Ctrl-C."
        ),
    ] = False,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Show the versions, sender and receivers of a store, and each receiver's lag.

    Of a bucket: the newest version, and the receivers whose mirrors have put records there.
    """
    if watch and as_json:
        raise OptionError("--watch and --json exclude each other")
    if watch and not sys.stdout.isatty():
        raise OptionError("--watch needs a terminal; in a pipe, call `dbuffer status` repeatedly")
    with shared.opened(store, allow_shared_store=allow_shared_store) as view:
        if isinstance(view, DoubleBuffer):
            _show(functools.partial(read_status, view), _REFRESH_S, watch=watch, as_json=as_json)
            return
        from dbuffer.tools.bucket_status import read_bucket_status

        with contextlib.nullcontext() if watch else progress(f"reading {store}"):
            read = functools.partial(read_bucket_status, view)
            _show(read, _BUCKET_REFRESH_S, watch=watch, as_json=as_json)


def _show(
    read: Callable[[], dict[str, Any]], refresh_s: float, *, watch: bool, as_json: bool
) -> None:
    if not watch:
        status = read()
        if as_json:
            print_json(status)
        else:
            print_parts(tables.status_parts(status))
        return
    from rich.console import Group
    from rich.live import Live

    with Live(screen=True, auto_refresh=False) as live:
        while True:
            live.update(Group(*tables.status_parts(read())), refresh=True)
            time.sleep(refresh_s)


def log(
    store: shared.StoreArgument,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Show the runs of a store's senders and their versions, newest first.

    Each start of a sender begins a run. Versions in the store or on receivers are listed with their
    time, metadata and state, and with the receivers that applied them.
    """
    runs = read_log(shared.view_of(store, allow_shared_store=allow_shared_store))
    if as_json:
        print_json(runs)
    else:
        print_parts(tables.log_parts(runs))


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
    with shared.opened(store, allow_shared_store=allow_shared_store) as view:
        from dbuffer.tools.verification import verify_bucket, verify_store

        in_bytes = not isinstance(view, DoubleBuffer)
        with progress(f"verifying {store}", in_bytes=in_bytes) as on_bytes:
            if isinstance(view, DoubleBuffer):
                checks = verify_store(view)
            else:
                checks = [verify_bucket(view, on_bytes)]
    results = [dataclasses.asdict(check) for check in checks]
    if as_json:
        print_json(results)
    else:
        notes = [
            f"version {check.version} has no checksums: bytes of its tensors are not verified"
            for check in checks
            if not check.has_checksums and not check.problems
        ]
        print_parts([tables.table(results), *map(tables.line, notes)])
    if any(check.problems for check in checks):
        raise typer.Exit(shared.EXIT_FAILED)


def ls(
    store: shared.PlaceArgument,
    against: Annotated[
        Path | None,
        typer.Option(
            help="Compare with the tensors of this HuggingFace checkpoint: list differing, missing "
            "and left over tensors. Exit code 1 if it does not fit. A tensor with another dtype "
            "fits, because engines cast, and is listed.",
            metavar="MODEL_DIR",
            parser=shared.parse_path,
        ),
    ] = None,
    rename: shared.RenameOption = None,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """List the newest version's tensors: name, dtype, shape, bytes."""
    if rename is not None and against is None:
        raise OptionError("--rename has no effect without --against")
    with (
        progress(f"reading {store}"),
        shared.opened(store, allow_shared_store=allow_shared_store) as view,
        _hold(view) as held,
    ):
        version, layout = held.manifest.version, held.read_layout()
    if against is None:
        tensors = [{**spec._asdict(), "num_bytes": spec.num_bytes} for spec in layout.specs]
        result = {"version": version, "tensors": tensors, "aliases": layout.aliases}
        fits = True
    else:
        from dbuffer.weights.checkpoint import read_checkpoint
        from dbuffer.weights.sources import spec_of
        from dbuffer.weights.suggestions import suggest

        of_model, _ = read_checkpoint(against)
        needed = [spec_of(name, tensor) for name, tensor in of_model.items()]
        comparison = compare(layout, needed, None if rename is None else NameMap.read(rename))
        suggestion = "" if comparison.fits else suggest(layout, needed, comparison)
        result = {"version": version, **_fields_of(comparison)}
        result["suggestion"] = suggestion.lstrip("; ")
        fits = comparison.fits
    if as_json:
        print_json(result)
    else:
        parts_of = tables.layout_parts if against is None else tables.comparison_parts
        print_parts(parts_of(result))
    if not fits:
        raise typer.Exit(shared.EXIT_FAILED)


def _hold(view: DoubleBuffer | Bucket) -> HeldVersion:
    """Hold the newest version of a store, or of a bucket."""
    if isinstance(view, DoubleBuffer):
        if (held := hold_newest(view, newer_than=None)) is None:
            raise WaitTimeoutError(f"nothing was published in {view.root} yet")
        return held
    from dbuffer.mirror.download import hold_objects, require_newest

    return hold_objects(view, require_newest(view))


def _fields_of(comparison: Comparison) -> dict[str, Any]:
    return {
        "fits": comparison.fits,
        "fits_exactly": comparison.fits_exactly,
        "matching": [spec.name for spec in comparison.matching],
        "missing": [spec._asdict() for spec in comparison.missing],
        "left_over": [spec._asdict() for spec in comparison.left_over],
        "differing": _pairs(comparison.differing),
        "renamed": {name: list(old) for name, old in comparison.renamed.items()},
        "recast": _pairs(comparison.recast),
        "unused_rules": [rule.as_json() for rule in comparison.unused_rules],
    }


def _pairs(pairs: list[tuple[TensorSpec, TensorSpec]]) -> list[dict[str, Any]]:
    return [{"published": have._asdict(), "needed": need._asdict()} for have, need in pairs]
