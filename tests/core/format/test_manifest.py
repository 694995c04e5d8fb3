"""The records of a store and their strict codec."""

from __future__ import annotations

import json
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from dbuffer.errors import StoreCorruptError, UnsupportedError
from dbuffer.format.lineage import MAX_NUMBER, MAX_RUNS, Run, VersionId
from dbuffer.format.lineage import RUN as RUN_PATTERN
from dbuffer.format.manifest import (
    FORMAT,
    Manifest,
    Pointer,
    ReceiverRecord,
    WriterRecord,
    decode,
    encode,
)
from dbuffer.store.records import OwnRecord

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
    is_final=False,
    anchor=None,
    anchor_buffer=None,
    chain=[],
    published_at=1.7e9,
    metadata={"step": 7},
)
PROCESS = {"host": "host", "pid": 12, "boot": "", "pid_namespace": 0, "started": 0}
WRITER = WriterRecord(epoch=1, token=RUN, started_at=1.5, **PROCESS)
RECEIVER = structs.replace(
    OwnRecord("r-1").current,
    token=RUN,
    applied=VERSION,
    runs=RUNS,
    held=VersionId(RUN, 8),
    updated_at=1.5,
    **PROCESS,
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
numbers = st.integers(1, MAX_NUMBER)
run_ids = st.from_regex(RUN_PATTERN, fullmatch=True)
version_ids = st.builds(VersionId, run_ids, numbers)
pids = st.integers(0, MAX_NUMBER)
runs = st.builds(Run, run_ids, st.none() | texts, texts, pids, times, st.none() | numbers)
OF_TYPE = {
    VersionId: version_ids,
    float: times,
    str: texts,
    bool: st.booleans(),
    dict[str, Any]: st.dictionaries(texts, documents, max_size=4),
    dict[str, int | float]: st.dictionaries(texts, pids | times, max_size=4),
    type(None): st.none(),
}


def values_of(hint):
    if get_origin(hint) in (Union, UnionType):
        return st.one_of([values_of(choice) for choice in get_args(hint)])
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if hint in OF_TYPE:
        return OF_TYPE[hint]
    if get_origin(hint) is dict:
        return st.dictionaries(texts, values_of(get_args(hint)[1]), max_size=4)
    kind, limits = get_args(hint)
    return st.from_regex(limits.pattern) if kind is str else st.integers(limits.ge, limits.le)


def records(kind, **given):
    """Records of any values in the fields that are not given."""
    fields = {item.name: item.type for item in structs.fields(kind) if item.name not in given}
    return st.builds(kind, **{name: values_of(hint) for name, hint in fields.items()}, **given)


@st.composite
def records_of_version(draw, kind, version="id", **given):
    """Records that name a version in this field, and the runs that lead to it."""
    others = draw(st.lists(runs, max_size=4))
    run, number = draw(runs), draw(numbers)
    lineage = {version: VersionId(run.id, number), "runs": [run, *others]}
    return draw(records(kind, **{name: st.just(value) for name, value in lineage.items()}, **given))


any_record = st.one_of(
    records_of_version(Pointer),
    records(WriterRecord),
    records(ReceiverRecord, applied=st.none(), runs=st.just([])),
    records_of_version(ReceiverRecord, version="applied"),
    records_of_version(
        Manifest,
        state=st.just("writing"),
        anchor=st.none(),
        anchor_buffer=st.none(),
        chain=st.just([]),
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
def test_a_record_is_refused_with_a_field_too_few_or_too_many(record):
    for name in record.__struct_fields__:
        with pytest.raises(StoreCorruptError, match=name):
            decode(type(record), changed(record, **{name: ...}))
    with pytest.raises(StoreCorruptError, match="extra"):
        decode(type(record), changed(record, extra=1))


@pytest.mark.parametrize("record", RECORDS, ids=IDS)
def test_a_lone_surrogate_is_text_at_most(record):
    for name in set(record.__struct_fields__) - {"host", "problem"}:
        with pytest.raises(StoreCorruptError, match=rf"ud800|{name}"):
            decode(type(record), changed(record, **{name: "\ud800"}))
    with pytest.raises(StoreCorruptError, match=r"ud800"):
        decode(type(record), changed(record, **{"\ud800": 1}))


@pytest.mark.parametrize("record", RECORDS, ids=IDS)
def test_no_field_takes_a_number_that_no_float_can_have(record):
    for name in record.__struct_fields__:
        with pytest.raises(StoreCorruptError):
            decode(type(record), changed(record, **{name: 10**400}))


def test_a_refusal_says_where():
    message = (
        r"^version pointer: Expected `int` >= 1 - at `\$.id\[1\]`$",
        r"^version pointer: Expected `str` matching regex .* - at `\$.writer`$",
    )
    for values, said in zip(({"id": [RUN, -3]}, {"writer": f"{RUN}x"}), message, strict=True):
        with pytest.raises(StoreCorruptError, match=said):
            decode(Pointer, changed(POINTER, **values))


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
    *([], [RUNS[1]], [FIRST] * (MAX_RUNS + 1), [FIRST[:5]], [[*FIRST, 1]], [FIRST, FIRST[:5]]),
    *(
        [[*FIRST[:at], value, *FIRST[at + 1 :]]]
        for at, value in ((0, "../secret"), (3, -1), (5, 0))
    ),
)
WRONG_TEXTS = (
    *("", RUN, "7", f"{RUN}-", f"-{RUN}-7", f"{RUN}-7\n", f"{RUN.upper()}-7", f"{RUN}-x"),
    *(f"{RUN}-0", f"{RUN}-{2**63}", f"{RUN}-{10**19}", f"{RUN}--1", f"../{RUN}-7"),
)
WRONG_IDS = (
    *(f"{RUN}-7", [RUN], [RUN, 7, 7], [RUN, True], [f"{RUN}\n", 7], [f"../{RUN}", 7]),
    *([RUN, 0], [RUN, 2**63]),
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
            (record, {field: runs_}, "runs")
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
        # A complete manifest is of one piece.
        (MANIFEST, {"layout_xxh3": None}, "manifest"),
        (MANIFEST, {"num_tensors": 9}, "manifest"),
        (MANIFEST, {"num_tensors": MAX_NUMBER}, "manifest"),
        (MANIFEST, {"layout_offset": 128}, "manifest"),
        (MANIFEST, {"layout_bytes": 809}, "manifest"),
        (MANIFEST, {"layout_bytes": MAX_NUMBER}, "manifest"),
        (MANIFEST, {"file_bytes": 491}, "manifest"),
        (MANIFEST, {"state": "done"}, "manifest"),
    ],
)
def test_values_that_do_not_fit_are_refused(record, values, message):
    with pytest.raises(StoreCorruptError, match=message):
        decode(type(record), changed(record, **values))


def test_a_version_that_no_run_leads_to_is_refused():
    for record in (POINTER, MANIFEST):
        with pytest.raises(StoreCorruptError, match="runs do not lead to"):
            decode(type(record), changed(record, id=["e" * 16, 7]))
    with pytest.raises(StoreCorruptError, match="runs do not lead to"):
        decode(ReceiverRecord, changed(RECEIVER, applied=["e" * 16, 7]))


def test_the_text_of_an_id_is_read_as_it_was_written():
    assert VersionId.parse(str(VERSION)) == VERSION == VersionId.parse(f"{RUN}-7")
    for text in WRONG_TEXTS:
        with pytest.raises(ValueError, match="RUN-NUMBER"):
            VersionId.parse(text)
