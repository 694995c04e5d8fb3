"""`BucketSource`: the bucket that a mirror copies from."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dbuffer.errors import StoreAccessError, StoreNotFoundError
from dbuffer.format.lineage import Lineage, VersionId
from dbuffer.format.manifest import Manifest, encode
from dbuffer.format.objects import POINTER_OBJECT, BucketVersion
from dbuffer.io.chain_reader import read_version
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import FileTensors
from dbuffer.mirror.bucket import Bucket, Tag
from dbuffer.receive.follow_loop import Followed
from dbuffer.receive.reader import VersionVerifier
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer, require_successor
from dbuffer.store.filesystem import Descriptor
from dbuffer.store.open_version import OpenVersion
from dbuffer.store.records import OwnRecord
from dbuffer.store.watcher import wait_and_clear


class CurrentRecord:
    """Record of a bucket's newest version, as this process has read or put it last."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._tag: Tag | None = None
        self.last: BucketVersion | None = None
        """Last record that this process has read or put. The bucket may have lost it since."""

    def read(self) -> BucketVersion | None:
        """Return the record, or None if there is none. Download it only if it has changed."""
        try:
            read = self._bucket.read(BucketVersion, POINTER_OBJECT, self._tag)
        except StoreNotFoundError:
            self._tag = None
            return None
        if read is not None:
            self.last, self._tag = read
        return self.last

    def put(self, version: BucketVersion) -> bool:
        """Put a record unless another process has put one since; return whether it was put."""
        tag = self._bucket.put_if(POINTER_OBJECT, encode(version), self._tag)
        if tag is not None:
            self.last, self._tag = version, tag
        return tag is not None


def newest_version(bucket: Bucket) -> BucketVersion | None:
    """Return the record of a bucket's newest version, or None if the bucket has no version."""
    return CurrentRecord(bucket).read()


class OpenBucketVersion(OpenVersion):
    """Version in a bucket. Each of its deltas is downloaded once, at the first read.

    Every method can raise:
        StoreNotFoundError: a file is missing.
        StoreCorruptError: a file has another size than was published.
    """

    def __init__(self, bucket: Bucket, version: BucketVersion) -> None:
        self._bucket = bucket
        self._record = version
        self.manifest = version.manifest
        self.copies: DoubleBuffer | None = None
        """Store that may have copies of the version's deltas, which then need no download."""
        self._deltas: dict[VersionId, Descriptor] = {}
        """Memory files of the downloaded deltas."""

    @property
    def name(self) -> str:
        return self._bucket.name_of(self._record.weights_file.name)

    def close(self) -> None:
        while self._deltas:
            self._deltas.popitem()[1].close()

    def is_unchanged(self) -> bool:
        return True  # an object's name is never reused for other content

    def open_delta(self, version: VersionId) -> tuple[Path | str, Descriptor]:
        if self.copies is not None:
            with contextlib.suppress(StoreNotFoundError, StoreAccessError):
                return self.copies.open_delta(version)
        name = f"{self.name}, delta to {version}"
        with filesystem.os_errors("keep a delta in memory", name):
            if version not in self._deltas:
                self._deltas[version] = self._download(version)
            # Return a second descriptor, which the caller closes.
            path = f"/proc/self/fd/{self._deltas[version].number}"
            return name, Descriptor.open(path, os.O_RDONLY)

    def _download(self, version: VersionId) -> Descriptor:
        memory = filesystem.make_memory_file(str(version))
        self._bucket.download(
            self._record.deltas[version],
            lambda offset, data: filesystem.write_at(memory.number, offset, data),
        )
        return memory

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        name = self._record.weights_file.name
        return bytes(self._bucket.get_range(name, offset, offset + num_bytes))

    def is_still_named(self) -> bool:
        newest = newest_version(self._bucket)
        return newest is not None and newest.id == self.manifest.id

    def read_into(self, memory: FileTensors, copier: Copier, *, hashed: bool) -> list[int] | None:
        """Download the version into ``memory``. If ``hashed``, return the tensors' checksums."""
        manifest = self.manifest
        # Copying into a NumPy array releases the GIL, so other threads go on downloading meanwhile.
        target = np.frombuffer(memory.raw[: manifest.checksums_offset], np.uint8)

        def put(offset: int, data: memoryview) -> None:
            place = target[offset : offset + data.nbytes]
            place[:] = np.frombuffer(data, np.uint8)[: len(place)]  # without the footer

        self._bucket.download(self._record.weights_file, put)
        self.copies = None  # they may be damaged
        since = manifest.file_version
        return read_version(self, memory.layout, memory, copier, since=since, hashed=hashed)


class BucketSource(Followed):
    """Bucket as a mirror's source: finds the newest version, and opens it for the mirror."""

    def __init__(
        self, bucket: Bucket, receiver_id: str, poll_interval_s: float, copier: Copier
    ) -> None:
        self.record = OwnRecord(receiver_id)
        self.reader = VersionVerifier(self.record, copier)
        self.poll_interval_s = poll_interval_s
        self.bucket = bucket
        self._current = CurrentRecord(bucket)
        self._seen: BucketVersion | None = None
        self._is_woken = threading.Event()

    @property
    def store(self) -> str:
        return self.bucket.url

    def newest(self) -> Manifest | None:
        version = newest_version(self.bucket)
        return None if version is None else version.manifest

    @property
    def last_seen(self) -> Lineage | None:
        return None if self._seen is None else self._seen.manifest.lineage

    def _wait(self, timeout_s: float) -> bool:
        return wait_and_clear(self._is_woken, timeout_s)

    def _until_next_look_s(self) -> float:
        # A random interval keeps the mirrors of many nodes from polling at the same time.
        return self.poll_interval_s * random.uniform(0.75, 1.25)  # noqa: S311

    @contextlib.contextmanager
    def open_seen(self, newer_than: int | None = None) -> Iterator[OpenBucketVersion | None]:
        """Open the version that `wait_for_version` saw last.

        Yield None if no version was seen, or if its number is not above ``newer_than``.
        """
        version = self._seen
        if version is None or (newer_than is not None and version.id.number <= newer_than):
            yield None
            return
        with OpenBucketVersion(self.bucket, version) as opened:
            yield opened

    def follow_fork(self) -> None:
        self._seen = None
        self.record.set(problem=None, problem_version=None)

    def wake(self) -> None:
        self._is_woken.set()

    def close(self) -> None:
        self.record.set(has_ended=True)

    def _look(self) -> int | None:
        """Return the newest version's number, or None if there is none yet."""
        version = self._current.read()
        if version is None and self._seen is not None:
            raise StoreNotFoundError(f"there is no {self.bucket.name_of(POINTER_OBJECT)}")
        if version is not None and version is not self._seen:
            if self._seen is not None:
                require_successor(self.store, self._seen.manifest, version.manifest)
            self._seen = version
        return None if version is None else version.id.number
