"""What the tests of the store share: weights that know themselves, and processes that end."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

import pytest
import torch

import dbuffer
from dbuffer.store import filesystem

SHARED_MEMORY = Path("/dev/shm")

TIMEOUT_S = 120.0
"""No child is waited for longer: a test that hangs must fail, and say where."""

_processes = multiprocessing.get_context("forkserver")
_preloaded: list[str] = []
# Python 3.11 does not give that process our `sys.path`, and it skips what it cannot import.
_paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _paths))


def preload(*modules: str) -> None:
    """Let children be forked off a process with one thread that has imported these, too.

    To be called as test files are imported: the process starts with the first child.
    """
    _preloaded.extend(name for name in modules if name not in _preloaded)
    _processes.set_forkserver_preload([*_preloaded, "frozen"])


@contextlib.contextmanager
def preloaded(*modules: str) -> Iterator[None]:
    """The same for a while, for large ones: each fork takes time for all that the process holds."""
    forkserver._forkserver._stop()
    _processes.set_forkserver_preload([*_preloaded, *modules, "frozen"])
    try:
        yield
    finally:
        forkserver._forkserver._stop()
        preload()


preload("dbuffer.mirror.mirror", "dbuffer.publish.resident", "dbuffer.publish.sharded", "pytest")
preload("httpx", "rich.logging", "rich.progress", "typer")  # for commands


class Pattern:
    """Tensors whose every element is a function of version, name and position.

    A tensor from another version, under another's name or from another place in the file has no
    element in common with the right one.
    """

    def __init__(self, num_tensors: int = 8, numel: int = 256) -> None:
        self.names = [f"layers.{index}.weight" for index in range(num_tensors)]
        position = torch.arange(numel, dtype=torch.int64)
        self._base = torch.stack([position + (index << 24) for index in range(num_tensors)])

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        """What is published as ``version`` (below 2**19)."""
        return dict(zip(self.names, self._base + (version << 44), strict=True))

    def empty(self) -> dict[str, torch.Tensor]:
        """A target to load into."""
        return dict(zip(self.names, torch.zeros_like(self._base), strict=True))

    def version_of(self, tensors: Mapping[str, torch.Tensor]) -> int | None:
        """The version that all of these are of; None if they are a mix."""
        if list(tensors) != self.names:
            return None
        version = int(tensors[self.names[0]][0]) >> 44
        right = torch.unbind(self._base + (version << 44))
        pairs = zip(self.names, right, strict=True)
        return version if all(torch.equal(tensors[name], value) for name, value in pairs) else None


class Sparse(Pattern):
    """A pattern of which each version changes one element in so many: what deltas are for.

    Each tensor tells all versions from one another still.
    """

    def __init__(self, num_tensors: int = 8, numel: int = 256, one_in: int = 16) -> None:
        super().__init__(num_tensors, numel)
        self.names = [f"sparse.{index}.weight" for index in range(num_tensors)]
        self._one_in = one_in
        self._position = torch.arange(numel, dtype=torch.int64)

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        changed_at = version - (version - self._position) % self._one_in
        return dict(zip(self.names, self._base + (changed_at.clamp(min=0) << 44), strict=True))

    def version_of(self, tensors: Mapping[str, torch.Tensor]) -> int | None:
        if list(tensors) != self.names:
            return None
        version = int(tensors[self.names[0]].max()) >> 44
        right = self.weights(version)
        return version if all(torch.equal(tensors[name], right[name]) for name in right) else None


SMALL = Pattern()
OTHER = Pattern(num_tensors=5, numel=700)
SPARSE = Sparse()


def publish(sender: dbuffer.WeightSender, *versions: int, pattern: Pattern = SMALL) -> None:
    """Send a pattern's weights as each of these versions."""
    for version in versions:
        sender.send(pattern.weights(version), version=version)


