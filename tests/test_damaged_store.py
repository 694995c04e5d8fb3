"""Guarantee 6, bad input is refused: damaged, hostile, unwritable, moved and vanished stores.

Whatever is in a store's files, a reader either gets a version as it was published or an error of
ours that names the file. It opens nothing outside the store, and never hangs. The next publish
replaces what was damaged.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import OTHER, SHARED_MEMORY, SMALL, Child, Pattern, newest

import dbuffer
from dbuffer import buffer as buffer_module
from dbuffer.layout import digest

SOON_S = 1.0
RECORDS = ("CURRENT", "A/manifest.json", "B/manifest.json", "writer.json", "receivers/old.json")
NEWEST = "B"
"""The buffer that holds version 3 of the template."""

fuzz = settings(
    max_examples=150,
    deadline=None,
    database=None,
    # The store and the patches are the same for all examples, and each works on its own copy.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store that holds versions 2 and 3, with checksums; not to be changed."""
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else tmp_path_factory.getbasetemp()
    path = base / f"dbuffer-test-template-{os.getpid()}"
    with dbuffer.WeightSender(path, checksum=True) as sender:
        for version in (1, 2, 3):
            sender.send(SMALL.weights(version), metadata={"step": version})
    with dbuffer.WeightReceiver(path, receiver_id="old") as receiver:
        receiver.load_into(SMALL.empty())
    yield path
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def _settle_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait two seconds to see whether a damaged store is only being written."""
    monkeypatch.setattr(buffer_module, "_SETTLE_S", 0.01)


@pytest.fixture
def damaged(template: Path, store: Path) -> Path:
    """A copy of the template, to be damaged."""
    shutil.copytree(template, store)
    return store


@contextlib.contextmanager
def copy_of(template: Path) -> Iterator[Path]:
    copy = template.with_name(f"{template.name}-copy")
    shutil.copytree(template, copy)
    try:
        yield copy
    finally:
        shutil.rmtree(copy)


# ---------------------------------------------------------------------------------------------
# What must hold whatever the damage

_opened: list[str] | None = None


def _note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None and isinstance(arguments[0], str | bytes):
        _opened.append(os.fsdecode(arguments[0]))


sys.addaudithook(_note_opened)


@contextlib.contextmanager
def opening_only_files_in(store: Path) -> Iterator[None]:
    global _opened
    _opened = []
    try:
        yield
        inside = f"{store}/"
        assert not [path for path in _opened if not path.startswith((inside, "/proc/self/"))]
    finally:
        _opened = None


def read(store: Path, *, verify: bool, pattern: Pattern | None = SMALL) -> int | None:
    """The version loaded by a new receiver; it must be what was published."""
    loaded: dict[str, torch.Tensor] = {}

    def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        loaded.update((name, tensor.clone()) for name, tensor in pairs)

    with dbuffer.WeightReceiver(store, receiver_id="reader", verify=verify) as receiver:
        version = receiver.load_into(load)
    if version is not None and pattern is not None:
        assert pattern.version_of(loaded) == version
    return version


def assert_read_or_refused(store: Path, *, verify: bool) -> None:
    started = time.monotonic()
    with opening_only_files_in(store):
        try:
            assert read(store, verify=verify) in (2, 3)
        except dbuffer.DBufferError as error:
            assert str(store) in str(error), "the message must say where"  # noqa: PT017
    assert time.monotonic() - started < SOON_S


def assert_repaired_by_publishing(store: Path) -> None:
    with dbuffer.WeightSender(store, checksum=True, reader_timeout_s=5) as sender:
        for _ in range(3):
            version = sender._writer.next_version(None) % 2**18 + 1000
            weights = SMALL.weights(version)
            published = sender.send(weights).version
            loaded = SMALL.empty()
            with dbuffer.WeightReceiver(store, verify=True) as receiver:
                assert receiver.load_into(loaded) == published
            assert SMALL.version_of(loaded) == version


# ---------------------------------------------------------------------------------------------
# Damaged records

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


@fuzz
@given(data=st.data())
@pytest.mark.parametrize("record", RECORDS)
def test_damaged_record(template: Path, record: str, data: st.DataObject) -> None:
    with copy_of(template) as store:
        good = (store / record).read_bytes()
        (store / record).write_bytes(data.draw(damaged_bytes(good)))
        assert_read_or_refused(store, verify=data.draw(st.booleans()))
        try:
            assert_repaired_by_publishing(store)
        except dbuffer.StoreFormatError as error:
            # A store of another format is not ours to repair.
            assert str(store / record) in str(error)  # noqa: PT017


@fuzz
@given(data=st.data())
def test_pointer_and_manifest_that_lie_together(template: Path, data: st.DataObject) -> None:
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


@pytest.mark.parametrize("name", ["version", "generation"])
def test_a_counter_at_its_end_is_a_clear_error(damaged: Path, name: str) -> None:
    for path in (damaged / "CURRENT", damaged / NEWEST / "manifest.json"):
        values = json.loads(path.read_bytes()) | {name: 2**63 - 1}
        path.write_text(json.dumps(values))
    read(damaged, verify=True, pattern=None)
    with dbuffer.WeightSender(damaged) as sender, pytest.raises(dbuffer.DBufferError):
        sender.send(SMALL.weights(4))
    read(damaged, verify=True, pattern=None)


@pytest.mark.parametrize("record", RECORDS[:4])
@pytest.mark.parametrize("format_number", [0, 2, 99])
def test_a_store_of_another_format_is_left_alone(
    damaged: Path, record: str, format_number: int
) -> None:
    """A newer dbuffer may have written it: an older one must not take it for damage."""
    values = json.loads((damaged / record).read_bytes()) | {"format": format_number, "new": 1}
    (damaged / record).write_text(json.dumps(values))
    before = contents(damaged)
    with pytest.raises(dbuffer.StoreFormatError, match=f"{record}.*format {format_number}"):
        publish_once(damaged)
    assert contents(damaged) == before
    if record in ("CURRENT", f"{NEWEST}/manifest.json"):
        with pytest.raises(dbuffer.StoreFormatError, match=f"{record}.*format {format_number}"):
            read(damaged, verify=False)


def publish_once(store: Path) -> None:
    with dbuffer.WeightSender(store) as sender:
        sender.send(SMALL.weights(1))


def contents(store: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}


@pytest.mark.parametrize("lost", [("CURRENT",), RECORDS[:3], (f"{NEWEST}/manifest.json",)])
def test_lost_records(damaged: Path, lost: tuple[str, ...]) -> None:
    for record in lost:
        (damaged / record).unlink()
    with contextlib.suppress(dbuffer.StoreCorruptError):
        assert read(damaged, verify=True) is None
    assert_repaired_by_publishing(damaged)


def test_a_lost_pointer_does_not_send_versions_back(damaged: Path) -> None:
    (damaged / "CURRENT").unlink()
    with dbuffer.WeightSender(damaged) as sender:
        assert sender.send(SMALL.weights(4)).version == 4


def test_a_damaged_acknowledgement_does_not_hide_the_others(damaged: Path) -> None:
    (damaged / "receivers" / "old.json").write_bytes(b"")
    with (
        dbuffer.WeightSender(damaged) as sender,
        dbuffer.WeightReceiver(damaged, receiver_id="good") as receiver,
    ):
        sender.send(SMALL.weights(4))
        assert receiver.load_into(SMALL.empty()) == 4
        sender.wait_applied(4, receivers=1, timeout_s=0)


# ---------------------------------------------------------------------------------------------
# Files that are no files

EVERY_FILE = (*RECORDS, "writer.lock", "A/weights", "B/weights")


def put_fifo(path: Path, aside: Path) -> None:
    os.mkfifo(path)


def put_socket(path: Path, aside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def put_directory(path: Path, aside: Path) -> None:
    path.mkdir()


def put_link_to_its_twin(path: Path, aside: Path) -> None:
    path.symlink_to(aside)


def put_dangling_link(path: Path, aside: Path) -> None:
    path.symlink_to(aside.with_name("nothing here"))


def put_link_to_zeros(path: Path, aside: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("file", EVERY_FILE)
@pytest.mark.parametrize(
    "put",
    [
        put_fifo,
        put_socket,
        put_directory,
        put_link_to_its_twin,
        put_dangling_link,
        put_link_to_zeros,
    ],
    ids=lambda put: put.__name__,
)
def test_something_else_in_the_place_of_a_file(
    damaged: Path, file: str, put: Callable[[Path, Path], None]
) -> None:
    path = damaged / file
    if path.name == "weights":
        [path] = path.parent.glob("weights-*")
    aside = damaged.with_name("aside")
    path.rename(aside)
    before = aside.read_bytes()
    put(path, aside)
    assert_read_or_refused(damaged, verify=True)
    if put is put_directory or path.name == "writer.lock":
        # What is inside may be somebody's: it is named, and left for a person to remove.
        with contextlib.suppress(dbuffer.StoreAccessError, dbuffer.StoreCorruptError):
            assert_repaired_by_publishing(damaged)
    else:
        assert_repaired_by_publishing(damaged)
    assert aside.read_bytes() == before, "something outside the store was written to"


@pytest.mark.parametrize("directory", ["A", "B", "receivers"])
@pytest.mark.parametrize("is_there", [False, True], ids=["missing", "a file"])
def test_a_directory_that_is_none(damaged: Path, directory: str, is_there: bool) -> None:
    shutil.rmtree(damaged / directory)
    if is_there:
        (damaged / directory).write_text("no directory")
        assert_read_or_refused(damaged, verify=True)
        with pytest.raises(dbuffer.StoreAccessError, match=f"{damaged / directory}"):
            dbuffer.WeightSender(damaged)
    else:
        assert_read_or_refused(damaged, verify=True)
        assert_repaired_by_publishing(damaged)


# ---------------------------------------------------------------------------------------------
# Damaged weights files


def weights_file(store: Path, buffer: str = NEWEST) -> tuple[Path, dict[str, Any]]:
    manifest = json.loads((store / buffer / "manifest.json").read_bytes())
    return store / buffer / manifest["file"], manifest


def flip_bit(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        [byte] = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


@fuzz
@given(place=st.integers(0, 8 * 2048 * len(SMALL.names) - 1))
def test_flipped_bit_in_a_tensor_is_refused_and_the_tensor_named(
    template: Path, place: int
) -> None:
    with copy_of(template) as store:
        path, _ = weights_file(store)
        target = SMALL.empty()
        flip_bit(path, place)
        with dbuffer.WeightReceiver(store, verify=True) as receiver:
            name = SMALL.names[place // (8 * 2048)]
            with pytest.raises(dbuffer.ChecksumError, match=f"{path}.*: {name};"):
                receiver.load_into(target)
            with pytest.raises(dbuffer.ChecksumError, match=name), receiver.open():
                pass
        assert not any(tensor.any() for tensor in target.values()), "the target was touched"


@fuzz
@given(data=st.data())
def test_flipped_bit_in_checksums_or_layout_is_refused(template: Path, data: st.DataObject) -> None:
    with copy_of(template) as store:
        path, manifest = weights_file(store)
        start, num_bytes, said = data.draw(
            st.sampled_from(
                [
                    (manifest["checksums_offset"], 8 * manifest["num_tensors"], "checksums"),
                    (manifest["layout_offset"], manifest["layout_bytes"], "layout"),
                ]
            )
        )
        flip_bit(path, data.draw(st.integers(8 * start, 8 * (start + num_bytes) - 1)))
        with pytest.raises(dbuffer.StoreCorruptError, match=f"{path}.*{said}"):
            read(store, verify=True)


def test_flipped_bit_is_seen_by_a_receiver_that_has_loaded_before(damaged: Path) -> None:
    with (
        dbuffer.WeightSender(damaged, checksum=True) as sender,
        dbuffer.WeightReceiver(damaged, verify=True) as receiver,
    ):
        target = SMALL.empty()
        for version in (3, 4, 5):
            assert receiver.load_into(target) == version
            sender.send(SMALL.weights(version + 1))
        flip_bit(weights_file(damaged, "A")[0], 12345)
        with pytest.raises(dbuffer.ChecksumError, match=SMALL.names[0]):
            receiver.load_into(target)
        assert SMALL.version_of(target) == 5
        sender.send(SMALL.weights(7))
        assert receiver.load_into(target) == 7


def test_verify_refuses_what_was_published_without_checksums(store: Path) -> None:
    with dbuffer.WeightSender(store, checksum=False) as sender:
        sender.send(SMALL.weights(1))
    with pytest.raises(dbuffer.ChecksumError, match="checksum=True"):
        read(store, verify=True)
    assert read(store, verify=False) == 1


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


@fuzz
@given(data=st.data())
def test_hostile_layout(template: Path, data: st.DataObject) -> None:
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


def use_truncated_files(connection: Connection, template: Path, copy: Path) -> None:
    """Cut each weights file short, and read and publish; send what came of it."""
    buffer_module._SETTLE_S = 0.01
    for buffer in ("A", "B"):
        path, manifest = weights_file(template, buffer)
        sizes = {0, 1, 4096, manifest["checksums_offset"], manifest["file_bytes"] - 1}
        for size in sorted(sizes):
            for is_warm in (False, True):
                shutil.copytree(template, copy)
                outcome = use_truncated(copy, copy / buffer / path.name, size, is_warm)
                connection.send((buffer, size, is_warm, *outcome))
                shutil.rmtree(copy)
    connection.send(None)


def use_truncated(store: Path, path: Path, size: int, is_warm: bool) -> tuple[str, int]:
    """The reader's outcome, and the version that could be read after two publishes."""
    target = SMALL.empty()
    with contextlib.ExitStack() as stack:
        sender = stack.enter_context(dbuffer.WeightSender(store, checksum=True))
        receiver = stack.enter_context(dbuffer.WeightReceiver(store))
        if is_warm:
            for version in (4, 5):
                sender.send(SMALL.weights(version))
                receiver.load_into(target)
        os.truncate(path, size)
        try:
            outcome = f"loaded {dbuffer.WeightReceiver(store).load_into(target)}"
        except dbuffer.StoreCorruptError as error:
            outcome = "refused" if str(path) in str(error) else repr(error)
        if not is_warm:
            sender.close()
            sender = stack.enter_context(dbuffer.WeightSender(store, checksum=True))
        for _ in range(3):
            version = sender._writer.next_version(None)
            sender.send(SMALL.weights(version))
            assert receiver.load_into(target) == version
        return outcome, SMALL.version_of(target) or 0


