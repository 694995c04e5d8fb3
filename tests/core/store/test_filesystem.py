"""The one module that flushes, renames, locks and allocates."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbuffer.errors import (
    StoreAccessError,
    StoreCorruptError,
    StoreFullError,
    StoreNotFoundError,
)
from dbuffer.store import filesystem, mounts
from dbuffer.store.medium import medium_of
from dbuffer.store.mounts import Mount
from tests.support.stores import open_below


@pytest.fixture
def opened(tmp_path):
    """Open ``tmp_path/file`` again and again, each time on its own."""
    descriptors = []

    def open_file() -> int:
        descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
        descriptors.append(descriptor)
        return descriptor

    yield open_file
    for descriptor in descriptors:
        os.close(descriptor)


class TestReplaceFile:
    @pytest.fixture
    def scratch(self, tmp_path):
        path = tmp_path / "scratch"
        path.mkdir()
        return path

    @pytest.mark.parametrize("durable", [False, True])
    def test_new_and_again(self, tmp_path, scratch, durable):
        path = tmp_path / "record"
        for data in (b"one", b"", b"x" * 100_000):
            filesystem.replace_file(path, data, scratch=scratch, durable=durable)
            assert path.read_bytes() == data
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert list(scratch.iterdir()) == []

    def test_who_has_the_old_one_open_keeps_it(self, tmp_path, scratch):
        path = tmp_path / "record"
        path.write_bytes(b"old")
        with path.open("rb") as old:
            filesystem.replace_file(path, b"new", scratch=scratch)
            assert old.read() == b"old"

    def test_a_link_is_replaced_not_followed(self, tmp_path, scratch):
        target, path = tmp_path / "target", tmp_path / "record"
        target.write_bytes(b"mine")
        path.symlink_to(target)
        filesystem.replace_file(path, b"new", scratch=scratch)
        assert target.read_bytes() == b"mine"
        assert path.read_bytes() == b"new"
        assert not path.is_symlink()

    def test_a_failure_leaves_the_old_file_and_nothing_else(self, tmp_path, scratch, monkeypatch):
        path = tmp_path / "record"
        path.write_bytes(b"old")

        def fail(*_):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(StoreAccessError, match=os.strerror(errno.EIO)):
            filesystem.replace_file(path, b"new", scratch=scratch)
        assert path.read_bytes() == b"old"
        assert list(scratch.iterdir()) == []

    @pytest.mark.parametrize("has_old", [False, True])
    def test_what_a_restarted_server_does_twice(self, tmp_path, scratch, monkeypatch, has_old):
        """As an NFS client sees it: the second answer is the one that it hears."""
        path = tmp_path / "record"
        if has_old:
            path.write_bytes(b"old")
        replace = os.replace

        def twice(*args):
            replace(*args)
            replace(*args)

        monkeypatch.setattr(os, "replace", twice)
        filesystem.replace_file(path, b"new", scratch=scratch)
        assert path.read_bytes() == b"new"
        assert list(scratch.iterdir()) == []

    @pytest.mark.parametrize("has_old", [False, True])
    def test_a_temporary_that_someone_removed_is_an_error(
        self, tmp_path, scratch, monkeypatch, has_old
    ):
        path = tmp_path / "record"
        if has_old:
            path.write_bytes(b"old")
        replace = os.replace

        def replace_nothing(temporary, path):
            temporary.unlink()
            replace(temporary, path)

        monkeypatch.setattr(os, "replace", replace_nothing)
        with pytest.raises(StoreNotFoundError):
            filesystem.replace_file(path, b"new", scratch=scratch)
        assert path.exists() == has_old

    def test_no_directory(self, tmp_path):
        with pytest.raises(StoreNotFoundError):
            filesystem.replace_file(tmp_path / "a", b"", scratch=tmp_path / "none")

    def test_leaves_no_descriptor_open(self, tmp_path, scratch):
        filesystem.replace_file(tmp_path / "a", b"1", scratch=scratch, durable=True)
        assert not open_below(tmp_path)


def test_old_temporaries_go_and_young_ones_stay(tmp_path):
    old, young, other = tmp_path / ".a.1.2.tmp", tmp_path / ".b.1.2.tmp", tmp_path / "c.tmp"
    for path in (old, young, other):
        path.touch()
    long_ago = time.time() - 3600
    os.utime(old, (long_ago, long_ago))
    os.utime(other, (long_ago, long_ago))
    filesystem.remove_stale_temporaries(tmp_path)
    assert sorted(tmp_path.iterdir()) == [young, other]


class TestReading:
    def test_a_small_file(self, tmp_path):
        path = tmp_path / "file"
        path.write_bytes(b"12345")
        assert filesystem.read_small(path, 5) == b"12345"
        with pytest.raises(StoreCorruptError, match=str(path)):
            filesystem.read_small(path, 4)

    def test_none(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            filesystem.read_small(tmp_path / "none", 10)

    @pytest.mark.parametrize("name", ["open", "read", "fstat"])
    def test_a_stale_handle_is_tried_again_for_a_while(self, tmp_path, monkeypatch, name):
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
        for times in (1, 2, 4):
            left = times
            assert filesystem.read_small(path, 5) == b"12345"
        left = 1000
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            filesystem.read_small(path, 5)
        monkeypatch.undo()
        assert not open_below(tmp_path)

    @pytest.mark.parametrize("kind", ["link", "dangling link", "directory", "pipe"])
    @pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR], ids=["read", "write"])
    def test_nothing_but_a_plain_file(self, tmp_path, kind, flags):
        path = tmp_path / "file"
        (tmp_path / "target").write_bytes(b"secret")
        match kind:
            case "link":
                path.symlink_to(tmp_path / "target")
            case "dangling link":
                path.symlink_to(tmp_path / "none")
            case "directory":
                path.mkdir()
            case "pipe":
                os.mkfifo(path)
        with pytest.raises(StoreCorruptError, match=str(path)):
            filesystem.open_regular(path, flags)
        assert not open_below(tmp_path)

    def test_read_and_write_at(self, tmp_path):
        descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        data = os.urandom(3_000_001)
        filesystem.write_at(descriptor, 100, data)
        assert filesystem.read_at(descriptor, 100, len(data)) == data
        assert filesystem.read_at(descriptor, 90, 20) == bytes(10) + data[:10]
        assert filesystem.read_at(descriptor, 100 + len(data) - 3, 10) == data[-3:]
        assert filesystem.read_at(descriptor, 10**9, 10) == b""
        os.close(descriptor)


class TestLocks:
    def test_readers_share_and_the_writer_is_alone(self, opened):
        one, other, writer = opened(), opened(), opened()
        assert filesystem.try_lock(one, exclusive=False)
        assert filesystem.try_lock(other, exclusive=False)
        assert not filesystem.try_lock(writer, exclusive=True)
        filesystem.unlock(one)
        assert not filesystem.try_lock(writer, exclusive=True)
        filesystem.unlock(other)
        assert filesystem.try_lock(writer, exclusive=True)
        assert not filesystem.try_lock(one, exclusive=False)

    def test_waiting_ends(self, opened):
        reader, writer = opened(), opened()
        assert filesystem.try_lock(reader, exclusive=False)
        started = time.monotonic()
        assert not filesystem.lock_within(writer, 0.2)
        assert 0.2 <= time.monotonic() - started < 5

    def test_no_time_at_all_is_one_try(self, opened):
        assert filesystem.lock_within(opened(), 0.0)
        assert not filesystem.lock_within(opened(), 0.0)

    def test_the_lock_of_a_killed_process_is_dropped(self, tmp_path, opened):
        code = (
            "import fcntl, sys, time; f = open(sys.argv[1], 'w'); "
            "fcntl.flock(f, fcntl.LOCK_EX); print('locked', flush=True); time.sleep(60)"
        )
        descriptor = opened()
        command = [sys.executable, "-c", code, str(tmp_path / "file")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "locked\n"
            assert not filesystem.lock_within(descriptor, 0.05)
            process.send_signal(signal.SIGKILL)
            assert filesystem.lock_within(descriptor, 5.0)


class TestDescriptor:
    def open(self, path) -> filesystem.Descriptor:
        return filesystem.Descriptor(os.open(path, os.O_RDWR | os.O_CREAT))

    def test_is_closed_once(self, tmp_path):
        descriptor = self.open(tmp_path / "file")
        assert descriptor.is_open
        descriptor.close()
        descriptor.close()
        assert not descriptor.is_open
        assert not open_below(tmp_path)

    def test_is_closed_when_dropped(self, tmp_path):
        descriptor = self.open(tmp_path / "file")
        del descriptor
        assert not open_below(tmp_path)

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
    def test_is_closed_in_a_forked_child(self, tmp_path):
        descriptor = self.open(tmp_path / "file")
        number = descriptor.number
        child = os.fork()
        if child == 0:
            try:
                os.fstat(number)
            except OSError:
                os._exit(0 if not descriptor.is_open else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert descriptor.is_open
        descriptor.close()


def test_allocated_space_is_real(tmp_path):
    path = tmp_path / "file"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    filesystem.allocate(descriptor, 1 << 20, path)
    found = os.fstat(descriptor)
    os.close(descriptor)
    assert found.st_size == 1 << 20
    assert found.st_blocks * 512 >= 1 << 20


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StoreFullError),
        (errno.EDQUOT, StoreFullError),
        (errno.EIO, StoreAccessError),
        (errno.EROFS, StoreAccessError),
        (errno.EACCES, StoreAccessError),
        (errno.ENOENT, StoreNotFoundError),
        (errno.ESTALE, StoreNotFoundError),
    ],
)
def test_os_errors_become_ours(tmp_path, number, kind):
    with (
        pytest.raises(kind, match="flush it") as caught,
        filesystem.os_errors("flush it", tmp_path),
    ):
        raise OSError(number, os.strerror(number), str(tmp_path))
    assert type(caught.value) is kind
    assert str(tmp_path) in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


class TestTrust:
    def test_made_for_the_owner_only(self, tmp_path):
        before = os.umask(0)
        try:
            filesystem.make_directory(tmp_path / "a" / "b", parents=True)
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
        filesystem.make_directory(tmp_path / "a" / "b")

    @pytest.mark.parametrize("mode", [0o700, 0o755, 0o750, 0o500])
    def test_nobody_else_may_write(self, tmp_path, mode):
        tmp_path.chmod(mode)
        filesystem.check_trust(tmp_path)
        tmp_path.chmod(0o700)

    @pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777, 0o720, 0o702])
    def test_others_may(self, tmp_path, mode):
        tmp_path.chmod(mode)
        advice = "name a directory below it" if mode & stat.S_ISVTX else f"chmod go-w {tmp_path}"
        with pytest.raises(StoreAccessError, match=advice):
            filesystem.check_trust(tmp_path)

    def test_someone_elses(self, tmp_path, monkeypatch):
        if os.geteuid() == 0:
            os.chown(tmp_path, 12345, 12345)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
        with pytest.raises(StoreAccessError, match=str(tmp_path)):
            filesystem.check_trust(tmp_path)

    def test_none(self, tmp_path):
        with pytest.raises(StoreNotFoundError):
            filesystem.check_trust(tmp_path / "none")

    def test_no_directory(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(StoreAccessError, match=str(tmp_path / "file")):
            filesystem.check_trust(tmp_path / "file")


class TestMounts:
    @pytest.fixture
    def mounts(self, tmp_path, monkeypatch):
        """Name mounts below ``tmp_path``."""

        def install(*table: tuple[str, str]) -> None:
            root = str(tmp_path.resolve())
            points = [("/", "ext4"), *((root + place, kind) for place, kind in table)]
            lines = [(point, Mount(kind, "none", ())) for point, kind in points]
            monkeypatch.setattr("dbuffer.store.mounts._mounts", lambda: iter(lines))

        return install

    def test_the_real_table(self, tmp_path):
        medium = medium_of(tmp_path)
        there = medium_of(tmp_path / "not" / "there")
        assert (medium.name, medium.filesystem) == (there.name, there.filesystem)
        kind = subprocess.run(
            ["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True
        ).stdout.strip()
        assert medium.filesystem[:3] == kind[:3]  # stat says ext2/ext3 for all of them

    def test_the_nearest_one_counts(self, tmp_path, mounts):
        mounts(("/a/b", "xfs"), ("/a", "nfs4"), ("/a/bc", "tmpfs"))
        assert medium_of(tmp_path / "a" / "b" / "c").filesystem == "xfs"
        assert medium_of(tmp_path / "a" / "x").filesystem == "nfs4"
        assert medium_of(tmp_path / "a" / "bc").filesystem == "tmpfs"
        assert medium_of(tmp_path / "ab").filesystem == "ext4"

    def test_the_latest_of_several_on_one_place_counts(self, tmp_path, mounts):
        mounts(("/a", "nfs4"), ("/a", "tmpfs"))
        assert medium_of(tmp_path / "a").filesystem == "tmpfs"

    def test_links_are_followed(self, tmp_path, mounts):
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        mounts(("/real", "nfs4"))
        assert medium_of(tmp_path / "link" / "store").name == "network"

    @pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p"])
    @pytest.mark.parametrize("prefix", ["", "fuse."])
    def test_network(self, tmp_path, mounts, kind, prefix):
        mounts(("/a", prefix + kind))
        medium = medium_of(tmp_path / "a")
        assert medium.name == "network"
        assert not medium.can_rewrite_in_place

    @pytest.mark.parametrize(("kind", "rewrites"), [("tmpfs", 1), ("ext4", 1), ("xfs", 1)])
    def test_local(self, tmp_path, mounts, kind, rewrites):
        mounts(("/a", kind))
        medium = medium_of(tmp_path / "a")
        assert medium.name == "local"
        assert medium.can_rewrite_in_place

    @pytest.mark.parametrize("kind", ["btrfs", "zfs", "neverheardofit"])
    def test_a_copy_on_write_or_unknown_one_is_never_rewritten(self, tmp_path, mounts, kind):
        mounts(("/a", kind))
        assert not medium_of(tmp_path / "a").can_rewrite_in_place


@given(st.text(st.sampled_from("ab \t\n\\0134é"), max_size=20))
def test_mount_points_are_read_as_the_kernel_writes_them(text):
    written = "".join(f"\\{ord(c):03o}" if c in " \t\n\\" else c for c in text)
    assert mounts._unescape(written) == text


@pytest.mark.parametrize(
    ("name", "is_ours"),
    [
        (".CURRENT.123.0.tmp", True),
        (".manifest.json.4194304.17.tmp", True),
        (".engine-0.rank-1.json.1.2.tmp", True),
        (".upload.tmp", False),
        (".notes.txt.tmp", False),
        (".a.b.c.tmp", False),
        (".CURRENT.123.tmp", False),
        (".CURRENT.123.x.tmp", False),
        (".my notes.1.2.tmp", False),
    ],
)
def test_other_peoples_temporaries_stay(tmp_path, name, is_ours):
    (tmp_path / name).touch()
    (tmp_path / ".folder.1.2.tmp").mkdir()
    (tmp_path / ".link.1.2.tmp").symlink_to("nowhere")
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1), follow_symlinks=False)
    filesystem.remove_stale_temporaries(tmp_path)
    assert (tmp_path / name).exists() != is_ours
    assert (tmp_path / ".folder.1.2.tmp").is_dir()
    assert (tmp_path / ".link.1.2.tmp").is_symlink()
