"""Guarantee 3, crash anywhere, where it is the power that goes: after every change of the disk.

A disk keeps what was flushed, and may keep any part of the rest or none. Here a publish is watched:
before each flush, rename and removal, and after each publish, the store is put together as a cut
just then may have left it, in every combination of what was not flushed: with the directories as
they were flushed or as they are, each by itself, and the files likewise. From each of these the
last version that `send` has returned must be read whole, and a new sender must go on.

Waiting for the next publish would hide a flush that is lacking: its flushes bring the last one's
along. The NFS lab cuts the power of a real disk.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from tests.support.patterns import OTHER, SMALL, SPARSE, Pattern, newest
from tests.support.soak import in_turn, is_soak

pytestmark = pytest.mark.timing(settle_s=0.01)

Entries = dict[str, int]
"""A directory: names, and numbers of inodes."""
Image = dict[str, bytes | None]
"""A disk after a cut: paths and contents; None for a directory."""


class Disk:
    """Everything below a directory, and what of it was flushed.

    The entries of ``top`` itself count as flushed as they are now.
    """

    def __init__(self, top: Path) -> None:
        self._top = top
        self._opened: dict[int, int] = {}
        self._flushed_files: dict[int, bytes] = {}
        self._flushed_directories: dict[int, Entries] = {}
        self.flushes: list[str] = []
        """What was flushed, in order: paths."""
        self._note_directory(top)

    def close(self) -> None:
        for descriptor in self._opened.values():
            os.close(descriptor)

    def note_flush(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if not path.is_relative_to(self._top):
            return
        self.flushes.append(str(path.relative_to(self._top)))
        if path.is_dir():
            self._note_directory(path)
        else:
            self._flushed_files[self._open(path)] = path.read_bytes()

    def _note_directory(self, path: Path) -> None:
        self._flushed_directories[self._open(path)] = self._entries(path)

    def _entries(self, path: Path) -> Entries:
        return {entry.name: self._open(path / entry.name) for entry in path.iterdir()}

    def _open(self, path: Path) -> int:
        """Its inode's number, which is nobody else's from now on: it stays open."""
        number = path.stat().st_ino
        if number not in self._opened:
            self._opened[number] = os.open(path, os.O_RDONLY)
        return number

    def images(self) -> Iterator[Image]:
        """What may be on the disk if the power is cut now."""
        directories = [self._top, *(path for path in self._top.rglob("*") if path.is_dir())]
        now = {self._open(path): self._entries(path) for path in directories}
        for late in itertools.product((True, False), repeat=len(now)):
            entries = {
                number: self._flushed_directories.get(number, {}) if is_late else found
                for is_late, (number, found) in zip(late, now.items(), strict=True)
            }
            for is_data_late in (True, False):
                yield dict(self._tree(self._open(self._top), "", entries, is_data_late))

    def _tree(
        self, number: int, path: str, entries: dict[int, Entries], is_data_late: bool
    ) -> Iterator[tuple[str, bytes | None]]:
        for name, child in entries[number].items():
            if stat.S_ISDIR(os.fstat(self._opened[child]).st_mode):
                yield f"{path}{name}", None
                yield from self._tree(child, f"{path}{name}/", entries, is_data_late)
            else:
                yield f"{path}{name}", self._data(child, is_data_late)

    def _data(self, number: int, is_late: bool) -> bytes:
        found = os.fstat(self._opened[number])
        if is_late:  # the size is as good as a name: it may be there before the bytes
            return self._flushed_files.get(number, bytes(found.st_size))
        return os.pread(self._opened[number], found.st_size, 0)


@contextlib.contextmanager
def watched(disk: Disk, before_each: Callable[[], None]) -> Iterator[None]:
    """Tell the disk of flushes, and call a function before each call that changes its state."""

    def telling(function: Any, tell: Callable[[Any], None]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            before_each()
            result = function(*args, **kwargs)
            tell(args[0])
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", telling(os.fsync, disk.note_flush))
        for name in ("replace", "rename", "unlink", "remove"):
            patch.setattr(os, name, telling(getattr(os, name), lambda argument: None))
        yield


class PowerCuts:
    """Publishes, and looks at what each cut would have left."""

    def __init__(self, directory: Path) -> None:
        (directory / "disk").mkdir()
        self._store = directory / "disk" / "store"
        self._after = directory / "after"
        self.disk = Disk(directory / "disk")
        self._published = 0
        self._seen: set[int] = set()
        self._is_checking = False
        self.num_images = 0
        self.close = self.disk.close

    def publish(self, patterns: list[Pattern]) -> None:
        """Publish in one sender's life; each cut must leave the last version or the next."""
        with watched(self.disk, self.cut):
            with dbuffer.WeightSender(
                self._store, durable=True, checksum=True, delta=SPARSE in patterns, num_threads=1
            ) as sender:
                for pattern in patterns:
                    version = sender.send(pattern.weights(self._published + 1)).version
                    assert version == self._published + 1
                    self._published = version
                    self.cut()

    def cut(self) -> None:
        if self._is_checking:
            return  # what is done to what a cut has left is no more of the disk
        self._is_checking = True
        for image in self.disk.images():
            key = hash((self._published, frozenset(image.items())))
            if key not in self._seen:
                self._seen.add(key)
                self._check_or_tell(image)
        self._is_checking = False

    def _check_or_tell(self, image: Image) -> None:
        try:
            self._check(image)
        except (AssertionError, dbuffer.DBufferError) as error:
            kept = "\n".join(f"{path}: {data!r:.100}" for path, data in sorted(image.items()))
            error.add_note(f"after {self.disk.flushes}, on the disk:\n{kept}")
            raise

    def _check(self, image: Image) -> None:
        self.num_images += 1
        self._after.mkdir()
        for path, data in image.items():
            if data is None:
                (self._after / path).mkdir(mode=0o700)
            else:
                (self._after / path).write_bytes(data)
                (self._after / path).chmod(0o600)
        store = self._after / "store"
        found = newest(store, verify=True) or 0
        assert found in (self._published, self._published + 1), (
            f"{self._published} was published, and {found} is there"
        )
        if found > 1:
            check_previous(store, found - 1)
        with dbuffer.WeightSender(store, checksum=True, num_threads=1) as sender:
            version = sender.send(SMALL.weights(found + 1), version=found + 1).version
        assert newest(store, verify=True) == version
        shutil.rmtree(self._after)


