"""A bucket as a mirror's source: `BucketSource`, and a version that is held there."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Self

import numpy as np

from dbuffer.errors import (
    SnapshotEvictedError,
    StoreCorruptError,
    StoreNotFoundError,
)
from dbuffer.format.layout import digest
from dbuffer.format.lineage import Lineage, VersionId
from dbuffer.format.manifest import Versioned
from dbuffer.format.objects import (
    POINTER_OBJECT,
    BucketVersion,
    Part,
    delta_directory,
    weights_directory,
)
from dbuffer.io.chain_reader import ChainReader
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import FileTensors
from dbuffer.mirror.bucket import Bucket, Tag
from dbuffer.mirror.records import BucketRecords
from dbuffer.receive.follow_loop import wait_until_newer
from dbuffer.receive.reader import VersionVerifier
from dbuffer.store import filesystem
from dbuffer.store.buffer import require_successor
from dbuffer.store.filesystem import Descriptor
from dbuffer.store.hold import HeldVersion
from dbuffer.store.records import OwnRecord
from dbuffer.store.watcher import wait_and_clear


class HeldObjects(HeldVersion):
    """A version in a bucket, with its footer and some of its deltas in memory.

    Args:
        bucket: where it is.
        version: its record.
        before: the version that was held last; a footer of the same weights file is not fetched.

    Raises:
        StoreNotFoundError: a part is missing.
        StoreCorruptError: a part is not what was published.
    """

    def __init__(
        self, bucket: Bucket, version: BucketVersion, before: HeldObjects | None = None
    ) -> None:
        self._bucket = bucket
        self.record = version
        self.manifest = version.manifest
        self.deltas: dict[VersionId, Descriptor] = {}
        """Open files with deltas, by the versions that they lead to."""
        has_footer = before is not None and before.record.weights_parts == version.weights_parts
        self.footer: bytes = before.footer if before and has_footer else self._fetch_footer()
        """The weights file from the table of checksums to the end of the layout."""

    @property
    def name(self) -> str:
        return self._bucket.name_of(weights_directory(self.manifest.file_version))

    def release(self) -> None:
        for file in self.deltas.values():
            file.close()
        self.deltas.clear()

    def is_unchanged(self) -> bool:
        return True  # no other process writes this memory

    def open_delta(self, version: VersionId) -> tuple[str, Descriptor]:
        # Opened once more: the caller closes it.
        path = f"/proc/self/fd/{self.deltas[version].number}"
        name = f"{self.name}, delta to {version}"
        with filesystem.os_errors("open a delta in memory", name):
            return name, Descriptor.open(path, os.O_RDONLY)

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        start = offset - self.manifest.checksums_offset
        return self.footer[start : start + num_bytes]

    def is_still_named(self) -> bool:
        newest = newest_version(self._bucket)
        return newest is not None and newest.id == self.manifest.id

    def fetch_deltas(
        self, versions: Iterable[VersionId], copies: Mapping[VersionId, Path] | None = None
    ) -> None:
        """Fetch deltas that lead to versions of its chain, unless they were fetched before.

        ``copies``: files with copies of deltas, which may be damaged or gone.
        """
        files: dict[VersionId, Descriptor] = {}
        items: list[_Item] = []
        for version in (each for each in versions if each not in self.deltas):
            parts = self.record.parts_in(delta_directory(version))
            if copies and version in copies and (copy := _open_copy(copies[version], parts)):
                self.deltas[version] = copy
                continue
            file = files[version] = filesystem.make_memory_file(str(version))
            items += [(part, functools.partial(_write_at, file)) for part in parts]
        with filesystem.os_errors("keep deltas in memory", self.name):
            self._fetch(items)
        self.deltas |= files

    def read_into(self, memory: FileTensors, copier: Copier, *, hashed: bool) -> list[int] | None:
        """Fetch it whole into memory; return the checksums of its tensors, if ``hashed``."""
        manifest = self.manifest
        self.fetch_deltas(manifest.since_anchor)
        # Copies into an array let go of the interpreter's lock.
        target = np.frombuffer(memory.raw[: manifest.checksums_offset], np.uint8)

        def place(offset: int, data: memoryview) -> None:
            some = target[offset : offset + data.nbytes]
            some[:] = np.frombuffer(data, np.uint8)[: len(some)]  # without the footer

        self._fetch([(part, place) for part in self.record.weights_parts])
        chain = ChainReader(self, memory.layout)
        return chain.read(memory, copier, since=manifest.file_version, hashed=hashed)

    def _fetch(self, items: list[_Item]) -> None:
        """Fetch parts side by side."""

        def fetch(item: _Item) -> None:
            part, place = item
            for _ in range(2):  # the network may have damaged it
                xxh3 = self._bucket.get_pieces(
                    part.name,
                    part.num_bytes,
                    lambda offset, data: place(part.offset + offset, data),
                )
                if xxh3 == part.xxh3:
                    return
            raise StoreCorruptError(f"{self._bucket.name_of(part.name)} is not what was published")

        self._bucket.in_parallel(fetch, items)

    def _fetch_footer(self) -> bytes:
        """Fetch the end of the weights file, which is compared with its digests."""
        manifest = self.record.manifest
        start, end = manifest.checksums_offset, manifest.layout_offset + manifest.layout_bytes
        data = b"".join(
            self._bucket.get_range(
                part.name, max(0, start - part.offset), min(part.num_bytes, end - part.offset)
            )
            for part in self.record.weights_parts
            if part.offset < end and start < part.offset + part.num_bytes
        )
        has_table = manifest.checksums_xxh3 in (None, digest(data[: 8 * manifest.num_tensors]))
        if has_table and digest(data[manifest.layout_offset - start :]) == manifest.layout_xxh3:
            return data
        raise StoreCorruptError(f"{self.name}: its footer is not what was published")


_Item = tuple[Part, Callable[[int, memoryview], None]]
"""A part, and a function that puts bytes to their place, from an offset in the file on."""


def _write_at(file: Descriptor, offset: int, data: memoryview) -> None:
    filesystem.write_at(file.number, offset, data)


def _open_copy(path: Path, parts: list[Part]) -> Descriptor | None:
    """Open a file if it has the content of these parts."""
    try:
        with filesystem.os_errors("read", path):
            file = filesystem.open_regular(path, os.O_RDONLY, owner_only=False)
    except StoreNotFoundError:
        return None
    num_bytes = os.fstat(file.number).st_size
    if num_bytes == sum(part.num_bytes for part in parts) and all(
        digest(filesystem.read_at(file.number, part.offset, part.num_bytes)) == part.xxh3
        for part in parts
    ):
        return file
    file.close()
    return None


def newest_version(bucket: Bucket) -> BucketVersion | None:
    """Return the record of a bucket's newest version, or None if there is no version."""
    try:
        read = bucket.read(BucketVersion, POINTER_OBJECT)
    except StoreNotFoundError:
        return None
    return None if read is None else read[0]


