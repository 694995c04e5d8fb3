"""Deltas: what a sender publishes of them, and what readers with and without the last one see.

On both media: on a network mount a version stands on an earlier one's file, on a local mount beside
a whole one. The trainer's tensors are compared bit by bit, in each reader's hands.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import dbuffer
from dbuffer import SparsePatch
from dbuffer.format import chain
from dbuffer.format.layout import ITEM_BYTES
from dbuffer.format.manifest import Manifest
from dbuffer.publish import deltas, kept_copy
from dbuffer.publish.draft import Draft
from dbuffer.receive import reader as reader_module
from dbuffer.receive.reader import verify_store
from dbuffer.store import retention
from dbuffer.store.buffer import DoubleBuffer, other_buffer
from dbuffer.store.writer import BufferWriter
from dbuffer.testing.waiting import TIMEOUT_S
from dbuffer.tools.status import read_status
from tests.support.children import Child
from tests.support.damage import flip_bit
from tests.support.patterns import (
    OTHER,
    SPARSE,
    assert_same,
    newest,
    patches_between,
    received,
    rows_of,
)
from tests.support.soak import in_turn
from tests.support.stores import fill, named_files, small_disk, version_files

Tensors = dict[str, torch.Tensor]

READER_TIMEOUT_S = 0.2


@pytest.fixture(params=["local", "network", "GPU"])
def mount(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Type of all mounts. "GPU": a local mount, with weights on a GPU, for which the CPU stands."""
    kind = "local" if request.param == "GPU" else str(request.param)
    monkeypatch.setenv("DBUFFER_MOUNT", kind)
    if request.param == "GPU":
        cpu = torch.device("cpu")
        monkeypatch.setattr(deltas, "gpu_of", lambda tensors: cpu if tensors else None)
        monkeypatch.setattr(kept_copy, "find_changes", None)  # it reads main memory alone
        monkeypatch.setattr(kept_copy, "_PENDING_BYTES", 1000)
    return kind


@pytest.fixture
def short_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "MAX_CHAIN", 3)


def make_sender(store: Path, **options: bool) -> dbuffer.WeightSender:
    return dbuffer.WeightSender(
        store,
        **{"delta": True, "checksum": True, **options},
        reader_timeout_s=READER_TIMEOUT_S,
        num_threads=1,
    )


@pytest.fixture
def sender(store: Path) -> Iterator[dbuffer.WeightSender]:
    with make_sender(store) as sender:
        yield sender


def publish(sender: dbuffer.WeightSender, *versions: int) -> list[int | None]:
    return [
        sender.send(SPARSE.weights(version), version=version).delta_bytes for version in versions
    ]


def newest_buffer(store: Path) -> str:
    return DoubleBuffer(store).pointer().buffer


def manifest_of(store: Path) -> Manifest:
    return DoubleBuffer(store).manifest(newest_buffer(store))


def reader_of(store: Path, name: str = "reader", **options: bool) -> dbuffer.WeightReceiver:
    return dbuffer.WeightReceiver(store, receiver_id=name, num_threads=1, **options)


@pytest.fixture
def reader(store: Path) -> Iterator[dbuffer.WeightReceiver]:
    with reader_of(store, verify=True) as reader:
        yield reader


def opened(receiver: dbuffer.WeightReceiver) -> int:
    """The version that it opens, which must be whole."""
    with receiver.open(timeout_s=5) as snapshot:
        assert SPARSE.version_of(dict(snapshot.tensors)) == snapshot.version
        return snapshot.version


def assert_all_read(store: Path, follower: dbuffer.WeightReceiver, weights: Tensors) -> None:
    with reader_of(store, "late", verify=True) as late:
        for receiver in (follower, late):
            with receiver.open() as snapshot:
                ties = {name: snapshot.tensors[tied] for name, tied in snapshot.aliases.items()}
                assert_same({**snapshot.tensors, **ties}, weights)


def flip_in(store: Path, buffer: str, tensor: int) -> None:
    [path] = (store / buffer).glob("weights-*")
    flip_bit(path, 8 * (tensor * 2048) + 100)


# Readers that follow, come late, skip


def read_with_few_descriptors(connection: Connection, store: Path) -> None:
    """Read the newest version with a dozen files open at most."""
    limit = os.dup(0) + 12
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    with reader_of(store) as reader:
        connection.send(opened(reader))


def test_a_chain_may_have_more_deltas_than_descriptors(store, network, monkeypatch, sender):
    monkeypatch.setattr(chain, "MAX_CHAIN_SHARE", 100)
    publish(sender, *range(1, 41))
    assert len(manifest_of(store).chain) == 40
    with Child(read_with_few_descriptors, store) as child:
        assert child.receive() == 40


