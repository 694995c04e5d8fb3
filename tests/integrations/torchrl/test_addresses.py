"""Which of a scheme's two directories is read: what is in them decides, on real stores."""

from __future__ import annotations

import shutil
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import dbuffer
from dbuffer.integrations.torchrl.addresses import Addresses
from tests.support.children import Child


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """Two addresses; their parents are there, as ``/tmp`` is on every host."""
    for name in ("remote", "local"):
        (tmp_path / name).mkdir()
    return tmp_path / "remote" / "store", tmp_path / "local" / "store"


def publish(store: Path) -> None:
    with dbuffer.WeightSender(store) as sender:
        sender.send({"a": torch.ones(2)})


def mirror(remote: Path, local: Path) -> None:
    with dbuffer.Mirror(remote, local).start() as mirror:
        mirror.wait_until_current()


def mirror_until_told(connection: Connection, remote: Path, local: Path) -> None:
    with dbuffer.Mirror(remote, local).start() as mirror:
        mirror.wait_until_current()
        connection.send("current")
        connection.recv()


def nothing(remote: Path, local: Path) -> None:
    assert not remote.exists()
    assert not local.exists()


def empty(remote: Path, local: Path) -> None:
    remote.mkdir(mode=0o700)
    local.mkdir(mode=0o700)


def trainers_store(remote: Path, local: Path) -> None:
    publish(remote)


def trainers_store_under_the_other_name(remote: Path, local: Path) -> None:
    publish(local)


def both_names_of_one_store(remote: Path, local: Path) -> None:
    # Not by a link, which shows: as two mounts show it.
    publish(remote)
    shutil.copytree(remote, local)


def both_names_of_a_resumed_store(remote: Path, local: Path) -> None:
    both_names_of_one_store(remote, local)
    publish(remote)  # a next run, which one mount shows later than the other


def copy_that_another_run_went_on_with(remote: Path, local: Path) -> None:
    both_names_of_a_resumed_store(remote, local)
    publish(local)


def store_and_its_mirror(remote: Path, local: Path) -> None:
    publish(remote)
    mirror(remote, local)


def left_over_mirror(remote: Path, local: Path) -> None:
    store_and_its_mirror(remote, local)
    shutil.rmtree(remote)


def two_other_stores(remote: Path, local: Path) -> None:
    publish(remote)
    publish(local)


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (nothing, None),
        (empty, None),
        (trainers_store, "remote, mirrored"),
        (trainers_store_under_the_other_name, "local"),
        (both_names_of_one_store, "local"),
        (both_names_of_a_resumed_store, "local"),
        (copy_that_another_run_went_on_with, "remote, mirrored"),
        (store_and_its_mirror, "remote, mirrored"),
        (left_over_mirror, None),
        # The mirror refuses it, by name; nothing is read from either.
        (two_other_stores, "remote, mirrored"),
    ],
)
def test_what_is_there_decides(places, prepare, expected):
    remote, local = places
    prepare(remote, local)
    stores = {
        None: None,
        "local": (str(local), None),
        "remote, mirrored": (str(remote), str(local)),
    }
    assert Addresses(remote, local).find() == stores[expected]


def test_mirror_at_work_is_read_where_its_source_is_not_seen(places):
    remote, local = places
    elsewhere = remote.parent / "elsewhere"
    publish(elsewhere)
    with Child(mirror_until_told, elsewhere, local) as child:
        assert child.receive() == "current"
        assert Addresses(remote, local).find() == (str(local), None)
        child.send()
        assert child.wait() == 0
    assert Addresses(remote, local).find() is None


@pytest.mark.parametrize("is_link", [True, False])
def test_one_address_is_itself(places, is_link):
    remote, local = places
    if is_link:
        local.symlink_to(remote)
    addresses = Addresses(remote, local if is_link else remote)
    assert addresses.find() is None
    publish(remote)
    assert addresses.find() == (str(addresses.local), None)


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (nothing, ["not there", "not there"]),
        (empty, ["nothing is published", "nothing is published"]),
        (left_over_mirror, ["not there", "left behind"]),
    ],
)
def test_message_says_what_stands_where(places, prepare, said, caplog):
    remote, local = places
    prepare(remote, local)
    addresses = Addresses(remote, local)
    for _ in range(2):
        addresses.log_once_if_nothing_is_there()
    [line] = [message for message in caplog.messages if str(remote) in message]
    before, after = line.split(", and in ")
    assert str(remote) in before
    assert said[0] in before
    assert str(local) in after
    assert said[1] in after


def test_store_that_others_can_write_to_is_refused(places):
    remote, local = places
    publish(local)
    (local / "CURRENT").chmod(0o666)
    with pytest.raises(dbuffer.StoreAccessError):
        Addresses(remote, local).find()
    assert Addresses(remote, local, allow_shared_store=True).find() is not None