class BucketSource:
    """A bucket that a mirror follows; once it is opened, with the methods of a `WeightReceiver`.

    The mirror relays its own record together with its receivers' records.
    """

    def __init__(self, bucket: Bucket, poll_interval_s: float, copier: Copier) -> None:
        self._bucket = bucket
        self._poll_interval_s = poll_interval_s
        self._copier = copier
        self._held: HeldObjects | None = None
        """Version that was held last."""
        self._seen: BucketVersion | None = None
        self._tag: Tag | None = None
        self._is_woken = threading.Event()
        self.record: OwnRecord
        self.reader: VersionVerifier

    @property
    def name(self) -> str:
        return self._bucket.url

    @property
    def store(self) -> str:
        return self._bucket.url

    def newest(self) -> Versioned | None:
        version = newest_version(self._bucket)
        return None if version is None else version.manifest

    def open_receiver(self, name: str) -> Self:
        """Begin to follow, as a receiver of this name."""
        self.record = OwnRecord(name)
        self.reader = VersionVerifier(self.store, self.record, self._copier)
        self._held = self._seen = self._tag = None
        return self

    def records(self) -> BucketRecords:
        return BucketRecords(self._bucket, self.record)

    @property
    def seen(self) -> Lineage | None:
        return None if self._seen is None else self._seen.manifest.lineage

    def wait_for_version(
        self,
        newer_than: int | None = None,
        timeout_s: float | None = 60.0,
        stop_event: threading.Event | None = None,
    ) -> int | None:
        def poll_interval_s() -> float:
            # At random, so that the mirrors of many nodes do not ask all at once.
            return self._poll_interval_s * random.uniform(0.75, 1.25)  # noqa: S311

        wait = functools.partial(wait_and_clear, self._is_woken)
        return wait_until_newer(
            self._look, wait, poll_interval_s, newer_than, timeout_s, stop_event
        )

    @contextlib.contextmanager
    def hold_seen(self, newer_than: int | None = None) -> Iterator[HeldObjects | None]:
        """Hold the version that was seen last.

        Raises:
            SnapshotEvictedError: it has gone since, as newer ones came.
            StoreCorruptError: its footer is damaged, or missing.
        """
        seen = self._seen
        if seen is None or (newer_than is not None and seen.id.number <= newer_than):
            yield None
            return
        self._held = self._hold(seen)
        with self._held:
            yield self._held

    def _hold(self, version: BucketVersion) -> HeldObjects:
        try:
            return HeldObjects(self._bucket, version, self._held)
        except StoreNotFoundError as error:
            if newest_version(self._bucket) == version:
                raise StoreCorruptError(f"{error}, which {POINTER_OBJECT} names") from error
            raise SnapshotEvictedError(f"{error}: newer versions have come") from error

    def follow_fork(self) -> None:
        self._seen = self._tag = None
        self.record.set(problem=None, problem_version=None)

    def wake(self) -> None:
        self._is_woken.set()

    def close(self) -> None:
        self.record.set(has_ended=True)

    def _look(self) -> int | None:
        """Read the newest version's record, unless it was read last; return its number."""
        try:
            read = self._bucket.read(BucketVersion, POINTER_OBJECT, self._tag)
        except StoreNotFoundError:
            if self._seen is None:
                return None
            raise
        if read is not None:
            if self._seen is not None:
                require_successor(self.store, self._seen.manifest, read[0].manifest)
            self._seen, self._tag = read
        return None if self._seen is None else self._seen.id.number
