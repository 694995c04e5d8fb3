"""Arguments, exit codes and signals that several commands share."""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from dbuffer.errors import OptionError, StoreNotFoundError
from dbuffer.format.lineage import VersionId
from dbuffer.runtime import options
from dbuffer.runtime.messages import counted, format_bytes
from dbuffer.store.buffer import DoubleBuffer, is_store
from dbuffer.tools.terminal import print_line, print_parts

if TYPE_CHECKING:
    from dbuffer.publish.publisher import Publication

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TIMEOUT = 3
EXIT_SUPERSEDED = 4
EXIT_SIGNAL = 128
"""Exit code of a command that a signal stopped, minus the number of the signal."""


def _parser(parse_url: Callable[[str, str], Any] = options.path) -> Callable[[str], Any]:
    """Return a parser that refuses an empty path, which often is an unset shell variable."""

    def parsed(text: str) -> Any:
        if not text:
            raise typer.BadParameter("an empty path: is a shell variable not set?")
        try:
            return (parse_url if options.is_url(text) else options.path)("path", text)
        except OptionError as error:  # typer would drop its message
            raise typer.BadParameter(str(error)) from None

    return parsed


parse_path = _parser()
parse_place = _parser(options.directory_or_bucket)

StoreArgument = Annotated[
    Path,
    typer.Argument(help="Store directory.", metavar="STORE", parser=_parser(options.directory)),
]
SharedOption = Annotated[
    bool,
    typer.Option(
        "--allow-shared-store",
        help="Accept a directory that belongs to another user, or that others can write to.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, one line per result.")]
CountOption = Annotated[
    int | None,
    typer.Option(help="Stop after N versions.", metavar="N", min=1),
]


def _parse_version(text: str) -> int | VersionId:
    """Parse a version's number or id. For a path, the error asks whether arguments are swapped."""
    if text.isdecimal():
        return int(text)
    with contextlib.suppress(ValueError):
        return VersionId.parse(text)
    swapped = " (are STORE and VERSION swapped?)" if Path(text).is_dir() else ""
    raise typer.BadParameter(f"{text!r} is not a version number{swapped}")


_VERSION = {
    "help": "Number of a version, or RUN-NUMBER, as in `dbuffer status`.",
    "metavar": "VERSION",
    "parser": _parse_version,
}
VersionArgument = Annotated[int, typer.Argument(**_VERSION)]
VersionOption = Annotated[int | None, typer.Option(**_VERSION)]


def view_of(store: Path, *, allow_shared_store: bool) -> DoubleBuffer:
    """Open a store for reading. Refuse a directory that contains no store."""
    view = DoubleBuffer(store, allow_shared_store=allow_shared_store)
    if view.exists() and not is_store(store):
        state = view.state_without_version() or ": the directory has no files of a store"
        raise StoreNotFoundError(f"there is no store at {store}{state}")
    return view


def refuse_for_bucket(**options: object) -> None:
    """Refuse options that have no effect on a bucket, if they were given."""
    for name, value in options.items():
        if value:
            raise OptionError(f"--{name.replace('_', '-')} has no effect on a bucket")


def show(result: Any, shown: str | Sequence[RenderableType], *, as_json: bool) -> None:
    """Print ``result`` as JSON if ``as_json``. Otherwise print the text or tables in ``shown``."""
    if as_json:
        fields = result if isinstance(result, dict | list) else dataclasses.asdict(result)
        if isinstance(fields, dict) and "id" in fields:
            version = fields.pop("id")
            fields = {"version": version.number, "run": version.run, **fields}
        print_line(json.dumps(fields, default=str))
    elif isinstance(shown, str):
        print_line(shown)
    else:
        print_parts(shown)


def describe_copy(done: Publication) -> str:
    """Describe a published or copied version, in a line for the user."""
    speed = done.num_bytes / max(done.duration_s, 1e-9)
    delta = "" if done.delta_bytes is None else f", {format_bytes(done.delta_bytes)} as a delta"
    return (
        f"version {done.version}: {counted(done.num_tensors, 'tensor')}, "
        f"{format_bytes(done.num_bytes)}{delta} in {done.duration_s:.2f} s "
        f"({format_bytes(speed)}/s)"
    )


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set. The block stops its work when the event is set.

    If a signal arrived, the command exits with the signal's code when the block ends.
    """
    # Don't raise an exception in the handlers: if a callback of a weak reference is running, Python
    # drops the exception.
    stop, received = threading.Event(), list[int]()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, _: object) -> None:
        received.append(number)
        # Set the event in another thread: the interrupted code may hold the event's lock.
        _thread.start_new_thread(stop.set, ())

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, handle)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise SystemExit(EXIT_SIGNAL + received[0])
