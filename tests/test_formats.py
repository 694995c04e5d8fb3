"""Stores that earlier formats left: read, verified, and published into.

``stores/format-1`` was written by the last commit that wrote format 1: versions 1 to 3 of two
tensors filled with the version, with checksums and ``{"step": 10 * version}``, and one receiver.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import dbuffer
from dbuffer.receive.stager import Stager
from dbuffer.store.buffer import DoubleBuffer

STORES = Path(__file__).parent / "stores"


def filled(value: float) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.full((4, 3), float(value)),
        "bias": torch.full((3,), value, dtype=torch.bfloat16),
    }


def are_filled(tensors: dict[str, torch.Tensor], value: float) -> bool:
    return all(bool((tensor == value).all()) for tensor in tensors.values())


@pytest.fixture(params=["local", "network"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DBUFFER_MOUNT", request.param)
    path = tmp_path / "store"
    shutil.copytree(STORES / "format-1", path)
    for found in (path, *path.rglob("*")):  # a checkout's modes are those of its user's umask
        found.chmod(0o700 if found.is_dir() else 0o600)
    return path


def test_a_store_of_format_1_is_read(store: Path) -> None:
    target = filled(0)
    with dbuffer.WeightReceiver(store, receiver_id="worker-0", verify=True) as receiver:
        assert receiver.load_into(target) == 3
        assert are_filled(target, 3)
        with receiver.open() as snapshot:
            assert snapshot.metadata == {"step": 30}
            assert snapshot.history is None
    assert [record.receiver for record in DoubleBuffer(store).receivers()] == ["worker-0"]


def test_a_reader_follows_from_format_1_to_the_next(store: Path) -> None:
    """The sender was upgraded and started again: no new run of versions began."""
    target = filled(0)
    with dbuffer.WeightReceiver(store, verify=True) as receiver:
        assert receiver.load_into(target) == 3
        with dbuffer.WeightSender(store, checksum=True) as sender:
            for version in (4, 5):
                assert sender.send(filled(version)).version == version
                assert receiver.load_into(target) == version
                assert are_filled(target, version)
                sender.wait_applied(version, receivers=[receiver.receiver_id], timeout_s=0)
        found = DoubleBuffer(store)
        pointer, writer = found.pointer(), found.writer()
        assert pointer is not None
        assert writer is not None
        assert pointer.history == writer.history == receiver.history == "c6dad3d40ccf170c"


def test_the_version_before_the_first_of_the_next_format_is_still_there(store: Path) -> None:
    """An engine goes back to it, where the load of that one fails."""
    with dbuffer.WeightSender(store, checksum=True) as sender:
        sender.send(filled(4))
        with dbuffer.WeightReceiver(store) as receiver, receiver.open(version=3) as snapshot:
            assert are_filled(dict(snapshot.tensors), 3)
        stager = Stager(dbuffer.WeightReceiver(store, receiver_id="rank"))
        try:
            assert are_filled(dict(stager.take(timeout_s=10).tensors), 4)
            stager.release()
            assert are_filled(dict(stager.take(3, history=None, timeout_s=10).tensors), 3)
        finally:
            stager.close()


def test_a_store_of_format_1_that_was_begun_anew_is_noticed_by_its_number(store: Path) -> None:
    with dbuffer.WeightReceiver(store) as receiver:
        assert receiver.load_into(filled(0)) == 3
        shutil.rmtree(store)
        with dbuffer.WeightSender(store) as sender:
            sender.send(filled(9), version=3)
            with pytest.raises(dbuffer.StoreReplacedError):
                receiver.load_into(filled(0))
