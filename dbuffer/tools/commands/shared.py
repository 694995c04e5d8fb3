"""Parts of all commands: arguments, exit codes, and functions that print results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dbuffer.errors import DBufferError, OptionError, StoreNotFoundError
from dbuffer.receive.follow_loop import Forked
from dbuffer.runtime import options
from dbuffer.runtime.messages import counted, format_bytes
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.foreign import is_store, other_contents
from dbuffer.tools.terminal import print_error, print_line, status_line

if TYPE_CHECKING:
    from dbuffer.publish.publication import Publication

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TIMEOUT = 3
EXIT_SUPERSEDED = 4
EXIT_SIGNAL = 128
"""Exit code of a command that a signal stopped is this plus the signal's number, as in shells."""


def parse_path(text: str) -> Path:
    """Parse a path; an empty one, from a variable that is not set, is wrong usage."""
    if not text:
        raise typer.BadParameter("an empty path; is a variable not set?")
    try:
        return options.path("path", text)
    except OptionError as error:  # whose message typer would drop
        raise typer.BadParameter(str(error)) from None


def parse_place(text: str) -> Path | str:
    """Parse a directory's path, or a bucket's URL, of which a path would drop a slash."""
    return options.directory_or_bucket("place", text) if options.is_url(text) else parse_path(text)


def parse_store(text: str) -> Path:
    """Parse a store's directory; for a bucket's URL the mirrors are named."""
    try:
        return options.directory("store", text) if options.is_url(text) else parse_path(text)
    except OptionError as error:
        raise typer.BadParameter(str(error)) from None


def view_of(store: Path, *, allow_shared_store: bool) -> DoubleBuffer:
    """Return a store as readers see it, for a command that does not wait for one.

    Raises:
        StoreNotFoundError: the directory has nothing of a store.
    """
    view = DoubleBuffer(store, allow_shared_store=allow_shared_store)
    if view.exists() and not is_store(store):
        there = view.state_without_version() or ": the directory has nothing of one"
        raise StoreNotFoundError(f"there is no store at {store}{there}")
    return view


def refuse_for_bucket(**given: object) -> None:
    """Refuse options that were given and have no effect on a bucket."""
    for name, value in given.items():
        if value:
            raise OptionError(f"--{name.replace('_', '-')} has no effect on a bucket")


def path_argument(text: str, metavar: str) -> Any:
    """Return an argument for a path, with this help."""
    return typer.Argument(help=text, metavar=metavar, parser=parse_path)


