"""A third medium, in a module of its own: files that are mapped, and never written twice.

Each version gets a new file, and the old one is unlinked at once: who maps it keeps its bytes. So
there is no lock to take, nobody to wait for, and no one to evict. It checks what every medium may
rely on, and fails where it is told to.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import dbuffer
from dbuffer.format.manifest import Manifest
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.filesystem import Descriptor
from dbuffer.store.medium import MEDIA, LocalMedium, Medium
from dbuffer.store.weights_files import WeightsFiles
from dbuffer.store.writer import FILES

failing: set[str] = set()
"""Names of the methods of `_UnlinkedFiles` that fail."""


@contextlib.contextmanager
def failing_at(method: str) -> Iterator[None]:
    failing.add(method)
    try:
        yield
    finally:
        failing.clear()


def _fail_if_told(method: str) -> None:
    if method in failing:
        raise dbuffer.StoreAccessError(f"told to fail at {method}")


class CheckedMedium(Medium):
    name = "checked"
    reaches_other_hosts = False

    @property
    def can_rewrite_in_place(self) -> bool:
        return False

    def now(self) -> float:
        return time.time()

    def shows_life(self, record: Path) -> bool:
        return LocalMedium(self.root, self.filesystem).shows_life(record)

    def lock_to_read(self, file: Descriptor) -> bool:
        assert file.is_open
        return True

    def publish_file(
        self,
        path: Path,
        data: bytes,
        *,
        durable: bool = False,
        shows_life: bool = False,
        before: Descriptor | None = None,
    ) -> Descriptor | None:
        local = LocalMedium(self.root, self.filesystem)
        return local.publish_file(path, data, durable=durable, shows_life=shows_life, before=before)


class _UnlinkedFiles(WeightsFiles):
    access = os.O_RDWR

    def reuse(
        self, buffer: str, old: Manifest | None, layout_xxh3: str | None, file_bytes: int
    ) -> Descriptor | None:
        pointer = DoubleBuffer(self.store.root).pointer()
        assert pointer is None or pointer.buffer != buffer, "the newest version is never touched"
        _fail_if_told("reuse")
        return None

    def retire(self, buffer: str, old: Manifest | None, *, keep: Collection[Path]) -> None:
        marked = DoubleBuffer(self.store.root).manifest(buffer)
        assert marked.state == "writing", "the mark comes first"
        assert self.store.root / buffer / marked.file in keep
        _fail_if_told("retire")
        self.sweep(buffer, keep=keep)

    def make(self, path: Path, num_bytes: int) -> Descriptor:
        _fail_if_told("make")
        return super().make(path, num_bytes)

    def _make_room(self, file: Descriptor, path: Path, num_bytes: int) -> None:
        if num_bytes:
            filesystem.allocate(file.number, num_bytes, path)

    def sweep(self, directory: str, *, keep: Collection[Path]) -> None:
        for path in self.all_in(directory):
            if path not in keep:
                self.close_at(path)
                path.unlink()

    def note_published(self, read_back: Callable[[], None]) -> None:
        read_back()
        _fail_if_told("note_published")


MEDIA[CheckedMedium.name] = CheckedMedium
FILES[CheckedMedium.name] = _UnlinkedFiles
