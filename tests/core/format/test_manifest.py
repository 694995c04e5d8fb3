"""The records of a store and their strict codec."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbuffer.errors import StoreCorruptError, UnsupportedError
from dbuffer.format.manifest import (
    FORMAT,
    MAX_INTEGER,
    Manifest,
    Pointer,
    ReceiverRecord,
    WriterRecord,
    decode,
    encode,
    is_receiver_id,
)

RUN = "0123456789abcdef"
POINTER = Pointer(version=7, buffer="A", generation=14, run=RUN, history=RUN)
MANIFEST = Manifest(
    state="complete",
    version=7,
    generation=14,
    run=RUN,
    history=RUN,
    file=f"weights-{RUN}-13.td",
    file_bytes=1000,
    num_tensors=2,
    num_bytes=100,
    layout_offset=192,
    layout_bytes=300,
    layout_xxh3=RUN,
    checksums_offset=128,
    checksums_xxh3=RUN,
    published_at=1.7e9,
    metadata={"step": 7},
)
WRITER = WriterRecord(epoch=1, run=RUN, host="host", pid=12, started_at=1.5, history=RUN)
RECEIVER = ReceiverRecord(
    receiver="r-1",
    token=RUN,
    host="host",
    pid=12,
    applied_version=None,
    held_version=3,
    updated_at=1.5,
)
RECORDS = (POINTER, MANIFEST, WRITER, RECEIVER)
IDS = ("pointer", "manifest", "writer", "receiver")

integers = st.integers(0, MAX_INTEGER)
boots = st.just("") | st.uuids().map(str)
runs = st.text("0123456789abcdef", min_size=16, max_size=16)
# A pair of surrogates is one character to JSON; a string that holds one is no proper text.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
times = st.floats(allow_nan=False, allow_infinity=False)
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | times | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)
any_record = st.one_of(
    st.builds(
        Pointer,
        version=integers,
        buffer=st.sampled_from("AB"),
        generation=integers,
        run=runs,
        history=runs,
    ),
    st.builds(
        WriterRecord,
        epoch=integers,
        run=runs,
        host=texts,
        pid=integers,
        started_at=times,
        history=runs,
        boot=boots,
        pid_namespace=integers,
        started=integers,
    ),
    st.builds(
        ReceiverRecord,
        receiver=st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", fullmatch=True),
        host=texts,
        pid=integers,
        applied_version=st.none() | integers,
        held_version=st.none() | integers,
        updated_at=times,
        part_of=st.none() | st.just("engine"),
        staged_version=st.none() | integers,
        problem=st.none() | texts,
        problem_version=st.none() | integers,
        stats=st.dictionaries(texts, integers | times, max_size=4),
        state=st.sampled_from([None, "serving", "broken"]),
        attempt=st.none() | st.from_regex(r"[0-9a-f]{16}", fullmatch=True),
        boot=boots,
        pid_namespace=integers,
        started=integers,
        token=runs,
        is_ephemeral=st.booleans(),
        is_relayed=st.booleans(),
        has_ended=st.booleans(),
        metadata=st.dictionaries(texts, documents, max_size=4),
    ),
    st.builds(
        Manifest,
        state=st.just("writing"),
        version=integers,
        generation=integers,
        run=runs,
        history=runs,
        file=st.from_regex(r"weights-[0-9a-f]{16}-[0-9]{1,19}\.td", fullmatch=True),
        is_final=st.booleans(),
        origin=st.none() | st.from_regex(r"[0-9a-f]{16}-[0-9]{1,19}", fullmatch=True),
        published_at=times,
        metadata=st.dictionaries(texts, documents, max_size=4),
    ),
)


def changed(record, **values) -> bytes:
    """The record's bytes with some fields changed, or (``...``) left out."""
    data = {**json.loads(encode(record)), **values}
    return json.dumps({name: value for name, value in data.items() if value is not ...}).encode()


@given(any_record)
def test_a_record_comes_back_as_it_was(record):
    data = encode(record)
    assert decode(type(record), data) == record
    assert data.isascii()
    assert data.count(b"\n") == 1
    assert data.endswith(b"\n")


@pytest.mark.parametrize("record", RECORDS, ids=IDS)
def test_every_field_must_be_there(record):
    for item in dataclasses.fields(record):
        with pytest.raises(StoreCorruptError, match=item.name):
            decode(type(record), changed(record, **{item.name: ...}))


@pytest.mark.parametrize("record", RECORDS, ids=IDS)
def test_no_other_field_may_be_there(record):
    with pytest.raises(StoreCorruptError, match="extra"):
        decode(type(record), changed(record, extra=1))


