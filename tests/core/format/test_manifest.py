"""The records of a store and their strict codec."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbuffer.errors import StoreCorruptError, UnsupportedError
from dbuffer.format.lineage import MAX_RUNS, Run, VersionId
from dbuffer.format.lineage import RUN as RUN_PATTERN
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
VERSION = VersionId(RUN, 7)
RUNS = [Run(RUN, "exp-7", "host", 12, 1.5, 3), Run("f" * 16, None, "other", 13, 1.0, None)]
POINTER = Pointer(id=VERSION, runs=RUNS, buffer="A", generation=14, writer=RUN)
MANIFEST = Manifest(
    state="complete",
    id=VERSION,
    runs=RUNS,
    generation=14,
    writer=RUN,
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
WRITER = WriterRecord(epoch=1, token=RUN, host="host", pid=12, started_at=1.5)
RECEIVER = ReceiverRecord(
    receiver="r-1",
    token=RUN,
    host="host",
    pid=12,
    applied=VERSION,
    runs=RUNS,
    held=VersionId(RUN, 8),
    updated_at=1.5,
)
RECORDS = (POINTER, MANIFEST, WRITER, RECEIVER)
IDS = ("pointer", "manifest", "writer", "receiver")

# A pair of surrogates is one character to JSON; a string that holds one is no proper text.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
times = st.floats(allow_nan=False, allow_infinity=False)
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | times | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)
OF_TYPE = {
    int: st.integers(0, MAX_INTEGER),
    float: times,
    str: texts,
    bool: st.booleans(),
    dict: st.dictionaries(texts, documents, max_size=4),
    type(None): st.none(),
}
numbers = st.integers(1, MAX_INTEGER)
run_ids = st.from_regex(RUN_PATTERN, fullmatch=True)
version_ids = st.builds(VersionId, run_ids, numbers)
OF_TYPE[VersionId] = version_ids
pids = st.integers(0, MAX_INTEGER)
runs = st.builds(Run, run_ids, st.none() | texts, texts, pids, times, st.none() | numbers)


def records(kind, *names, **given):
    """Records of any values in the named fields; without names, in all fields."""

    def values(name):
        pattern = kind.PATTERNS.get(name)
        of_type = (
            OF_TYPE if pattern is None else OF_TYPE | {str: st.from_regex(pattern, fullmatch=True)}
        )
        return st.one_of([of_type[one] for one in kind.TYPES[name]])

    fields = {name: values(name) for name in names or kind.TYPES if name not in given}
    return st.builds(kind, **fields, **given)


@st.composite
def records_of_version(draw, kind, *names, version="id", **given):
    """Records that name a version in this field, and the runs that lead to it."""
    others = draw(st.lists(runs, max_size=4))
    run, number = draw(runs), draw(numbers)
    lineage = {version: VersionId(run.id, number), "runs": [run, *others]}
    fields = {name: st.just(value) for name, value in lineage.items()}
    return draw(records(kind, *names, **fields, **given))


stats = st.dictionaries(texts, st.integers(0, MAX_INTEGER) | times, max_size=4)
of_receiver = {"state": st.sampled_from([None, "serving", "broken"]), "stats": stats}
any_record = st.one_of(
    records_of_version(Pointer, buffer=st.sampled_from("AB")),
    records(WriterRecord),
    records(ReceiverRecord, applied=st.none(), runs=st.just([]), **of_receiver),
    records_of_version(ReceiverRecord, version="applied", **of_receiver),
    records_of_version(
        *(Manifest, "generation", "writer", "file", "is_final", "published_at", "metadata"),
        state=st.just("writing"),
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
def test_a_record_is_refused_with_a_field_too_few_or_too_many_or_cut_anywhere(record):
    for item in dataclasses.fields(record):
        with pytest.raises(StoreCorruptError, match=item.name):
            decode(type(record), changed(record, **{item.name: ...}))
    with pytest.raises(StoreCorruptError, match="extra"):
        decode(type(record), changed(record, extra=1))
    data = encode(record)
    for end in range(len(data) - 1):  # without the last byte, the line's end, it is whole
        with pytest.raises(StoreCorruptError):
            decode(type(record), data[:end])


@pytest.mark.parametrize("record", RECORDS, ids=IDS)
@pytest.mark.parametrize("value", [True, [], 1.5j, "\x00", -1, 2**63, {"a": 1}], ids=repr)
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


@pytest.mark.parametrize("record", RECORDS, ids=IDS)
@pytest.mark.parametrize("value", [..., None, 0, FORMAT + 1, True, "1", 1.0, [1]], ids=repr)
def test_an_unknown_format_says_so(record, value):
    with pytest.raises(UnsupportedError):
        decode(type(record), changed(record, format=value))


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


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
@pytest.mark.parametrize("place", [b"1700000000.0", b'"step":7'])
def test_numbers_that_are_no_json_are_refused(place, number):
    """Python would read them, and write them again for others that do not."""
    value = place[: place.rfind(b":") + 1] + number
    with pytest.raises(StoreCorruptError, match="not JSON"):
        decode(Manifest, encode(MANIFEST).replace(place, value))


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


FILES = (
    *("", ".", "..", "../weights.td", "/etc/passwd", "manifest.json", "weights-1.td"),
    *(f"../A/weights-{RUN}-1.td", f"weights-{RUN}-.td", f"weights-{RUN.upper()}-1.td"),
    *(f"weights-{RUN}-1.td\n", f"weights-{RUN}-1.td/..", f"x/weights-{RUN}-1.td"),
    f"weights-{RUN}-{10**19}.td",
)

FIRST = ["0123456789abcdef", "exp-7", "host", 12, 1.5, 3]
WRONG_RUNS = (
    *([], [RUNS[1]], [FIRST] * (MAX_RUNS + 1), [FIRST[:5]], [[*FIRST, 1]], [RUN], [None]),
    *(
        [[*FIRST[:at], value, *FIRST[at + 1 :]]]
        for at, value in (
            *((0, "0" * 15), (0, "../secret"), (1, 7), (2, None), (3, "12"), (3, True), (3, -1)),
            *((4, None), (4, "1.5"), (5, 3.5), (5, "3"), (5, True), (5, -1), (5, 0), (5, 2**63)),
        )
    ),
    [FIRST, FIRST[:5]],
)
WRONG_IDS = (
    *("", RUN, "7", f"{RUN}-", f"-{RUN}-7", f"{RUN}-7\n", f"{RUN.upper()}-7", f"{RUN}-x"),
    *(f"{RUN}-0", f"{RUN}-{2**63}", f"{RUN}-{10**19}", f"{RUN}--1", f"../{RUN}-7"),
)


@pytest.mark.parametrize(
    ("record", "values", "message"),
    [
        *((MANIFEST, {"file": file}, "file") for file in FILES),
        *(
            (POINTER, {"buffer": name}, "buffer")
            for name in ("", "C", "a", "AB", "../A", "A/", "A\n")
        ),
        *(
            (record, {field: runs_}, "runs do not lead to")
            for record, field in ((POINTER, "runs"), (MANIFEST, "runs"), (RECEIVER, "runs"))
            for runs_ in WRONG_RUNS
        ),
        *(
            (record, {field: id_}, field)
            for record, field in (
                (RECEIVER, "held"),
                (RECEIVER, "unreadable"),
                (MANIFEST, "anchor"),
            )
            for id_ in WRONG_IDS
        ),
        *((record, {"id": id_}, "id") for record in (POINTER, MANIFEST) for id_ in WRONG_IDS),
        *((RECEIVER, {"applied": id_}, "applied") for id_ in WRONG_IDS),
        *((RECEIVER, {"stats": {"a": value}}, "stats") for value in ("1", None, True, [1], {})),
        # A complete manifest is of one piece.
        (MANIFEST, {"layout_xxh3": None}, "manifest"),
        (MANIFEST, {"num_tensors": 9}, "manifest"),
        (MANIFEST, {"num_tensors": MAX_INTEGER}, "manifest"),
        (MANIFEST, {"layout_offset": 128}, "manifest"),
        (MANIFEST, {"layout_bytes": 809}, "manifest"),
        (MANIFEST, {"layout_bytes": MAX_INTEGER}, "manifest"),
        (MANIFEST, {"file_bytes": 491}, "manifest"),
        (MANIFEST, {"state": "done"}, "manifest"),
    ],
)
def test_values_that_do_not_fit_are_refused(record, values, message):
    with pytest.raises(StoreCorruptError, match=message):
        decode(type(record), changed(record, **values))
    with pytest.raises(StoreCorruptError):
        dataclasses.replace(record, **values)


def test_a_version_that_no_run_leads_to_is_refused():
    for record in (POINTER, MANIFEST):
        with pytest.raises(StoreCorruptError, match="runs do not lead to"):
            decode(type(record), changed(record, id=f"{'e' * 16}-7"))
    with pytest.raises(StoreCorruptError, match="runs do not lead to"):
        decode(ReceiverRecord, changed(RECEIVER, applied=f"{'e' * 16}-7"))


def test_the_text_of_an_id_is_read_as_it_was_written():
    assert VersionId.parse(str(VERSION)) == VERSION == VersionId.parse(f"{RUN}-7")
    for text in WRONG_IDS:
        with pytest.raises(ValueError, match="RUN-NUMBER"):
            VersionId.parse(text)


def test_names_of_receivers():
    for good in ("a", "_", "worker-0", "Node1.rank_3", "x" * 128):
        assert is_receiver_id(good)
    for bad in ("", ".", "..", ".a", "-a", "a/b", "../a", "a b", "a\n", "é", "x" * 129, "a\0"):
        assert not is_receiver_id(bad)