def test_truncated_weights_files_are_refused_and_never_a_bus_error(
    template: Path, store: Path
) -> None:
    with Child(use_truncated_files, template, store) as child:
        count = 0
        while (found := child.receive()) is not None:
            buffer, size, is_warm, outcome, version = found
            if buffer == NEWEST:
                assert outcome == "refused", (size, is_warm)
            else:
                assert outcome == f"loaded {5 if is_warm else 3}", (size, is_warm)
            assert version == (8 if is_warm else 6)
            count += 1
        assert count == 20
        assert child.wait() == 0


def put_copies_in_the_place_of_files(store: Path) -> None:
    """What restoring a backup does: the same names, sizes and bytes, and other files."""
    for buffer in ("A", "B"):
        path, _ = weights_file(store, buffer)
        shutil.copyfile(path, path.with_name("copy"))
        path.with_name("copy").rename(path)


def test_sender_does_not_write_into_a_file_that_was_replaced(store: Path) -> None:
    with dbuffer.WeightSender(store) as sender:
        for version in (1, 2, 3, 4):
            sender.send(SMALL.weights(version))
        put_copies_in_the_place_of_files(store)
        for version in (5, 6, 7):
            sender.send(SMALL.weights(version))
            assert newest(store) == version


def test_receiver_does_not_read_a_file_that_was_replaced(store: Path) -> None:
    target = SMALL.empty()
    with dbuffer.WeightReceiver(store) as receiver:
        with dbuffer.WeightSender(store) as sender:
            for version in (1, 2, 3, 4):
                sender.send(SMALL.weights(version))
                assert receiver.load_into(target) == version
        put_copies_in_the_place_of_files(store)
        with dbuffer.WeightSender(store) as sender:
            for version in (5, 6, 7):
                sender.send(SMALL.weights(version))
                assert receiver.load_into(target) == version
                assert SMALL.version_of(target) == version


