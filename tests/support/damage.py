"""Ways to damage a store, and what must hold however it was damaged.

The store that is damaged is a copy of the fixture ``template``: versions 2 and 3, with checksums.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

import dbuffer
from tests.support.patterns import SMALL, Pattern, copy_newest
from tests.support.soak import is_soak

SOON_S = 60.0
fuzzed = settings(max_examples=1_000 if is_soak() else 10)
RECORDS = ("CURRENT", "A/manifest.json", "B/manifest.json", "writer.json", "receivers/old.json")
NEWEST = "B"
"""The buffer that holds version 3 of the template."""


@contextlib.contextmanager
def copy_of(template: Path) -> Iterator[Path]:
    copy = template.with_name(f"{template.name}-copy")
    shutil.copytree(template, copy)
    try:
        yield copy
    finally:
        shutil.rmtree(copy)


_opened: list[str] | None = None
_others: set[int] = set()
"""Threads that were there before: those of other tests' engines and servers open what they like."""


def _note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or _opened is None or isinstance(arguments[0], int):
        return
    if threading.get_ident() not in _others:
        _opened.append(os.fsdecode(arguments[0]))


@functools.cache
def _watch_files() -> None:
    """Note files that are opened, from the first use on: a hook slows its process down for good."""
    sys.addaudithook(_note_opened)


@contextlib.contextmanager
def opening_only_files_in(store: Path) -> Iterator[None]:
    global _opened, _others
    _watch_files()
    _others = {thread.ident for thread in threading.enumerate() if thread.ident is not None}
    _others.discard(threading.get_ident())
    _opened = []
    try:
        yield
        # Text in another encoding makes Python import what decodes it.
        expected = (f"{store}/", "/proc/self/", os.path.dirname(os.__file__))  # noqa: PTH120
        assert not [
            path for path in map(os.path.normpath, _opened) if not f"{path}/".startswith(expected)
        ]
    finally:
        _opened = None


def read(store: Path, *, verify: bool, pattern: Pattern | None = SMALL) -> int | None:
    """Return the version that a new receiver loads; it must be what was published."""
    with dbuffer.WeightReceiver(store, receiver_id="reader", verify=verify) as receiver:
        version, tensors = copy_newest(receiver)
    assert version is None or pattern is None or pattern.version_of(tensors) == version
    return version


def assert_read_or_refused(store: Path, *, verify: bool) -> None:
    started = time.monotonic()
    with opening_only_files_in(store):
        try:
            assert read(store, verify=verify) in (2, 3)
        except dbuffer.DBufferError as error:
            assert str(store) in str(error), "the message must say where"
    assert time.monotonic() - started < SOON_S


def assert_repaired_by_publishing(store: Path) -> None:
    with dbuffer.WeightSender(store, checksum=True, reader_timeout_s=60) as sender:
        for _ in range(3):
            version = sender._writer.next_version(None) % 2**18 + 1000
            weights = SMALL.weights(version)
            published = sender.send(weights).version
            loaded = SMALL.empty()
            with dbuffer.WeightReceiver(store, verify=True) as receiver:
                assert receiver.load_into(loaded) == published
            assert SMALL.version_of(loaded) == version


def weights_file(store: Path, buffer: str = NEWEST) -> tuple[Path, dict[str, Any]]:
    manifest = json.loads((store / buffer / "manifest.json").read_bytes())
    return store / buffer / manifest["file"], manifest