def receiver_records(store: Path) -> dict[str, dict[str, Any]]:
    """Read the records of a store's receivers as JSON, by id: of each id the one written last."""
    paths = (store / "receivers").glob("*.json")
    records = [json.loads(path.read_bytes()) for path in paths if path.name[0] != "."]
    return {one["receiver"]: one for one in sorted(records, key=lambda one: one["updated_at"])}


def until(what: str, is_so: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Wait until it is so; what it is then."""
    deadline = time.monotonic() + timeout_s
    while not (found := is_so()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)
    return found


def received(store: Path) -> dict[str, torch.Tensor]:
    """The tensors of the newest version, in memory of their own."""
    with dbuffer.WeightReceiver(store) as receiver, receiver.open(timeout_s=5) as snapshot:
        return {name: tensor.clone() for name, tensor in snapshot.tensors.items()}


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes: two NaNs may be the same, and 0.0 is not -0.0."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of any bits at all, NaNs included."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (num_bytes,), dtype=torch.uint8)
    return data.view(dtype).view(shape)


def is_running(pid: int) -> bool:
    """Whether a process is there; an orphan stays as a zombie where nothing collects it."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return _state_of(pid) != "Z"
    return False


def error_of(function: Callable[[], object]) -> str | None:
    """What it raises, if anything."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def free_port() -> int:
    """One that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[Path]:
    """A filesystem of its own; skips the test where none may be mounted."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "dbuffer-test", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.strip()}")
    yield path
    # Lazily: a traceback of what the test has caught may still hold a file open.
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path, leave_bytes: int = 0) -> Path:
    """Leave that much room and no more; the file to remove to make room again."""
    path = disk / "filler"
    stats = os.statvfs(disk)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, stats.f_bavail * stats.f_frsize - leave_bytes)
    return path


def newest(store: Path, *patterns: Pattern, verify: bool = False) -> int | None:
    """The version that a receiver made now reads; it must be whole, and one of the patterns."""
    with dbuffer.WeightReceiver(store, receiver_id="newest", verify=verify) as receiver:
        loaded: dict[str, torch.Tensor] = {}

        def load(pairs: Any) -> None:
            loaded.update((name, tensor.clone()) for name, tensor in pairs)

        version = receiver.load_into(load)
    if version is not None:
        pattern = next(p for p in (*patterns, SMALL, OTHER, SPARSE) if p.names == list(loaded))
        assert pattern.version_of(loaded) == version
    return version


def weights_files(store: Path) -> dict[str, list[str]]:
    """The weights files in each buffer."""
    return {
        buffer: sorted(path.name for path in (store / buffer).glob("weights-*"))
        for buffer in ("A", "B")
    }


def version_files(store: Path) -> set[Path]:
    """All weights files, and all deltas."""
    return {*store.glob("[AB]/weights-*"), *store.glob("deltas/*")}


def named_files(store: Path) -> set[Path]:
    """Those that the manifests name."""
    double = dbuffer.store.buffer.DoubleBuffer(store)
    named = set()
    for buffer in ("A", "B"):
        if (manifest := double.undamaged_manifest(buffer)) is not None:
            named.add(store / (manifest.anchor_buffer or buffer) / manifest.file)
            named |= {store / "deltas" / f"{identity}.delta" for identity in manifest.chain[1:]}
    return named


def assert_tidy(store: Path) -> None:
    """Nothing lies in the store but what it needs."""
    assert version_files(store) <= named_files(store), "left over"
    assert not list(store.rglob("*.tmp"))


def make_temporaries_old(store: Path) -> None:
    """Let what a dead process left look as if it had died a while ago."""
    for path in store.rglob("*.tmp"):
        os.utime(path, (time.time() - 3600,) * 2)


def without_flock() -> None:
    """Let this process's locks succeed always and hold nobody back."""
    filesystem.try_lock = lambda descriptor, *, exclusive: True
    filesystem.lock_within = lambda descriptor, timeout_s: True
    filesystem.unlock = lambda descriptor: None


class Child:
    """A process that runs ``function(connection, *args)`` and never outlives its block."""

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        self._connection, theirs = _processes.Pipe()
        self._process = _processes.Process(
            target=_run, args=(function, theirs, args, dict(os.environ))
        )
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        self._process.join(TIMEOUT_S)
        self._process.close()
        self._connection.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def receive(self, timeout_s: float = TIMEOUT_S) -> Any:
        """What the child sends next."""
        assert self._connection.poll(timeout_s), f"the child sent nothing for {timeout_s} s"
        try:
            return self._connection.recv()
        except EOFError:
            raise AssertionError(f"the child ended with {self.wait()}") from None

    def has_sent(self) -> bool:
        """Wait until the child sends something, or ends; whether it sends something."""
        assert self._connection.poll(TIMEOUT_S), "the child neither sends anything nor ends"
        with socket.socket(fileno=os.dup(self._connection.fileno())) as connection:
            try:
                return connection.recv(1, socket.MSG_PEEK) != b""
            except ConnectionResetError:  # it ended before it read what it was sent
                return False

    def send(self, value: Any = None) -> None:
        self._connection.send(value)

    def signal(self, number: int) -> None:
        if self._process.exitcode is None:
            # Whoever forks children has seen the end of one a moment before telling us of it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for its end; the exit status, negative for a signal."""
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, f"the child still runs after {timeout_s} s"
        return self._process.exitcode

    def wait_until_stopped(self) -> None:
        """Wait until a SIGSTOP has taken effect."""
        deadline = time.monotonic() + TIMEOUT_S
        while _state_of(self.pid) != "T":
            assert self._process.exitcode is None, "the child ended"
            assert time.monotonic() < deadline, "the child did not stop"
            time.sleep(0.001)


class Command(Child):
    """``dbuffer ARGUMENTS``, but for the start of an interpreter that imports torch: seconds.

    Its output goes to files in the directory. The command line itself is imported by the fork, as
    it looks at its output and its environment then.
    """

    def __init__(self, directory: Path, *arguments: object) -> None:
        number = len(list(directory.glob("command-*.out")))
        self._output = directory / f"command-{number}.out"
        self._errors = directory / f"command-{number}.err"
        for path in (self._output, self._errors):
            path.touch()
        super().__init__(_command, self._output, self._errors, [str(each) for each in arguments])

    def output(self) -> str:
        """What it has printed so far."""
        return self._output.read_text()

    def errors(self) -> str:
        """What it has complained of so far."""
        return self._errors.read_text()

    def line(self, number: int) -> str:
        """Wait for a line of its output; the first is 0."""
        return self._wait_for_line(self._output, number)

    def line_of_errors(self, number: int) -> str:
        """Wait for a line of its complaints."""
        return self._wait_for_line(self._errors, number)

    def _wait_for_line(self, path: Path, number: int) -> str:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            has_ended = self._process.exitcode is not None
            *lines, _ = path.read_text().split("\n")
            if number < len(lines):
                return lines[number]
            assert not has_ended, f"it ended with {self.wait()}: {self.errors()}"
            assert time.monotonic() < deadline, f"no such line within {TIMEOUT_S} s"
            time.sleep(0.005)

    def communicate(self, timeout_s: float = TIMEOUT_S) -> tuple[int, str, str]:
        """Wait for its end; the exit status, and all that it printed and complained of."""
        return self.wait(timeout_s), self.output(), self.errors()


def _command(connection: Connection, output: Path, errors: Path, arguments: list[str]) -> None:
    for number, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    # As an interpreter opens them, whatever those of the process that this is a fork of are.
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.argv = ["dbuffer", *arguments]
    from dbuffer.__main__ import main

    main()


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _run(
    function: Callable[..., None],
    connection: Connection,
    args: tuple[Any, ...],
    environment: dict[str, str],
) -> None:
    # As a fork of the test's own process would have it: the server may be older than a change.
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)  # so that the child can fork, and does not fight for two cores
    try:
        function(connection, *args)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        raise


