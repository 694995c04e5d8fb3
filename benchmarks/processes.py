"""Child processes of the benchmark, and scratch folders for them."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

REPLY_TIMEOUT_S = 120.0

# The fork server imports torch once for all children.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["dbuffer"])


@contextmanager
def child(target: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Run ``target(connection, *arguments)`` in a process, terminated in the end."""
    here, there = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=target, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        process.terminate()
        process.join()
        here.close()


def reply(connection: Connection, timeout_s: float = REPLY_TIMEOUT_S) -> Any:
    """Wait for what the child sends next; an error if it died or hangs."""
    if not connection.poll(timeout_s):
        raise TimeoutError("a child process of the benchmark does not answer")
    return connection.recv()


def finish(connection: Connection) -> None:
    """Let a child that waits for it end by itself, and wait until it has."""
    connection.send("finish")
    connection.poll(REPLY_TIMEOUT_S)  # its end of the pipe closes with it


@contextmanager
def scratch_folder(directory: Path) -> Iterator[Path]:
    """Make a folder in ``directory``, deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="dbuffer-benchmark-", dir=directory) as folder:
        yield Path(folder)
