"""Python programs as forks of a process that has imported what they need.

vLLM takes each of them 8 s else. The processes of a run of tests are forks, too: of a process that
has imported torch and more, which test files import, and which takes 4 s.

Run as a program, this file is such a process. It does nothing but import, and fork when asked. What
is forked off goes on as an interpreter would that was just started: it has the environment, the
descriptors, the session and the parent that it would have; and so have the processes that it
spawns, which are forks too, of a helper that it forks before all else. So none is a fork of a
process with engines, threads and locks. What they import, and how long that takes, is all that a
test cannot tell from such forks. Three things of vLLM are changed, which cost processor time alone:
its ranks sleep between messages (`let_readers_sleep`), they find their kernels replaced
(`replace_kernels`), and outside of soaks torch compiles nothing. A fourth makes engines the same on
all processors (`hide_amx`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import importlib
import importlib.metadata
import multiprocessing.util
import os
import pickle
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

TESTS = (
    "dbuffer.api",
    "dbuffer.mirror.mirror",
    "dbuffer.publish.resident",
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

VLLM = (
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "dbuffer.integrations.vllm.backend",
    "dbuffer.integrations.vllm.extension",
    "dbuffer.integrations.vllm.rank",
)
"""And its plugins. An older vLLM may lack some."""

QUEUES = "vllm.distributed.device_communicators.shm_broadcast"
SPIN_S = 0.01

KERNELS = "register_triton_kernel_overrides"

REGISTRY = "vllm.model_executor.models.registry"

MAX_MESSAGE_BYTES = 1 << 17
MAX_DESCRIPTORS = 64
HIGH_DESCRIPTOR = 500
"""Above those that anybody asks for."""

START_TIMEOUT_S = 120.0
"""Until the first helper has imported all, on a busy machine."""

FROZEN = str(Path(__file__).parents[1] / "frozen.py")

FORKED_WITH_CARE = "jemalloc_bg_thd"
"""Thread of pyarrow's allocator, which an older vLLM imports; jemalloc starts it anew in a fork."""

READY, HAS_THREADS = b"ready", b"has threads"

PR_SET_CHILD_SUBREAPER = 36

READ_AS_IMPORTED = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

CAN_FORK = not Path("/dev/nvidiactl").exists()
"""What has met a GPU cannot be forked."""


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
    with Path(os.devnull).open("rb") as nothing, _turns:
        if not imports_anew and CAN_FORK and (helper := _helper_with_vllm()) is not None:
            at = {0: nothing.fileno(), 1: output.fileno(), 2: (errors or output).fileno()}
            return Forked(helper.fork(arguments, env, at, new_session=new_session))
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=env,
        stdout=output,
        stderr=errors or output,
        start_new_session=new_session,
    )


class Forked:
    """What ``subprocess.Popen`` is to a child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Its exit status, if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end; the exit status, negative for a signal."""
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


class Helper:
    """Asks a process that has imported all, and does nothing else, for a fork."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(START_TIMEOUT_S)

    def fork(
        self,
        arguments: Sequence[str],
        env: dict[str, str],
        at: dict[int, int],
        *,
        new_session: bool = False,
    ) -> int:
        """The process id of a new child of this process, with these descriptors at these places."""
        asked = (list(arguments), env, str(Path.cwd()), list(at), os.getpid(), new_session)
        # The helper forks twice, and who is between them ends: to the new process this one is then
        # the nearest ancestor that takes orphans. Nobody else may become an orphan meanwhile.
        _take_orphans(yes=True)
        try:
            socket.send_fds(self._connection, [pickle.dumps(asked)], list(at.values()))
            return int(self._connection.recv(MAX_MESSAGE_BYTES))
        finally:
            _take_orphans(yes=False)


_the_helper: Helper | None = None
"""Helper of a fork, which was born with it: it has imported what the fork had."""
_with_vllm: Helper | None = None
_can_be_forked = True
_turns = threading.Lock()
"""Who asks: several threads start programs."""


def _start_helper(kind: str) -> Helper | None:
    """Start a process that imports the modules of a kind; None: these start threads."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arguments, env = [__file__, str(theirs.fileno()), kind], os.environ | READ_AS_IMPORTED
    with theirs:
        process: Process
        if _the_helper is None:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=env,
            )
        else:
            at = {place: place for place in (0, 1, 2, theirs.fileno())}
            process = Forked(_the_helper.fork(arguments, env, at, new_session=True))
    atexit.register(_end, ours, process)
    helper = Helper(ours)
    answer = ours.recv(MAX_MESSAGE_BYTES)
    assert answer in (READY, HAS_THREADS), "the helper has ended; above is why"
    return helper if answer == READY else None


