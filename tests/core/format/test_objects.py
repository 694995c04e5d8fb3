"""Names and records of a bucket's objects: what is damaged is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

import dbuffer
from dbuffer.format.manifest import Manifest, decode, encode, fields_of
from dbuffer.format.objects import (
    BucketPointer,
    BucketReceivers,
    BucketVersion,
    is_of_receivers,
    is_of_version,
    part_object,
    receivers_object,
)

RUN, XXH3 = "0123456789abcdef", "fedcba9876543210"
BASE, IDENTITY = f"{RUN}-3", f"{RUN}-6"
WRITER = "f" * 16

VERSION = BucketVersion(
    manifest=fields_of(
        Manifest(
            state="complete",
            version=2,
            generation=6,
            run=RUN,
            file=f"weights-{BASE}.td",
            history=RUN,
            file_bytes=300,
            layout_offset=256,
            layout_bytes=20,
            layout_xxh3=XXH3,
            is_final=True,
            origin=IDENTITY,
            anchor=BASE,
            chain=[BASE, IDENTITY],
        )
    ),
    part_bytes=128,
    anchor_version=1,
    weights=[XXH3] * 3,
    deltas={IDENTITY: [100, [XXH3]]},
)


def changed(**fields: Any) -> bytes:
    """The version's record with other fields, as a damaged bucket may have it."""
    return json.dumps(json.loads(encode(VERSION)) | fields).encode()


def test_records_are_read_as_they_were_written():
    for record in (VERSION, BucketPointer.to(VERSION, WRITER)):
        assert decode(type(record), encode(record)) == record
    assert VERSION.described.identity == IDENTITY
    assert (VERSION.weights_parts.num_bytes, VERSION.delta_parts(IDENTITY).num_bytes) == (300, 100)


def test_names_of_all_objects_are_known():
    names = VERSION.objects
    assert len(names) == 5
    assert all(map(is_of_version, names))
    assert is_of_receivers(receivers_object("mirror-node"))
    for name in (
        "CURRENT",
        "mine",
        f"{RUN}/weights/{BASE}/x",
        f"{RUN}/versions/2-{IDENTITY}-{XXH3}.json",
    ):
        assert not is_of_version(name)
    assert not is_of_receivers("receivers/a/b.json")
    assert not is_of_version("x/" + part_object(f"{RUN}/weights/{BASE}", 0, XXH3))


@pytest.mark.parametrize(
    "fields",
    [
        {"weights": [XXH3] * 2},
        {"weights": [XXH3, XXH3, "../../secret"]},
        {"weights": [XXH3, XXH3, 7]},
        {"part_bytes": 0},
        {"deltas": {}},
        {"deltas": {IDENTITY: [100, [XXH3, XXH3]]}},
        {"deltas": {IDENTITY: [0, []]}},
        {"deltas": {IDENTITY: "x"}},
        {"deltas": {"../secret": [100, [XXH3]]}},
        {"manifest": {}},
        {"manifest": VERSION.manifest | {"state": "writing"}},
        {"manifest": VERSION.manifest | {"origin": None}},
        {"manifest": VERSION.manifest | {"chain": [IDENTITY, BASE]}},
        {"anchor_version": -1},
        {"more": 1},
    ],
)
def test_a_damaged_version_is_refused(fields):
    with pytest.raises(dbuffer.StoreCorruptError):
        decode(BucketVersion, changed(**fields))


def test_a_pointer_that_was_changed_is_refused():
    pointer = BucketPointer.to(VERSION, WRITER)
    values = dataclasses.asdict(pointer)
    for other in (
        {"version": 3},
        {"identity": BASE},
        {"history": WRITER},
        {"writer": RUN},
        {"version_xxh3": RUN},
    ):
        with pytest.raises(dbuffer.StoreCorruptError, match="not as it was written"):
            BucketPointer(**values | other)
    assert pointer.by(RUN).writer == RUN
    assert dataclasses.replace(pointer.by(RUN).by(WRITER)) == pointer


def test_receivers_are_a_list():
    with pytest.raises(dbuffer.StoreCorruptError):
        decode(BucketReceivers, b'{"format": 1, "records": {}, "updated_at": 0.0}')
