#!/usr/bin/env python3
"""Run the commands of docs/tutorial.md, and write their output into it.

    .venv/bin/python docs/make_tutorial.py

Needs vLLM and TRL, and takes three minutes. `python -m benchmarks.board` does the same beside a
Prometheus, and draws the dashboard. A test runs `follow` and compares.
"""

import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

HERE = Path(__file__).parent
PAGE = HERE / "tutorial.md"
COLUMNS, ROWS = 200, 24
"""Wide enough that no line is folded, also in a test's directory, whose name is long."""
HOST = "vm"
"""Name of the machine in the page."""
_TIMEOUT_S = 300.0
"""For each command; servers start in 20 s on an idle machine."""
_BLOCK = re.compile(r"^```bash\n(.*?)^```\n(\n```text\n.*?^```\n)?", re.DOTALL | re.MULTILINE)
"""Commands, and their output."""
_COMMAND = re.compile(r"(?:.*\\\n)*.+")
_VARIES = re.compile(r"\d+(?:\.\d+)+(?:e[+-]\d+)?|\d{1,3}(?:,\d{3})+|\b\d{3,}\b|[0-9a-f]{16}")


class Shell:
    """Bash whose commands write to a terminal, as a reader's do; for a `with` block."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._terminal, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (ROWS, COLUMNS))
        commands, self._input = os.pipe()
        self._bash = subprocess.Popen(
            ["/bin/bash", "--noprofile", "--norc"],
            stdin=commands,
            stdout=theirs,
            stderr=theirs,
            cwd=HERE.parent,
            env=env,
            start_new_session=True,
        )
        os.close(commands)
        os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._bash.pid, signal.SIGKILL)
        self._bash.wait()
        os.close(self._input)
        os.close(self._terminal)

    def run(self, command: str) -> str:
        """Return a command's output; it must succeed."""
        os.write(self._input, f'{command}\necho "[ended with $?]"\n'.encode())
        written, deadline_s = b"", time.monotonic() + _TIMEOUT_S
        while (end := re.search(rb"\[ended with (\d+)\]\r\n$", written)) is None:
            if not select.select([self._terminal], [], [], deadline_s - time.monotonic())[0]:
                raise TimeoutError(f"{command!r} is still running: {written.decode()}")
            written += os.read(self._terminal, 1 << 16)
        output = written[: end.start()].decode().replace("\r\n", "\n")
        if int(end[1]):
            raise RuntimeError(f"{command!r} ended with {int(end[1])}: {output}")
        return output


def follow(page: str, replaced: Mapping[str, str], show: Callable[[str], object]) -> str:
    """Run a page's commands from top to bottom; return it with their output.

    `replaced` are parts of the page that have others in this run, such as ports.
    """
    names = {new: old for old, new in replaced.items()}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    more = {"PATH": path, "TERM": "dumb", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    with Shell(os.environ | more) as shell:

        def rerun(block: re.Match[str]) -> str:
            if is_marked(page, block.start()):
                return block[0]
            output = ""
            for command in _COMMAND.findall(block[1]):
                show(command)
                lines = shell.run(swap(command, replaced)).splitlines()
                output += "".join(f"{line.rstrip()}\n" for line in lines)
            output = re.sub(rf"\b{re.escape(socket.gethostname())}\b", HOST, swap(output, names))
            shown = f"\n```text\n{output}```\n" if output else ""
            return f"```bash\n{block[1]}```\n{shown}"

        return _BLOCK.sub(rerun, page)


def swap(text: str, pairs: Mapping[str, str]) -> str:
    """Replace parts of a text by others."""
    for old, new in pairs.items():
        text = text.replace(old, new)
    return text


def is_marked(page: str, start: int) -> bool:
    """Whether the block that begins there says that it is not run."""
    return page[:start].endswith("-->\n")


def steady(page: str) -> list[str]:
    """Return the page's lines without what differs from run to run."""
    page = re.sub(r"[ ─━]+", " ", _VARIES.sub("N", page))
    return [line.strip() for line in page.splitlines()]


if __name__ == "__main__":
    shutil.rmtree("/dev/shm/tutorial", ignore_errors=True)  # noqa: S108
    made = follow(PAGE.read_text(encoding="utf-8"), {}, print)
    PAGE.write_text(made, encoding="utf-8")