def _helper_with_vllm() -> Helper | None:
    """This process's: started here, unless this process was born with one.

    None: what it imports, of an older vLLM, starts a thread, so that it cannot be forked.
    """
    global _with_vllm, _can_be_forked
    if _with_vllm is None and _can_be_forked:
        _with_vllm = _start_helper("VLLM")
        _can_be_forked = _with_vllm is not None
    return _with_vllm


def fork_workers() -> None:
    """Let the processes that pytest-xdist starts be forks."""
    from execnet import gateway_base, gateway_io

    if not CAN_FORK or (helper := _start_helper("TESTS")) is None:
        return

    class ForkedWorker(gateway_io.Popen2IOMaster):
        def __init__(self, args: list[str], execmodel: gateway_base.ExecModel) -> None:
            (stdin, to_it), (from_it, stdout) = os.pipe(), os.pipe()
            at = {0: stdin, 1: stdout, 2: 2}
            self.popen = Forked(helper.fork(args[args.index("-c") :], dict(os.environ), at))
            for ours in (stdin, stdout):
                os.close(ours)
            pipes = os.fdopen(to_it, "wb", 0), os.fdopen(from_it, "rb")
            gateway_base.Popen2IO.__init__(self, *pipes, execmodel)

    gateway_io.Popen2IOMaster = ForkedWorker


def is_fork() -> bool:
    """Whether this process is a fork of a helper, and can have more of them in a moment."""
    return _the_helper is not None


_spawn_anew = multiprocessing.util.spawnv_passfds


def spawn_fork(
    get_helper: Callable[[], Helper | None],
    path: bytes,
    arguments: Sequence[Any],
    passed: Sequence[int],
) -> int:
    """Start a process in the place of :func:`multiprocessing.util.spawnv_passfds`.

    Processes of the kind "spawn" and forkservers are forks; trackers of resources are not.
    """
    words = [os.fsdecode(word) for word in arguments]
    is_child = "--multiprocessing-fork" in words or "multiprocessing.forkserver" in words[-1]
    if not is_child or not CAN_FORK or (helper := get_helper()) is None:
        return int(_spawn_anew(path, arguments, passed))
    at = {place: place for place in (0, 1, 2, *passed)}
    with _turns:
        return helper.fork(words[words.index("-c") :], dict(os.environ), at)


@contextlib.contextmanager
def preloaded(*modules: str) -> Iterator[None]:
    """Let children be forked off a fork of the helper with vLLM for a while: it has transformers.

    ``modules``: what it is to import besides; see `children.preloaded`.
    """
    from tests.support import children

    before = multiprocessing.util.spawnv_passfds
    multiprocessing.util.spawnv_passfds = functools.partial(spawn_fork, _helper_with_vllm)
    try:
        with children.preloaded(*modules):
            yield
    finally:
        multiprocessing.util.spawnv_passfds = before


def _end(connection: socket.socket, process: Process) -> None:
    """The helper that cannot be asked any more ends."""
    connection.close()
    process.wait()


