"""Output to terminals and pipes: printable text, and a status line.

Names, hosts, paths and messages come from other programs, and may contain control sequences. All of
them pass through :func:`printable`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dbuffer.runtime.messages import format_bytes

if TYPE_CHECKING:
    from rich.live import Live

_REDRAW_S = 0.1


def printable(text: object) -> str:
    r"""Return text with control characters written out (``\x1b``), except for line ends."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii")
        for c in str(text)
    )


def print_line(text: str) -> None:
    """Print text on stdout at once, as a pipe may be waiting for it; the status line goes."""
    status_line.clear()
    print(printable(text), flush=True)


def print_error(text: str) -> None:
    """Print text on stderr; the status line goes."""
    status_line.clear()
    print(printable(text), file=sys.stderr, flush=True)


class StatusLine:
    """Line at the end of a terminal that says what a command does or waits for.

    It is on stderr, and only if that is a terminal. Whatever is printed replaces it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # progress comes from several threads
        self._live: Live | None = None
        self._text = ""
        """Text that is shown."""
        self._drawn_at = 0.0

    def show(self, text: str) -> None:
        """Show one line of text, as much of it as fits."""
        if not sys.stderr.isatty():
            return
        from rich.text import Text

        line = Text(printable(text).replace("\n", " "), no_wrap=True, overflow="crop")
        with self._lock:
            self._live = self._live or _new_live()
            self._text = text
            self._drawn_at = time.monotonic()
            self._live.start()
            self._live.console.show_cursor()  # which a killed command would leave hidden
            self._live.update(line, refresh=True)

    def show_bytes(self, text: str, done: int, total: int) -> None:
        """Show how many bytes are done, and of how many (0: unknown), ten times a second."""
        if time.monotonic() - self._drawn_at >= _REDRAW_S:
            of_total = f" of {format_bytes(total)} ({done / total:.0%})" if total else ""
            self.show(f"{text}: {format_bytes(done)}{of_total}")

    def clear(self) -> str:
        """Remove the line, if it is shown, and return its text."""
        with self._lock:
            text, self._text = self._text, ""
            if self._live is not None:
                self._live.stop()
            return text


status_line = StatusLine()
"""The status line of this process."""


@contextlib.contextmanager
def show_elapsed(text: str) -> Iterator[None]:
    """Show in the status line what takes long, with the seconds so far, during a ``with`` block."""
    if not sys.stderr.isatty():
        yield
        return
    has_ended = threading.Event()

    def count() -> None:
        started = time.monotonic()
        while not has_ended.wait(1.0):
            status_line.show(f"{text}: {time.monotonic() - started:.0f} s")

    counter = threading.Thread(target=count, name="dbuffer-elapsed", daemon=True)
    counter.start()
    try:
        yield
    finally:
        has_ended.set()
        counter.join()
        status_line.clear()


class LogHandler(logging.StreamHandler):  # type: ignore[type-arg]  # no class at run time
    """Handler that prints records on stderr, above the status line."""

    def __init__(self, *, debug: bool) -> None:
        super().__init__()
        origin = "%(asctime)s %(name)s" if debug else "dbuffer"
        self.setFormatter(_PrintableFormatter(f"{origin}: %(levelname)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        text = status_line.clear()
        self.stream = sys.stderr  # as it is now
        super().emit(record)
        if text:
            status_line.show(text)


class _PrintableFormatter(logging.Formatter):
    """Formatter of log records, with a traceback if there is one, as printable text."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _new_live() -> Live:
    from rich.console import Console
    from rich.live import Live

    # Its redirection would move what is printed on stdout to stderr.
    return Live(
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
