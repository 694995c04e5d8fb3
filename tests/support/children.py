"""Processes that end with their tests: functions, and the command line, as forks.

`call` runs the command line in the test's own process.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from dbuffer.testing import processes
from dbuffer.testing.waiting import TIMEOUT_S, until
from tests.support import ROOT

# Python 3.11 does not give that process our `sys.path`, and it skips what it cannot import.
_paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _paths))
_environment = dict(os.environ)
_PRELOADED = [
    *("dbuffer.engine.rank_receiver", "dbuffer.mirror.mirror", "dbuffer.publish.sender"),
    *("dbuffer.publish.sharded", "dbuffer.tools.doctor.peer", "hypothesis.stateful"),
    *("prometheus_client", "pytest", "tests.support.damage", "tests.support.light_engines"),
    "torch._dynamo",  # which torch imports when it first computes on tensors without memory
    *("httpx", "pydantic.dataclasses", "rich.console", "rich.table", "typer"),  # for commands
]


def preload(*modules: str) -> None:
    """Let children be forked off a process that has imported these, too, from now on."""
    more = [module for module in modules if module not in _PRELOADED]
    if more:
        _PRELOADED.extend(more)
        server: Any = forkserver._forkserver
        if server._forkserver_alive_fd is not None:
            os.close(server._forkserver_alive_fd)  # it ends with the last of its children
        server.__init__()
        _name_modules()


def _name_modules() -> None:
    processes.FORK_SERVER.set_forkserver_preload([*_PRELOADED, "tests.support.frozen"])


def start_server() -> None:
    """Start it with the first child, but not in the environment of a test that changes its own."""
    if forkserver._forkserver._forkserver_pid is None:
        _name_modules()  # whatever else named some meanwhile
        current = dict(os.environ)
        os.environ.update(_environment)
        try:
            forkserver.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(current)


def is_running(pid: int) -> bool:
    """Whether a process is there; an orphan stays as a zombie where nothing collects it."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return processes.state_of(pid) != "Z"
    return False


class Child(processes.Child):
    """A child that is forked off a process which has imported torch and more."""

    def __init__(self, *arguments: Any, **how: Any) -> None:
        start_server()
        super().__init__(*arguments, **how)


class Command(Child):
    """``dbuffer ARGUMENTS``, but for the start of an interpreter that imports torch: seconds.

    Its output goes to files in the directory. The command line itself is imported by the fork, as
    it looks at its output and its environment then. ``closed``: numbers of its standard streams
    that are closed when it begins.
    """

    def __init__(self, directory: Path, *arguments: object, closed: tuple[int, ...] = ()) -> None:
        number = len(list(directory.glob("command-*.out")))
        self._output = directory / f"command-{number}.out"
        self._errors = directory / f"command-{number}.err"
        for path in (self._output, self._errors):
            path.touch()
        given = [str(each) for each in arguments]
        super().__init__(_command, self._output, self._errors, given, closed)

    def output(self) -> str:
        """What it has printed so far."""
        return self._output.read_text()

    def errors(self) -> str:
        """What it has complained of so far."""
        return self._errors.read_text()

    def line(self, number: int) -> str:
        """Wait for a line of its output; the first is 0."""
        return self._wait_for_line(self._output, number)

    def line_of_errors(self, number: int) -> str:
        """Wait for a line of its complaints."""
        return self._wait_for_line(self._errors, number)

    def _wait_for_line(self, path: Path, number: int) -> str:
        def lines_up_to_it() -> list[str]:
            has_ended = self._process.exitcode is not None
            *lines, _ = path.read_text().split("\n")
            is_there = number < len(lines)
            assert is_there or not has_ended, f"it ended with {self.wait()}: {self.errors()}"
            return lines[: number + 1] if is_there else []

        line: str = until(f"line {number}", lines_up_to_it, TIMEOUT_S)[-1]
        return line

    def communicate(self, timeout_s: float = TIMEOUT_S) -> tuple[int, str, str]:
        """Wait for its end; the exit status, and all that it printed and complained of."""
        return self.wait(timeout_s), self.output(), self.errors()


def _command(
    connection: Connection,
    output: Path,
    errors: Path,
    arguments: list[str],
    closed: tuple[int, ...],
) -> None:
    for number, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    # As an interpreter opens them, whatever those of the process that this is a fork of are.
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    for number in closed:
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)
    sys.argv = ["dbuffer", *arguments]
    from dbuffer.__main__ import main

    main()


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run a command that needs no process of its own; its exit code, output and complaints."""
    from dbuffer.tools import cli  # looks at the environment

    code = cli.run([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def run_program(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program, and return its exit status and its output."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    done.stderr = without_leaks_of_triton(done.stderr)
    return done


def without_leaks_of_triton(errors: str) -> str:
    """Remove the report that Triton 3.9 (torch 2.15) makes of its own objects as Python ends."""
    return re.sub(r"nanobind: leaked .*?refleaks\.html\n?", "", errors, flags=re.DOTALL)
