"""Stores that cannot be written, vanish or come late, on odd paths."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import dbuffer
from tests.support.children import Child, run_program
from tests.support.patterns import SMALL, load, publish

# Stores that cannot be written, move, vanish or come late


@pytest.fixture
def read_only(damaged: Path) -> Iterator[Path]:
    """A store that this process cannot write to."""
    if os.geteuid() != 0:
        directories = [damaged, *(path for path in damaged.iterdir() if path.is_dir())]
        for path in directories:
            path.chmod(0o500)
        yield damaged
        for path in directories:
            path.chmod(0o700)
        return
    view = damaged.with_name("read-only")
    view.mkdir()
    for options in (["--bind", str(damaged)], ["-o", "remount,ro,bind"]):
        done = subprocess.run(["mount", *options, str(view)], capture_output=True, text=True)
        if done.returncode:
            subprocess.run(["umount", str(view)], capture_output=True)
            pytest.skip(f"root may not mount here: {done.stderr.strip()}")
    yield view
    # Lazily: what the test's log holds on to still has the store open.
    subprocess.run(["umount", "--lazy", str(view)], check=True)


def test_read_only_store_can_be_read_and_not_written(read_only, caplog):
    with dbuffer.WeightReceiver(read_only, verify=True) as receiver:
        target = SMALL.empty()
        assert receiver.load_into(target) == SMALL.version_of(target) == 3
        with receiver.open() as snapshot:
            assert SMALL.version_of(snapshot.tensors) == 3
        assert receiver.load_into(target) is None
    [line] = [r.getMessage() for r in caplog.records if "acknowledge" in r.getMessage()]
    assert str(read_only) in line
    with pytest.raises(dbuffer.StoreAccessError, match=str(read_only)):
        dbuffer.WeightSender(read_only)


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    """An overlay mount, as a container has, with a store of version 2 in its lower layer."""
    lower, upper, work, mount = (tmp_path / name for name in ("lower", "upper", "work", "mount"))
    for path in (lower, upper, work, mount):
        path.mkdir()
    with dbuffer.WeightSender(lower / "store") as sender:
        publish(sender, 1, 2)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    command = ["mount", "-t", "overlay", "-o", options, "overlay", str(mount)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting an overlay is not permitted here: {done.stderr.strip()}")
    yield mount / "store"
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.mark.parametrize("delta", [False, True])
def test_store_in_the_lower_layer_of_an_overlay(image, delta):
    """The overlay copies a file up when it is first opened for writing, under older mappings."""
    target = SMALL.empty()
    with dbuffer.WeightReceiver(image) as receiver:
        assert receiver.load_into(target) == 2
        with dbuffer.WeightSender(image, delta=delta) as sender:
            for version in range(3, 9):
                publish(sender, version)
                assert receiver.load_into(target) == SMALL.version_of(target) == version


def test_store_that_vanishes_under_its_users(store):
    with dbuffer.WeightSender(store) as sender, dbuffer.WeightReceiver(store) as receiver:
        publish(sender, 1)
        target = SMALL.empty()
        assert receiver.load_into(target) == 1
        held = contextlib.ExitStack()
        snapshot = held.enter_context(receiver.open())
        shutil.rmtree(store)
        for use in (
            lambda: publish(sender, 2),
            lambda: receiver.load_into(target),
            lambda: receiver.wait_for_version(1, timeout_s=5),
        ):
            with pytest.raises(dbuffer.StoreNotFoundError, match=str(store)):
                use()
            assert SMALL.version_of(snapshot.tensors) == SMALL.version_of(target) == 1
        with pytest.raises(dbuffer.VersionRegressedError, match=str(store)):
            held.close()
        assert not store.exists()


def test_store_that_vanishes_in_the_middle_of_a_publish(store):
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(SMALL.weights(2).items()):
            if index == 3:
                shutil.rmtree(store)
            yield pair

    with dbuffer.WeightSender(store) as sender:
        publish(sender, 1)
        with pytest.raises(dbuffer.StoreNotFoundError, match=str(store)):
            sender.send(stream())
    assert not store.exists()


@pytest.mark.parametrize(
    "name",
    [
        "with spaces",
        " around ",
        "Ünïcödé",
        "模型/权重",
        "🚀",
        "tab\tand\nline",
        "-rf",
        "a'b\"c\\d",
        "%s",
        "x" * 200,
        os.fsdecode(b"not \xff utf-8"),
    ],
)
def test_any_path_will_do(shm_path, name):
    store = shm_path / name
    with (
        dbuffer.WeightSender(store) as sender,
        dbuffer.WeightReceiver(store, poll_interval_s=0.05) as receiver,
    ):
        for version in (1, 2, 3):
            publish(sender, version)
            assert load(receiver) == version
        sender.wait_applied(3, timeout_s=1)
        with pytest.raises(dbuffer.StoreBusyError):
            dbuffer.WeightSender(store)


# What is no place for a store, and no memory, said as errors of ours


@pytest.fixture(params=["below a file", "on a loop of links"])
def no_place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "below a file":
        (tmp_path / "file").write_text("mine")
        return tmp_path / "file" / "store"
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path / "loop"


def test_no_place_for_a_store(no_place):
    makers = [
        lambda: dbuffer.WeightSender(no_place),
        lambda: dbuffer.WeightReceiver(no_place).wait_for_version(timeout_s=0),
        lambda: dbuffer.WeightReceiver(no_place).load_into({"a": torch.ones(1)}),
        lambda: dbuffer.Mirror(no_place, no_place.with_name("local")).wait_until_current(0),
    ]
    for make in makers:
        with pytest.raises(dbuffer.StoreAccessError, match=str(no_place)):
            make()
    with pytest.raises((dbuffer.StoreAccessError, dbuffer.WaitTimeoutError), match=str(no_place)):
        with dbuffer.Mirror(no_place.with_name("remote"), no_place) as mirror:
            mirror.start(0.1)


def test_a_lazy_module_has_nothing_to_publish_or_to_load_into(store):
    module = torch.nn.LazyLinear(4)
    with dbuffer.WeightSender(store) as sender, dbuffer.WeightReceiver(store) as receiver:
        with pytest.raises(dbuffer.InvalidWeightsError, match="'weight'"):
            sender.send(module)
        sender.send(torch.nn.Linear(3, 4))
        with pytest.raises(dbuffer.WeightsMismatchError, match="'weight'"):
            receiver.load_into(module)
        module(torch.ones(2, 3))
        assert receiver.load_into(module) == 1
        assert sender.send(module).version == 2


AT_EXIT = """
import faulthandler
faulthandler.dump_traceback_later(100, exit=True)  # it has hung once, after it had published
import atexit, sys, torch, dbuffer
weights = {str(n): torch.full((1000,), float(n)) for n in range(8)}

