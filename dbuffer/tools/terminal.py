"""Output: results on stdout; errors, logs and progress on stderr.

Names, hosts, paths and messages come from other programs, and may contain control sequences. So all
output passes through :func:`printable`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, RenderableType
from rich.progress import DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def printable(text: object) -> str:
    r"""Return text with control characters written out (``\x1b``), except for line ends."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii")
        for c in str(text)
    )


def print_line(text: str) -> None:
    """Print text on stdout and flush it: a program may be waiting at the other end of a pipe."""
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
    """Show progress on stderr, if it is a terminal, until the ``with`` block ends.

    Yield a function of the bytes done and the bytes in all (0: unknown), for any thread.
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
        redirect_stdout=sys.stdout.isatty(),  # prints lines above the progress; not into a pipe
    ) as shown:
        task = shown.add_task(printable(text), total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total or None)


class LogHandler(logging.StreamHandler):  # type: ignore[type-arg]  # no class at run time
    """Handler that prints records on stderr, above progress, as printable text."""

    def __init__(self, *, debug: bool) -> None:
        super().__init__()
        origin = "%(asctime)s %(name)s" if debug else "dbuffer"
        self.setFormatter(logging.Formatter(f"{origin}: %(levelname)s: %(message)s"))

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr  # the progress display replaces sys.stderr
        super().emit(record)