@pytest.mark.usefixtures("network", "short_chains")
@pytest.mark.timing(keep_superseded_s=0.0)
def test_a_reader_that_follows_reads_no_file_again(store, sender, monkeypatch):
    """Not after a block that raised, nor past an anchor: its chain still begins before it."""
    read_whole = mock.Mock(wraps=reader_module.read_whole)
    monkeypatch.setattr(reader_module, "read_whole", read_whole)
    with reader_of(store, "opens") as opens, reader_of(store, "loads") as loads:
        target, anchors = SPARSE.empty(), []
        publish(sender, 1, 2)
        with pytest.raises(KeyError), opens.open():
            raise KeyError
        assert loads.load_into(target) == 2
        for version in range(3, 14):
            publish(sender, version)
            if manifest_of(store).anchor is None:
                anchors.append(version)
            if version % 3:
                assert opened(opens) == loads.load_into(target) == version
                assert SPARSE.version_of(target) == version
    assert anchors == [5, 9, 13]
    assert [held.manifest.version for (held, *_), _ in read_whole.call_args_list] == [2, 2]


@pytest.mark.usefixtures("network", "short_chains")
def test_status_says_when_the_next_anchor_comes(store, sender):
    half = sum(tensor.nbytes for tensor in SPARSE.weights(1).values()) // 2
    left, room = [], half
    for version in range(1, 7):
        [delta_bytes] = publish(sender, version)
        buffers = read_status(DoubleBuffer(store))["buffers"]
        [newest] = [buffer for buffer in buffers if buffer["state"] == "newest"]
        left.append(newest["deltas_until_anchor"])
        room = half if left[-1] is None else room - delta_bytes
        assert newest["bytes_until_anchor"] == (None if left[-1] is None else room)
    assert left == [None, 2, 1, 0, None, 2]


def test_too_many_changes_or_another_layout_begin_a_new_chain(store, mount, sender, reader):
    assert publish(sender, 1, 2)[1] is not None
    assert opened(reader) == 2
    # Sixteen versions on, every element is another one.
    assert publish(sender, 18) == [None]
    assert manifest_of(store).chain == []
    assert opened(reader) == 18 == newest(store, verify=True)
    assert sender.send(OTHER.weights(19)).delta_bytes is None
    assert newest(store, verify=True) == 19
    with reader.open() as snapshot:
        assert OTHER.version_of(snapshot.tensors) == 19
    assert publish(sender, 20) == [None]
    assert publish(sender, 21)[0] is not None
    assert opened(reader) == 21 == newest(store, verify=True)


@pytest.mark.parametrize("delta", [True, False], ids=["a delta sender", "one without"])
def test_a_new_sender_begins_with_a_whole_version(store, mount, delta, caplog):
    """Receivers of the earlier sender's versions go on; a patch has nothing to follow yet."""
    caplog.set_level(logging.INFO, "dbuffer")
    with reader_of(store, verify=True) as reader:
        with make_sender(store) as first:
            publish(first, 1, 2, 3)
            assert opened(reader) == 3
        with make_sender(store, delta=delta) as second:
            if delta:
                with pytest.raises(dbuffer.VersionError, match="send all weights once"):
                    second.send_patches([])
            for version in (4, 5, 6):
                assert (publish(second, version) != [None]) == (delta and version > 4)
                assert opened(reader) == version == newest(store, verify=True)
    assert caplog.text.count("no delta: this sender has published no version yet") == 1 + delta


def test_a_third_of_a_model_of_two_dtypes_is_published_as_a_delta(store, mount, reader, sender):
    """Words of one byte are compared where the two dtypes are side by side."""
    weights = {
        "fp8": torch.zeros(1000).to(torch.float8_e4m3fn),
        "fp32": torch.arange(1000, dtype=torch.float32),
    }
    for version in range(3):
        delta_bytes = sender.send(weights).delta_bytes
        assert (delta_bytes is not None) == (version > 0)
        assert_all_read(store, reader, weights)
        weights["fp32"].view(torch.int32)[:300] ^= 0x01010101


def test_deltas_that_others_can_write_to_are_refused_and_not_built_upon(
    store, mount, caplog, sender
):
    publish(sender, 1, 2)
    [path] = store.glob("deltas/*")
    path.chmod(0o666)
    if mount == "network":
        with pytest.raises(dbuffer.StoreAccessError, match=path.name):
            newest(store)
    publish(sender, 3)
    assert f"others can write to {path}" in caplog.text
    assert path.stem not in manifest_of(store).chain[1:]
    assert newest(store, verify=True) == 3
    (store / "deltas").chmod(0o777)
    with pytest.raises(dbuffer.StoreAccessError, match="chmod go-w"):
        publish(sender, 4)
    with pytest.raises(dbuffer.StoreAccessError, match="deltas"):
        newest(store)
    sender.close()
    with (
        make_sender(store, allow_shared_store=True) as careless,
        reader_of(store, allow_shared_store=True) as reader,
    ):
        assert opened(reader) == 3
        publish(careless, 4, 5)
        assert opened(reader) == 5


def test_a_directory_that_was_removed_is_made_again(store, mount, sender):
    publish(sender, 1, 2, 3)
    for version, name in enumerate(("tmp", "idle", "receivers", "deltas"), 4):
        shutil.rmtree(store / (other_buffer(newest_buffer(store)) if name == "idle" else name))
        publish(sender, 2 * version, 2 * version + 1)
        assert newest(store, verify=True) == 2 * version + 1


