"""Processes in a PID namespace of their own, as containers have it, below the same host name."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import Child

_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000
_MS_PRIVATE_REC = (1 << 18) | (1 << 14)
_PR_SET_PDEATHSIG = 1


class Boxed(Child):
    """``function(connection, *args)`` in a container; skips the test where the kernel refuses one.

    Its process id is ``pid`` in there: one that no process has out here, unless it is 1.
    """

    def __init__(self, function: Callable[..., None], *args: Any, pid: int | None = None) -> None:
        super().__init__(_enter, _free_pid() if pid is None else pid, function, *args)
        self.boxed_pid: int = 0

    def __enter__(self) -> Boxed:
        super().__enter__()
        first = self.receive()
        if isinstance(first, str):
            self.__exit__()
            pytest.skip(first)
        self.boxed_pid = first
        return self

    def kill(self) -> None:
        """Kill all that is in there, and wait until it is gone."""
        os.kill(self.boxed_pid, signal.SIGKILL)
        self.wait()


def _free_pid() -> int:
    pid = 20000
    while Path(f"/proc/{pid}").exists():
        pid += 1
    return pid


def _enter(connection: Connection, pid: int, function: Callable[..., None], *args: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWPID | _CLONE_NEWNS) != 0:
        connection.send(f"no PID namespaces here: {os.strerror(ctypes.get_errno())}")
        return
    is_named, name_it = os.pipe()
    first = os.fork()
    if first == 0:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.mount(b"none", b"/", None, _MS_PRIVATE_REC, None)
        libc.mount(b"proc", b"/proc", b"proc", 0, None)
        os.read(is_named, 1)  # what it sends comes after its number
        if pid != 1:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
            if (inner := os.fork()) != 0:
                os.waitpid(inner, 0)
                os._exit(0)
        assert os.getpid() == pid
        function(connection, *args)
        os._exit(0)
    connection.send(first)
    os.write(name_it, b"1")
    os.waitpid(first, 0)
