"""Names and records of a bucket's objects: what is damaged is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import structs

import dbuffer
from dbuffer.format.lineage import Run, VersionId
from dbuffer.format.manifest import Manifest, decode, encode, fields_of
from dbuffer.format.objects import (
    BucketPointer,
    BucketReceivers,
    BucketVersion,
    Parts,
    is_of_receivers,
    part_object,
    receivers_object,
    version_object,
    version_of,
    weights_object,
)

RUN, XXH3 = "0123456789abcdef", "fedcba9876543210"
BASE, ID = VersionId("a" * 16, 1), VersionId(RUN, 2)
RUNS = [Run(RUN, "exp-7", "host", 7, 1.5, 1), Run(BASE.run, None, "host", 6, 0.5, None)]
WRITER = "f" * 16

VERSION = BucketVersion(
    manifest=(
        Manifest(
            state="complete",
            id=ID,
            runs=RUNS,
            generation=6,
            writer=WRITER,
            file=f"weights-{WRITER}-3.td",
            file_bytes=300,
            num_tensors=0,
            num_bytes=0,
            layout_offset=256,
            layout_bytes=20,
            layout_xxh3=XXH3,
            checksums_offset=0,
            checksums_xxh3=None,
            is_final=True,
            anchor=BASE,
            anchor_buffer=None,
            chain=[BASE, ID],
            published_at=0.0,
            metadata={},
        )
    ),
    part_bytes=128,
    weights=[XXH3] * 3,
    deltas={str(ID): Parts(100, [XXH3])},
)
MANIFEST = fields_of(VERSION.manifest)


def changed(**fields: Any) -> bytes:
    """The version's record with other fields, as a damaged bucket may have it."""
    return json.dumps(json.loads(encode(VERSION)) | fields).encode()


def test_records_are_read_as_they_were_written():
    for record in (VERSION, BucketPointer.to(VERSION, WRITER)):
        assert decode(type(record), encode(record)) == record
    assert (VERSION.id, VERSION.anchor, VERSION.manifest.id) == (ID, BASE, ID)
    assert (VERSION.weights_parts.num_bytes, VERSION.delta_parts(ID).num_bytes) == (300, 100)


def test_names_of_all_objects_are_known():
    names = VERSION.objects
    assert len(names) == 5
    assert {version_of(name) for name in names} == {BASE, ID}
    assert version_of(VERSION.name) == ID
    assert version_of(version_object(VersionId(RUN, 10), XXH3)) == VersionId(RUN, 10)
    assert VERSION.name < version_object(VersionId("0" * 16, 10), XXH3), "sorted by number"
    assert is_of_receivers(receivers_object(f"mirror-node-{RUN}"))
    for name in (
        "CURRENT",
        "mine",
        f"{weights_object(BASE)}/x",
        f"versions/2-{RUN}-{XXH3}.json",
        f"versions/{2:019}-{RUN}.json",
    ):
        assert version_of(name) is None
    assert not is_of_receivers("receivers/a/b.json")
    assert not is_of_receivers("receivers/others.json")
    assert version_of("x/" + part_object(weights_object(BASE), 0, XXH3)) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"weights": [XXH3] * 2},
        {"weights": [XXH3, XXH3, "../../secret"]},
        {"weights": [XXH3, XXH3, 7]},
        {"part_bytes": 0},
        {"deltas": {}},
        {"deltas": {str(ID): [100, [XXH3, XXH3]]}},
        {"deltas": {str(ID): [0, []]}},
        {"deltas": {str(ID): "x"}},
        {"deltas": {"../secret": [100, [XXH3]]}},
        {"manifest": {}},
        {"manifest": MANIFEST | {"state": "writing"}},
        {"deltas": {str(BASE): [100, [XXH3]]}},
        {"manifest": MANIFEST | {"id": BASE}},
        {"manifest": MANIFEST | {"runs": []}},
        {"manifest": MANIFEST | {"chain": [ID, BASE]}},
        {"manifest": {name: MANIFEST[name] for name in MANIFEST if name != "is_final"}},
        {"manifest": MANIFEST | {"extra": 1}},
        {"more": 1},
    ],
)
def test_a_damaged_version_is_refused(fields):
    with pytest.raises(dbuffer.StoreCorruptError):
        decode(BucketVersion, changed(**fields))


def test_a_pointer_that_was_changed_is_refused():
    pointer = BucketPointer.to(VERSION, WRITER)
    for other in (
        {"id": VersionId(RUN, 3)},
        {"runs": RUNS[:1]},
        {"writer": RUN},
        {"version_xxh3": RUN},
    ):
        with pytest.raises(dbuffer.StoreCorruptError, match="not as it was written"):
            structs.replace(pointer, **other)
    assert pointer.by(RUN).writer == RUN
    assert pointer.by(RUN).by(WRITER) == pointer


def test_receivers_are_a_list():
    with pytest.raises(dbuffer.StoreCorruptError):
        decode(BucketReceivers, b'{"format": 1, "records": {}, "updated_at": 0.0}')
