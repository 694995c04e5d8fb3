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
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import distributed

import dbuffer
from dbuffer.errors import OptionError, StoreAccessError, WaitTimeoutError
from dbuffer.mirror.mirror import Mirror
from tests.support.children import call
from tests.support.soak import in_turn
from tests.support.stores import contents, small_disk

WEIGHTS = {"a": torch.ones(4)}
OLD = {"a": torch.zeros(4), "nested": {"b": torch.zeros(2), "deeper": {"c": torch.zeros(1)}}}


def write_as_torchrl(directory: Path) -> None:
    """Write weights as TorchRL's ``VLLMDoubleBufferTransport.send_weights`` does."""
    TensorDict(OLD, batch_size=[]).memmap(directory, num_threads=1)
    directory.chmod(0o700)


@pytest.fixture
def torchrls(tmp_path: Path) -> Path:
    path = tmp_path / "policy"
    write_as_torchrl(path)
    return path


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


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("publish", SENDERS)
def test_no_sender_writes_beside_torchrls_weights(torchrls, publish):
    """Receivers of TorchRL's own scheme would go on serving the old ones."""
    before = contents(torchrls)
    with pytest.raises(OptionError, match="receivers of TorchRL's own scheme"):
        publish(torchrls)
    assert contents(torchrls) == before


def fill(directory: Path, *files: str) -> None:
    """Put files of something else into a directory."""
    directory.mkdir(mode=0o700)
    for file in files:
        (directory / file).parent.mkdir(exist_ok=True)
        (directory / file).write_bytes(b"other")


@pytest.mark.usefixtures("group")
@in_turn(
    ("files", "there", "publish"),
    [
        pytest.param(["model.safetensors"], "a checkpoint (model.safetensors)"),
        pytest.param(["pytorch_model-1.bin", "x"], "a checkpoint (pytorch_model-1.bin)"),
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
    assert ("checkpoint" in there) != (f" such as {directory}/" in str(error.value))
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


def test_the_mode_of_a_mount_is_not_to_be_changed(tmp_path):
    with small_disk(tmp_path / "mount", 8 << 20) as mount:
        mount.chmod(0o770)
        with pytest.raises(StoreAccessError, match="name a directory below it"):
            send(mount)


def test_readers_say_what_is_there(torchrls, caplog, capsys):
    with caplog.at_level(logging.WARNING), dbuffer.WeightReceiver(torchrls) as receiver:
        assert receiver.load_into({}) is None
        assert receiver.load_into({}) is None
        (record,) = [each for each in caplog.records if str(torchrls) in each.message]
        assert "holds weights of TorchRL's own double buffer" in record.message
        with (
            pytest.raises(WaitTimeoutError, match="TorchRL"),
            receiver.open(timeout_s=0),
        ):
            pass
    for expected, *arguments in ((1, "ls"), (1, "verify"), (3, "follow", "--timeout-s", "0")):
        code, _, err = call(capsys, *arguments, torchrls)
        assert code == expected
        assert "which holds weights of TorchRL's own" in err


def test_a_reader_of_a_mistyped_path_says_so_once(tmp_path, caplog):
    path = tmp_path / "polic"
    with dbuffer.WeightReceiver(path) as receiver, dbuffer.WeightReceiver(path) as other:
        for _ in range(2):
            assert receiver.load_into({}) is None
            assert other.wait_for_version(timeout_s=0) is None
    assert caplog.messages == [f"waiting for a first version in {path}, which does not exist"]


def test_the_command_line_refuses_as_wrong_usage(torchrls, tmp_path, capsys):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    project = tmp_path / "project"
    fill(project, "notes.txt", "data/x")
    project.chmod(0o777)
    before = contents(project)
    code, _, err = call(capsys, "publish", tmp_path / "model.safetensors", project)
    assert (code, contents(project)) == (2, before)
    assert "holds data, notes.txt, and no store" in err
    send(remote := tmp_path / "remote")
    for command in (
        ["publish", tmp_path / "model.safetensors", torchrls],
        ["mirror", remote, torchrls, "--count", "1"],
    ):
        code, _, err = call(capsys, *command)
        assert code == 2
        assert "holds weights of TorchRL's own" in err
