"""Parts of all commands: arguments, exit codes and signals."""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import signal
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
from dbuffer.tools.terminal import print_error, print_json, print_line

if TYPE_CHECKING:
    from types import FrameType

    from dbuffer.mirror.bucket import Bucket
    from dbuffer.publish.publication import Publication

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TIMEOUT = 3
EXIT_SUPERSEDED = 4
EXIT_SIGNAL = 128
"""Exit code of a command that a signal stopped is this plus the signal's number, as in shells."""


def _parser(parse_url: Callable[[str, str], Any] = options.path) -> Callable[[str], Any]:
    """Return a parser of paths; an empty one, from a variable that is not set, is refused."""

    def parsed(text: str) -> Any:
        if not text:
            raise typer.BadParameter("an empty path; is a variable not set?")
        try:
            return (parse_url if options.is_url(text) else options.path)("path", text)
        except OptionError as error:  # whose message typer would drop
            raise typer.BadParameter(str(error)) from None

    return parsed


parse_path = _parser()
"""Parser of a path."""


parse_place = _parser(options.directory_or_bucket)
"""Parser of a directory's path, or a bucket's URL."""


StoreArgument = Annotated[
    Path,
    typer.Argument(help="Store directory.", metavar="STORE", parser=_parser(options.directory)),
]
PlaceArgument = Annotated[
    str,
    typer.Argument(
        help="Store directory, or URL of a bucket (s3://BUCKET/PREFIX).", metavar="STORE"
    ),
]
"""Argument that a command parses by :data:`parse_place`: typer knows no union of types."""
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


def _parse_seconds(text: str) -> float:
    try:
        return options.seconds("timeout_s", float(text))
    except (OptionError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None


TimeoutOption = Annotated[
    float | None,
    typer.Option(
        help="Stop with exit code 3 if no version comes for this many seconds.",
        show_default="never",
        metavar="SECONDS",
        parser=_parse_seconds,
    ),
]
ReceiverOption = Annotated[
    str | None,
    typer.Option(
        help="Acknowledge versions under this name. Default: `exec` generates one, "
        "`follow-server` takes the engine's, `follow` does not acknowledge.",
        metavar="ID",
    ),
]
VerifyOption = Annotated[
    bool,
    typer.Option("--verify", help="Check every tensor's checksum; the default on a network mount."),
]
ForkedOption = Annotated[
    Forked,
    typer.Option(
        help="If another run has published in place of the versions seen so far: follow it, with a "
        "warning, or refuse it and stop."
    ),
]


def view_of(store: Path, *, allow_shared_store: bool) -> DoubleBuffer:
    """Return a store as readers see it, for a command that does not wait for one."""
    view = DoubleBuffer(store, allow_shared_store=allow_shared_store)
    if view.exists() and not is_store(store):
        there = view.state_without_version() or ": the directory has nothing of one"
        raise StoreNotFoundError(f"there is no store at {store}{there}")
    return view


@contextlib.contextmanager
def opened(text: str, *, allow_shared_store: bool) -> Iterator[DoubleBuffer | Bucket]:
    """Open a store, as :func:`view_of` does, or a bucket, for a command that only reads it."""
    place = parse_place(text)
    if isinstance(place, Path):
        yield view_of(place, allow_shared_store=allow_shared_store)
        return
    refuse_for_bucket(allow_shared_store=allow_shared_store)
    from dbuffer.mirror.bucket import Bucket

    with Bucket(place) as bucket:
        yield bucket


def refuse_for_bucket(**given: object) -> None:
    """Refuse options that were given and have no effect on a bucket."""
    for name, value in given.items():
        if value:
            raise OptionError(f"--{name.replace('_', '-')} has no effect on a bucket")


def report(result: Any, text: str, *, as_json: bool) -> None:
    """Print a result: a dictionary, or the fields of a dataclass, as JSON; or a text."""
    if not as_json:
        print_line(text)
        return
    fields = result if isinstance(result, dict) else dataclasses.asdict(result)
    version = fields.pop("id", None)
    if version is not None:
        fields = {"version": version.number, "run": version.run, **fields}
    print_json(fields)


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
    with noting_signals(raises=False) as (stop, received):
        yield stop
    if received:
        raise SystemExit(EXIT_SIGNAL + received[0])


@contextlib.contextmanager
def noting_signals(*, raises: bool) -> Iterator[tuple[threading.Event, list[int]]]:
    """Yield an event that SIGINT and SIGTERM set, and a list of their numbers.

    With ``raises``, the earlier handlers of the signals run, too. Python drops an exception that is
    raised in the callback of a weak reference, so a long wait checks the event.
    """
    noted, received = threading.Event(), list[int]()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        # In another thread: the code that the signal interrupts may have the event's lock.
        _thread.start_new_thread(noted.set, ())
        handler = before[signal.Signals(number)]
        if raises and callable(handler):
            handler(number, frame)

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, handle)
    try:
        yield noted, received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def explain_wait(store: Path, target: Path | str | None = None) -> None:
    """Print on stderr that a command waits for a store's first version, if it does.

    Args:
        store: the store.
        target: store that a mirror copies it into, or a bucket.
    """
    view = DoubleBuffer(store, allow_shared_store=True)
    # The command itself reads the store next, and reports errors.
    with contextlib.suppress(DBufferError):
        if not view.exists():
            text = f"there is no store at {store} yet: waiting for one"
        elif (contents := other_contents(store)) is not None:
            text = f"{store} holds {contents}, and no store (is it the right path?): waiting"
        elif view.newest_pointer() is None:
            text = f"nothing was published in {store} yet: waiting"
        else:
            return
        there = DoubleBuffer(target, allow_shared_store=True) if isinstance(target, Path) else None
        if there is not None and (pointer := there.undamaged_pointer()) is not None:
            text += f"; it will be copied into {target}, which holds version {pointer.version}"
        print_error(f"dbuffer: {text}")


def describe_wait(store: Path | str, newer_than: int | None) -> str:
    """Return a text for the progress of a command that waits for a store's next version."""
    above = "" if newer_than is None else f" above {newer_than}"
    return f"waiting for a version{above} in {store}"
