"""Directories that hold something other than a store: senders refuse them, readers name it."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import dbuffer
from dbuffer.errors import OptionError, StoreAccessError, WaitTimeoutError
from dbuffer.mirror.mirror import Mirror
from tests.support.children import call
from tests.support.soak import in_turn
from tests.support.stores import contents, small_disk

WEIGHTS = {"a": torch.ones(4)}


@pytest.fixture
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def send(directory: Path, **more: Any) -> None:
    with dbuffer.WeightSender(directory, **more) as sender:
        sender.send(WEIGHTS)


def send_sharded(directory: Path, **more: Any) -> None:
    with dbuffer.ShardedWeightSender(directory, **more) as sender:
        sender.send(WEIGHTS)


def mirror(directory: Path, **more: Any) -> None:
    remote = directory.with_name("remote")
    send(remote)
    with Mirror(remote, directory, poll_interval_s=0.05, **more).start() as copying:
        copying.wait_until_current(10)


SENDERS = [send, send_sharded, mirror]


def fill(directory: Path, *files: str) -> None:
    directory.mkdir(mode=0o700)
    for file in files:
        (directory / file).parent.mkdir(exist_ok=True)
        (directory / file).write_bytes(b"other")


@pytest.mark.usefixtures("group")
@in_turn(
    ("files", "there", "publish"),
    [
        pytest.param(["config.json", "model.safetensors"], "config.json, model.safetensors"),
        pytest.param(["a.memmap", "meta.json"], "a.memmap, meta.json, and no store"),
        pytest.param(["policy/CURRENT"], "policy, and no store"),
        pytest.param(["notes.txt", "data/x"], "data, notes.txt, and no store"),
        pytest.param([f"run-{n}/x" for n in range(5)], "run-0, run-1, run-2 and 2 more, and no "),
    ],
    SENDERS,
)
def test_no_sender_writes_beside_other_files(tmp_path, files, there, publish):
    directory = tmp_path / "runs"
    fill(directory, *files)
    before = contents(directory)
    with pytest.raises(OptionError, match=re.escape(f"{directory} holds {there}")) as error:
        publish(directory)
    assert f" such as {directory}/" in str(error.value)
    assert contents(directory) == before


@pytest.mark.parametrize("left", [(), ("A", "tmp"), ("receivers",), ("writer.json", "B")])
def test_what_is_left_of_a_store_is_one(tmp_path, left):
    """Whatever files come into it later."""
    store = tmp_path / "store"
    send(store)
    (store / "notes.txt").touch()
    send(store)
    for path in store.iterdir():
        if path.name not in left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (store / ".nfs0001").touch()
    (store / "lost+found").mkdir()
    send(store)


@pytest.mark.parametrize("command", ["status", "verify", "ls", "follow"])
def test_no_mode_is_to_be_changed_of_what_is_no_store(tmp_path, capsys, command):
    """As of /dev/shm, or of a project's directory, named by mistake."""
    fill(tmp_path / "runs", "policy/CURRENT")
    for mode in (0o777, 0o1777):
        (tmp_path / "runs").chmod(mode)
        code, _, err = call(capsys, command, tmp_path / "runs")
        assert code == 1
        assert f"there is no store at {tmp_path / 'runs'}" in err
        assert "chmod" not in err


@pytest.mark.parametrize("command", ["status", "ls"])
def test_an_empty_filesystem_is_no_store(tmp_path, capsys, command):
    (tmp_path / "lost+found").mkdir()
    code, _, err = call(capsys, command, tmp_path)
    assert code == 1
    assert f"there is no store at {tmp_path}" in err


def test_the_mode_of_a_mount_is_not_to_be_changed(tmp_path):
    with small_disk(tmp_path / "mount", 8 << 20) as mount:
        mount.chmod(0o770)
        with pytest.raises(StoreAccessError, match="name a directory below it"):
            send(mount)


def test_readers_say_what_is_there(tmp_path, caplog, capsys):
    directory = tmp_path / "model"
    fill(directory, "model.safetensors")
    with caplog.at_level(logging.WARNING), dbuffer.WeightReceiver(directory) as receiver:
        assert receiver.load_into({}) is None
        assert receiver.load_into({}) is None
        (record,) = [each for each in caplog.records if str(directory) in each.message]
        assert "which holds model.safetensors, and no store" in record.message
        with (
            pytest.raises(WaitTimeoutError, match="holds model"),
            receiver.open(timeout_s=0),
        ):
            pass
    for expected, *arguments in ((1, "ls"), (1, "verify"), (3, "follow", "--timeout-s", "0")):
        code, _, err = call(capsys, *arguments, directory)
        assert code == expected
        assert "which holds model.safetensors, and no store" in err


def test_a_reader_of_a_mistyped_path_says_so_once(tmp_path, caplog):
    path = tmp_path / "polic"
    with dbuffer.WeightReceiver(path) as receiver, dbuffer.WeightReceiver(path) as other:
        for _ in range(2):
            assert receiver.load_into({}) is None
            assert other.wait_for_version(timeout_s=0) is None
    assert caplog.messages == [f"waiting for a first version in {path}, which does not exist"]