def check_previous(store: Path, version: int) -> None:
    """It may have gone; if it is there, it is whole, with no checksums to tell."""
    with dbuffer.WeightReceiver(store, verify=False, num_threads=1) as receiver:
        with contextlib.suppress(dbuffer.VersionError):
            with receiver.open(version=version) as snapshot:
                found = dict(snapshot.tensors)
                pattern = next(p for p in (SMALL, OTHER, SPARSE) if p.names == list(found))
                assert pattern.version_of(found) == version


LIVES = {
    "whole": [[SMALL, SMALL, SMALL], [SMALL, OTHER]],
    # A first version, a delta or two, and an anchor; then a sender that was started again.
    "deltas": [[SPARSE] * (5 if is_soak() else 3), [SPARSE, SPARSE]],
}


@in_turn(("lives", "mount"), ["whole", "deltas"], ["local", "network"])
def test_whenever_the_power_is_cut_what_was_published_is_there(shm_path, lives, mount, monkeypatch):
    monkeypatch.setenv("DBUFFER_MOUNT", mount)
    monkeypatch.setattr("dbuffer.format.chain.MAX_CHAIN", 2 if is_soak() else 1)
    with contextlib.closing(PowerCuts(shm_path)) as cuts:
        for patterns in LIVES[lives]:
            cuts.publish(patterns)
    assert cuts.num_images > 50