StoreArgument = Annotated[
    Path, typer.Argument(help="Store directory.", metavar="STORE", parser=parse_store)
]
PlaceArgument = Annotated[
    str,
    typer.Argument(
        help="Store directory, or URL of a bucket (s3://BUCKET/PREFIX).", metavar="STORE"
    ),
]
"""Argument that a command parses by :func:`parse_place`: typer knows no union of types."""
SharedOption = Annotated[
    bool,
    typer.Option(
        "--allow-shared-store",
        help="Accept a directory that belongs to another user, or that others can write to.",
    ),
]
RenameOption = Annotated[
    Path | None,
    typer.Option(
        help="Rename tensors by the rules in this JSON or TOML file, such as "
        '{"rules": [{"prefix": "actor.", "to": ""}]}.',
        metavar="FILE",
        parser=parse_path,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
JsonLinesOption = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
CountOption = Annotated[
    int | None,
    typer.Option(help="Stop after N versions.", metavar="N", min=1, show_default="never"),
]
NewerThanOption = Annotated[
    int | None,
    typer.Option(help="Start above this version.", show_default="with the newest one in the store"),
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FollowOptions:
    """Options of all commands that follow a store; see :func:`with_follow_options`."""

    count: CountOption = None
    timeout_s: Annotated[
        float | None,
        typer.Option(
            help="Stop with exit code 3 if no version comes for this many seconds.",
            show_default="never",
        ),
    ] = None
    receiver_id: Annotated[
        str | None,
        typer.Option(
            help="Acknowledge versions under this name. Default: `exec` generates one, "
            "`follow-server` takes the engine's, `follow` does not acknowledge.",
            metavar="ID",
        ),
    ] = None
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Check every tensor's checksum; the default on a network mount."
        ),
    ] = False
    forked: Annotated[
        Forked,
        typer.Option(
            help="If another run has published in place of the versions seen so far: follow it, "
            "with a warning, or refuse it and stop."
        ),
    ] = "follow"
    as_json: JsonLinesOption = False
    allow_shared_store: SharedOption = False

    def __post_init__(self) -> None:
        if self.timeout_s is not None:
            options.seconds("timeout_s", self.timeout_s)


def with_follow_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's last parameter by options of the command line, a `FollowOptions`."""
    fields = inspect.signature(FollowOptions, eval_str=True).parameters
    *own, last = inspect.signature(command, eval_str=True).parameters.values()

    @functools.wraps(command)
    def parsed(**arguments: Any) -> None:
        values = {name: arguments.pop(name) for name in fields}
        command(**arguments, **{last.name: FollowOptions(**values)})

    parsed.__signature__ = inspect.Signature([*own, *fields.values()])  # type: ignore[attr-defined]  # typer reads it
    return parsed


def print_json(value: Any) -> None:
    """Print one line of JSON."""
    print_line(json.dumps(value, default=str))


def _fields_of(done: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, with a version's run and number for its id."""
    fields = dataclasses.asdict(done)
    version = fields.pop("id", None)
    named = {} if version is None else {"version": version.number, "run": version.run}
    return named | fields


def report(result: Any, text: str, *, as_json: bool) -> None:
    """Print a result: a dictionary, or the fields of a dataclass, as JSON; or a text."""
    if as_json:
        print_json(result if isinstance(result, dict) else _fields_of(result))
    else:
        print_line(text)


def describe_copy(done: Publication) -> str:
    """Return a text about a version that was written."""
    speed = done.num_bytes / max(done.duration_s, 1e-9)
    delta = "" if done.delta_bytes is None else f", {format_bytes(done.delta_bytes)} as a delta"
    return (
        f"version {done.version}: {counted(done.num_tensors, 'tensor')}, "
        f"{format_bytes(done.num_bytes)}{delta} in {done.duration_s:.2f} s "
        f"({format_bytes(speed)}/s)"
    )


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set, so that work under way ends in order.

    When the block ends, the command exits with the signal's code.
    """
    stop = threading.Event()
    # A handler interrupts this thread anywhere, also while it has the event's lock. Queues of this
    # kind allow that, and another thread sets the event.
    received: queue.SimpleQueue[int] = queue.SimpleQueue()
    first = 0

    def wait() -> None:
        nonlocal first
        first = received.get()
        stop.set()

    thread = threading.Thread(target=wait, name="dbuffer-signals", daemon=True)
    thread.start()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _: received.put(number)) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        received.put(0)
        thread.join()
    if first:
        raise SystemExit(EXIT_SIGNAL + first)


def explain_wait(store: Path, target: Path | str | None = None) -> None:
    """Print on stderr that a command waits for a store's first version, if it does.

    ``target``: where a mirror copies it to.
    """
    view = DoubleBuffer(store, allow_shared_store=True)
    # The command itself reads the store next, and reports errors.
    with contextlib.suppress(DBufferError):
        if not view.exists():
            text = f"there is no store at {store} yet: waiting for one"
        elif view.newest_pointer() is None:
            contents = other_contents(store)
            text = f"nothing was published in {store} yet: waiting"
            if contents is not None:
                text = f"{store} holds {contents}, and no store (is it the right path?): waiting"
        else:
            return
        print_error(f"dbuffer: {text}{'' if target is None else _describe_target(target)}")


def _describe_target(target: Path | str) -> str:
    if isinstance(target, str):
        return f", to be copied into {target}"
    view = DoubleBuffer(target, allow_shared_store=True)
    newest = view.newest_pointer() if view.exists() else None
    there = "holds nothing yet" if newest is None else f"holds version {newest.version}"
    return f", to be copied into {target}, which {there}"


def show_wait(store: Path | str, newer_than: int | None) -> None:
    """Show in the status line that a command waits for a store's next version."""
    above = "" if newer_than is None else f" above {newer_than}"
    status_line.show(f"waiting for a version{above} in {store}")


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end a ``with`` block as Ctrl-C does, so that files in it are cleaned up."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_SIGNAL + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
