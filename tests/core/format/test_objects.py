"""Names and records of a bucket's objects: what is damaged is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import structs

import dbuffer
from dbuffer.format.layout import digest
from dbuffer.format.lineage import Run, VersionId
from dbuffer.format.manifest import Manifest, decode, fields_of
from dbuffer.format.objects import (
    BucketReceivers,
    BucketVersion,
    FileObject,
    is_of_receivers,
    receivers_object,
    version_of,
)

RUN, XXH3 = "0123456789abcdef", "fedcba9876543210"
BASE, ID = VersionId("a" * 16, 1), VersionId(RUN, 2)
RUNS = [Run(RUN, "exp-7", "host", 7, 1.5, 1), Run(BASE.run, None, "host", 6, 0.5, None)]
WRITER = "f" * 16
DELTA = FileObject(f"versions/{ID}-{XXH3}.delta", 100)

VERSION = BucketVersion.sealed(
    writer=WRITER,
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
    files=[FileObject(f"versions/{BASE}-{XXH3}.weights", 300), DELTA],
)
MANIFEST = fields_of(VERSION.manifest)


def changed(**fields: Any) -> bytes:
    """The version's record with other fields and the digest of these."""
    values = {**fields_of(VERSION), **fields}
    others = {name: value for name, value in values.items() if name != "xxh3"}
    xxh3 = digest(json.dumps(others, sort_keys=True).encode())
    return json.dumps({"format": 1, "xxh3": xxh3, **others}).encode()


def test_names_of_all_objects_are_known():
    assert [version_of(file.name) for file in VERSION.files] == [BASE, ID]
    assert is_of_receivers(receivers_object(f"mirror-node-{RUN}"))
    for name in (
        "CURRENT",
        "mine",
        f"{VERSION.weights_file.name}/x",
        f"versions/{BASE}",
        f"x/{VERSION.weights_file.name}",
    ):
        assert version_of(name) is None
    assert not is_of_receivers("receivers/a/b.json")
    assert not is_of_receivers("receivers/others.json")


@pytest.mark.parametrize(
    "fields",
    [
        {"writer": "me"},
        {"files": []},
        {"files": [DELTA]},
        {"files": [DELTA] * 3},
        {"files": [DELTA, ["../../secret", 100]]},
        {"files": [DELTA, [f"{DELTA.name}\n", 100]]},
        {"files": [DELTA, [DELTA.name, 0]]},
        {"files": [DELTA, [DELTA.name]]},
        {"files": "x"},
        {"files": {str(ID): [100, XXH3]}},
        {"manifest": {}},
        {"manifest": MANIFEST | {"state": "writing"}},
        {"manifest": MANIFEST | {"id": BASE}},
        {"manifest": MANIFEST | {"runs": []}},
        {"manifest": MANIFEST | {"chain": [ID, BASE]}},
        {"manifest": {name: MANIFEST[name] for name in MANIFEST if name != "is_final"}},
        {"manifest": MANIFEST | {"extra": 1}},
        {"more": 1},
    ],
)
def test_a_damaged_version_is_refused(fields):
    with pytest.raises(dbuffer.StoreCorruptError) as caught:
        decode(BucketVersion, changed(**fields))
    assert "damaged after it was written" not in str(caught.value)


def test_a_version_that_was_changed_is_refused():
    for other in (
        {"writer": RUN},
        {"files": [DELTA, DELTA]},
    ):
        with pytest.raises(dbuffer.StoreCorruptError, match="damaged after it was written"):
            structs.replace(VERSION, **other)
    assert VERSION.by(RUN).writer == RUN
    assert VERSION.by(RUN).by(WRITER) == VERSION


def test_receivers_are_a_list():
    with pytest.raises(dbuffer.StoreCorruptError):
        decode(BucketReceivers, b'{"format": 1, "records": {}, "updated_at": 0.0}')
