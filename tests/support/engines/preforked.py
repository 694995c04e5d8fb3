"""Python programs as forks of processes that have imported vLLM.

An import of vLLM takes 8 s. The server of forks of a test's process (:mod:`tests.support.children`)
imports it once, see :mod:`lean_vllm`; a program begins by forking a server of forks off itself, so
that the engines and ranks that it spawns need not import it either. Both are forkservers of
Python's multiprocessing.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Sequence
from multiprocessing import context, forkserver, resource_tracker, spawn, util
from pathlib import Path
from typing import Any, NoReturn

CAN_FORK = not Path("/dev/nvidiactl").exists() and sys.version_info < (3, 12)
"""A process that uses a GPU cannot be forked; the servers of newer Pythons start otherwise."""

LEAN_VLLM = "tests.support.engines.lean_vllm"

_processes = multiprocessing.get_context("forkserver")


def is_fork() -> bool:
    """Whether this process is a fork, which can have more of them in a moment."""
    return multiprocessing.parent_process() is not None


def start(
    arguments: Sequence[str],
    *,
    env: dict[str, str],
    output: Path | None = None,
    new_session: bool = False,
    imports_anew: bool = False,
    python: Path | None = None,
) -> Process:
    """Run a program in another process.

    Args:
        arguments: Python's, such as a script's path and its own, or ``-m MODULE``.
        env: the environment.
        output: file of its standard output and error. Default: those of this process.
        new_session: whether it leads a session of its own.
        imports_anew: whether what it imports must see its environment, as prometheus_client looks
            for several processes then: it is no fork.
        python: another interpreter, which imports anew.
    """
    if output is not None:
        output.touch()
    if python or imports_anew or not CAN_FORK:
        with output.open("ab") if output else contextlib.nullcontext() as written:
            return subprocess.Popen(
                [python or sys.executable, *arguments],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=written,
                start_new_session=new_session,
            )
    if not is_fork():
        from tests.support import children

        children.preload(LEAN_VLLM)
        children.start_server()
    return Forked(_become, list(arguments), env, str(Path.cwd()), output, new_session)


class Forked:
    """Fork that runs a function, with the methods of ``subprocess.Popen``."""

    def __init__(self, *function_and_arguments: Any) -> None:
        function, *arguments = function_and_arguments
        self._process = _processes.Process(target=function, args=arguments)
        self._process.start()
        # Python would wait for it as this process ends.
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end, and return the exit status."""
        self._process.join(timeout_s)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = Forked | subprocess.Popen[bytes]


def _become(
    arguments: list[str],
    env: dict[str, str],
    directory: str,
    output: Path | None,
    new_session: bool,
) -> None:
    """Go on as an interpreter that was just started, and run a program to its end."""
    if new_session:
        os.setsid()
    if output is not None:
        for number in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    multiprocessing.current_process().name = "MainProcess"
    os.environ.clear()
    os.environ.update(env)
    os.chdir(directory)
    lean = sys.modules.get(LEAN_VLLM)
    if lean is not None and lean.has_threads():  # an older vLLM, which no fork can use
        os.execve(sys.executable, [sys.executable, *arguments], env)
    if env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    for path in reversed(env.get("PYTHONPATH", "").split(os.pathsep)):
        if path and path not in sys.path:
            sys.path.insert(1, path)
    serve_forks()
    try:
        _run(arguments)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _run(arguments: list[str]) -> None:
    """Run a program as Python's command line does."""
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = str(Path.cwd())
        runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]
        return
    if arguments[0] == "-c":
        sys.argv, code = ["-c", *arguments[2:]], arguments[1]
        sys.path[0] = ""
    else:
        sys.argv, code = arguments, Path(arguments[0]).read_text()
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        main.__file__ = arguments[0]
    exec(compile(code, main.__dict__.get("__file__", "<string>"), "exec"), main.__dict__)


_spawn, _data, _prepare = util.spawnv_passfds, spawn.get_preparation_data, spawn.prepare


def serve_forks() -> None:
    """Let all processes that this one spawns be forks of it as it is now.

    No fork is one of a process with engines, threads and locks: each of them has a server, too.
    """
    context._concrete_contexts["spawn"] = context._concrete_contexts["forkserver"]
    spawn.get_preparation_data = lambda name: _data(name) | {"environment": dict(os.environ)}
    spawn.prepare = _prepare_fork
    # Before the replacement below, or the tracker would be a fork that serves.
    resource_tracker.ensure_running()  # type: ignore[attr-defined]
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    inherited = server._inherited_fds
    server.__init__()  # another lock: a fork inherits its parent's, which is held
    server._inherited_fds, server._preload_modules = inherited, []
    util.spawnv_passfds = _fork_server
    try:
        server.ensure_running()
    finally:
        util.spawnv_passfds = _spawn


def _fork_server(path: bytes, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
    """Replace :func:`util.spawnv_passfds` for a forkserver, which imports nothing."""
    pid = os.fork()
    if pid == 0:
        _serve(*descriptors)
    return pid


def _serve(listener: int, alive: int) -> NoReturn:
    kept = {0, 1, 2, listener, alive, resource_tracker.getfd()}  # type: ignore[attr-defined]
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) not in kept:
            with contextlib.suppress(OSError):  # the descriptor of this list
                os.close(int(path.name))
    try:
        forkserver.main(listener, alive, [])
    finally:
        os._exit(0)


def _prepare_fork(data: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(data.pop("environment"))
    serve_forks()
    _prepare(data)
