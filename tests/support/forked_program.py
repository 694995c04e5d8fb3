"""The other process of `dbuffer doctor` as a fork, for tests that examine many places.

An examination starts up to three interpreters. Its program, pipes and end stay what they are.
"""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from dbuffer.tools.doctor import process
from tests.support import children


class ForkedProgram:
    """What ``subprocess.Popen`` is to the doctor's ``OtherProcess``."""

    def __init__(self, command: list[str], **_: Any) -> None:
        assert command[:4] == [sys.executable, "-P", "-c", process._PROGRAM]
        read_tasks, write_tasks = children._processes.Pipe(duplex=False)
        read_answers, write_answers = children._processes.Pipe(duplex=False)
        self._child = children.Child(_serve, read_tasks, write_answers)
        self.stdin = _file(write_tasks, "wb", buffering=0)
        self.stdout = _file(read_answers, "rb", buffering=0)
        for connection in (read_tasks, write_tasks, read_answers, write_answers):
            connection.close()

    def poll(self) -> int:
        return self._child.wait()

    def kill(self) -> None:
        self._child.__exit__()

    def wait(self) -> None:
        """It is part of the kill."""


def _serve(_: Connection, tasks: Connection, answers: Connection) -> None:
    sys.stdin, sys.stdout = _file(tasks, "r"), _file(answers, "w")
    process.answer_tasks()


def _file(connection: Connection, mode: str, **options: Any) -> Any:
    return os.fdopen(os.dup(connection.fileno()), mode, **options)


def fork_programs(patch: pytest.MonkeyPatch) -> None:
    """Let the other processes of examinations be forks."""
    forking = SimpleNamespace(Popen=ForkedProgram, PIPE=subprocess.PIPE)
    patch.setattr(process, "subprocess", forking)
