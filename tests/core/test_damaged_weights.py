"""Guarantee 6, bad input is refused: weights files that are truncated, flipped or replaced."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dbuffer
from dbuffer.format.layout import digest
from dbuffer.runtime.timing import TIMING
from tests.support.children import Child
from tests.support.damage import (
    NEWEST,
    VALUES,
    assert_repaired_by_publishing,
    copy_of,
    damaged_bytes,
    flip_bit,
    fuzzed,
    opening_only_files_in,
    read,
    weights_file,
)
from tests.support.patterns import SMALL, SPARSE, load, newest, publish
from tests.support.stores import open_files

pytestmark = pytest.mark.timing(settle_s=0.01)


@fuzzed
@given(place=st.integers(0, 8 * 2048 * len(SMALL.names) - 1))
def test_flipped_bit_in_a_tensor_is_refused_and_the_tensor_named(template, place):
    with copy_of(template) as store:
        path, _ = weights_file(store)
        target = SMALL.empty()
        flip_bit(path, place)
        with dbuffer.WeightReceiver(store, verify=True) as receiver:
            name = SMALL.names[place // (8 * 2048)]
            with pytest.raises(dbuffer.StoreCorruptError, match=f"{path}.*: {name};"):
                receiver.load_into(target)
            with pytest.raises(dbuffer.StoreCorruptError, match=name), receiver.open():
                pass
        assert not any(tensor.any() for tensor in target.values()), "the target was touched"
        with dbuffer.WeightReceiver(store) as receiver:  # on a local disk checksums are left out
            assert receiver.load_into(target) == 3


@fuzzed
@given(data=st.data())
def test_flipped_bit_in_checksums_or_layout_is_refused(template, data):
    with copy_of(template) as store:
        path, manifest = weights_file(store)
        start, num_bytes = data.draw(
            st.sampled_from(
                [
                    (manifest["checksums_offset"], 8 * manifest["num_tensors"]),
                    (manifest["layout_offset"], manifest["layout_bytes"]),
                ]
            )
        )
        flip_bit(path, data.draw(st.integers(8 * start, 8 * (start + num_bytes) - 1)))
        with pytest.raises(dbuffer.StoreCorruptError, match=f"{path}"):
            read(store, verify=True)
        assert_repaired_by_publishing(store)


@fuzzed
@given(data=st.data(), which=st.integers(1, 4), verify=st.booleans())
def test_damaged_delta_is_refused_and_the_file_named(
    chain_template, data, which, verify, monkeypatch
):
    """Each is needed to read the newest version; also by who compares no checksums of tensors."""
    monkeypatch.setenv("DBUFFER_MOUNT", "network")
    with copy_of(chain_template) as store:
        chain = json.loads((store / newest_buffer(store) / "manifest.json").read_bytes())["chain"]
        path = store / "deltas" / "{}-{}.delta".format(*chain[which])
        good = path.read_bytes()
        at = data.draw(st.integers(0, len(good) - 1))
        match data.draw(st.sampled_from(["random", "cut", "flip", "inserted", "another"])):
            case "random":
                bad = data.draw(st.binary(max_size=300))
            case "cut":
                bad = good[:at]
            case "flip":
                bit = data.draw(st.integers(0, 7))
                bad = good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :]
            case "inserted":
                bad = good[:at] + b"\0" + good[at:]
            case "another":
                other = data.draw(st.sampled_from([n for n in (1, 2, 3, 4) if n != which]))
                bad = (store / "deltas" / "{}-{}.delta".format(*chain[other])).read_bytes()
        path.write_bytes(bad)
        with (
            opening_only_files_in(store),
            pytest.raises((dbuffer.StoreCorruptError, dbuffer.UnsupportedError), match=str(path)),
        ):
            read(store, verify=verify, pattern=SPARSE)
        with dbuffer.WeightSender(store, delta=True) as sender:
            for version in (6, 7):
                sender.send(SPARSE.weights(version), version=version)
                assert read(store, verify=True, pattern=SPARSE) == version


def newest_buffer(store: Path) -> str:
    return str(json.loads((store / "CURRENT").read_bytes())["buffer"])


def test_flipped_bit_is_seen_by_a_receiver_that_has_loaded_before(damaged):
    with (
        dbuffer.WeightSender(damaged, checksum=True) as sender,
        dbuffer.WeightReceiver(damaged, verify=True) as receiver,
    ):
        target = SMALL.empty()
        for version in (3, 4, 5):
            assert receiver.load_into(target) == version
            sender.send(SMALL.weights(version + 1))
        flip_bit(weights_file(damaged, "A")[0], 12345)
        with pytest.raises(dbuffer.StoreCorruptError, match=SMALL.names[0]):
            receiver.load_into(target)
        assert SMALL.version_of(target) == 5
        sender.send(SMALL.weights(7))
        assert receiver.load_into(target) == 7


LAYOUT_NUMBERS = st.one_of(
    st.sampled_from([-64, -1, 0, 1, 63, 64, 2**31, 2**40, 2**62, 2**63 - 1, 2**63]),
    st.integers(0, 40_000),
)
LAYOUT_VALUES = st.one_of(
    LAYOUT_NUMBERS,
    st.lists(LAYOUT_NUMBERS, max_size=5),
    st.sampled_from(["bool", "int8", "float8_e4m3fn", "float4_e2m1fn_x2", "complex128", "object"]),
    st.sampled_from(SMALL.names),
    VALUES,
)


@fuzzed
@given(data=st.data())
def test_hostile_layout(template, data):
    """A layout that was changed together with its digest: nothing is read outside the data."""
    with copy_of(template) as store:
        path, manifest = weights_file(store)
        file = path.read_bytes()
        at, size = manifest["layout_offset"], manifest["layout_bytes"]
        layout = json.loads(file[at : at + size])
        if data.draw(st.booleans()):
            for _ in range(data.draw(st.integers(1, 3))):
                row = data.draw(st.sampled_from(layout["tensors"]))
                row[data.draw(st.integers(0, 3))] = data.draw(LAYOUT_VALUES)
            encoded = json.dumps(layout).encode()
        else:
            encoded = data.draw(damaged_bytes(file[at : at + size]))
        path.write_bytes(file[:at] + encoded)
        manifest |= {
            "layout_bytes": len(encoded),
            "layout_xxh3": digest(encoded),
            "file_bytes": at + len(encoded),
        }
        (path.parent / "manifest.json").write_text(json.dumps(manifest))
        with opening_only_files_in(store), contextlib.suppress(dbuffer.DBufferError):
            read(store, verify=False, pattern=None)
        assert_repaired_by_publishing(store)


def test_layout_that_lies_out_of_place_is_refused_and_the_file_named(damaged):
    path, manifest = weights_file(damaged)
    (path.parent / "manifest.json").write_text(json.dumps(manifest | {"checksums_offset": 0}))
    with pytest.raises(dbuffer.StoreCorruptError, match=f"{path}.*{SMALL.names[0]}"):
        read(damaged, verify=False)


def use_truncated_files(connection: Connection, template: Path, store: Path) -> None:
    """Cut each weights file short, by a sender and a receiver that are new, or not; use it."""
    TIMING.settle_s = 0.01
    for buffer, is_warm in itertools.product(("A", "B"), (False, True)):
        path, manifest = weights_file(template, buffer)
        for size in (0, 1, 4096, manifest["checksums_offset"], manifest["file_bytes"] - 1):
            shutil.copytree(template, store)
            use_truncated(store, store / buffer / path.name, size, is_warm)
            shutil.rmtree(store)
            connection.send((buffer, is_warm, size))


def use_truncated(store: Path, path: Path, size: int, is_warm: bool) -> None:
    """The reader refuses the newest version, or reads it; and some publishes later it goes on."""
    target, last = SMALL.empty(), 3
    with contextlib.ExitStack() as stack:
        sender = stack.enter_context(dbuffer.WeightSender(store, checksum=True))
        receiver = stack.enter_context(dbuffer.WeightReceiver(store))
        if is_warm:
            for last in (4, 5):
                sender.send(SMALL.weights(last))
                receiver.load_into(target)
        os.truncate(path, size)
        reader = dbuffer.WeightReceiver(store)
        if path.parent.name == NEWEST:
            with pytest.raises(dbuffer.StoreCorruptError, match=str(path)):
                reader.load_into(target)
        else:
            assert reader.load_into(target) == last
        if not is_warm:
            sender.close()
            sender = stack.enter_context(dbuffer.WeightSender(store, checksum=True))
        for version in range(last + 1, last + 4):
            sender.send(SMALL.weights(version))
            assert receiver.load_into(target) == version == SMALL.version_of(target)


def test_truncated_weights_files_are_refused_and_never_a_bus_error(template, store):
    with Child(use_truncated_files, template, store) as child:
        assert len([child.receive() for _ in range(20)]) == 20
        assert child.wait() == 0


def test_a_file_that_was_replaced_is_neither_written_nor_read(store):
    """As by restoring a backup: the same names, sizes and bytes, and other files."""
    with dbuffer.WeightSender(store) as sender, dbuffer.WeightReceiver(store) as receiver:
        for version in range(1, 8):
            if version == 5:
                for path in [weights_file(store, buffer)[0] for buffer in "AB"]:
                    shutil.copyfile(path, path.with_name("copy"))
                    path.with_name("copy").rename(path)
            publish(sender, version)
            assert load(receiver) == newest(store) == version


def test_damage_leaks_no_descriptors(template):
    for _ in range(3):
        with copy_of(template) as store:
            path, manifest = weights_file(store)
            flip_bit(path, 8 * manifest["layout_offset"])
            with pytest.raises(dbuffer.StoreCorruptError):
                read(store, verify=True)
            assert not open_files(store)
