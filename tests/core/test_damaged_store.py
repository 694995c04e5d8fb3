"""Guarantee 6, bad input is refused: records that are damaged, hostile, or no files at all.

Whatever is in a store's records, a reader either gets a version as it was published or an error
of ours that names the file. It opens nothing outside the store, and never hangs. The next publish
replaces what was damaged.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dbuffer
from dbuffer.format.manifest import FORMAT
from dbuffer.store.buffer import DoubleBuffer
from tests.support.damage import (
    NEWEST,
    NUMBERS,
    OUTSIDE,
    RECORDS,
    SOON_S,
    assert_read_or_refused,
    assert_repaired_by_publishing,
    copy_of,
    damaged_bytes,
    damaged_chain,
    fuzzed,
    nested,
    opening_only_files_in,
    read,
    weights_file,
)
from tests.support.patterns import SMALL, SPARSE, publish
from tests.support.stores import contents

pytestmark = pytest.mark.timing(settle_s=0.01)


@fuzzed
@given(data=st.data())
@pytest.mark.parametrize("record", RECORDS)
def test_damaged_record(template, record, data):
    with copy_of(template) as store:
        good = (store / record).read_bytes()
        (store / record).write_bytes(data.draw(damaged_bytes(good)))
        assert_read_or_refused(store, verify=data.draw(st.booleans()))
        try:
            assert_repaired_by_publishing(store)
        except dbuffer.UnsupportedError as error:
            # A store of another format is not ours to repair.
            assert str(store / record) in str(error)


@fuzzed
@given(data=st.data())
def test_pointer_and_manifest_that_lie_together(template, data):
    """Both agree, and both are wrong."""
    with copy_of(template) as store:
        pointer, manifest = store / "CURRENT", store / NEWEST / "manifest.json"
        changes = data.draw(
            st.dictionaries(
                st.sampled_from(["version", "generation", "file_bytes", "layout_bytes"])
                | st.sampled_from(["layout_offset", "checksums_offset", "num_tensors", "file"]),
                NUMBERS | OUTSIDE,
                min_size=1,
            )
        )
        for path in (pointer, manifest):
            values = json.loads(path.read_bytes())
            values |= {name: value for name, value in changes.items() if name in values}
            path.write_text(json.dumps(values))
        started = time.monotonic()
        with opening_only_files_in(store), contextlib.suppress(dbuffer.DBufferError):
            read(store, verify=data.draw(st.booleans()), pattern=None)
        assert time.monotonic() - started < SOON_S
        assert_repaired_by_publishing(store)


@pytest.mark.parametrize("is_idle", [False, True], ids=["newest", "the one before"])
@fuzzed
@given(data=st.data())
def test_manifest_that_names_other_deltas(chain_template, data, is_idle, monkeypatch):
    """Whatever it names, what is read is that version and no other; or nothing is."""
    monkeypatch.setenv("DBUFFER_MOUNT", "network")
    with copy_of(chain_template) as store:
        pointer = json.loads((store / "CURRENT").read_bytes())
        buffer = {"A": "B", "B": "A"}[pointer["buffer"]] if is_idle else pointer["buffer"]
        path = store / buffer / "manifest.json"
        values = data.draw(damaged_chain(json.loads(path.read_bytes())))
        path.write_text(json.dumps(values))
        # One that says of a whole version that it is another one is believed.
        pattern = None if values["anchor"] is None else SPARSE
        started = time.monotonic()
        with opening_only_files_in(store):
            if is_idle:
                assert read(store, verify=True, pattern=SPARSE) == 5
            try:
                assert read(store, verify=True, pattern=pattern) == 5
            except dbuffer.DBufferError as error:
                assert str(store) in str(error), "the message must say where"
        assert time.monotonic() - started < SOON_S
        with dbuffer.WeightSender(store, delta=True) as sender:
            for version in (6, 7, 8):
                sender.send(SPARSE.weights(version), version=version)
                assert read(store, verify=True, pattern=SPARSE) == version


@pytest.mark.parametrize("place", ["../../aside.td", "../aside.td", "{}/aside.td", "./{}"])
def test_manifest_that_names_a_file_elsewhere(damaged, place):
    """What it names has the right size and bytes, and is not the buffer's own file."""
    path, manifest = weights_file(damaged)
    for directory in (damaged.parent, damaged):
        shutil.copyfile(path, directory / "aside.td")
    named = place.format(path.name if place.startswith(".") else damaged.parent)
    assert (path.parent / named).is_file()
    (path.parent / "manifest.json").write_text(json.dumps(manifest | {"file": named}))
    with (
        opening_only_files_in(damaged),
        pytest.raises(dbuffer.StoreCorruptError, match=f"{path.parent}/manifest.json.*file"),
    ):
        read(damaged, verify=True)
    assert_repaired_by_publishing(damaged)
    assert (damaged.parent / "aside.td").is_file()


@pytest.mark.parametrize("name", ["id", "generation"])
def test_a_counter_at_its_end_is_a_clear_error(damaged, name):
    for path in (damaged / "CURRENT", damaged / NEWEST / "manifest.json"):
        values = json.loads(path.read_bytes())
        values |= {name: [values["writer"], 2**63 - 1] if name == "id" else 2**63 - 1}
        path.write_text(json.dumps(values))
    read(damaged, verify=True, pattern=None)
    with dbuffer.WeightSender(damaged) as sender, pytest.raises(dbuffer.DBufferError):
        sender.send(SMALL.weights(4))
    read(damaged, verify=True, pattern=None)