def few_changed(version: int) -> Tensors:
    weights = {"a": torch.zeros(4000), "b": torch.ones(7)}
    weights["a"][::100] = version
    return weights


@in_turn(("num_versions", "delta"), [2, 3, 4], [True, False])
def test_a_local_sender_writes_into_no_file_of_a_network_sender(
    store, monkeypatch, num_versions, delta
):
    """Whose newest version stands on one; and other hosts may be reading the other."""
    monkeypatch.setenv("DBUFFER_MOUNT", "network")
    with make_sender(store) as sender:
        for version in range(1, num_versions + 1):
            sender.send(few_changed(version))
    before = {path: path.read_bytes() for path in version_files(store)}
    monkeypatch.setenv("DBUFFER_MOUNT", "local")
    monkeypatch.setattr(BufferWriter, "commit", mock.Mock(side_effect=KeyError))
    with make_sender(store, delta=delta) as sender, pytest.raises(KeyError):
        sender.send(few_changed(9))
    assert all(path.read_bytes() == before[path] for path in before if path.exists())
    monkeypatch.setenv("DBUFFER_MOUNT", "network")
    with reader_of(store) as reader, reader.open() as snapshot:
        assert snapshot.version == num_versions
        assert_same(snapshot.tensors, few_changed(num_versions))


@pytest.mark.parametrize("is_found", [True, False])
def test_weights_changed_while_they_are_sent_make_the_next_version_whole(
    store, mount, is_found, monkeypatch, sender
):
    weights, encode = SPARSE.weights(3), deltas.encode_delta

    def encode_and_change(*arguments, **options):
        encoded = encode(*arguments, **options)
        if not is_found:
            raise KeyError("the trainer's own trouble")
        weights[SPARSE.names[0]][5] += 1
        return encoded

    monkeypatch.setattr("dbuffer.publish.sender._COPIED_BYTES", 0)  # else they are copied
    publish(sender, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(deltas, "encode_delta", encode_and_change)
        with pytest.raises(dbuffer.InvalidWeightsError if is_found else KeyError):
            sender.send(weights, wait=False).wait(TIMEOUT_S)
    assert newest(store, verify=True) == 2
    assert version_files(store) <= named_files(store), "its delta was left"
    with pytest.raises(dbuffer.VersionError):
        sender.send_patches([])
    assert publish(sender, 3) == [None]
    assert publish(sender, 4)[0] is not None
    assert newest(store, verify=True) == 4


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (Draft, "begin"),
        (deltas, "encode_delta"),
        (deltas.Deltas, "_write_delta"),
        (Draft, "commit"),
    ],
)
def test_weights_changed_unnoticed_do_not_make_later_versions_wrong(
    store, mount, holder, name, checksum, monkeypatch
):
    """Past autograd: that version is torn at worst, and readable; the next is right."""
    weights = {"a": torch.zeros(20_000), "b": torch.zeros(200_000)}  # too long to be copied

    def step() -> None:
        for tensor in weights.values():
            tensor.numpy()[: 7 if tensor is weights["b"] else None] += 1

    called = getattr(holder, name)

    def and_step(*arguments, **options):
        done = called(*arguments, **options)
        step()
        return done

    with make_sender(store, checksum=checksum) as sender, reader_of(store) as reader:
        for _ in range(4):
            sender.send(weights)
            step()
            with monkeypatch.context() as patch:
                patch.setattr(holder, name, and_step)
                published = sender.send(weights, wait=False).wait(TIMEOUT_S)
            assert published.delta_bytes is not None
            with reader_of(store, "late", verify=checksum) as late, late.open() as snapshot:
                assert snapshot.version == published.version
            for _ in range(2):
                assert sender.send(weights).delta_bytes is not None
                with reader.open() as snapshot:
                    assert_same(snapshot.tensors, weights)
                weights["b"][11] += 1


# What goes and what stays


@pytest.mark.usefixtures("short_chains")
@pytest.mark.timing(keep_superseded_s=0.0)
def test_the_chain_is_trimmed_and_nothing_is_left_but_what_manifests_name(store, mount, sender):
    """By its length; on a network mount what leads from the anchor stays."""
    lengths, since_anchor = [], []
    for version in range(1, 30):
        publish(sender, version)
        found = manifest_of(store)
        lengths.append(len(found.chain))
        since_anchor.append(len(found.deltas_after(found.anchor)) if found.anchor else 0)
        # What the last publish put away goes with the next, for who has just begun to read it.
        assert len(version_files(store) - named_files(store)) <= (mount == "network") * 4
        assert len(list(store.glob("deltas/*"))) <= 8
    assert len(list(store.glob("[AB]/weights-*"))) <= 3
    is_local = mount == "local"
    assert max(since_anchor) == (0 if is_local else chain.MAX_CHAIN)
    longest = max(lengths) - 1  # of a chain's versions, one has no delta
    if is_local:
        assert longest == chain.MAX_CHAIN
    else:
        assert chain.MAX_CHAIN <= longest <= 2 * chain.MAX_CHAIN


