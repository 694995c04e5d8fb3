"""A bucket as a mirror's source: `BucketSource`, its receiver, and a version that is held there."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path

import numpy as np

from dbuffer.errors import (
    SnapshotEvictedError,
    StoreCorruptError,
    StoreNotFoundError,
    WaitTimeoutError,
)
from dbuffer.format.layout import KeptLayouts, digest
from dbuffer.format.lineage import Lineage, VersionId
from dbuffer.format.objects import (
    POINTER_OBJECT,
    BucketPointer,
    BucketVersion,
    Parts,
    delta_object,
    part_object,
    weights_object,
)
from dbuffer.io.transfer import OnBytes
from dbuffer.mirror.bucket import Bucket, Tag
from dbuffer.mirror.bucket_records import BucketRecords
from dbuffer.mirror.options import MirrorOptions
from dbuffer.receive.follow_loop import wait_until_newer
from dbuffer.receive.reader import VersionVerifier
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.store import filesystem
from dbuffer.store.buffer import require_successor
from dbuffer.store.filesystem import Descriptor
from dbuffer.store.hold import HeldVersion
from dbuffer.store.records import OwnRecord
from dbuffer.store.watcher import wait_and_clear


class HeldObjects(HeldVersion):
    """A version in a bucket. Deltas that were fetched are kept in memory until it is released.

    Args:
        bucket: where it is.
        version: its record.
        layouts: the layouts that were decoded last.
    """

    def __init__(self, bucket: Bucket, version: BucketVersion, layouts: KeptLayouts) -> None:
        self.manifest = version.manifest
        self._bucket = bucket
        self.record = version
        self._layouts = layouts
        self._weights = weights_object(version.anchor)
        self._deltas: dict[VersionId, Descriptor] = {}
        self._fetch_ahead: futures.Future[None] | None = None

    @property
    def name(self) -> str:
        return self._bucket.name_of(self._weights)

    @property
    def layouts(self) -> KeptLayouts:
        return self._layouts

    def release(self) -> None:
        if self._fetch_ahead is not None:
            futures.wait([self._fetch_ahead])
        for file in self._deltas.values():
            file.close()
        self._deltas.clear()

    def is_unchanged(self) -> bool:
        return True  # its objects are immutable

    def is_still_named(self) -> bool:
        pointer = newest_pointer(self._bucket)
        return pointer is not None and pointer.id == self.manifest.id

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        parts, part_bytes = self.record.weights_parts, self.record.part_bytes
        data = b""
        while len(data) < num_bytes:
            index, start = divmod(offset + len(data), part_bytes)
            end = min(part_bytes, start + num_bytes - len(data))
            name = part_object(self._weights, index, parts.digests[index])
            data += self._bucket.get_range(name, start, end)
        return data

    def read_data(self, into: memoryview, on_bytes: OnBytes | None) -> None:
        target = np.frombuffer(into, np.uint8)  # copies into it let go of the interpreter's lock

        def place(offset: int, data: memoryview) -> None:
            some = target[offset : offset + data.nbytes]
            some[:] = np.frombuffer(data, np.uint8)[: len(some)]  # without the footer

        def count(offset: int, num_bytes: int) -> None:
            if on_bytes is not None:
                on_bytes(len(target[offset : offset + num_bytes]))

        self._fetch([(self._weights, self.record.weights_parts, place)], count)

    def expect_deltas(
        self, versions: Sequence[VersionId], copies: Mapping[VersionId, Path]
    ) -> None:
        """Fetch deltas without a copy in another thread, while the caller applies the others."""
        missing = [
            version
            for version in versions
            if version not in copies or not self._take_copy(version, copies[version])
        ]
        if missing:
            self._fetch_ahead = self._bucket.begin(lambda: self._fetch_deltas(missing))

    def _take_copy(self, version: VersionId, path: Path) -> bool:
        """Take a file in place of a delta, which then is not fetched, if it is a copy of it."""
        try:
            with filesystem.os_errors("read", path):
                file = filesystem.open_regular(path, os.O_RDONLY, owner_only=False)
        except StoreNotFoundError:
            return False
        parts, part_bytes = self.record.delta_parts(version), self.record.part_bytes
        found = [
            digest(filesystem.read_at(file.number, offset, part_bytes))
            for offset in range(0, os.fstat(file.number).st_size, part_bytes)
        ]
        if found != parts.digests:
            file.close()
            return False
        self._deltas[version] = file
        return True

    def open_delta(self, version: VersionId) -> tuple[str, Descriptor]:
        if version not in self._deltas and self._fetch_ahead is not None:
            ahead, self._fetch_ahead = self._fetch_ahead, None
            ahead.result()
        if version not in self._deltas:
            # With the later ones, which are needed next: a request takes long, side by side or not.
            self._fetch_deltas(self.manifest.chain[self.manifest.chain.index(version) :])
        # Opened once more: the caller closes it.
        path = f"/proc/self/fd/{self._deltas[version].number}"
        name = self._bucket.name_of(delta_object(version))
        with filesystem.os_errors("open a delta in memory", name):
            return name, Descriptor.open(path, os.O_RDONLY)

    def _fetch_deltas(self, versions: list[VersionId]) -> None:
        files: dict[VersionId, Descriptor] = {}
        wholes: list[_Whole] = []
        for version in (each for each in versions if each not in self._deltas):
            file = files[version] = filesystem.make_memory_file(str(version))
            place = functools.partial(_write_at, file)
            wholes.append((delta_object(version), self.record.delta_parts(version), place))
        with filesystem.os_errors("keep deltas in memory", self.name):
            self._fetch(wholes)
        self._deltas |= files

    def _fetch(
        self, wholes: list[_Whole], on_part: Callable[[int, int], None] = lambda *_: None
    ) -> None:
        """Fetch all parts of some files, side by side; ``on_part``: called with place and size."""

        def fetch(item: tuple[_Whole, int]) -> None:
            (directory, parts, place), index = item
            first = index * self.record.part_bytes
            num_bytes = min(self.record.part_bytes, parts.num_bytes - first)
            name = part_object(directory, index, parts.digests[index])
            for _ in range(2):  # the network may have damaged it
                part_xxh3 = self._bucket.get_pieces(
                    name, num_bytes, lambda offset, data: place(first + offset, data)
                )
                if part_xxh3 == parts.digests[index]:
                    break
            else:
                raise StoreCorruptError(f"{self._bucket.name_of(name)} is not what was published")
            on_part(first, num_bytes)

        items = [(whole, index) for whole in wholes for index in range(len(whole[1].digests))]
        self._bucket.in_parallel(fetch, items)


_Whole = tuple[str, Parts, Callable[[int, memoryview], None]]
"""Name of a file, its parts, and a function that puts bytes to their place from an offset on."""


def _write_at(file: Descriptor, offset: int, data: memoryview) -> None:
    filesystem.write_at(file.number, offset, data)


def newest_pointer(bucket: Bucket) -> BucketPointer | None:
    """Read a bucket's pointer; None: nothing was published there."""
    try:
        read = bucket.read(BucketPointer, POINTER_OBJECT)
    except StoreNotFoundError:
        return None
    return None if read is None else read[0]