class Step(NamedTuple):
    """A moment in the life of a sender, as Python's profiler sees it."""

    event: str
    """``call`` and ``return`` of a Python function, ``c_call`` and ``c_return`` of others."""
    function: str
    """Qualified name, without the module."""
    file: str = ""
    """Name of the file that the function works on: its local variable ``path``."""
    nth: int = 1


def at_step(step: Step, action: Callable[[], None]) -> None:
    """Call ``action`` in this thread when it comes to ``step``."""
    left = step.nth

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        if event != step.event:
            return
        name = argument.__name__ if event.startswith("c_") else frame.f_code.co_qualname
        if name != step.function:
            return
        if step.file and getattr(frame.f_locals.get("path"), "name", None) != step.file:
            return
        left -= 1
        if left == 0:
            sys.setprofile(None)
            action()

    sys.setprofile(watch)


def die() -> None:
    """End this process as if the machine had turned on it: no handler runs."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Freeze this process until someone lets it go on."""
    os.kill(os.getpid(), signal.SIGSTOP)


CHANGING_CALLS = frozenset(
    {"flock", "fsync", "link", "mkdir", "open", "posix_fallocate", "pwrite", "replace", "unlink"}
)
"""Calls of the system that can change what is on the disk, or who holds it."""
MOMENTS = CHANGING_CALLS | {"setprofile", "xxh3_64_intdigest"}
"""The same, and moments between them: a tensor is in its place and hashed, or the watch is
ended by ``sys.setprofile(None)``."""