def _take_orphans(*, yes: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


# In the helper.


def serve(connection: socket.socket) -> None:
    """Fork whenever asked to, until nobody can ask; what is forked returns from here never."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
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
    places: list[int],
    parent: int,
    new_session: bool,
    descriptors: list[int],
) -> NoReturn:
    """Be the program that is asked for, from here to the end of the process."""
    while os.getppid() != parent:
        if os.getppid() == 1:  # it has ended
            os._exit(1)
        time.sleep(0.001)
    connection = _put(descriptors, places, beside=connection)
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
    have_a_helper()
    connection.send(str(os.getpid()).encode())
    connection.close()
    if arguments[0] in ("-c", "-m"):  # a child of multiprocessing, or a server
        end_after(arguments)
    run(arguments)
    sys.exit()


def _put(descriptors: list[int], places: list[int], *, beside: socket.socket) -> socket.socket:
    """Have these descriptors, each at its place, and no others but the one of a socket."""
    high = [fcntl.fcntl(one, fcntl.F_DUPFD, HIGH_DESCRIPTOR) for one in descriptors]
    kept = fcntl.fcntl(beside.fileno(), fcntl.F_DUPFD, HIGH_DESCRIPTOR)
    beside.detach()
    for descriptor, place in zip(high, places, strict=True):
        os.dup2(descriptor, place)
    _close_all_but({*places, kept})
    return socket.socket(fileno=kept)


def _close_all_but(kept: set[int]) -> None:
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) not in kept:
            with contextlib.suppress(OSError):  # the one that the list was read by
                os.close(int(path.name))


def have_a_helper() -> None:
    """Fork the helper of this process, as long as it has imported and done nothing else."""
    global _the_helper, _with_vllm
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        nothing = os.open(os.devnull, os.O_RDWR)
        for place in (0, 1, 2):
            os.dup2(nothing, place)
        _close_all_but({0, 1, 2, theirs.fileno()})
        serve(theirs)
    theirs.close()
    _the_helper = Helper(ours)
    if "vllm" in sys.modules:
        _with_vllm = _the_helper
    multiprocessing.util.spawnv_passfds = functools.partial(spawn_fork, lambda: _the_helper)
    if (registry := sys.modules.get(REGISTRY)) is not None:
        registry.subprocess = types.SimpleNamespace(run=_run_registry)  # type: ignore[attr-defined]


def _run_registry(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run vLLM's registry of models as a program, by which vLLM learns what a model's class can do.

    It is asked once for each class, unless the user's cache has the answer.
    """
    assert _the_helper is not None
    with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as output:
        question.write(options["input"])
        question.seek(0)
        at = {0: question.fileno(), 1: output.fileno(), 2: output.fileno()}
        with _turns:
            child = Forked(_the_helper.fork(command[1:], dict(os.environ), at))
        status = child.wait()
        output.seek(0)
        return subprocess.CompletedProcess(command, status, b"", output.read())


def run(arguments: list[str]) -> None:
    """As Python's command line does."""
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


def import_all(names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):  # whoever needs it will see it
            importlib.import_module(name)


def let_readers_sleep() -> None:
    """Let vLLM's ranks spin for 10 ms after each message, not for a second.

    On few processors they would take the time of the rank that they wait for. Before a reader's
    first message it spins as ever: until then it may miss what would wake it.
    """
    if (queues := sys.modules.get(QUEUES)) is None:
        return

    def record_read(self: Any) -> None:
        self.last_read = time.monotonic() - self.busy_loop_s + SPIN_S

    queues.SpinCondition.record_read = record_read  # type: ignore[attr-defined]


def replace_kernels() -> None:
    """Let vLLM replace its Triton kernels now, not for each engine.

    A CPU has other kernels. To replace one, vLLM looks at all names of all modules: 0.25 s.
    """
    platform = getattr(sys.modules.get("vllm.platforms"), "current_platform", None)
    if (replace := getattr(platform, KERNELS, None)) is not None:  # older ones replace none
        replace()
        setattr(type(platform), KERNELS, classmethod(lambda cls: None))


def hide_amx() -> None:
    """Let vLLM see a processor without AMX.

    With AMX it packs small layers of bfloat16 whatever `set_packing` asks for, its int8 layers take
    no float32, and 0.28 dies of an illegal instruction.
    """
    if (cpu := sys.modules.get("torch.cpu")) is not None:
        cpu._is_amx_tile_supported = lambda: False  # type: ignore[attr-defined]


def prepare_vllm() -> None:
    """Import vLLM and its plugins, and change what the top of this file says."""
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    import_all([*VLLM, *(plugin.module for plugin in plugins)])
    if "DBUFFER_SOAK" not in os.environ:
        # Each engine with two ranks compiles how it looks up embeddings, for seconds.
        importlib.import_module("torch._dynamo.config").disable = True  # type: ignore[attr-defined]
    let_readers_sleep()
    replace_kernels()
    hide_amx()


if __name__ == "__main__":
    # Programs that import this have the helper that they were born with, not one more.
    sys.modules["tests.support.engines.preforked"] = sys.modules["__main__"]
    sys.path.insert(1, str(Path(__file__).parents[3]))
    number, kind = sys.argv[1:]
    if kind == "VLLM":
        prepare_vllm()
    else:
        import_all(TESTS)
    runpy.run_path(FROZEN)
    asked = socket.socket(fileno=int(number))
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if len([name for name in threads if name != FORKED_WITH_CARE]) == 1:
        asked.send(READY)
        serve(asked)
    print(f"preforked: what {kind} names starts a thread: no program is a fork", file=sys.stderr)
    asked.send(HAS_THREADS)
