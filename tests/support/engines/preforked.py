"""Python programs as forks of zygotes: processes that have imported what the programs need.

An import of vLLM takes 8 s, and of what test files import 4 s. `zygote.py` is such a process, and
says what a fork is. Here are its clients: tests, pytest-xdist, and the forks themselves, for the
processes that they spawn.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import multiprocessing.util
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from tests.support import ROOT

PROGRAM = str(Path(__file__).with_name("zygote.py"))

MAX_MESSAGE_BYTES = 1 << 17
READY, HAS_THREADS = b"ready", b"has threads"

START_TIMEOUT_S = 120.0
"""Until a zygote has imported all, on a busy machine."""

PR_SET_CHILD_SUBREAPER = 36

REGISTRY = "vllm.model_executor.models.registry"

READ_AS_IMPORTED = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

CAN_FORK = not Path("/dev/nvidiactl").exists()
"""A process that uses a GPU cannot be forked."""


def start(
    arguments: Sequence[str],
    *,
    env: dict[str, str],
    output: IO[bytes],
    errors: IO[bytes] | None = None,
    new_session: bool = False,
    imports_anew: bool = False,
) -> Process:
    """Run a program in a child of this process.

    Args:
        arguments: as those of Python: a script's path, or ``-m MODULE``, and more.
        env: the environment.
        output: what it writes to.
        errors: where its standard error goes; None: to the output, too.
        new_session: whether it leads a session of its own.
        imports_anew: whether what it imports must see its environment, as prometheus_client looks
            for several processes then: it is no fork.
    """
    errors = errors or output
    zygote = _zygote_with_vllm() if CAN_FORK and not imports_anew else None
    if zygote is not None:
        with Path(os.devnull).open("rb") as nothing:
            at = {0: nothing.fileno(), 1: output.fileno(), 2: errors.fileno()}
            return Forked(zygote.fork(arguments, env, at, new_session=new_session))
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        start_new_session=new_session,
    )


class Forked:
    """Fork that is a child of this process, with the methods of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end, and return the exit status, negative for a signal."""
        if self.returncode is None:
            if not select.select([self._descriptor], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s or 0)
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
            os.close(self._descriptor)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = Forked | subprocess.Popen[bytes]


_turns = threading.RLock()
"""Held by a thread that asks for a fork, or starts a zygote."""


class Zygote:
    """Connection to a zygote."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(START_TIMEOUT_S)

    def fork(
        self,
        arguments: Sequence[str],
        env: dict[str, str],
        descriptors: dict[int, int],
        *,
        new_session: bool = False,
    ) -> int:
        """Let a fork run a program; return its process id.

        ``descriptors``: those of this process, by their numbers in the fork.
        """
        program = (list(arguments), env, str(Path.cwd()), [*descriptors], os.getpid(), new_session)
        with _turns:
            # The zygote forks twice, and the process in between ends. To the fork this process is
            # then the nearest ancestor that adopts orphans; it must adopt no others meanwhile.
            _adopt_orphans(yes=True)
            try:
                message = [pickle.dumps(program)]
                socket.send_fds(self._connection, message, [*descriptors.values()])
                return int(self._connection.recv(MAX_MESSAGE_BYTES))
            finally:
                _adopt_orphans(yes=False)

    def forget(self) -> None:
        """Leave the descriptor alone: in a fork, its number is another one's by now."""
        self._connection.detach()

    def close(self, process: Process) -> None:
        """End the zygote, which is this process."""
        self._connection.close()
        process.wait()