@pytest.mark.parametrize("record", RECORDS, ids=IDS)
@pytest.mark.parametrize("value", [True, [], 1.5j, "\x00", -1, 2**63, 1e400, {"a": 1}], ids=repr)
def test_no_field_takes_what_it_should_not(record, value):
    for item in dataclasses.fields(record):
        types = record.TYPES[item.name]
        if isinstance(value, complex) or (type(value) in types and not refused(item.name, value)):
            continue
        with pytest.raises(StoreCorruptError, match=item.name):
            decode(type(record), changed(record, **{item.name: value}))


def refused(name: str, value: object) -> bool:
    """Whether a value of a field's own type must be refused."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return is_number or (value == "\x00" and name not in ("host", "problem"))


@pytest.mark.parametrize("value", ["1", None, True, [1], {}], ids=repr)
def test_stats_are_numbers(value):
    with pytest.raises(StoreCorruptError, match="stats"):
        decode(ReceiverRecord, changed(RECEIVER, stats={"stage_s": value}))


@pytest.mark.parametrize("record", RECORDS, ids=IDS)
@pytest.mark.parametrize("value", [..., None, 0, FORMAT + 1, True, "1", 1.0, [1]], ids=repr)
def test_an_unknown_format_says_so(record, value):
    with pytest.raises(UnsupportedError):
        decode(type(record), changed(record, format=value))


@pytest.mark.parametrize("record", RECORDS, ids=IDS)
def test_any_cut_is_refused(record):
    data = encode(record)
    for end in range(len(data) - 1):  # without the last byte, the line's end, it is whole
        with pytest.raises(StoreCorruptError):
            decode(type(record), data[:end])


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"null", b"[]", b"3", b"{", b"\xff\xfe", b'{"format":1} x'),
        *(b"[" * 100_000, b'{"a":' * 100_000, b'{"format":1,"a":' + b"9" * 5000 + b"}"),
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_is_not_a_json_object_is_refused(data):
    for record in RECORDS:
        with pytest.raises(StoreCorruptError):
            decode(type(record), data)


@given(st.sampled_from(RECORDS), st.data())
def test_swapped_bytes_are_refused_or_another_good_record(record, data):
    text = bytearray(encode(record))
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        again = decode(type(record), bytes(text))
    except (StoreCorruptError, UnsupportedError):
        return
    assert decode(type(record), encode(again)) == again


@pytest.mark.parametrize(
    "file",
    [
        *("", ".", "..", "../weights.td", "/etc/passwd", "manifest.json", "weights-1.td"),
        *(f"../A/weights-{RUN}-1.td", f"weights-{RUN}-.td", f"weights-{RUN.upper()}-1.td"),
        *(f"weights-{RUN}-1.td\n", f"weights-{RUN}-1.td/..", f"x/weights-{RUN}-1.td"),
        f"weights-{RUN}-{10**19}.td",
    ],
)
def test_a_manifest_names_a_weights_file_of_its_own_directory_only(file):
    with pytest.raises(StoreCorruptError, match="file"):
        decode(Manifest, changed(MANIFEST, file=file))


@pytest.mark.parametrize("buffer", ["", "C", "a", "AB", "../A", "A/", "A\n"])
def test_a_pointer_names_one_of_the_two_buffers(buffer):
    with pytest.raises(StoreCorruptError, match="buffer"):
        decode(Pointer, changed(POINTER, buffer=buffer))


@pytest.mark.parametrize(
    "values",
    [
        {"layout_xxh3": None},
        {"num_tensors": 9},
        {"num_tensors": MAX_INTEGER},
        {"layout_offset": 128},
        {"layout_bytes": 809},
        {"layout_bytes": MAX_INTEGER},
        {"file_bytes": 491},
        {"state": "done"},
    ],
    ids=repr,
)
def test_a_complete_manifest_must_be_of_one_piece(values):
    with pytest.raises(StoreCorruptError):
        decode(Manifest, changed(MANIFEST, **values))
    with pytest.raises(StoreCorruptError):
        dataclasses.replace(MANIFEST, **values)


def test_names_of_receivers():
    for good in ("a", "_", "worker-0", "Node1.rank_3", "x" * 128):
        assert is_receiver_id(good)
    for bad in ("", ".", "..", ".a", "-a", "a/b", "../a", "a b", "a\n", "é", "x" * 129, "a\0"):
        assert not is_receiver_id(bad)
