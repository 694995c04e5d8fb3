"""Output on a terminal: results on stdout; errors, logs and progress on stderr.

Tensor names, hosts, paths and messages can contain control sequences, because they come from other
programs. So all output passes through :func:`printable`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, RenderableType
from rich.progress import DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def printable(text: object) -> str:
    r"""Return text with its control characters, except line ends, as escapes such as ``\x1b``."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii")
        for c in str(text)
    )


def print_line(text: str) -> None:
    """Print text on stdout and flush stdout: a program may be waiting at the end of a pipe."""
    print(printable(text), flush=True)


def print_error(text: str) -> None:
    """Print text on stderr."""
    print(printable(text), file=sys.stderr, flush=True)


def print_parts(parts: Sequence[RenderableType]) -> None:
    """Print lines and tables on stdout."""
    width = None if sys.stdout.isatty() else 1 << 16  # so that no line in a pipe is folded
    Console(width=width).print(*parts, sep="\n")


@contextlib.contextmanager
def progress(text: str, *, in_bytes: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show progress on stderr, if stderr is a terminal, until the ``with`` block ends.

    Yield a function that updates the progress. The arguments of the function are the amount
    done and the total amount, or 0 for an unknown total. Any thread can call the function.
    """
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        *([DownloadColumn()] if in_bytes else []),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # a terminal shows lines above the progress
    ) as shown:
        task = shown.add_task(printable(text), total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total or None)


class LogHandler(logging.StreamHandler):  # type: ignore[type-arg]  # not generic at run time
    """Handler that prints log records on stderr as printable text, above the progress."""

    def __init__(self, *, debug: bool) -> None:
        super().__init__()
        origin = "%(asctime)s %(name)s" if debug else "dbuffer"
        self.setFormatter(logging.Formatter(f"{origin}: %(levelname)s: %(message)s"))

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr  # the progress display replaces sys.stderr
        super().emit(record)