def last(sender, receiver):
    sender.send(weights)
    target = {name: torch.zeros(1000) for name in weights}
    receiver.load_into(target)
    assert all(torch.equal(weights[name], target[name]) for name in weights)
    print("published")

for store in sys.argv[1:]:
    sender = dbuffer.WeightSender(store, num_threads=2)
    receiver = dbuffer.WeightReceiver(store, num_threads=2)
    if store.endswith("warm"):
        sender.send(weights)
    atexit.register(last, sender, receiver)
"""


def test_a_last_publish_at_exit_needs_no_threads(shm_path):
    """By a sender that has published before, and by one that has started no thread yet."""
    warm, cold = shm_path / "warm", shm_path / "cold"
    done = run_program(AT_EXIT, warm, cold)
    assert (done.returncode, done.stdout) == (0, "published\n" * 2), done.stderr
    assert done.stderr.count("with fewer") >= 2
    for store, version in ((warm, 2), (cold, 1)):
        with dbuffer.WeightReceiver(store) as receiver:
            assert receiver.wait_for_version(timeout_s=0) == version


def load_with_little_memory(connection: Connection, store: Path) -> None:
    receiver = dbuffer.WeightReceiver(store, num_threads=1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
    try:
        receiver.load_into(lambda pairs: None)
    except dbuffer.StoreAccessError as error:
        connection.send(str(error))


def test_what_cannot_be_mapped_is_an_error_of_ours(store):
    with dbuffer.WeightSender(store) as sender:
        sender.send({"big": torch.zeros(256 << 20, dtype=torch.uint8)})
    with Child(load_with_little_memory, store) as child:
        assert "268" in child.receive()


def test_a_reader_sets_no_memory_aside(store):
    """The kernel's flag "nr": a mapping that is only read needs none."""
    with dbuffer.WeightSender(store) as sender, dbuffer.WeightReceiver(store) as receiver:
        sender.send(SMALL.weights(1))
        with receiver.open() as snapshot:
            mappings = Path("/proc/self/smaps").read_text().split(str(snapshot.path))[1:]
            flags = [re.search("VmFlags: (.*)", text) for text in mappings]
    assert any("nr" in found[1].split() for found in flags if found is not None)
