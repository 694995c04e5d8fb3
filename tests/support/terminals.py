"""The command line in a pseudo-terminal of 80 columns and 24 rows, as a user sees it."""

from __future__ import annotations

import os
import pty
import re
import sys
import termios
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from dbuffer.testing.waiting import TIMEOUT_S, until
from tests.support.children import Child

COLUMNS, ROWS = 80, 24

_TOKENS = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|(.)", re.DOTALL)


class Terminal(Child):
    """``dbuffer ARGUMENTS`` as a child that a terminal controls, for a ``with`` block."""

    def __init__(self, *arguments: object) -> None:
        self._terminal, self._theirs = pty.openpty()
        termios.tcsetwinsize(self._terminal, (ROWS, COLUMNS))
        os.set_blocking(self._terminal, False)
        self._written = b""
        name = os.ttyname(self._theirs)
        super().__init__(_in_terminal, name, [str(each) for each in arguments])

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        os.close(self._terminal)
        os.close(self._theirs)

    def written(self) -> str:
        """All that it has written so far, with control sequences."""
        try:
            while piece := os.read(self._terminal, 1 << 16):
                self._written += piece
        except BlockingIOError:
            pass
        return self._written.decode(errors="ignore")  # a character may be cut

    def lines(self) -> list[str]:
        """The lines of the terminal, also those that have scrolled off its screen."""
        return lines_of(self.written())

    def wait_for(self, is_there: Callable[[list[str]], Any]) -> list[str]:
        """Wait for a state of the lines, and return them."""

        def shown() -> list[str] | None:
            lines = self.lines()
            return lines if is_there(lines) else None

        try:
            lines: list[str] = until("the terminal shows it", shown, TIMEOUT_S)
        except BaseException:
            print(self.written())
            raise
        return lines

    def wait_for_end(self) -> tuple[int, list[str]]:
        """Wait for the command's end; its exit status, and the lines of the terminal."""

        def has_ended() -> bool:
            self.written()  # a full terminal stops whoever writes to it
            return self._process.exitcode is not None

        until("the command ends", has_ended, TIMEOUT_S)
        return self.wait(), self.lines()

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._terminal, text.encode())


def lines_of(written: str) -> list[str]:
    """Return the text as a terminal shows it that knows the sequences of dbuffer."""
    main, screen = _Screen(), _Screen()
    screen = main
    for sequence in _TOKENS.finditer(written):
        parameters, letter, character = sequence.groups()
        if (parameters, letter) == ("?1049", "h"):
            screen = _Screen()
        elif (parameters, letter) == ("?1049", "l"):
            screen = main
        elif letter is not None:
            screen.obey(letter, parameters)
        else:
            screen.write(character)
    return screen.text()


class _Screen:
    """Lines of characters, and a cursor; a line that is too long goes on in the next one."""

    def __init__(self) -> None:
        self._lines: list[list[str]] = [[]]
        self._row = self._column = 0

    def write(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._row += 1
        elif character.isprintable():
            if self._column == COLUMNS:
                self._row, self._column = self._row + 1, 0
            line = self._line()
            line.extend(" " * (self._column + 1 - len(line)))
            line[self._column] = character
            self._column += 1
        self._line()

    def obey(self, letter: str, parameters: str) -> None:
        match letter:
            case "H":
                self._row, self._column = max(0, len(self._lines) - ROWS), 0
            case "A":
                self._row -= int(parameters)
            case "K":
                del self._line()[0 if parameters == "2" else self._column :]
            case "J":
                del self._line()[self._column :]
                del self._lines[self._row + 1 :]
            case "m" | "h" | "l":
                pass
            case _:
                raise AssertionError(f"a sequence that ends with {letter!r}")

    def text(self) -> list[str]:
        lines = ["".join(line).rstrip() for line in self._lines]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def _line(self) -> list[str]:
        self._lines.extend([] for _ in range(self._row + 1 - len(self._lines)))
        return self._lines[self._row]


def _in_terminal(connection: Connection, name: str, arguments: list[str]) -> None:
    os.setsid()
    terminal = os.open(name, os.O_RDWR)  # a leader's first one, by which it is controlled
    for number in (0, 1, 2):
        os.dup2(terminal, number)
    os.environ["TERM"] = "xterm"
    for variable in ("COLUMNS", "LINES", "NO_COLOR"):
        os.environ.pop(variable, None)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.argv = ["dbuffer", *arguments]
    from dbuffer.__main__ import main

    main()
