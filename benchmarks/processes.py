"""Child processes of the benchmark, and scratch folders for them."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

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


def reply(connection: Connection) -> int:
    """Wait for the child's next number; an error if it died or hangs."""
    if not connection.poll(REPLY_TIMEOUT_S):
        raise TimeoutError("a child process of the benchmark does not answer")
    number: int = connection.recv()
    return number


@contextmanager
def scratch_folder(directory: Path) -> Iterator[Path]:
    """Make a folder in ``directory``, deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="dbuffer-benchmark-", dir=directory) as folder:
        yield Path(folder)