@pytest.mark.usefixtures("network", "short_chains")
@pytest.mark.timing(keep_superseded_s=0.0)
@pytest.mark.parametrize(("version", "is_endless"), [(3, False), (4, False), (3, True)])
def test_what_a_reader_says_that_it_reads_stays_and_then_goes(
    store, monkeypatch, caplog, version, is_endless, sender, reader
):
    """The anchor that it needs, and the deltas since, long after newer anchors.

    The delta of version 4 is named last by version 5, an anchor.
    """
    publish(sender, *range(1, version + 1))
    needed = named_files(store)
    reader.wait_for_version()
    with reader.open_seen() as held:
        assert held is not None
        monkeypatch.setattr(retention.time, "monotonic", lambda: 0.0)
        publish(sender, *range(version + 1, 20))
        late = version_files(store)
        assert needed <= late
        assert len(late - needed - named_files(store)) <= 6, "what nobody reads has gone"
        if is_endless:
            monkeypatch.setattr(retention.time, "monotonic", lambda: READER_TIMEOUT_S)
            publish(sender, 20, 21)
            assert reader.receiver_id in caplog.text
            assert not needed & version_files(store)
    publish(sender, 22, 23)
    assert not needed & version_files(store)
    assert newest(store, verify=True) == 23


def test_a_delta_that_is_too_long_is_none(store, mount, sender):
    """Just under half of all words changed, to anything; on a network mount it is needed."""
    weights = {"a": torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int32)}
    sender.send(weights)
    places = torch.randperm(100_000)[:49_900]
    weights["a"][places] = torch.randint(-(2**31), 2**31, (49_900,), dtype=torch.int32)
    published = sender.send(weights)
    assert (published.delta_bytes is None) == (manifest_of(store).chain == []) == (mount == "local")
    assert version_files(store) == named_files(store)
    assert torch.equal(received(store)["a"], weights["a"])


def test_a_chain_of_large_deltas_is_short(store, mount, sender):
    for version in range(1, 20):
        publication = sender.send(SPARSE.weights(version))
        found = manifest_of(store)
        sizes = [(store / "deltas" / f"{name}.delta").stat().st_size for name in found.chain[1:]]
        most = chain.MAX_CHAIN_SHARE * publication.num_bytes
        assert sum(sizes) <= 2 * (most + (publication.delta_bytes or 0))
        if version > 1 and sizes:
            assert publication.delta_bytes == sizes[-1] < publication.num_bytes / 4


