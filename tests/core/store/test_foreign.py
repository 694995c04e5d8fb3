"""Directories that hold something other than a store: senders refuse them, readers name it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import distributed, nn

import dbuffer
from dbuffer.errors import OptionError, WaitTimeoutError
from dbuffer.mirror.mirror import Mirror
from dbuffer.publish.resident import ResidentModel
from dbuffer.store.foreign import ASIDE_DIRECTORY, other_weights
from dbuffer.tools import cli

WEIGHTS = {"a": torch.ones(4)}
OLD = {"a": torch.zeros(4), "nested": {"b": torch.zeros(2), "deeper": {"c": torch.zeros(1)}}}


def write_as_torchrl(directory: Path) -> None:
    """Write weights as TorchRL's ``VLLMDoubleBufferTransport.send_weights`` does."""
    TensorDict(OLD, batch_size=[]).memmap(directory, num_threads=1)
    directory.chmod(0o700)


def files_in(directory: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
    }


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


def reside(directory: Path, **more: Any) -> None:
    module = nn.Module()
    module.a = nn.Parameter(WEIGHTS["a"].clone())
    before = module.a.data_ptr()
    try:
        with ResidentModel(module, directory, **more) as model:
            model.publish()
    except OptionError:
        assert module.a.data_ptr() == before, "a refused model is not touched"
        raise


def mirror(directory: Path, **more: Any) -> None:
    remote = directory.with_name("remote")
    send(remote)
    with Mirror(remote, directory, poll_interval_s=0.05, **more).start() as copying:
        copying.wait_until_current(10)


SENDERS = [send, send_sharded, reside, mirror]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("publish", SENDERS)
def test_no_sender_writes_beside_torchrls_weights(torchrls, publish):
    """Receivers of TorchRL's own scheme would go on serving the old ones."""
    before = files_in(torchrls)
    with pytest.raises(OptionError, match="move_torchrl_aside"):
        publish(torchrls)
    assert files_in(torchrls) == before
    publish(torchrls, move_torchrl_aside=True)
    with dbuffer.WeightReceiver(torchrls) as receiver, receiver.open(timeout_s=5) as snapshot:
        assert snapshot.tensors["a"].tolist() == [1.0] * 4
    with pytest.raises(FileNotFoundError):
        TensorDict.load_memmap(torchrls)
    assert files_in(torchrls / ASIDE_DIRECTORY / "1") == before


def test_weights_that_torchrl_writes_later_are_moved_beside_the_first(torchrls):
    send(torchrls, move_torchrl_aside=True)
    write_as_torchrl(torchrls)
    with pytest.raises(OptionError):
        send(torchrls)
    send(torchrls, move_torchrl_aside=True)
    for number in ("1", "2"):
        aside = TensorDict.load_memmap(torchrls / ASIDE_DIRECTORY / number)
        assert aside["nested", "b"].tolist() == [0.0, 0.0]
    assert other_weights(torchrls) is None


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("publish", SENDERS)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model-00001-of-00002.bin"])
def test_no_sender_writes_into_a_checkpoint(tmp_path, publish, name):
    directory = tmp_path / "checkpoint"
    directory.mkdir(mode=0o700)
    (directory / name).write_bytes(b"weights")
    for more in ({}, {"move_torchrl_aside": True}):
        with pytest.raises(OptionError, match=name):
            publish(directory, **more)
    assert files_in(directory) == {name: b"weights"}


def test_readers_say_what_is_there(torchrls, caplog, capsys):
    with caplog.at_level(logging.WARNING), dbuffer.WeightReceiver(torchrls) as receiver:
        assert receiver.load_into({}) is None
        assert receiver.load_into({}) is None
        (record,) = caplog.records
        assert "holds weights of TorchRL's own double buffer" in record.message
        with (
            pytest.raises(WaitTimeoutError, match="TorchRL"),
            receiver.open(timeout_s=0),
        ):
            pass
    for arguments in (["ls"], ["verify"], ["follow", "--timeout-s", "0"]):
        assert cli.run([*arguments, str(torchrls)]) == 3
        assert "which holds weights of TorchRL's own" in capsys.readouterr().err


def test_the_command_line_moves_them_aside(torchrls, tmp_path, capsys):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    publish = ["publish", str(tmp_path / "model.safetensors"), str(torchrls)]
    assert cli.run(publish) == 2
    assert "holds weights of TorchRL's own" in capsys.readouterr().err
    assert cli.run([*publish, "--move-torchrl-aside"]) == 0
    write_as_torchrl(tmp_path / "mirror")
    copy = ["mirror", str(torchrls), str(tmp_path / "mirror"), "--count", "1"]
    assert cli.run(copy) == 2
    assert cli.run([*copy, "--move-torchrl-aside"]) == 0