def flip_bit(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        [byte] = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


# What may stand in a record

OUTSIDE = st.sampled_from(
    [
        "../../../etc/passwd",
        "/etc/passwd",
        "../A/manifest.json",
        "weights-0123456789abcdef-1.td/../../CURRENT",
        "weights-0123456789abcdef-1.td\0",
        "weights-0123456789abcdef-1.td\n",
        "weights-0123456789abcdef-99.td",
        "A",
        "B",
        "C",
        "A/../B",
        "",
        ".",
        "..",
        "x" * 5000,
        "\udc80",
        "complete",
        "writing",
    ]
)
NUMBERS = st.one_of(
    st.sampled_from([-1, 0, 1, 64, 2**31, 2**32, 2**53 + 1, 2**62, 2**63, 2**64, 10**400]),
    st.integers(-(2**70), 2**62),
    st.floats(),
)
VALUES = st.one_of(
    OUTSIDE,
    NUMBERS,
    st.none(),
    st.booleans(),
    st.recursive(
        NUMBERS | OUTSIDE,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(OUTSIDE, inner, max_size=3),
    ),
)


def nested(depth: int, kind: str) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


@st.composite
def damaged_bytes(draw: st.DrawFn, good: bytes) -> bytes:
    """What might stand where ``good`` stood."""
    kind = draw(st.sampled_from(["random", "cut", "flip", "padded", "towers", "utf-16", "fields"]))
    if kind == "random":
        return draw(st.binary(max_size=300))
    if kind == "cut":
        return good[: draw(st.integers(0, len(good) - 1))]
    if kind == "flip":
        bit = draw(st.integers(0, 8 * len(good) - 1))
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        return bytes(flipped)
    if kind == "padded":
        return good + b" " * draw(st.sampled_from([1, 1 << 16, 1 << 20, 1 << 21]))
    if kind == "towers":
        opening = draw(st.sampled_from([b"[", b'{"a":', b'[{"a":']))
        return opening * draw(st.sampled_from([10, 500, 990, 1000, 5000, 200_000]))
    if kind == "utf-16":
        return good.decode().encode(draw(st.sampled_from(["utf-16", "utf-32", "utf-8-sig"])))
    return json.dumps(draw(damaged_fields(json.loads(good)))).encode()


@st.composite
def damaged_chain(draw: st.DrawFn, good: dict[str, Any]) -> dict[str, Any]:
    """A manifest whose fields of deltas were changed, and still may look like some."""
    values = dict(good)
    chain = values["chain"]
    names = st.sampled_from([*chain, ["0123456789abcdef", 3], [values["writer"], 7]])
    for _ in range(draw(st.integers(1, 2))):
        match draw(
            st.sampled_from(["chain", "cut", "permuted", "anchor", "buffer", "file", "any"])
        ):
            case "chain":
                values["chain"] = draw(st.lists(names, max_size=6))
            case "cut":
                first = draw(st.integers(0, len(chain)))
                values["chain"] = chain[:first] + chain[draw(st.integers(first, len(chain))) :]
            case "permuted":
                values["chain"] = draw(st.permutations(chain))
            case "anchor":
                values["anchor"] = draw(st.none() | names)
            case "buffer":
                values["anchor_buffer"] = draw(st.sampled_from([None, "A", "B", "C", "../A"]))
            case "file":
                values["file"] = draw(OUTSIDE)
            case "any":
                name = draw(st.sampled_from(["chain", "anchor", "anchor_buffer", "is_final"]))
                values[name] = draw(VALUES)
    return values


@st.composite
def damaged_fields(draw: st.DrawFn, good: dict[str, Any]) -> dict[str, Any]:
    values = dict(good)
    names = st.sampled_from(sorted(values))
    for _ in range(draw(st.integers(1, 3))):
        match draw(st.sampled_from(["set", "drop", "add", "swap", "format", "nest"])):
            case "set":
                values[draw(names)] = draw(VALUES)
            case "drop":
                values.pop(draw(names), None)
            case "add":
                values[draw(st.text(max_size=20))] = draw(VALUES)
            case "swap":
                one, other = draw(names), draw(names)
                values[one], values[other] = values.get(other), values.get(one)
            case "format":
                values["format"] = draw(st.sampled_from([0, 2, 1.0, "1", True, None, 2**70]))
            case "nest":
                depth = draw(st.one_of(st.integers(1, 60), st.integers(900, 1000)))
                values[draw(names)] = nested(depth, draw(st.sampled_from(["list", "dict"])))
    return values