@pytest.mark.usefixtures("network")
def test_a_version_that_is_a_delta_alone_is_not_published_without_it(tmp_path):
    """There is room for its records alone, which would name an earlier version's file."""
    weights = {"a": torch.zeros(1 << 20, dtype=torch.uint8)}
    with small_disk(tmp_path / "disk", 8 << 20) as disk, make_sender(disk / "store") as sender:
        for _ in range(2):
            weights["a"][torch.randperm(1 << 20)[:50_000]] += 1
            published = sender.send(weights)
        before = weights["a"].clone()
        weights["a"][torch.randperm(1 << 20)[:50_000]] += 1
        filler = fill(disk, leave_bytes=published.delta_bytes // 2)
        with pytest.raises(dbuffer.StoreFullError):
            sender.send(weights)
        assert torch.equal(received(sender.store)["a"], before)
        filler.unlink()
        assert sender.send(weights).version == published.version + 1
        assert torch.equal(received(sender.store)["a"], weights["a"])


@pytest.mark.timing(settle_s=0.01)
def test_a_store_is_verified(store, mount, sender):
    publish(sender, 1, 2, 3, 4)
    double = DoubleBuffer(store)
    assert [(check["version"], check["problems"]) for check in verify_store(double)] == [
        (4, []),
        (3, []),
    ]
    if mount == "network":
        path = store / "deltas" / f"{manifest_of(store).id}.delta"
        flip_bit(path, 8 * path.stat().st_size - 20)
        newest_check, other = verify_store(double)
        assert path.name in str(newest_check["problems"])
        assert not other["problems"]
        path.unlink()
        assert path.name in str(verify_store(double)[0]["problems"])


# Memory that is used again


@pytest.mark.usefixtures("network")
def test_open_snapshots_keep_their_memory_in_whichever_order_they_are_left(sender, reader):
    """However many the same receiver opens and loads meanwhile."""
    snapshots: dict[dbuffer.WeightSnapshot, contextlib.ExitStack] = {}

    def read_one_more(version: int) -> None:
        publish(sender, version)
        assert opened(reader) == version
        for snapshot in snapshots:
            assert SPARSE.version_of(dict(snapshot.tensors)) == snapshot.version

    publish(sender, 1)
    assert opened(reader) == 1  # whose memory is there to go on from
    for version in (3, 5, 7):
        publish(sender, version - 1)
        leave = contextlib.ExitStack()
        snapshots[leave.enter_context(reader.open(acknowledge=False))] = leave
        read_one_more(version)
    first, second, third = snapshots
    for version, left in enumerate((second, third, first), 8):
        snapshots.pop(left).close()
        read_one_more(version)


@pytest.mark.usefixtures("network")
def test_a_snapshot_that_its_user_wrote_into_is_not_gone_on_from(caplog, sender, reader):
    for version, name in ((2, SPARSE.names[0]), (4, SPARSE.names[7])):
        publish(sender, version)
        with reader.open() as snapshot:
            snapshot.tensors[name][3] += 1
        publish(sender, version + 1)
        with caplog.at_level(logging.WARNING, "dbuffer"):
            assert opened(reader) == version + 1
        if version > 2:
            assert name in caplog.text


def test_what_changed_in_several_versions_is_named_once(store, mount, sender, reader):
    weights = {"a": torch.zeros(4000), "c": torch.zeros(500, dtype=torch.complex128)}
    first = sender.send(weights)
    for places in ([3, 70], [9, 70, 399]):
        for tensor in weights.values():
            tensor[places] += 1 + 1j if tensor.is_complex() else 1
        sender.send(weights)
    with reader.open() as snapshot:
        changed = snapshot.changed_since(first.id)
    assert {name: places.tolist() for name, places in changed.items()} == {
        name: [3, 9, 70, 399] for name in weights
    }


# Tensors of all kinds


def awkward_weights() -> Tensors:
    """One tensor of each dtype, a scalar, an empty one, a tied one, and one that is a slice."""
    raw = torch.arange(4096, dtype=torch.int64).to(torch.uint8)
    tied = torch.arange(500.0).reshape(50, 10)
    return {
        **{name: raw.clone().view(getattr(torch, name)) for name in ITEM_BYTES if name != "bool"},
        "bool": raw.bool(),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "tied": tied,
        "also tied": tied,
        "slice": torch.arange(2000.0).reshape(40, 50)[:, ::2],
    }


def change(weights: Tensors, step: int) -> None:
    """Write in place into a few elements of each tensor."""
    for name, tensor in weights.items():
        if name in ("slice", "tied"):
            tensor[step, step] = -1.0 - step
        elif name == "bool":
            tensor[step] = not tensor[step]
        elif name == "scalar":
            tensor += 1
        elif tensor.numel() and name != "also tied":
            tensor.view(torch.uint8)[[step * 37, step * 91 + 64]] += 1
    # -0.0 is not 0.0, and of a NaN all bits count.
    weights["float32"][100] = (0.0, -0.0)[step % 2]
    weights["float64"].view(torch.int64)[100] = 0x7FF8_0000_0000_0000 + step


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("with_patches", [False, True], ids=["send", "patches"])
def test_tensors_of_all_kinds(store, mount, with_patches, monkeypatch):
    monkeypatch.setattr(kept_copy, "_BATCH_BYTES", 10_000)  # more than most of them, together
    weights = awkward_weights()
    with make_sender(store) as sender, reader_of(store, verify=True) as follower:
        assert sender.send(weights).delta_bytes is None
        assert_all_read(store, follower, weights)
        for step in range(8):
            before = {name: tensor.clone() for name, tensor in weights.items()}
            change(weights, step)
            if with_patches and step < 7:
                patches = patches_between(before, weights)
                send_shuffled(sender, patches, step)
            else:  # at last from here as from a send
                assert sender.send(weights).delta_bytes is not None
            assert_all_read(store, follower, weights)


def send_shuffled(sender: dbuffer.WeightSender, patches: list[SparsePatch], step: int) -> None:
    """Send patches in any order, of one of two tied names, with indices of a kind each time.

    They are the trainer's again when they are published.
    """
    kind = (torch.int64, torch.int32, torch.int16)[step % 3]
    shuffled = []
    for patch in patches:
        if len(patch.indices) and patch.name != ("also tied", "tied")[step % 2]:
            order = torch.arange(len(patch.indices))
            order = order.flip(0) if step % 4 else order
            values = rows_of(patch.values)[order].view(-1).view(patch.values.dtype)
            shuffled.append(SparsePatch(patch.name, patch.indices[order].to(kind), values))
    assert sender.send_patches(shuffled).delta_bytes
    for patch in shuffled:
        patch.indices.zero_()
        rows_of(patch.values).zero_()


ONE, TWO = torch.tensor([1.0]), torch.tensor([1.0, 2.0])
AT = ONE.long()
MISMATCH, INVALID = dbuffer.WeightsMismatchError, dbuffer.InvalidWeightsError

REFUSED_PATCHES: list[tuple[Any, type[Exception], str]] = [
    ([SparsePatch("x", AT, ONE)], MISMATCH, "'x'"),
    ([SparsePatch("a", AT, ONE.int())], MISMATCH, "int32"),
    ([SparsePatch("a", AT, ONE.to(torch.float8_e5m2))], MISMATCH, "float8_e5m2"),
    ([SparsePatch("a", AT, ONE, (4, 1000))], MISMATCH, "shape"),
    ([SparsePatch("a", torch.tensor([4000]), ONE)], MISMATCH, "outside"),
    ([SparsePatch("a", torch.tensor([-1]), ONE)], MISMATCH, "outside"),
    ([SparsePatch("e", torch.tensor([0]), ONE)], MISMATCH, "outside"),
    ([SparsePatch("a", AT, TWO)], INVALID, "1 indices and 2"),
    ([SparsePatch("a", TWO.long() * 0, TWO)], INVALID, "twice"),
    ([SparsePatch("a", AT, ONE.double() * 1e39)], INVALID, "'a' cannot be cast to float32"),
    ([SparsePatch("a", ONE, ONE)], INVALID, "integers"),
    ([SparsePatch("a", ONE.bool(), ONE)], INVALID, "integers"),
    ([SparsePatch("a", ONE + 0j, ONE)], INVALID, "integers"),
    ([SparsePatch("a", AT, ONE)] * 2, INVALID, "two patches"),
    (None, INVALID, "a list of SparsePatch, not None"),
    ([("a", AT, ONE)], INVALID, "must be a SparsePatch"),
    ([SparsePatch(5, AT, ONE)], INVALID, "must be a string"),
    ([SparsePatch(["a"], AT, ONE)], INVALID, "must be a string"),
    ([SparsePatch("a", [1], ONE)], INVALID, "indices .* not this list"),
    ([SparsePatch("a", AT, ONE.numpy())], INVALID, "ndarray"),
    ([SparsePatch("a", AT, ONE.to_sparse())], INVALID, "sparse"),
    ([SparsePatch("a", AT, ONE.to("meta"))], INVALID, "meta"),
    ([SparsePatch("a", AT, ONE, 4000)], INVALID, "must be a tuple"),
    ([SparsePatch("a", AT, ONE), SparsePatch("tied", AT, ONE)], INVALID, "tied"),
]


def test_patches_that_do_not_fit_are_refused_and_nothing_is_touched(store, mount, sender, reader):
    a = torch.arange(4000.0)
    sender.send({"a": a, "tied": a, "e": torch.empty(0)})
    for version, (patches, error, said) in enumerate(REFUSED_PATCHES, 2):
        before = {path: path.read_bytes() for path in version_files(store)}
        with pytest.raises(error, match=said):
            sender.send_patches(patches)
        assert {path: path.read_bytes() for path in version_files(store)} == before
        good = SparsePatch("a", torch.tensor([7]), torch.tensor([-float(version)]))
        assert sender.send_patches([good]).version == version
        with reader.open() as snapshot:
            assert snapshot.tensors["a"][7] == -version


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_patches_that_are_not_finite_are_refused_if_they_must_be(store, mount, reader, value):
    a = torch.arange(4000.0)
    patches = [SparsePatch("a", torch.tensor([7, 3]), torch.tensor([5.0, value]))]
    with make_sender(store, require_finite=True) as sender:
        sender.send({"a": a})
        before = {path: path.read_bytes() for path in version_files(store)}
        for _ in range(2):
            with pytest.raises(INVALID, match="1 of 2 values of 'a' are NaN or infinite"):
                sender.send_patches(patches)
        assert {path: path.read_bytes() for path in version_files(store)} == before
        assert sender.send_patches([SparsePatch("a", AT, ONE)]).version == 2
    with make_sender(store) as sender:
        sender.send({"a": a})
        assert sender.send_patches(patches).version == 4
    with reader.open() as snapshot:
        assert not snapshot.tensors["a"][3].isfinite()


def test_patches_of_views_and_of_values_of_another_width(store, mount, sender, reader):
    """One element of a view is contiguous, whatever its stride; others are cast.

    Patches that change nothing make a version, too.
    """
    weights = {"a": torch.arange(4000.0), "b": torch.arange(4000).to(torch.bfloat16)}
    sender.send(weights)
    negated = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
    third = torch.tensor([1 / 3], dtype=torch.float64)
    strided = torch.arange(9.0)[5::2]
    at = torch.arange(40).flip(0)[::2]
    all_values = (negated[:1], negated, strided[:1], strided, third, third, third, third[:0])
    for version, values in enumerate(all_values, 2):
        indices = at[: len(values)]
        patches = [SparsePatch(name, indices, values, (4000,)) for name in weights]
        publication = sender.send_patches(patches, metadata={"v": version})
        assert (publication.version, publication.num_bytes) == (version, 6 * 4000)
        assert manifest_of(store).metadata == {"v": version}
        for tensor in weights.values():
            tensor[indices] = values.to(tensor.dtype)
        assert_all_read(store, reader, weights)


@pytest.mark.parametrize(("has_room", "num_files_compared"), [(True, 1), (False, 3)])
@pytest.mark.parametrize("mount", ["GPU"], indirect=True)
def test_versions_on_a_gpu_are_compared_there_if_it_has_room(
    store, mount, sender, reader, monkeypatch, caplog, has_room, num_files_compared
):
    """A patch is written into a file alone, so the next version is compared with this file."""
    caplog.set_level(logging.INFO, "dbuffer")
    weights = {"a": torch.arange(400.0), "b": torch.arange(400).to(torch.bfloat16)}
    num_bytes = 400 * (4 + 2)
    monkeypatch.setattr(deltas, "free_on", lambda _: num_bytes * (5 if has_room else 3))
    with mock.patch.object(deltas, "find_changes", wraps=deltas.find_changes) as compare_files:
        for version, is_patch in enumerate([False, False, True, False, False], 1):
            weights["a"][version] = value = torch.tensor(-1.0)
            if is_patch:
                patch = SparsePatch("a", torch.tensor([version]), value.view(1))
                publication = sender.send_patches([patch])
            else:
                publication = sender.send(weights)
            assert (publication.delta_bytes is None) == (version == 1)
            assert_all_read(store, reader, weights)
    assert compare_files.call_count == num_files_compared
    assert ("comparing files" in caplog.text) == (not has_room)


@pytest.mark.parametrize("mount", ["GPU"], indirect=True)
def test_a_delta_is_encoded_later_if_no_thread_can_be_started(
    store, mount, sender, reader, monkeypatch, caplog
):
    """This is logged once."""
    start = threading.Thread.start

    def refuse_to_encode(thread: threading.Thread) -> None:
        if thread.name.startswith("delta"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_to_encode)
    for version in (1, 2, 3):
        assert (publish(sender, version)[0] is None) == (version == 1)
        assert opened(reader) == version
    [record] = [record for record in caplog.records if "can't start new thread" in record.message]
    assert record.message.startswith(f"{store}: no thread to encode a delta with")


REFUSED: dict[str, dict[str, Any]] = {
    "not a tensor": {"weights": {"a": object()}},
    "metadata": {"metadata": {"a": object()}},
    "version": {"version": 1, "wait": False},
    "delta=True": {"weights": iter(())},
}
"""Arguments of a send that is refused, by what is said then."""


def test_patches_need_a_published_version_and_a_sender_with_deltas(store, mount, sender):
    """None go after a send that was refused: they are of weights that were never published."""
    with make_sender(store.parent / "whole", delta=False) as whole:
        publish(whole, 1)
        with pytest.raises(dbuffer.OptionError, match="delta"):
            whole.send_patches([])
    with pytest.raises(dbuffer.VersionError):
        sender.send_patches([])
    publish(sender, 1, 2)
    with pytest.raises(dbuffer.VersionError):
        sender.send_patches([], version=2)
    with pytest.raises(dbuffer.InvalidWeightsError, match="metadata"):
        sender.send_patches([], metadata={"a": object()})
    with pytest.raises(dbuffer.OptionError, match="wait"):
        sender.send(SPARSE.weights(3), wait="x")  # which spoils no patches
    assert sender.send_patches([], version=7).version == 7
    for version, message in zip((7, 9, 11, 13), REFUSED, strict=True):
        patches = patches_between(SPARSE.weights(version + 1), SPARSE.weights(version + 2))
        with pytest.raises(dbuffer.DBufferError, match=message):
            sender.send(**{"weights": SPARSE.weights(version + 1)} | REFUSED[message])
        for _ in range(2):
            with pytest.raises(dbuffer.VersionError):
                sender.send_patches(patches)
        assert manifest_of(store).version == version
        assert publish(sender, version + 1)[0] is not None, "nothing was touched"
        assert sender.send_patches(patches).version == version + 2
        assert newest(store, verify=True) == version + 2


# Damage to deltas and anchors: who can read, reads; who cannot, says so; the next one is whole


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "lost": Path.unlink,
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "flipped": lambda path: flip_bit(path, 8 * path.stat().st_size // 2),
}


def path_in(store: Path, file: str) -> Path:
    """The delta of version 3 of a chain that begins with version 1, or the anchor."""
    manifest = manifest_of(store)
    if file == "delta":
        return store / "deltas" / f"{manifest.chain[2]}.delta"
    return store / str(manifest.anchor_buffer) / manifest.file


@pytest.mark.usefixtures("network")
@pytest.mark.timing(settle_s=0.01)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", ["delta", "anchor"])
def test_after_damage_the_next_version_is_whole(store, sender, file, damage):
    with (
        reader_of(store, "early") as early,
        reader_of(store, "close") as close,
        reader_of(store, "late") as late,
    ):
        publish(sender, 1, 2)
        assert opened(early) == 2
        publish(sender, 3, 4)
        assert opened(close) == 4
        publish(sender, 5)
        path = path_in(store, file)
        DAMAGES[damage](path)
        needs_it = {early: file == "delta", close: False, late: True}
        if file == "anchor" and damage != "flipped":  # without it nothing else is looked at
            needs_it = {close: True}
        for receiver, cannot_read in needs_it.items():
            if not cannot_read:
                assert opened(receiver) == 5
                continue
            with pytest.raises(dbuffer.StoreCorruptError, match=str(path)):
                opened(receiver)
            if file == "delta":
                record = DoubleBuffer(store).receiver(receiver.receiver_id)
                assert record.unreadable.number == 5
        publish(sender, 6)
        assert manifest_of(store).anchor is None
        for version in (6, 7, 8):
            assert opened(early) == opened(close) == opened(late) == version
            assert newest(store, verify=True) == version
            if version < 8:
                assert publish(sender, version + 1)[0] is not None
        assert manifest_of(store).anchor is not None, "from there on as ever"


@pytest.mark.usefixtures("network")
def test_after_damage_to_the_layout_the_next_version_is_whole(store, sender):
    early_target, late_target = SPARSE.empty(), SPARSE.empty()
    with reader_of(store, "early") as early, reader_of(store, "late") as late:
        publish(sender, 1, 2)
        assert early.load_into(early_target) == 2
        publish(sender, 3)
        flip_bit(path_in(store, "anchor"), 8 * (manifest_of(store).layout_offset + 5))
        assert early.load_into(early_target) == 3, "it has read this layout before"
        with pytest.raises(dbuffer.StoreCorruptError, match="layout"):
            late.load_into(late_target)
        publish(sender, 4)
        assert late.load_into(late_target) == early.load_into(early_target) == 4
        assert SPARSE.version_of(late_target) == SPARSE.version_of(early_target) == 4


@pytest.mark.usefixtures("network")
def test_a_delta_that_is_damaged_is_reported_until_it_is_read(store, sender):
    """A load that fails before it reads deltas takes no report back."""
    with reader_of(store, "reader") as reader:
        publish(sender, 1, 2, 3)
        flip_bit(path_in(store, "delta"), 8 * 100)
        with pytest.raises(dbuffer.StoreCorruptError):
            reader.load_into(SPARSE.empty())
        with pytest.raises(dbuffer.WeightsMismatchError):
            reader.load_into({"another": torch.zeros(1)})
        publish(sender, 4)
        assert reader.load_into(SPARSE.empty()) == 4


@pytest.mark.usefixtures("network")
@pytest.mark.timing(settle_s=0.01)
def test_a_lost_delta_is_seen_by_the_sender_itself(store, sender):
    publish(sender, 1, 2, 3, 4, 5)
    path_in(store, "delta").unlink()
    publish(sender, 6)
    assert newest(store, verify=True) == 6
    shutil.rmtree(store / "deltas")
    publish(sender, 7, 8)
    assert newest(store, verify=True) == 8
    shutil.rmtree(store / "deltas")
    sender.send_patches(patches_between(SPARSE.weights(8), SPARSE.weights(9)))
    assert newest(store, verify=True) == 9


@pytest.mark.usefixtures("network", "short_chains")
@pytest.mark.timing(keep_superseded_s=0.0, settle_s=0.01)
@pytest.mark.parametrize("what", ["newest manifest", "idle manifest", "pointer", "all"])
def test_no_version_stands_on_a_file_that_is_about_to_go(store, what, sender):
    """Whose manifest was damaged, so that no record names it: it is nothing to stand on."""
    for version in (3, 13, 23):
        publish(sender, version - 2, version - 1, version)
        pointer = newest_buffer(store)
        for buffer in (pointer, other_buffer(pointer)):
            if what in ("all", "newest manifest" if buffer == pointer else "idle manifest"):
                (store / buffer / "manifest.json").write_bytes(b"{")
        if what in ("all", "pointer"):
            (store / "CURRENT").write_bytes(b"{")
        for later in range(version + 1, version + 7):
            publish(sender, later)
            assert named_files(store) <= version_files(store)
            assert newest(store, verify=True) == later


# Damage to a local store


@pytest.mark.parametrize("with_patches", [False, True], ids=["send", "patches"])
@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "published"])
def test_damage_to_a_local_buffer_is_not_published_with_a_checksum(
    store, monkeypatch, with_patches, is_idle, caplog, sender
):
    """Patches leave most of the buffer as it is, but its checksums are of the sent weights."""
    publish(sender, 1, 2, 3)
    buffer = newest_buffer(store)
    flip_in(store, other_buffer(buffer) if is_idle else buffer, 3)
    with caplog.at_level(logging.WARNING, "dbuffer"):
        for version in (4, 5, 6):
            patches = patches_between(SPARSE.weights(version - 1), SPARSE.weights(version))
            if with_patches:
                sender.send_patches(patches)
            else:
                publish(sender, version)
            assert newest(store, verify=True) == version
    if is_idle and with_patches:
        assert "was damaged" in caplog.text


def test_the_first_patches_upon_a_damaged_buffer_are_refused(store, sender):
    """They are written into a copy of the published file: no delta leads to that version."""
    publish(sender, 1)
    flip_in(store, newest_buffer(store), 3)
    patches = patches_between(SPARSE.weights(1), SPARSE.weights(2))
    with pytest.raises(dbuffer.StoreCorruptError, match="send all weights"):
        sender.send_patches(patches)
    assert publish(sender, 2) == [None]
    assert newest(store, verify=True) == 2