COPIES = MOMENTS | {"_foreach_copy_", "allgather", "copy_", "preadv"}
"""The same, before each copy of tensors, too, and before what one rank tells the others."""
LOOKS = frozenset(
    {"close", "flock", "fstat", "link", "open", "pread", "preadv", "read", "replace", "unlink"}
)
"""Calls by which a reader sees what is on the disk, or says what it reads."""


def at_call(
    number: int, action: Callable[[], None], names: frozenset[str] | None = MOMENTS
) -> None:
    """Call ``action`` in this thread before its ``number``-th call of one of these (None: of any).

    No function that publishes has to be named for this: each state that the disk goes through lies
    before one of the calls.
    """
    left = number

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        # Python handles no signal between the last line of a `with` block and the lock's release.
        if event != "c_call" or argument.__name__ == "__exit__":
            return
        # Opens to read; just for speed.
        changes_nothing = names is not LOOKS and frame.f_code.co_name == "open_regular"
        if names is None or (argument.__name__ in names and not changes_nothing):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                action()

    sys.setprofile(watch)


Record = Callable[[str, int], None]
"""pytest's ``record_property``: a figure that is added up over all tests, and told at the end."""


def is_soak() -> bool:
    """Whether to try everything, and not what every change has to pass (``dev.py soak``)."""
    return "DBUFFER_SOAK" in os.environ


IN_SOAKS_ALONE = [
    pytest.mark.soak,
    pytest.mark.skipif(not is_soak(), reason="in a soak alone"),
]
"""Of what takes long, and shows what others show in another way."""


def in_soaks_alone(test: Callable[..., None]) -> Callable[..., None]:
    """Mark one test so."""
    for mark in IN_SOAKS_ALONE:
        test = mark(test)
    return test


def moments() -> frozenset[str] | None:
    """Where to stop whom: before calls of the system, or in a soak before every call of C."""
    return None if is_soak() else MOMENTS


def numbers(first: int = 1, every: int = 3) -> Iterator[int]:
    """Of the calls to stop before: each in a soak, and else every third, say, which is quicker."""
    return itertools.count(first, 1 if is_soak() else every)


def patience_s() -> float:
    """For how long to wait for a child that goes through all of them."""
    return 3600.0 if is_soak() else 2 * TIMEOUT_S


def die_before_call(number: int) -> None:
    """Kill this process before its ``number``-th call that can change what is on the disk."""
    at_call(number, die, CHANGING_CALLS)