def test_damage_leaks_no_descriptors(template: Path) -> None:
    def spoil(store: Path) -> None:
        path, manifest = weights_file(store)
        flip_bit(path, 8 * manifest["layout_offset"])

    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(5):
        with copy_of(template) as store:
            spoil(store)
            with contextlib.suppress(dbuffer.DBufferError):
                read(store, verify=True)
    assert len([*Path("/proc/self/fd").iterdir()]) == before


# ---------------------------------------------------------------------------------------------
# Metadata


@pytest.mark.parametrize("depth", [50, 200, 320, 600, 900, 940, 960, 980, 990, 2000])
def test_deep_metadata_is_refused_or_can_be_read(store: Path, depth: int) -> None:
    """What one process can still write, another may have too little stack left to read."""

    def load_deeper(frames: int) -> int | None:
        return load_deeper(frames - 1) if frames else read(store, verify=False)

    with dbuffer.WeightSender(store) as sender:
        sender.send(SMALL.weights(1))
        with contextlib.suppress(dbuffer.InvalidWeightsError):
            sender.send(SMALL.weights(2), metadata={"deep": nested(depth, "list")})
        assert load_deeper(100) in (1, 2)
        sender.send(SMALL.weights(3), version=3)
    assert load_deeper(100) == 3


# ---------------------------------------------------------------------------------------------
# Stores that cannot be written, move, vanish or come late