def require_newest(bucket: Bucket) -> BucketPointer:
    """Read a bucket's pointer.

    Raises:
        WaitTimeoutError: nothing was published there.
    """
    pointer = newest_pointer(bucket)
    if pointer is None:
        raise WaitTimeoutError(f"nothing was published in {bucket.url} yet")
    return pointer


def hold_version(bucket: Bucket, pointer: BucketPointer, layouts: KeptLayouts) -> HeldObjects:
    """Hold the version that a pointer names.

    Raises:
        SnapshotEvictedError: it has gone since, as newer ones came.
        StoreCorruptError: its record is damaged, or missing.
    """
    name = pointer.version_name
    try:
        read = bucket.read(BucketVersion, name)
    except StoreNotFoundError as error:
        if newest_pointer(bucket) == pointer:
            raise StoreCorruptError(f"{error}, which {POINTER_OBJECT} names") from error
        raise SnapshotEvictedError(f"{error}: newer versions have come") from error
    assert read is not None  # noqa: S101 - without a tag it is read
    record = read[0]
    if record.name != name:
        raise StoreCorruptError(f"{bucket.name_of(name)} is not what {POINTER_OBJECT} names")
    return HeldObjects(bucket, record, layouts)


class BucketReceiver:
    """Receiver of a mirror that follows a bucket. Its record is relayed with others'."""

    def __init__(self, bucket: Bucket, receiver_id: str, options: MirrorOptions) -> None:
        self._bucket = bucket
        self._poll_interval_s = options.poll_interval_s
        self.record = OwnRecord(receiver_id)
        self.reader = VersionVerifier(bucket.url, self.record, options.copier)
        self._layouts = KeptLayouts()
        self._seen: BucketPointer | None = None
        self._tag: Tag | None = None
        self._is_woken = threading.Event()

    @property
    def store(self) -> str:
        return self._bucket.url

    @property
    def seen(self) -> Lineage | None:
        return None if self._seen is None else self._seen.lineage

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
        seen = self._seen
        if seen is None or (newer_than is not None and seen.version <= newer_than):
            yield None
            return
        with hold_version(self._bucket, seen, self._layouts) as held:
            yield held

    def follow_fork(self) -> None:
        self._seen = self._tag = None
        self.record.set(problem=None, problem_version=None)

    def wake(self) -> None:
        self._is_woken.set()

    def close(self) -> None:
        self.record.set(has_ended=True)

    def _look(self) -> int | None:
        """Read the pointer, unless it is the one that was read last; return its version."""
        try:
            read = self._bucket.read(BucketPointer, POINTER_OBJECT, self._tag)
        except StoreNotFoundError:
            if self._seen is None:
                return None
            raise
        if read is not None:
            if self._seen is not None:
                require_successor(self.store, self._seen, read[0])
            self._seen, self._tag = read
        return None if self._seen is None else self._seen.version


class BucketSource:
    """A bucket that a mirror follows."""

    def __init__(self, bucket: Bucket, options: MirrorOptions) -> None:
        self._bucket = bucket
        self._options = options

    @property
    def name(self) -> str:
        return self._bucket.url

    def newest(self) -> BucketPointer | None:
        return newest_pointer(self._bucket)

    def open_receiver(self, name: str) -> BucketReceiver:
        return BucketReceiver(self._bucket, name, self._options)

    def records(self, receiver: WeightReceiver | BucketReceiver) -> BucketRecords:
        return BucketRecords(self._bucket, receiver.record)
