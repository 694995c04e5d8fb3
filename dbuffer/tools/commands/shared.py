"""What the commands share: options, consoles, exit codes, and how results are printed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from dbuffer.errors import DBufferError
from dbuffer.runtime.messages import format_bytes
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.tools.render import cell, printable

if TYPE_CHECKING:
    from dbuffer.publish.publication import Publication

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TIMEOUT = 3
EXIT_SIGNAL = 128
"""Plus the number of the signal that stopped a command, as shells have it."""

console = Console()
errors = Console(stderr=True)


def parse_path(text: str) -> Path:
    """A path of the command line; an empty one, of a variable that is not set, is wrong usage."""
    if not text:
        raise typer.BadParameter("an empty path; is a variable not set?")
    return Path(text)


def path_argument(text: str, metavar: str | None = None) -> Any:
    """A required path, with this help."""
    return typer.Argument(help=text, metavar=metavar, show_default=False, parser=parse_path)


StoreArgument = Annotated[Path, path_argument("The store's directory.")]
SharedOption = Annotated[
    bool,
    typer.Option(
        "--allow-shared-store",
        help="Accept a directory that belongs to another user, or that others can write to.",
    ),
]
AsideOption = Annotated[
    bool,
    typer.Option(
        "--move-torchrl-aside",
        help="Where the directory holds weights of TorchRL's own double buffer, move them into "
        "`before-dbuffer` below it. Default: refuse such a directory.",
    ),
]
NamesOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Rename tensors by the rules in this JSON file.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
JsonLinesOption = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
CountOption = Annotated[
    int | None, typer.Option(min=1, help="Stop after N versions.  [default: never]", metavar="N")
]
NewerThanOption = Annotated[
    int | None,
    typer.Option(help="Start above this version.  [default: with the newest one in the store]"),
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(help="Stop with exit code 3 if no version comes for this many seconds."),
]
ReceiverOption = Annotated[
    str | None, typer.Option(help="Name under which versions are acknowledged.")
]
VerifyOption = Annotated[bool, typer.Option("--verify", help="Check every tensor's checksum.")]
NewHistoryOption = Annotated[
    str,
    typer.Option(
        metavar="follow|refuse",
        help="If the store was emptied or replaced by another run: 'follow' the new versions, with "
        "a warning, or 'refuse' them and stop.",
    ),
]


def print_json(value: Any) -> None:
    """One line of JSON, at once: a pipe may be waiting for it."""
    print(json.dumps(value, default=str), flush=True)


def print_line(text: str) -> None:
    """A line that may hold names and paths: no markup, no wrapping, nothing a terminal acts on."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def report(result: Any, text: str, *, as_json: bool) -> None:
    """A result, a dataclass, for machines; or what it says to people."""
    if as_json:
        print_json(dataclasses.asdict(result))
    else:
        print_line(text)


def describe_copy(done: Publication) -> str:
    """A version that was written, for people."""
    speed = done.num_bytes / max(done.duration_s, 1e-9)
    delta = "" if done.delta_bytes is None else f", {format_bytes(done.delta_bytes)} as a delta"
    return (
        f"version {done.version}: {done.num_tensors} tensors, {format_bytes(done.num_bytes)}"
        f"{delta} in {done.duration_s:.2f} s ({format_bytes(speed)}/s)"
    )


def byte_progress(*, hidden: bool) -> Progress:
    """A progress bar of bytes on stderr, if that is a terminal."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    is_hidden = hidden or not errors.is_terminal
    return Progress(*columns, console=errors, disable=is_hidden, transient=True)


@contextlib.contextmanager
def status_line(*, hidden: bool) -> Iterator[Callable[[str], None] | None]:
    """What is being done, on one line of stderr; None if that is no terminal."""
    if hidden or not errors.is_terminal:
        yield None
        return
    with errors.status("") as line:
        yield lambda text: line.update(cell(text))


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Event that SIGINT and SIGTERM set, so that what has begun ends in order.

    The exit code tells of the signal when the block is left.
    """
    stop = threading.Event()
    received: list[int] = []

    def note(number: int, _frame: object) -> None:
        received.append(number)
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, note) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    if received:
        raise typer.Exit(EXIT_SIGNAL + received[0])


def explain_wait(store: Path) -> None:
    """Print on stderr, before a command waits for a store's first version, that it does."""
    view = DoubleBuffer(store, allow_shared_store=True)
    # The command itself reads the store next, and reports errors.
    with contextlib.suppress(DBufferError):
        if not view.exists():
            text = f"there is no store at {store} yet: waiting for one"
        elif view.newest_pointer() is None:
            text = f"nothing was published in {store} yet: waiting"
        else:
            return
        print(printable(f"dbuffer: {text}"), file=sys.stderr, flush=True)


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end a block as Ctrl-C would: what was made in a user's directory is removed."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_SIGNAL + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