def _adopt_orphans(*, yes: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


_own: Zygote | None = None
"""Zygote that has imported what this process had when it was forked."""
_with_vllm: Zygote | None = None
_has_tried_vllm = False


def use(connection: socket.socket) -> None:
    """Fork all processes that this one will spawn from the zygote that was forked with it."""
    global _own, _with_vllm
    if _own is not None:
        _own.forget()
    _own = Zygote(connection)
    if "vllm" in sys.modules:
        _with_vllm = _own
    multiprocessing.util.spawnv_passfds = functools.partial(_spawn, lambda: _own)
    if (registry := sys.modules.get(REGISTRY)) is not None:
        registry.subprocess = types.SimpleNamespace(run=_run_registry)  # type: ignore[attr-defined]


def is_fork() -> bool:
    """Whether this process is a fork of a zygote, and can have more of them in a moment."""
    return _own is not None


def _start_zygote(kind: str) -> Zygote | None:
    """Start a zygote that imports modules of a kind; None if these start threads."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arguments = [PROGRAM, str(theirs.fileno()), kind]
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    env = os.environ | READ_AS_IMPORTED | {"PYTHONPATH": os.pathsep.join(paths)}
    process: Process
    with theirs:
        if _own is None:
            command, passed = [sys.executable, *arguments], [theirs.fileno()]
            process = subprocess.Popen(command, pass_fds=passed, start_new_session=True, env=env)
        else:
            at = {number: number for number in (0, 1, 2, theirs.fileno())}
            process = Forked(_own.fork(arguments, env, at, new_session=True))
    zygote = Zygote(ours)
    atexit.register(zygote.close, process)
    answer = ours.recv(MAX_MESSAGE_BYTES)
    assert answer in (READY, HAS_THREADS), "the zygote has ended; above is why"
    return zygote if answer == READY else None


def _zygote_with_vllm() -> Zygote | None:
    """Return the zygote that has imported vLLM, or None: an older vLLM starts a thread then."""
    global _with_vllm, _has_tried_vllm
    with _turns:
        if _with_vllm is None and not _has_tried_vllm:
            _has_tried_vllm = True
            _with_vllm = _start_zygote("VLLM")
    return _with_vllm


def fork_workers() -> None:
    """Let the processes that pytest-xdist starts be forks."""
    from execnet import gateway_base, gateway_io

    if not CAN_FORK or (zygote := _start_zygote("TESTS")) is None:
        return

    class ForkedWorker(gateway_io.Popen2IOMaster):
        def __init__(self, args: list[str], execmodel: gateway_base.ExecModel) -> None:
            (stdin, to_it), (from_it, stdout) = os.pipe(), os.pipe()
            at = {0: stdin, 1: stdout, 2: 2}
            self.popen = Forked(zygote.fork(args[args.index("-c") :], dict(os.environ), at))
            for ours in (stdin, stdout):
                os.close(ours)
            pipes = os.fdopen(to_it, "wb", 0), os.fdopen(from_it, "rb")
            gateway_base.Popen2IO.__init__(self, *pipes, execmodel)

    gateway_io.Popen2IOMaster = ForkedWorker


_spawn_anew = multiprocessing.util.spawnv_passfds


def _spawn(
    get_zygote: Callable[[], Zygote | None],
    path: bytes,
    arguments: Sequence[Any],
    passed: Sequence[int],
) -> int:
    """Replace :func:`multiprocessing.util.spawnv_passfds`.

    Processes of the kind "spawn" and forkservers are forks; trackers of resources are not.
    """
    words = [os.fsdecode(word) for word in arguments]
    is_child = "--multiprocessing-fork" in words or "multiprocessing.forkserver" in words[-1]
    if not is_child or not CAN_FORK or (zygote := get_zygote()) is None:
        return int(_spawn_anew(path, arguments, passed))
    at = {number: number for number in (0, 1, 2, *passed)}
    try:
        return zygote.fork(words[words.index("-c") :], dict(os.environ), at)
    except BrokenPipeError:  # SGLang's engine kills all children of its process as it shuts down
        return int(_spawn_anew(path, arguments, passed))


@contextlib.contextmanager
def preloaded(*modules: str) -> Iterator[None]:
    """Let children be forked off a fork of the zygote with vLLM for a while: it has transformers.

    ``modules``: what it is to import besides; see `children.preloaded`.
    """
    from tests.support import children

    before = multiprocessing.util.spawnv_passfds
    multiprocessing.util.spawnv_passfds = functools.partial(_spawn, _zygote_with_vllm)
    try:
        with children.preloaded(*modules):
            yield
    finally:
        multiprocessing.util.spawnv_passfds = before


def _run_registry(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run vLLM's registry of models, a program that tells vLLM what a model's class can do.

    vLLM asks it once for each class, unless the user's cache has the answer.
    """
    assert _own is not None
    with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as output:
        question.write(options["input"])
        question.seek(0)
        at = {0: question.fileno(), 1: output.fileno(), 2: output.fileno()}
        status = Forked(_own.fork(command[1:], dict(os.environ), at)).wait()
        output.seek(0)
        return subprocess.CompletedProcess(command, status, b"", output.read())
