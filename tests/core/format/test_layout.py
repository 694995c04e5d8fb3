"""Where tensors lie in a weights file, and the codec that says so."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbuffer.errors import StoreCorruptError, UnsupportedError
from dbuffer.format.layout import (
    ALIGNMENT_BYTES,
    BLOCK_BYTES,
    ITEM_BYTES,
    Layout,
    Piece,
    TensorSpec,
    align,
)
from dbuffer.format.manifest import FORMAT

specs = st.builds(
    TensorSpec,
    # Any text at all, lone surrogates too, without pairs of them: JSON makes one character of
    # a pair, and no name that is published has one.
    st.text(max_size=12) | st.text(st.characters(categories=["Cs"]), max_size=1),
    st.sampled_from(sorted(ITEM_BYTES)),
    st.lists(st.integers(0, 40), max_size=4).map(tuple),
)


@st.composite
def layouts(draw) -> Layout:
    chosen = draw(st.lists(specs, max_size=8, unique_by=lambda spec: spec.name))
    names = [spec.name for spec in chosen]
    others = st.text(max_size=8).filter(lambda name: name not in names)
    aliases = draw(st.dictionaries(others, st.sampled_from(names), max_size=3)) if names else {}
    return Layout.of(chosen, aliases)


def layout_json(**values) -> bytes:
    rows = [["a", "float32", [2, 3], 0], ["b", "bfloat16", [], 64]]
    good = {"format": 1, "tensors": rows, "aliases": {"c": "a"}, "parts": [], "pieces": []}
    return json.dumps(good | values).encode()


def test_every_dtype_that_a_checkpoint_can_hold_has_a_place():
    ours = {getattr(torch, name) for name in ITEM_BYTES}
    theirs = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    left_over = {str(dtype).removeprefix("torch.") for dtype in theirs - ours}
    # What is left are placeholders without arithmetic and the old quantised types.
    kinds = ("bit", "int", "uint", "qint", "quint", "bcomplex")
    assert all(name.startswith(kinds) for name in left_over)
    assert not left_over & {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"}


@given(layouts())
def test_a_layout_comes_back_as_it_was(layout):
    data = layout.encoded
    assert data.isascii()
    again = Layout.decode(data, end=layout.checksums_offset)
    assert again == layout
    assert again.num_bytes == layout.num_bytes == sum(spec.num_bytes for spec in layout.specs)


@given(layouts())
def test_tensors_are_aligned_in_order_and_apart(layout):
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in layout.offsets)
    ends = [at + spec.num_bytes for at, spec in zip(layout.offsets, layout.specs, strict=True)]
    starts = [*layout.offsets[1:], layout.checksums_offset]
    assert all(end <= start for end, start in zip(ends, starts, strict=bool(ends)))
    table_end = layout.checksums_offset + 8 * len(layout.specs)
    assert table_end <= layout.layout_offset < table_end + ALIGNMENT_BYTES


@st.composite
def layouts_in_parts(draw) -> Layout:
    """Tensors cut anywhere, their pieces dealt out to parts."""
    layout = draw(layouts())
    part_bytes = [0] * draw(st.integers(1, 4))
    pieces = []
    for index, size in enumerate(layout.sizes):
        cuts = draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else set()
        for start, end in itertools.pairwise([0, *sorted(cuts), size] if size else []):
            part = draw(st.integers(0, len(part_bytes) - 1))
            place = align(part_bytes[part])
            pieces.append(Piece(index, start, end - start, part, place))
            part_bytes[part] = place + end - start
    return dataclasses.replace(layout, part_bytes=tuple(part_bytes), pieces=tuple(pieces))


@given(layouts_in_parts())
def test_a_layout_in_parts_comes_back_as_it_was(layout):
    for one in (layout, layout.joined):
        assert Layout.decode(one.encoded, end=one.checksums_offset) == one
        covered = [0] * len(layout.specs)
        for block in one.blocks:
            assert block.offset == covered[block.tensor]
            assert block.num_bytes <= BLOCK_BYTES
            covered[block.tensor] += block.num_bytes
        assert covered == layout.sizes
    assert not layout.joined.is_in_parts


GOOD_PIECES = [[0, 0, 8, 1, 0], [0, 8, 16, 0, 64], [1, 0, 2, 0, 0]]


def test_good_layouts_are_read():
    assert Layout.decode(layout_json(), end=128).offsets == (0, 64)
    layout = Layout.decode(layout_json(parts=[80, 8], pieces=GOOD_PIECES), end=128)
    assert [str(spec) for spec in layout.specs] == ["a float32[2, 3]", "b bfloat16[]"]
    assert layout.aliases == {"c": "a"}
    assert layout.part_bytes == (80, 8)
    assert layout.pieces[1] == Piece(tensor=0, offset=8, num_bytes=16, part=0, place=64)


WRONG_ROWS = [
    ["b", "bfloat16", [], 63],
    ["b", "bfloat16", [], 0],
    ["b", "bfloat16", [], -64],
    ["b", "bfloat16", [], 128],
    ["b", "bfloat16", [33], 64],
    ["b", "bfloat16", [2**62, 2**62], 64],
    ["b", "bfloat16", [-1], 64],
    ["b", "bfloat16", [2**63], 64],
    ["b", "bfloat16", [1] * 65, 64],
    ["b", "bfloat16", [], 2**63],
    ["b", "float33", [], 64],
    ["a", "bfloat16", [], 64],
    ["b", "bfloat16", []],
]

WRONG_ALIASES = [[], {"c": "x"}, {"a": "b"}, {"c": 1}, {"c": "d", "d": "a"}]
WRONG_PIECES = [
    {"pieces": GOOD_PIECES[1:]},
    {"pieces": GOOD_PIECES[:2]},
    {"pieces": [GOOD_PIECES[2], *GOOD_PIECES[:2]]},
    {"pieces": [GOOD_PIECES[1], GOOD_PIECES[0], GOOD_PIECES[2]]},
    {"pieces": [*GOOD_PIECES, [1, 2, 1, 0, 128]]},
    {"pieces": [*GOOD_PIECES, GOOD_PIECES[2]]},
    {"pieces": [[0, 0, 8, 1, 0], [0, 8, 16, 0, 0], [1, 0, 2, 0, 0]]},
    {"pieces": [[0, 0, 8, 1, 0], [0, 8, 16, 0, 65], [1, 0, 2, 0, 0]]},
    {"pieces": [[0, 0, 8, 1, 0], [0, 8, 16, 0, 128], [1, 0, 2, 0, 0]]},
    {"pieces": [[0, 0, 8, 2, 0], *GOOD_PIECES[1:]]},
    {"pieces": [[0, 0, 0, 1, 0], *GOOD_PIECES]},
    {"pieces": [[2, 0, 8, 1, 0], *GOOD_PIECES]},
    {"pieces": []},
    {"parts": [79, 8]},
    {"parts": [80, 7]},
    {"parts": [80]},
    {"parts": []},
]


@pytest.mark.parametrize(
    "values",
    [
        *({"tensors": [["a", "float32", [2, 3], 0], row]} for row in WRONG_ROWS),
        *({"aliases": aliases} for aliases in WRONG_ALIASES),
        *({"parts": [80, 8], "pieces": GOOD_PIECES} | values for values in WRONG_PIECES),
        *({"extra": 1}, {"tensors": None}, {"tensors": {}}),
    ],
    ids=repr,
)
def test_what_does_not_fit_is_refused(values):
    with pytest.raises(StoreCorruptError):
        Layout.decode(layout_json(**values), end=128)


def test_an_unknown_format_says_so():
    with pytest.raises(UnsupportedError):
        Layout.decode(layout_json(format=FORMAT + 1), end=128)


@given(layouts() | layouts_in_parts(), st.data())
def test_damaged_bytes_are_refused_or_another_good_layout(layout, data):
    text = bytearray(layout.encoded)
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    end = layout.checksums_offset
    try:
        again = Layout.decode(bytes(text), end=end)
    except (StoreCorruptError, UnsupportedError):
        return
    for spec, offset in zip(again.specs, again.offsets, strict=True):
        assert 0 <= offset <= offset + spec.num_bytes <= end
