"""Process that imports modules, and then does nothing but fork programs that need them.

A fork goes on as an interpreter that was just started: with the environment, the descriptors, the
session and the parent that it would have. Only what it has imported already, and how long that
took, tell it from one. Before all else it forks a zygote of its own, from which the processes that
it spawns are forked: none is a fork of a process with engines, threads and locks.

Usage: zygote.py DESCRIPTOR (TESTS | VLLM), by `preforked.py`, which asks for forks.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import gc
import os
import pickle
import random
import runpy
import socket
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any, NoReturn

from tests.support import ROOT
from tests.support.engines import lean_vllm, preforked

TESTS = (
    "dbuffer.api",
    "dbuffer.mirror.mirror",
    "dbuffer.publish.sharded",
    "matplotlib.pyplot",
    "rich.console",
    "rich.table",
    "tensordict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "typer",
)
"""For processes of tests, without what pytest knows as plugins: it rewrites these itself."""

MAX_DESCRIPTORS = 64
HIGH_DESCRIPTOR = 500
"""Above the numbers that descriptors of a fork get."""

FROZEN = str(ROOT / "tests" / "support" / "frozen.py")

FORKED_WITH_CARE = "jemalloc_bg_thd"
"""Thread of pyarrow's allocator, which an older vLLM imports; jemalloc starts it anew in a fork."""


def serve(connection: socket.socket) -> None:
    """Fork for each message, until the other end is closed; forks never return."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(
            connection, preforked.MAX_MESSAGE_BYTES, MAX_DESCRIPTORS
        )
        if not message:
            os._exit(0)
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            become(connection, *pickle.loads(message), descriptors)
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def become(
    connection: socket.socket,
    arguments: list[str],
    env: dict[str, str],
    directory: str,
    numbers: list[int],
    parent: int,
    new_session: bool,
    descriptors: list[int],
) -> NoReturn:
    """Run a program, from here to the end of the process."""
    while os.getppid() != parent:
        if os.getppid() == 1:  # the parent has ended
            os._exit(1)
        time.sleep(0.001)
    connection = _renumber(descriptors, numbers, beside=connection)
    if new_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(directory)
    random.seed()
    if env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    for path in reversed(env.get("PYTHONPATH", "").split(os.pathsep)):
        if path and path not in sys.path:
            sys.path.insert(1, path)
    fork_zygote()
    connection.send(str(os.getpid()).encode())
    connection.close()
    if arguments[0] in ("-c", "-m"):  # a child of multiprocessing, or a server
        end_after(arguments)
    run(arguments)
    sys.exit()


def _renumber(
    descriptors: list[int], numbers: list[int], *, beside: socket.socket
) -> socket.socket:
    """Give descriptors these numbers, and close all others but the one of a socket."""
    high = [fcntl.fcntl(one, fcntl.F_DUPFD, HIGH_DESCRIPTOR) for one in descriptors]
    kept = fcntl.fcntl(beside.fileno(), fcntl.F_DUPFD, HIGH_DESCRIPTOR)
    beside.detach()
    for descriptor, number in zip(high, numbers, strict=True):
        os.dup2(descriptor, number)
    _close_all_but({*numbers, kept})
    return socket.socket(fileno=kept)


def _close_all_but(kept: set[int]) -> None:
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) not in kept:
            with contextlib.suppress(OSError):  # the one that the list was read by
                os.close(int(path.name))


def fork_zygote() -> None:
    """Fork the zygote of this process, which has imported modules and done nothing else."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        _close_all_but({0, 1, 2, theirs.fileno()})
        serve(theirs)
    theirs.close()
    preforked.use(ours)


def run(arguments: list[str]) -> None:
    """Run a program as Python's command line does."""
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = str(Path.cwd())
        runpy._run_module_as_main(sys.argv[0])
        return
    if arguments[0] == "-c":
        sys.argv, code = ["-c", *arguments[2:]], arguments[1]
        sys.path[0] = ""
    else:
        sys.argv, code = arguments, Path(arguments[0]).read_text()
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        main.__file__ = arguments[0]
    exec(compile(code, main.__dict__.get("__file__", "<string>"), "exec"), main.__dict__)


def end_after(arguments: list[str]) -> NoReturn:
    """Run a program, and end without taking apart what was imported, which takes 0.5 s."""
    status: Any = None
    try:
        run(arguments)
    except SystemExit as end:
        status = end.code
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else status is not None)


def main(descriptor: int, kind: str) -> None:
    """Import modules, and serve."""
    gc.disable()  # of what imports make, hardly anything is garbage; to look for it takes seconds
    if kind == "VLLM":
        lean_vllm.prepare()
    else:
        lean_vllm.import_all(TESTS)
    runpy.run_path(FROZEN)  # it is no module: forkservers that are forks import it again
    for package in ("tests", "tests.support", "tests.support.engines"):
        del sys.modules[package]  # pytest rewrites what it imports itself
    asker = socket.socket(fileno=descriptor)
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if len([name for name in threads if name != FORKED_WITH_CARE]) == 1:
        asker.send(preforked.READY)
        serve(asker)
    print(f"zygote: a module of {kind} starts a thread: no program is a fork", file=sys.stderr)
    asker.send(preforked.HAS_THREADS)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
