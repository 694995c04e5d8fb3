"""``dbuffer ls``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from dbuffer.errors import OptionError, WaitTimeoutError
from dbuffer.format.layout import KeptLayouts, Layout, TensorSpec
from dbuffer.store.hold import HeldVersion, hold_newest
from dbuffer.tools.commands import shared
from dbuffer.tools.render import comparison_parts, layout_table, print_parts
from dbuffer.tools.terminal import status_line
from dbuffer.weights.comparison import Comparison, compare
from dbuffer.weights.names import NameMap


def ls(
    store: shared.PlaceArgument,
    against: Annotated[
        Path | None,
        typer.Option(
            help="Compare with the tensors of this HuggingFace checkpoint: list those that differ, "
            "are missing or left over. Exit code 1 if it does not fit. A tensor with another "
            "dtype fits, because engines cast, and is listed.",
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
    with _hold(shared.parse_place(store), allow_shared_store=allow_shared_store) as held:
        version, layout = held.manifest.version, held.read_layout()
    if against is not None:
        _compare(version, layout, against, rename, as_json=as_json)
    elif as_json:
        tensors = [{**spec._asdict(), "num_bytes": spec.num_bytes} for spec in layout.specs]
        shared.print_json({"version": version, "tensors": tensors, "aliases": layout.aliases})
    else:
        print_parts([layout_table(layout)])


@contextlib.contextmanager
def _hold(place: Path | str, *, allow_shared_store: bool) -> Iterator[HeldVersion]:
    """Hold the newest version of a store, or of a bucket."""
    if isinstance(place, str):
        shared.refuse_for_bucket(allow_shared_store=allow_shared_store)
        status_line.show(f"reading {place}")
        from dbuffer.mirror.bucket import Bucket
        from dbuffer.mirror.download import hold_version, require_newest

        with (
            Bucket(place) as bucket,
            hold_version(bucket, require_newest(bucket), KeptLayouts()) as objects,
        ):
            yield objects
        return
    view = shared.view_of(place, allow_shared_store=allow_shared_store)
    held = hold_newest(view, newer_than=None)
    if held is None:
        raise WaitTimeoutError(f"nothing was published in {place} yet")
    with held:
        yield held


def _compare(
    version: int, layout: Layout, model: Path, rename: Path | None, *, as_json: bool
) -> None:
    status_line.show(f"reading {model}")
    from dbuffer.weights.checkpoint import read_checkpoint
    from dbuffer.weights.sources import spec_of
    from dbuffer.weights.suggestions import suggest

    names, tensors, _ = read_checkpoint(model)
    needed = list(map(spec_of, names, tensors))
    comparison = compare(layout, needed, None if rename is None else NameMap.read(rename))
    suggestion = "" if comparison.fits else suggest(layout, needed, comparison)
    if as_json:
        found = _json_of(comparison)
        shared.print_json({"version": version, **found, "suggestion": suggestion.lstrip("; ")})
    else:
        title = f"version {version} against {model}"
        print_parts(comparison_parts(comparison, title, suggestion))
    if not comparison.fits:
        raise typer.Exit(shared.EXIT_FAILED)


def _json_of(comparison: Comparison) -> dict[str, Any]:
    return {
        "fits": comparison.fits,
        "fits_exactly": comparison.fits_exactly,
        "matching": [spec.name for spec in comparison.matching],
        "missing": [spec._asdict() for spec in comparison.missing],
        "left_over": [spec._asdict() for spec in comparison.left_over],
        "differing": _json_pairs(comparison.differing),
        "renamed": {name: list(old) for name, old in comparison.renamed.items()},
        "recast": _json_pairs(comparison.recast),
        "unused_rules": [rule.as_json() for rule in comparison.unused_rules],
    }


def _json_pairs(pairs: list[tuple[TensorSpec, TensorSpec]]) -> list[dict[str, Any]]:
    return [{"published": have._asdict(), "needed": need._asdict()} for have, need in pairs]
