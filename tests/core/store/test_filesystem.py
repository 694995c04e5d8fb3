"""The one module that flushes, renames, locks and allocates; and the mounts below it."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbuffer.errors import (
    StoreAccessError,
    StoreCorruptError,
    StoreNotFoundError,
)
from dbuffer.store import filesystem, medium
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.medium import medium_of
from dbuffer.testing.waiting import TIMEOUT_S
from tests.support.forks import in_a_fork
from tests.support.stores import open_files, small_disk


@pytest.fixture
def scratch(tmp_path):
    path = tmp_path / "scratch"
    path.mkdir()
    return path


# Replacing


def refuse(replace, temporary, path):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def replace_twice(replace, temporary, path):
    """As a restarted NFS server does, whose second answer is the one that a client gets."""
    replace(temporary, path)
    replace(temporary, path)


def lose_the_temporary(replace, temporary, path):
    temporary.unlink()
    replace(temporary, path)


@pytest.mark.parametrize("has_old", [False, True])
@pytest.mark.parametrize(
    ("rename", "error"),
    [(refuse, StoreAccessError), (replace_twice, None), (lose_the_temporary, StoreNotFoundError)],
)
def test_rename_that_goes_wrong(tmp_path, scratch, monkeypatch, rename, error, has_old):
    """The file is the new one or the old one, and nothing else is left."""
    path = tmp_path / "record"
    if has_old:
        path.write_bytes(b"old")
    monkeypatch.setattr(os, "replace", functools.partial(rename, os.replace))
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        filesystem.replace_file(path, b"new", scratch=scratch)
    left = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    old = {"record": b"old"} if has_old else {}
    assert left == ({"record": b"new"} if error is None else old)


def test_stale_temporaries_are_removed_and_other_files_stay(tmp_path):
    end = ".0123456789abcdef.tmp"
    ours = [f".{name}{end}" for name in ("CURRENT", "manifest.json", "engine-0.rank-1.json")]
    others = ["c.tmp", ".upload.tmp", ".a.b.c.tmp", f".a b{end}"]
    others += [".CURRENT.1.tmp", ".CURRENT.0123456789abcdefg.tmp"]
    for name in (*ours, *others):
        (tmp_path / name).touch()
    (tmp_path / f".folder{end}").mkdir()
    (tmp_path / f".link{end}").symlink_to("nowhere")
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1), follow_symlinks=False)
    (tmp_path / f".young{end}").touch()
    filesystem.remove_stale_temporaries(tmp_path, time.time())
    stay = {*others, *(f".{name}{end}" for name in ("folder", "link", "young"))}
    assert {path.name for path in tmp_path.iterdir()} == stay


# Reading


@pytest.mark.parametrize("name", ["open", "read", "fstat"])
def test_small_file_is_read_again_after_a_stale_handle(tmp_path, monkeypatch, name):
    """A file that is replaced between lookup and read; the next lookup finds the new one."""
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    real, left = getattr(os, name), 0

    def stale(*arguments):
        nonlocal left
        if left > 0:
            left -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(*arguments)

    monkeypatch.setattr(os, name, stale)
    for times in (0, 1, 2, 4):
        left = times
        assert filesystem.read_small(path, 5) == b"12345"
    with pytest.raises(StoreCorruptError, match=str(path)):
        filesystem.read_small(path, 4)
    left = 1000
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        filesystem.read_small(path, 5)
    monkeypatch.undo()
    assert not open_files(tmp_path)


# Descriptors


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_descriptor_is_closed_once_when_dropped_and_in_a_fork(tmp_path):
    def open_file() -> filesystem.Descriptor:
        return filesystem.Descriptor(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT))

    descriptor = open_file()

    def require_closed() -> None:
        assert not descriptor.is_open
        assert not open_files(tmp_path)

    assert in_a_fork(require_closed) == 0
    assert descriptor.is_open
    descriptor.close()
    descriptor.close()
    require_closed()
    dropped = open_file()
    assert open_files(tmp_path)
    del dropped
    assert not open_files(tmp_path)


def test_an_opening_that_hangs_keeps_neither_forks_nor_other_files_waiting(tmp_path, monkeypatch):
    """As on a mount whose server is gone: trainers fork for their data all the time."""
    hanging, other = tmp_path / "hanging", tmp_path / "other"
    has_begun, may_end, open_file = threading.Event(), threading.Event(), os.open

    def open_late(path: Path, *arguments: int) -> int:
        if path == hanging:
            has_begun.set()
            may_end.wait(TIMEOUT_S)
        return open_file(path, *arguments)

    def open_and_close(path: Path) -> None:
        filesystem.Descriptor.open(path, os.O_CREAT | os.O_RDWR).close()

    def fork_and_open() -> None:
        assert in_a_fork(lambda: None) == 0
        open_and_close(other)

    monkeypatch.setattr(os, "open", open_late)
    first = threading.Thread(target=open_and_close, args=(hanging,), daemon=True)
    second = threading.Thread(target=fork_and_open, daemon=True)
    first.start()
    assert has_begun.wait(TIMEOUT_S)
    second.start()
    second.join(10)
    has_ended = not second.is_alive()
    may_end.set()
    first.join(TIMEOUT_S)
    assert has_ended
    assert other.exists()


# Mounts


def test_medium_is_that_of_the_real_mount(tmp_path):
    medium, there = medium_of(tmp_path), medium_of(tmp_path / "not" / "there")
    assert (medium.root, medium.filesystem) == (tmp_path, there.filesystem)
    command = ["stat", "-f", "-c", "%T", tmp_path]
    kind = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert medium.filesystem[:3] == kind[:3]  # stat says ext2/ext3 for all of them


@pytest.fixture
def mounted(tmp_path, monkeypatch):
    """Mount kinds of filesystems at places below ``tmp_path``."""

    def install(*table: tuple[str, str]) -> None:
        mounted = [(str(tmp_path.resolve() / place), kind) for place, kind in table]
        lines = [(point, (kind, "none")) for point, kind in [("/", "ext4"), *mounted]]
        monkeypatch.setattr("dbuffer.store.medium._mounts", lambda: iter(lines))

    return install


def test_nearest_mount_counts_and_of_several_at_one_place_the_latest(tmp_path, mounted):
    mounted(("a/b", "xfs"), ("a", "tmpfs"), ("a", "nfs4"), ("a/bc", "tmpfs"))
    (tmp_path / "link").symlink_to(tmp_path / "a")
    kinds = {"a/b/c": "xfs", "a/x": "nfs4", "a/bc": "tmpfs", "ab": "ext4", "link/store": "nfs4"}
    assert {place: medium_of(tmp_path / place).filesystem for place in kinds} == kinds


@pytest.mark.parametrize(
    ("kinds", "is_network", "can_rewrite"),
    [
        ("tmpfs ext4", False, True),
        ("btrfs overlay xfs zfs", False, False),
        ("nfs nfs4 cifs smb3 ceph lustre 9p fuse.nfs neverheardofit", True, False),
    ],
)
def test_medium_of_a_filesystem(tmp_path, mounted, kinds, is_network, can_rewrite):
    for kind in kinds.split():
        mounted(("", kind))
        medium = medium_of(tmp_path)
        assert medium.reaches_other_hosts == is_network, kind
        assert medium.can_rewrite_in_place == can_rewrite, kind


@given(st.text(st.sampled_from("ab \t\n\\0134é"), max_size=20))
def test_mount_points_are_read_as_the_kernel_writes_them(text):
    written = "".join(f"\\{ord(c):03o}" if c in " \t\n\\" else c for c in text)
    assert medium._unescape(written) == text


def test_a_disk_that_is_mounted_later_counts(tmp_path):
    store = DoubleBuffer(tmp_path / "disk" / "store")
    assert store.medium.filesystem != "tmpfs"
    with small_disk(tmp_path / "disk", 1 << 20):
        store.root.mkdir()
        assert store.medium.filesystem == "tmpfs"