@pytest.fixture
def read_only(damaged: Path) -> Iterator[Path]:
    """A store that this process cannot write to."""
    if os.geteuid() != 0:
        directories = [damaged, *(path for path in damaged.iterdir() if path.is_dir())]
        for path in directories:
            path.chmod(0o500)
        yield damaged
        for path in directories:
            path.chmod(0o700)
        return
    view = damaged.with_name("read-only")
    view.mkdir()
    for options in (["--bind", str(damaged)], ["-o", "remount,ro,bind"]):
        done = subprocess.run(["mount", *options, str(view)], capture_output=True, text=True)
        if done.returncode:
            subprocess.run(["umount", str(view)], capture_output=True)
            pytest.skip(f"root may not mount here: {done.stderr.strip()}")
    yield view
    # Lazily: what the test's log holds on to still has the store open.
    subprocess.run(["umount", "--lazy", str(view)], check=True)


def test_read_only_store_can_be_read_and_not_written(
    read_only: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with dbuffer.WeightReceiver(read_only, verify=True) as receiver:
        target = SMALL.empty()
        assert receiver.load_into(target) == SMALL.version_of(target) == 3
        with receiver.open() as snapshot:
            assert SMALL.version_of(snapshot.tensors) == 3
        assert receiver.load_into(target) is None
    [line] = [r.getMessage() for r in caplog.records if "acknowledge" in r.getMessage()]
    assert str(read_only) in line
    with pytest.raises(dbuffer.StoreAccessError, match=str(read_only)):
        dbuffer.WeightSender(read_only)


def test_store_that_vanishes_under_its_users(store: Path) -> None:
    with dbuffer.WeightSender(store) as sender, dbuffer.WeightReceiver(store) as receiver:
        sender.send(SMALL.weights(1))
        target = SMALL.empty()
        assert receiver.load_into(target) == 1
        shutil.rmtree(store)
        with pytest.raises(dbuffer.StoreNotFoundError, match=str(store)):
            sender.send(SMALL.weights(2))
        with pytest.raises(dbuffer.StoreNotFoundError, match=str(store)):
            receiver.load_into(target)
        with pytest.raises(dbuffer.StoreNotFoundError, match=str(store)):
            receiver.wait_for_version(1, timeout_s=5)
        assert SMALL.version_of(target) == 1
        assert not store.exists()


def test_store_that_vanishes_while_a_snapshot_is_held(store: Path) -> None:
    with dbuffer.WeightSender(store) as sender, dbuffer.WeightReceiver(store) as receiver:
        sender.send(SMALL.weights(1))
        with contextlib.ExitStack() as held:
            snapshot = held.enter_context(receiver.open())
            shutil.rmtree(store)
            assert SMALL.version_of(snapshot.tensors) == 1
            with pytest.raises(dbuffer.DBufferError, match=str(store)):
                held.close()


def test_store_that_vanishes_in_the_middle_of_a_publish(store: Path) -> None:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(SMALL.weights(2).items()):
            if index == 3:
                shutil.rmtree(store)
            yield pair

    with dbuffer.WeightSender(store) as sender:
        sender.send(SMALL.weights(1))
        with pytest.raises(dbuffer.StoreNotFoundError, match=str(store)):
            sender.send(stream())
    assert not store.exists()


def test_emptied_store_never_takes_a_receiver_back(store: Path) -> None:
    target = SMALL.empty()
    with dbuffer.WeightReceiver(store) as receiver:
        with dbuffer.WeightSender(store) as sender:
            sender.send(SMALL.weights(7), version=7)
            assert receiver.load_into(target) == 7
        shutil.rmtree(store)
        with dbuffer.WeightSender(store) as sender:
            sender.send(SMALL.weights(1))
            for use in (receiver.load_into, lambda _: receiver.wait_for_version(timeout_s=5)):
                with pytest.raises(dbuffer.VersionRegressedError, match="7 to 1"):
                    use(target)
            assert SMALL.version_of(target) == 7
            sender.send(SMALL.weights(8), version=8)
            assert receiver.load_into(target) == 8


def test_receiver_that_came_before_the_store(store: Path) -> None:
    target = SMALL.empty()
    with dbuffer.WeightReceiver(store, poll_interval_s=0.05) as receiver:
        assert receiver.load_into(target) is None
        assert receiver.wait_for_version(timeout_s=0.01) is None
        with (
            pytest.raises(dbuffer.VersionTimeoutError, match=str(store)),
            receiver.open(timeout_s=0.01),
        ):
            pass
        with dbuffer.WeightSender(store) as sender:
            assert receiver.load_into(target) is None
            sender.send(SMALL.weights(1))
            assert receiver.wait_for_version(timeout_s=5) == 1
        assert receiver.load_into(target) == 1
    assert SMALL.version_of(target) == 1


@pytest.mark.parametrize(
    "name",
    [
        "with spaces",
        " around ",
        "Ünïcödé",
        "模型/权重",
        "🚀",
        "tab\tand\nline",
        "-rf",
        "a'b\"c\\d",
        "%s",
        "x" * 200,
        os.fsdecode(b"not \xff utf-8"),
    ],
)
def test_any_path_will_do(shm_path: Path, name: str) -> None:
    store = shm_path / name
    with (
        dbuffer.WeightSender(store) as sender,
        dbuffer.WeightReceiver(store, poll_interval_s=0.05) as receiver,
    ):
        for version in (1, 2, 3):
            sender.send(SMALL.weights(version))
            with receiver.open(newer_than=version - 1, timeout_s=5) as snapshot:
                assert SMALL.version_of(snapshot.tensors) == version
        sender.wait_applied(3, timeout_s=1)
        with pytest.raises(dbuffer.WriterActiveError):
            dbuffer.WeightSender(store)


def test_a_relative_path_stays_where_it_was(
    shm_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shm_path / "elsewhere").mkdir()
    monkeypatch.chdir(shm_path)
    with dbuffer.WeightSender("store") as sender, dbuffer.WeightReceiver("store") as receiver:
        sender.send(SMALL.weights(1))
        assert receiver.load_into(SMALL.empty()) == 1
        monkeypatch.chdir("elsewhere")
        sender.send(SMALL.weights(2))
        assert receiver.load_into(SMALL.empty()) == 2


# ---------------------------------------------------------------------------------------------
# Clocks

DAY_S = 24 * 3600.0


@pytest.mark.parametrize("jump_s", [10 * DAY_S, -10 * DAY_S, 400 * DAY_S, -20_000 * DAY_S])
def test_clock_that_jumps(store: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    now, jumped = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: now() + jumped)
    target = SMALL.empty()
    with dbuffer.WeightReceiver(store, receiver_id="steady") as receiver:
        with dbuffer.WeightSender(store) as sender:
            sender.send(SMALL.weights(1))
            assert receiver.load_into(target) == 1
            jumped = jump_s
            sender.send(SMALL.weights(2))
            assert receiver.load_into(target) == 2
            sender.wait_applied(2, timeout_s=0)
        with dbuffer.WeightSender(store) as sender:
            sender.wait_applied(2, timeout_s=0), "a receiver that lives was forgotten"
            jumped = 0.0
            for version in (3, 4):
                sender.send(SMALL.weights(version))
                with receiver.open(version - 1, timeout_s=5) as snapshot:
                    assert SMALL.version_of(snapshot.tensors) == version
            assert receiver.wait_for_version(4, timeout_s=0.01) is None
            sender.send(OTHER.weights(5))
    assert newest(store) == 5
