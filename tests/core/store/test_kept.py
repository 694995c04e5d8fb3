"""Versions kept beside the newest two: opened, pinned, dropped, published again."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dbuffer
from dbuffer.format import chain
from dbuffer.store import filesystem, kept
from dbuffer.store.buffer import DoubleBuffer, other_buffer
from dbuffer.store.open_version import OpenStoreVersion
from dbuffer.testing.moments import CHANGING_CALLS, at_call, die
from tests.support.children import Child, call
from tests.support.patterns import SMALL, SPARSE, Pattern, newest, opened, publish, received
from tests.support.soak import in_turn, numbers
from tests.support.stores import (
    assert_tidy,
    make_temporaries_old,
    named_files,
    version_files,
)

KEEP = 3


def readable(store: Path, last: int, pattern: Pattern = SMALL) -> list[int]:
    """The versions that a receiver can open, each with its own weights."""
    found = [version for version in range(1, last + 1) if opened(store, version, pattern)]
    assert all(opened(store, version, pattern) == version for version in found)
    return found


@pytest.mark.parametrize("delta", [False, True])
def test_so_many_versions_are_kept_besides_the_newest_two(store, mount, delta):
    pattern = SPARSE if delta else SMALL
    with dbuffer.WeightSender(store, keep=KEEP, delta=delta) as sender:
        for version in range(1, 9):
            publish(sender, version, pattern=pattern)
            first = max(1, version - KEEP - 1)
            assert readable(store, version, pattern) == list(range(first, version + 1))
    assert newest(store) == 8


def test_a_pinned_version_stays_until_it_is_unpinned(store, mount):
    view = DoubleBuffer(store)
    with dbuffer.WeightSender(store) as sender:
        publish(sender, 1, 2)
        kept.pin(view, 1)
        publish(sender, 3, 4, 5, 6)
        assert readable(store, 6) == [1, 5, 6]
        kept.unpin(view, 1)
        publish(sender, 7)
        assert readable(store, 7) == [6, 7]
        with pytest.raises(dbuffer.VersionError) as error:
            kept.pin(view, 3)
        assert "version 3" in str(error.value)
        assert "6, 7" in str(error.value)


def test_a_version_that_was_unpinned_while_it_was_the_newest_takes_no_other_versions_place(
    store, keeper
):
    """It is in a buffer as well: the one to keep besides the newest two is another."""
    view = DoubleBuffer(store)
    kept.pin(view, 3)
    kept.unpin(view, 3)
    publish(keeper, 4)
    assert readable(store, 4) == [2, 3, 4]
    assert [manifest.version for manifest in view.kept().values()] == [2, 3]
    publish(keeper, 5)
    assert readable(store, 5) == [3, 4, 5]


@pytest.mark.timing(keep_superseded_s=0.0)
def test_deltas_of_a_kept_version_stay(store, mount, monkeypatch):
    """They stay when no newer version names them, and when another sender begins."""
    monkeypatch.setattr(chain, "MAX_CHAIN", 3)
    with dbuffer.WeightSender(store, delta=True) as sender:
        publish(sender, 1, 2, 3, pattern=SPARSE)
        kept.pin(DoubleBuffer(store), 3)
        publish(sender, *range(4, 16), pattern=SPARSE)
        deltas = {path.name for path in store.glob("deltas/*")}
        [manifest] = DoubleBuffer(store).kept().values()
        assert {f"{version}.delta" for version in manifest.chain[1:]} <= deltas
    with dbuffer.WeightSender(store, delta=True) as sender:
        publish(sender, 16, 17, pattern=SPARSE)
    assert len(manifest.chain) == 3
    assert readable(store, 17, SPARSE) == [3, 16, 17]
    assert named_files(store) <= version_files(store) | set(store.glob("kept/*/weights-*"))


@pytest.mark.parametrize("delta", [False, True])
def test_going_back(store, mount, delta):
    pattern = SPARSE if delta else SMALL
    with dbuffer.WeightSender(store, keep=KEEP, delta=delta) as sender:
        for version in range(1, 6):
            sender.send(pattern.weights(version), metadata={"step": 10 * version})
        for old in (2, 5, 4):  # kept, newest, and the one before
            published = sender.republish(old, metadata={"why": "worse"})
            with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
                assert snapshot.version == published.version
                assert pattern.version_of(snapshot.tensors) == old
                expected = {"step": 10 * old, "why": "worse", "republished_version": old}
                assert snapshot.metadata == expected
        publish(sender, 20, 21, pattern=pattern)
    assert newest(store) == 21


def test_going_back_unmaps_files_that_are_removed(shm_path):
    """A mapping keeps the room of a file that has no name any more."""
    store = shm_path / "store"
    with dbuffer.WeightSender(store) as sender:
        publish(sender, 1, 2, 3)
        sender.republish(2)
        publish(sender, 5)
        mapped = Path("/proc/self/maps").read_text().splitlines()
        assert not [line for line in mapped if str(store) in line and "(deleted)" in line]


@pytest.fixture
def keeper(store: Path, mount: str) -> Iterator[dbuffer.WeightSender]:
    """A sender that keeps one version, and has published 1, which is kept, 2 and 3."""
    with dbuffer.WeightSender(store, keep=1, checksum=True) as sender:
        publish(sender, 1, 2, 3)
        yield sender


def file_of(store: Path, version: int) -> Path:
    """Path of the weights file of a version, in A, in B or kept."""
    view = DoubleBuffer(store)
    manifests = {**{buffer: view.undamaged_manifest(buffer) for buffer in "AB"}, **view.kept()}
    [path] = [view.weights_path(b, m) for b, m in manifests.items() if m and m.version == version]
    return path


def test_going_back_copies_nothing_and_needs_a_version_that_is_there(store, keeper):
    inode = file_of(store, 1).stat().st_ino
    assert keeper.republish(1).version == 4
    assert file_of(store, 4).stat().st_ino == inode
    keeper.close()
    with dbuffer.WeightSender(store) as sender:
        sender.republish(3)
        assert SMALL.version_of(received(store)) == 3
        publish(sender, 6, 7, 8)
        with pytest.raises(dbuffer.VersionError):
            sender.republish(2)
        publish(sender, 9, 10)
    assert newest(store) == 10


@pytest.mark.parametrize(
    ("version", "metadata", "error"),
    [
        *[(version, None, dbuffer.OptionError) for version in ("1", None, True, 0, -1, 1.0)],
        *[(1, metadata, dbuffer.InvalidWeightsError) for metadata in ([1], "text", 7)],
    ],
)
def test_wrong_arguments_for_going_back_are_refused_at_once(
    store, sender, version, metadata, error
):
    publish(sender, 1)
    with pytest.raises(error):
        sender.republish(version, metadata=metadata)
    assert not list(store.glob("kept/*"))


def test_damaged_versions_are_neither_kept_nor_published_again(store, keeper, caplog):
    pointer = DoubleBuffer(store).pointer()
    (store / other_buffer(pointer.buffer) / "manifest.json").write_bytes(b"")
    assert opened(store, 1) == 1, "a kept version is read beside a damaged one"
    with pytest.raises(dbuffer.StoreCorruptError):
        opened(store, 2)
    publish(keeper, 4)
    assert readable(store, 4) == [1, 3, 4]
    file_of(store, 3).unlink()
    publish(keeper, 5, 6)
    assert readable(store, 6) == [4, 5, 6]
    assert "version 3 is not kept" in caplog.text
    with file_of(store, 4).open("r+b") as file:
        file.write(b"damage")
    keeper.close()
    with (
        dbuffer.WeightSender(store, keep=1, delta=True, checksum=True) as sender,
        pytest.raises(dbuffer.StoreCorruptError, match="version 4"),
    ):
        sender.republish(4)
    assert newest(store) == 6


def test_a_version_whose_place_is_taken_is_not_said_to_be_kept(store, keeper, caplog):
    [second] = [it for it in map(DoubleBuffer(store).manifest, "AB") if it.version == 2]
    place = store / "kept" / str(second.id)
    place.mkdir()
    (place / "manifest.json").write_bytes(b"damaged")
    with pytest.raises(dbuffer.VersionError, match="version 2 was dropped"):
        kept.pin(DoubleBuffer(store), 2)
    publish(keeper, 4)
    assert "version 2 is not kept" in caplog.text
    assert not place.exists()


def test_other_files_among_kept_versions_are_left_alone(store, keeper):
    """As a backup puts them there; even one with the name of a version."""
    others = [store / "kept" / ".snapshot", store / "kept" / f"{keeper.run}-9"]
    for path in (*others, store / "kept" / "notes" / "mine"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    publish(keeper, 4, 5)
    assert readable(store, 5) == [3, 4, 5]
    assert {path.name for path in store.glob("kept/*")} > {"notes", *(it.name for it in others)}
    assert (store / "kept" / "notes" / "mine").exists()


def test_a_snapshot_of_a_pinned_version_can_be_sent(store):
    with dbuffer.WeightSender(store) as sender, dbuffer.WeightReceiver(store) as receiver:
        publish(sender, 1)
        with receiver.open() as snapshot:
            tensors = dict(snapshot.tensors)
        publish(sender, 2)
        with pytest.raises(dbuffer.InvalidWeightsError, match="its memory is the buffer"):
            sender.send(tensors)
        kept.pin(DoubleBuffer(store), 1)
        assert sender.send(tensors).version == 3
        assert SMALL.version_of(received(store)) == 1


def test_a_kept_version_with_a_damaged_manifest_is_removed_unless_it_is_pinned(store, keeper):
    kept.pin(DoubleBuffer(store), 1)
    publish(keeper, 4)
    pinned = file_of(store, 1)
    directories = [file_of(store, version).parent for version in (1, 2)]
    for directory in directories:
        (directory / "manifest.json").write_bytes(b"")
    keeper.close()
    with dbuffer.WeightSender(store, reader_timeout_s=0) as sender:
        publish(sender, 20, 21, 22)
        assert [directory.exists() for directory in directories] == [True, False]
        assert pinned.exists()
        kept.unpin(DoubleBuffer(store), 1)
        publish(sender, 23)
    assert not directories[0].exists()


def test_a_pinned_version_that_a_killed_sender_was_dropping_comes_back(store, keeper):
    directory = file_of(store, 1).parent
    keeper.close()
    (directory / "manifest.json").rename(directory / "dropped.json")
    (directory / "pinned").touch()
    assert opened(store, 1) is None
    dbuffer.WeightSender(store).close()
    assert opened(store, 1) == 1


def test_a_version_that_is_pinned_while_it_is_dropped_stays(store, keeper, monkeypatch):
    """The pin comes after the sender has looked for it, and before the manifest is away."""
    rename = filesystem.rename

    def pin_first(path: Path, name: Path) -> None:
        if name.name == "dropped.json":
            path.with_name("pinned").touch()
        rename(path, name)

    monkeypatch.setattr(filesystem, "rename", pin_first)
    publish(keeper, 4, 5, 6)
    assert [opened(store, version) for version in (1, 2)] == [1, 2]


def test_a_version_that_goes_while_it_is_pinned_is_not_pinned(store, keeper, monkeypatch):
    monkeypatch.setattr(OpenStoreVersion, "is_still_named", lambda _: False)
    with pytest.raises(dbuffer.VersionError):
        kept.pin(DoubleBuffer(store), 1)
    assert not list(store.glob("kept/*/pinned"))


def test_a_reader_of_a_kept_version_outlives_it(store, keeper):
    with dbuffer.WeightReceiver(store) as receiver, receiver.open(version=1) as snapshot:
        publish(keeper, 4, 5, 6)
        assert SMALL.version_of(snapshot.tensors) == 1
    assert opened(store, 1) is None


def test_a_sender_that_rewrites_files_spares_a_kept_one(store):
    """Killed between keeping a version and marking its buffer, a sender leaves one file in both."""
    with dbuffer.WeightSender(store) as sender:
        publish(sender, 1, 2)
    view = DoubleBuffer(store)
    kept.pin(view, 1)
    with dbuffer.WeightSender(store) as sender:
        publish(sender, 3)
    assert opened(store, 1) == 1


def _publish_and_die(_: object, store: Path, number: int, delta: bool) -> None:
    with dbuffer.WeightSender(store, keep=KEEP, delta=delta, reader_timeout_s=0) as sender:
        at_call(number, die, CHANGING_CALLS)
        sender.send(SPARSE.weights(7), version=7)
        sender.republish(4)
        sys.setprofile(None)


@in_turn(("delta", "medium"), [False, True], ["local", "network"])
def test_killed_at_any_call_a_sender_loses_no_kept_version(
    shm_path, monkeypatch, delta, medium, record_property
):
    """All that was kept is there afterwards, but for the version that is beyond what is kept."""
    monkeypatch.setenv("DBUFFER_MOUNT", medium)
    template, num_kills = shm_path / "template", 0
    with dbuffer.WeightSender(template, keep=KEEP, delta=delta) as sender:
        publish(sender, 1, 2, 3, 4, 5, 6, pattern=SPARSE)
    for number in numbers(every=16):
        store = shm_path / f"store-{number}"
        shutil.copytree(template, store)
        with Child(_publish_and_die, store, number, delta) as child:
            has_ended = child.wait() == 0
        num_kills += not has_ended
        pointer = DoubleBuffer(store).pointer()
        last = pointer.version
        assert last in ((8,) if has_ended else (6, 7, 8))
        found = {version: opened(store, version, SPARSE) for version in range(1, last + 1)}
        # The oldest goes as the next one is begun; after version 8 none was.
        first = last - KEEP - (last == 8)
        stays = {version: version if version < 8 else 4 for version in range(first, last + 1)}
        may_stay = {first - 1: first - 1} if last < 8 else {}
        found = {version: read for version, read in found.items() if read}
        assert stays.items() <= found.items() <= (stays | may_stay).items()
        make_temporaries_old(store)
        with dbuffer.WeightSender(store, keep=KEEP, delta=delta, reader_timeout_s=0) as sender:
            publish(sender, 9, pattern=SPARSE)
            assert SPARSE.version_of(received(store)) == 9
        assert_tidy(store)
        shutil.rmtree(store)
        if has_ended:
            record_property("kills of a sender that keeps versions", num_kills)
            return


def test_a_filesystem_without_second_names_is_refused_at_once(store, monkeypatch):
    def link(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", link)
    with pytest.raises(dbuffer.StoreAccessError):
        dbuffer.WeightSender(store, keep=1)
    with dbuffer.WeightSender(store) as sender:
        publish(sender, 1)
    assert not list((store / "tmp").iterdir())


def test_the_command_line_pins_and_goes_back(store, capsys):
    with dbuffer.WeightSender(store) as sender:
        sender.send(SMALL.weights(1), metadata={"step": 10})
        publish(sender, 2)
    assert call(capsys, "pin", store, 1)[0] == 0
    with dbuffer.WeightSender(store) as sender:
        publish(sender, 3, 4)
    status = json.loads(call(capsys, "status", store, "--json")[1])
    states = {buffer["version"]: buffer["state"] for buffer in status["buffers"]}
    assert states == {1: "pinned", 3: "previous", 4: "newest"}
    assert "pinned" in call(capsys, "status", store)[1]
    checks = json.loads(call(capsys, "verify", store, "--json")[1])
    assert [check["version"] for check in checks] == [4, 3, 1]
    code, output, _ = call(capsys, "rollback", store, 1, "--json")
    assert (code, json.loads(output)["version"]) == (0, 5)
    with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
        assert SMALL.version_of(snapshot.tensors) == 1
        assert snapshot.metadata == {"step": 10, "republished_version": 1}
    assert call(capsys, "unpin", store, 1)[0] == 0
    for arguments in (("unpin", store, 1), ("rollback", store, 2)):
        code, _, errors = call(capsys, *arguments)
        assert code == 1
        assert f"version {arguments[-1]}" in errors


def test_a_version_that_is_dropped_while_kept_ones_are_listed_is_left_out(
    store, keeper, monkeypatch
):
    listing = DoubleBuffer(store)
    listed = listing.kept_directories()
    gone = {"kept/0123456789abcdef-1": store / "kept" / "0123456789abcdef-1"}
    monkeypatch.setattr(listing, "kept_directories", lambda: listed | gone)
    assert [manifest.version for manifest in listing.kept().values()] == [1]


def rename_unless(
    name: str,
    temporary: Path,
    path: Path,
    file: filesystem.Descriptor,
    *,
    rename: Callable[..., None] = filesystem._rename,
) -> None:
    if path.name == name:
        raise OSError(errno.ENOSPC, "No space left on device")
    rename(temporary, path, file)


def test_a_version_that_no_pointer_named_counts_as_none(store, mount, capsys, monkeypatch):
    """Its number is not used again, as readers may know the pointer that was put."""
    view = DoubleBuffer(store)
    with dbuffer.WeightSender(store, keep=1) as sender:
        for number in (1, 4):
            with monkeypatch.context() as patch, pytest.raises(dbuffer.StoreFullError):
                patch.setattr(filesystem, "_rename", functools.partial(rename_unless, "CURRENT"))
                sender.send(SMALL.weights(99))
            status = json.loads(call(capsys, "status", store, "--json")[1])
            states = {buffer["version"]: buffer["state"] for buffer in status["buffers"]}
            assert states[number] == "unfinished"
            verified = call(capsys, "verify", store, "--json")[1]
            assert f'"version": {number},' not in verified
            with pytest.raises(dbuffer.VersionError):
                kept.pin(view, number)
            with pytest.raises(dbuffer.VersionError):
                sender.republish(number)
            publish(sender, number + 1, number + 2)
            versions = [version for version in (number - 1, number + 1, number + 2) if version]
            assert readable(store, number + 2) == versions


@pytest.mark.parametrize(
    ("record", "publish_again"),
    [("manifest.json", False), ("manifest.json", True), ("CURRENT", True)],
)
@pytest.mark.parametrize("delta", [False, True])
def test_a_publish_that_fails_spares_the_version_before_and_one_to_go_back_to(
    store, mount, delta, record, publish_again, monkeypatch
):
    with dbuffer.WeightSender(store, delta=delta) as sender:
        publish(sender, 1, 2)
        with monkeypatch.context() as patch, pytest.raises(dbuffer.StoreFullError):
            patch.setattr(filesystem, "_rename", functools.partial(rename_unless, record))
            sender.republish(1) if publish_again else publish(sender, 3)
        assert readable(store, 2) == [1, 2]
        version = sender.republish(1).version
        assert version == (4 if record == "CURRENT" else 3), (
            "the pointer's number is not used again"
        )
        assert SMALL.version_of(received(store)) == 1
        publish(sender, version + 1, version + 2)
    assert readable(store, version + 2) == [version + 1, version + 2]


def test_what_is_published_again_is_flushed_too(store, monkeypatch):
    with dbuffer.WeightSender(store) as sender:
        publish(sender, 1, 2)
    flush, flushed = os.fsync, set()

    def note(number: int) -> None:
        flushed.add(os.fstat(number).st_ino)
        flush(number)

    monkeypatch.setattr(os, "fsync", note)
    with dbuffer.WeightSender(store, durable=True) as sender:
        sender.republish(1)
    assert file_of(store, 3).stat().st_ino in flushed