@pytest.mark.parametrize("record", RECORDS[:4])
def test_a_store_of_another_format_is_left_alone(damaged, record):
    """A newer dbuffer may have written it: an older one must not take it for damage."""
    values = json.loads((damaged / record).read_bytes())
    for number in (0, FORMAT + 1, 99):
        (damaged / record).write_text(json.dumps(values | {"format": number, "new": 1}))
        before = contents(damaged)
        refused = pytest.raises(dbuffer.UnsupportedError, match=f"{record}.*\\b{number}\\b")
        with refused, dbuffer.WeightSender(damaged) as sender:
            sender.send(SMALL.weights(1))
        assert contents(damaged) == before
        if record in ("CURRENT", f"{NEWEST}/manifest.json"):
            with refused:
                read(damaged, verify=False)


@pytest.mark.parametrize("lost", [("CURRENT",), RECORDS[:3], (f"{NEWEST}/manifest.json",)])
def test_lost_records(damaged, lost):
    for record in lost:
        (damaged / record).unlink()
    with contextlib.suppress(dbuffer.StoreCorruptError):
        assert read(damaged, verify=True) is None
    assert_repaired_by_publishing(damaged)


def test_a_lost_pointer_does_not_send_versions_back(damaged):
    (damaged / "CURRENT").unlink()
    with dbuffer.WeightSender(damaged) as sender:
        assert sender.send(SMALL.weights(4)).version == 4


REPEATED = [("a", torch.ones(1)), ("a", torch.ones(1))]
"""Pairs that a sender refuses once it has begun to write."""


def test_a_generation_is_never_used_twice(store):
    """A reader compares generations, so one that came back would hide a rewrite from it."""
    double = DoubleBuffer(store)
    with dbuffer.WeightSender(store) as sender:
        publish(sender, 1, 2, 3)
        pointer = double.pointer()
        assert pointer is not None
        (store / "CURRENT").unlink()
        (store / pointer.buffer / "manifest.json").write_bytes(b"")
        with pytest.raises(dbuffer.InvalidWeightsError):
            sender.send(iter(REPEATED))
        manifest = double.manifest(pointer.buffer)
        assert manifest.generation > pointer.generation


# Files that are no files

EVERY_FILE = (*RECORDS, "writer.lock", "A/weights", "B/weights")


def put_socket(path: Path, aside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


PUT: dict[str, Callable[[Path, Path], None]] = {
    "fifo": lambda path, aside: os.mkfifo(path),
    "socket": put_socket,
    "directory": lambda path, aside: path.mkdir(),
    "link to its twin": lambda path, aside: path.symlink_to(aside),
    "dangling link": lambda path, aside: path.symlink_to(aside.with_name("nothing here")),
    "link to zeros": lambda path, aside: path.symlink_to("/dev/zero"),
}
"""Ways to put something else in the place of a file that was moved aside."""


@pytest.mark.parametrize("file", EVERY_FILE)
@pytest.mark.parametrize("put", PUT)
def test_something_else_in_the_place_of_a_file(damaged, file, put):
    path = damaged / file
    if path.name == "weights":
        [path] = path.parent.glob("weights-*")
    aside = damaged.with_name("aside")
    path.rename(aside)
    before = aside.read_bytes()
    PUT[put](path, aside)
    assert_read_or_refused(damaged, verify=True)
    if put == "directory" or path.name == "writer.lock":
        # What is inside may be somebody's: it is named, and left for a person to remove.
        with contextlib.suppress(dbuffer.StoreAccessError, dbuffer.StoreCorruptError):
            assert_repaired_by_publishing(damaged)
    else:
        assert_repaired_by_publishing(damaged)
    assert aside.read_bytes() == before, "something outside the store was written to"


@pytest.mark.parametrize("directory", ["A", "B", "receivers"])
@pytest.mark.parametrize("is_there", [False, True], ids=["missing", "a file"])
def test_a_directory_that_is_none(damaged, directory, is_there):
    shutil.rmtree(damaged / directory)
    if is_there:
        (damaged / directory).write_text("no directory")
    assert_read_or_refused(damaged, verify=True)
    if is_there:
        with pytest.raises(dbuffer.DBufferError, match=f"{damaged / directory}"):
            dbuffer.WeightSender(damaged)
    else:
        assert_repaired_by_publishing(damaged)


def test_deep_metadata_is_refused_or_can_be_read(store):
    """What one process can still write, another may have too little stack left to read."""

    def load_deeper(frames: int) -> int | None:
        return load_deeper(frames - 1) if frames else read(store, verify=False)

    with dbuffer.WeightSender(store) as sender:
        publish(sender, last := 1)
        for depth in (50, 200, 320, 600, 900, 940, 960, 980, 990, 2000):
            with contextlib.suppress(dbuffer.InvalidWeightsError):
                metadata = {"deep": nested(depth, "list")}
                sender.send(SMALL.weights(last + 1), version=last + 1, metadata=metadata)
            assert load_deeper(100) in (last, last + 1)
            publish(sender, last := last + 2)
            assert load_deeper(100) == last
