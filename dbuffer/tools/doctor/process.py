"""`OtherProcess`: the second process of a probe, on the same host.

It is spawned, not forked: the caller may be a trainer with threads and a GPU. It reads one task a
line from its standard input, and answers with a line of JSON.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from dbuffer.errors import StoreAccessError
from dbuffer.runtime.timing import TIMING
from dbuffer.store import filesystem

_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from dbuffer.tools.doctor.process import answer_tasks
answer_tasks()
"""


class OtherProcess:
    """Process that runs tasks, and ends with its ``with`` block."""

    def __init__(self) -> None:
        package = Path(__file__).parents[2]
        # -P: Python must not import a json.py of the user's directory.
        command = [sys.executable, "-P", "-c", _PROGRAM, str(package.parent)]
        self._process = subprocess.Popen(  # noqa: S603  # our own program
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C goes to the owner, which ends this process
        )
        self._tasks = cast("BinaryIO", self._process.stdin)
        self._answers = cast("BinaryIO", self._process.stdout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Kill the process, as a crash would."""
        self._process.kill()
        self._process.wait()
        self._tasks.close()
        self._answers.close()

    def ask(self, task: str, *arguments: Any) -> Any:
        """Run a task and return its result.

        Raises:
            StoreAccessError: the task failed, or the process did not answer.
        """
        self.begin(task, *arguments)
        return self.answer()

    def begin(self, task: str, *arguments: Any) -> None:
        """Start a task; see :meth:`is_done` and :meth:`answer`."""
        self._tasks.write(json.dumps([task, *arguments]).encode() + b"\n")

    def is_done(self, timeout_s: float = 0.0) -> bool:
        """Whether the started task has ended, or ends within ``timeout_s``."""
        return bool(select.select([self._answers], [], [], timeout_s)[0])

    def answer(self) -> Any:
        """Return the result of the started task."""
        line = self._answers.readline() if self.is_done(TIMING.doctor_answer_s) else b""
        if not line:
            raise StoreAccessError(
                f"the probe's other process ({sys.executable}) did not answer: exit status "
                f"{self._process.poll()}"
            )
        reply = json.loads(line)
        if "error" in reply:
            raise StoreAccessError(f"in another process: {reply['error']}")
        return reply["value"]


def answer_tasks() -> None:
    """Run the tasks on standard input, in the other process."""
    for line in sys.stdin:
        task, *arguments = json.loads(line)
        try:
            reply = {"value": _TASKS[task](*arguments)}
        except OSError as error:
            reply = {"error": str(error)}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def _lock(path: str) -> bool:
    """Lock a file exclusively, until this process ends."""
    return filesystem.try_lock(os.open(path, os.O_RDWR), exclusive=True)


def _watch(path: str, duration_s: float) -> dict[str, int]:
    """Read a file repeatedly while it is replaced; all of its bytes should be the same."""
    reads = mixed = missing = 0
    end = time.monotonic() + duration_s
    while time.monotonic() < end:
        reads += 1
        try:
            data = filesystem.read_small(Path(path), mmap.PAGESIZE, owner_only=False)
            mixed += not data or data != data[:1] * len(data)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            missing += 1
    return {"reads": reads, "mixed": mixed, "missing": missing}


def _see(path: str, num_bytes: int) -> dict[str, str]:
    """Return the first bytes of a file, by a read and by a mapping."""
    with (
        Path(path).open("rb") as file,
        mmap.mmap(file.fileno(), num_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapped,
    ):
        return {"read": file.read(num_bytes).hex(), "mapped": bytes(mapped[:num_bytes]).hex()}


def _write_mapped(path: str, data: str) -> None:
    written = bytes.fromhex(data)
    with Path(path).open("r+b") as file, mmap.mmap(file.fileno(), len(written)) as mapped:
        mapped[:] = written


_TASKS: dict[str, Callable[..., Any]] = {
    "lock": _lock,
    "watch": _watch,
    "see": _see,
    "write_mapped": _write_mapped,
}
