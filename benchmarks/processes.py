"""Child processes, scratch folders, emulated mounts, and a count of the bytes that were read."""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from dbuffer.store import filesystem
from dbuffer.store.filesystem import MOUNT_VARIABLE

REPLY_TIMEOUT_S = 120.0

# The fork server imports torch once for all children.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["dbuffer"])


@contextmanager
def child(target: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Run ``target(connection, *arguments)`` in a process. The end of ``with`` terminates it."""
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
    """Return the next object that the child sends. Raise an error if the child died or hangs."""
    if not connection.poll(timeout_s):
        raise TimeoutError("a child process of the benchmark does not answer")
    return connection.recv()


def finish(connection: Connection) -> None:
    """Tell a waiting child to finish, and wait until it has closed its end of the pipe."""
    connection.send("finish")
    connection.poll(REPLY_TIMEOUT_S)


@contextmanager
def scratch_folder(directory: Path) -> Iterator[Path]:
    """Make a folder in ``directory``. The end of ``with`` deletes it."""
    with tempfile.TemporaryDirectory(prefix="dbuffer-benchmark-", dir=directory) as folder:
        yield Path(folder)


def as_network() -> AbstractContextManager[object]:
    """Let stores behave as on a network mount during a ``with`` block."""
    return mock.patch.dict("os.environ", {MOUNT_VARIABLE: "network"})


@contextmanager
def slow_link(bytes_per_s: float) -> Iterator[None]:
    """Slow all reads and writes of stores down to a common link of ``bytes_per_s``."""
    lock, free_at = threading.Lock(), 0.0

    def on_link(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: int, offset: int, data: Any) -> Any:
            nonlocal free_at
            result = function(descriptor, offset, data)
            num_bytes = data if isinstance(data, int) else memoryview(data).nbytes
            with lock:
                free_at = max(free_at, time.monotonic()) + num_bytes / bytes_per_s
                delay_s = free_at - time.monotonic()
            time.sleep(max(0.0, delay_s))
            return result

        return call

    with ExitStack() as stack:
        for name in ("read_at", "read_into", "write_at"):
            slow = on_link(getattr(filesystem, name))
            stack.enter_context(mock.patch.object(filesystem, name, slow))
        yield


def bytes_read() -> int:
    """Return the bytes that this process has read with read calls, so not through mappings."""
    first_line = Path("/proc/self/io").read_text().splitlines()[0]
    return int(first_line.removeprefix("rchar: "))
