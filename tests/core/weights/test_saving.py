"""Versions saved as checkpoints: whole or not at all, and read by others as by us."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dbuffer
from tests.support.children import Child
from tests.support.patterns import assert_same
from tests.support.stores import small_disk

WEIGHTS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "b.weight": torch.randn(4, 5).bfloat16(),
    "c.scale": torch.tensor(2.0),
    "d.codes": torch.arange(7, dtype=torch.uint8),
    "e.empty": torch.ones(0, 3),
    "f.small": torch.ones(8).to(torch.float8_e4m3fn),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for name in (
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ):
        (path / name).write_text("{}")
    (path / "runs").mkdir()
    return path


def contents(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("mount", ["local", "network"])
def test_a_version_is_saved_with_the_other_files_of_its_model(
    store, model, tmp_path, monkeypatch, mount
):
    monkeypatch.setenv("DBUFFER_MOUNT", mount)
    with dbuffer.WeightSender(store) as sender, dbuffer.WeightReceiver(store) as receiver:
        published = sender.send(WEIGHTS)
        path = tmp_path / "parent" / "saved"
        done: list[tuple[int, int]] = []
        saved = receiver.save_pretrained(
            path, model=model, on_bytes=lambda *args: done.append(args)
        )
        assert saved == published.id
        assert_same(contents(path), WEIGHTS)
        names = {file.name for file in path.iterdir()}
        assert names == {"config.json", "tokenizer.json", "model.safetensors"}
        num_bytes = sum(tensor.nbytes for tensor in WEIGHTS.values())
        assert done == [(num_bytes, num_bytes)]
        sender.send(path)  # which reads what was saved
        assert list(path.parent.iterdir()) == [path]
        with receiver.open(acknowledge=False) as snapshot:
            assert_same(dict(snapshot.tensors), WEIGHTS)
        assert not receiver.record.current.applied


def test_the_configuration_names_the_dtype_of_the_saved_tensors(store, model, tmp_path):
    """`from_pretrained` would round a version in float32 to a configuration's bfloat16."""
    config = {"dtype": "bfloat16", "hidden_size": 2, "text_config": {"torch_dtype": "bfloat16"}}
    config["audio_config"] = None
    (model / "config.json").write_text(json.dumps(config))
    with dbuffer.WeightSender(store) as sender, dbuffer.WeightReceiver(store) as receiver:
        for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float8_e4m3fn), 1):
            sender.send({"weight": torch.ones(2).to(dtype), "codes": torch.ones(2).int()})
            receiver.save_pretrained(tmp_path / str(number), model=model)
            saved = json.loads((tmp_path / str(number) / "config.json").read_text())
            name = "float32" if dtype is torch.float32 else "bfloat16"
            assert saved == config | {"dtype": name, "text_config": {"torch_dtype": name}}
        sender.send({"weight": torch.ones(2)})
        for text in ("{", "[]"):
            (model / "config.json").write_text(text)
            with pytest.raises(dbuffer.InvalidWeightsError, match="of the model is invalid"):
                receiver.save_pretrained(tmp_path / "4", model=model)
            assert not (tmp_path / "4").exists()


def test_large_versions_are_saved_in_files_of_a_size_with_an_index(store, tmp_path):
    weights = {f"layers.{number}": torch.full((100,), float(number)) for number in range(7)}
    with dbuffer.WeightSender(store) as sender, dbuffer.WeightReceiver(store) as receiver:
        sender.send(weights)
        receiver.save_pretrained(tmp_path / "saved", shard_bytes=1000)
        index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": 7 * 400}
        files = [index["weight_map"][name] for name in weights]
        assert files == sorted(
            f"model-0000{1 + number // 2}-of-00004.safetensors" for number in range(7)
        )
        for name, file in index["weight_map"].items():
            assert_same({name: load_file(tmp_path / "saved" / file)[name]}, {name: weights[name]})
        sender.send(tmp_path / "saved")


def test_an_earlier_version_is_saved_by_its_number_or_id(store, tmp_path):
    with dbuffer.WeightSender(store, keep=1) as sender, dbuffer.WeightReceiver(store) as receiver:
        for number in range(1, 4):
            sender.send({"a": torch.full((3,), float(number))})
        for number in range(1, 4):
            saved = receiver.save_pretrained(tmp_path / f"{number}", version=number)
            assert saved.number == number
            assert contents(tmp_path / f"{number}")["a"].tolist() == [number] * 3
        again = receiver.save_pretrained(tmp_path / "again", version=saved)
        assert again == saved


def test_what_is_there_is_not_touched(store, tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with dbuffer.WeightSender(store) as sender, dbuffer.WeightReceiver(store) as receiver:
        with pytest.raises(dbuffer.WaitTimeoutError):
            receiver.save_pretrained(taken)
        sender.send(WEIGHTS)
        receiver.save_pretrained(taken)  # it was empty
        before = sorted(file.stat().st_mtime_ns for file in taken.iterdir())
        for path in (taken, taken / "model.safetensors", tmp_path / "link"):
            with pytest.raises(dbuffer.OptionError, match="a new or an empty directory"):
                receiver.save_pretrained(path)
        with pytest.raises(dbuffer.VersionError):
            receiver.save_pretrained(
                tmp_path / "other", version=sender.send(WEIGHTS).id._replace(number=7)
            )
        with pytest.raises(dbuffer.InvalidWeightsError, match="nowhere is not a directory"):
            receiver.save_pretrained(tmp_path / "other", model=tmp_path / "nowhere")
        assert sorted(file.stat().st_mtime_ns for file in taken.iterdir()) == before
        assert {path.name for path in tmp_path.iterdir()} <= {"taken", "empty", "link", "store"}
        assert not (tmp_path / "other").exists()


def test_an_empty_disk_is_refused(store, tmp_path):
    with (
        small_disk(tmp_path / "disk", 1 << 20) as disk,
        dbuffer.WeightSender(store) as sender,
        dbuffer.WeightReceiver(store) as receiver,
    ):
        sender.send(WEIGHTS)
        with pytest.raises(dbuffer.OptionError, match="not a mount point"):
            receiver.save_pretrained(disk)


def test_a_dtype_that_safetensors_lacks_is_refused(store, tmp_path):
    with dbuffer.WeightSender(store) as sender, dbuffer.WeightReceiver(store) as receiver:
        sender.send({"a": torch.ones(2, dtype=torch.complex128), "b": torch.ones(2)})
        with pytest.raises(dbuffer.UnsupportedError, match=r"no dtype torch.complex128.* hold a:"):
            receiver.save_pretrained(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()


def save(connection: Any, store: Path, path: Path) -> None:
    with dbuffer.WeightReceiver(store) as receiver:
        connection.send(None)
        receiver.save_pretrained(path, shard_bytes=1 << 20)
        connection.recv()


def test_a_killed_process_leaves_all_of_it_or_nothing(store, tmp_path):
    weights = {f"{number}": torch.randn(1 << 18) for number in range(32)}
    outcomes = set()
    with dbuffer.WeightSender(store) as sender:
        sender.send(weights)
        for number in range(12):
            path = tmp_path / f"saved {number}"
            with Child(save, store, path) as child:
                child.receive()
                time.sleep(random.Random(number).uniform(0, 0.1))
                child.kill()
            outcomes.add(path.exists())
            if path.exists():
                assert_same(contents(path), weights)
    assert False in outcomes
