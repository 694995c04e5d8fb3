"""`BucketSource` and `BucketTarget`: the buckets that a mirror copies from and into.

A mirror first puts the files of a version, under names that no other mirror uses. Then it puts the
version's record, unless another mirror has put a record meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from msgspec.structs import replace

from dbuffer.errors import (
    OptionError,
    StoreAccessError,
    StoreCorruptError,
    StoreNotFoundError,
    WriterSupersededError,
)
from dbuffer.format.chain import chain_of, is_long, trimmed
from dbuffer.format.layout import Layout, digest
from dbuffer.format.lineage import Lineage, VersionId
from dbuffer.format.manifest import Manifest, Versioned, encode
from dbuffer.format.objects import (
    POINTER_OBJECT,
    RECEIVERS_PREFIX,
    VERSIONS_PREFIX,
    BucketVersion,
    FileObject,
    file_name,
    is_of_receivers,
    version_of,
)
from dbuffer.io.chain_reader import ChainReader
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import FileTensors, as_bytes, new_memory, pack_checksums
from dbuffer.mirror.bucket import Bucket, Listed, Tag
from dbuffer.mirror.records import BucketRecords, ReceiversOfBucket
from dbuffer.mirror.stores import (
    SWAPPED,
    OpenUpstream,
    StoreSource,
    Upstream,
    UpstreamReceiver,
    copy_deltas,
)
from dbuffer.publish.publisher import Publication
from dbuffer.receive.follow_loop import Followed
from dbuffer.receive.reader import VersionVerifier, read_whole
from dbuffer.runtime.timing import TIMING
from dbuffer.runtime.trouble import log_once
from dbuffer.store import filesystem
from dbuffer.store.buffer import require_successor
from dbuffer.store.filesystem import Descriptor
from dbuffer.store.open_version import OpenStoreVersion, OpenVersion
from dbuffer.store.records import OwnRecord
from dbuffer.store.watcher import wait_and_clear

logger = logging.getLogger(__name__)

KEEP_ANCHORS = 2
"""Number of newest full versions ("anchors") that stay, with their deltas, for slow readers."""


class CurrentRecord:
    """Record of a bucket's newest version, as this process has read or put it last."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._tag: Tag | None = None
        self.last: BucketVersion | None = None

    def read(self) -> BucketVersion | None:
        """Return the record, or None if there is none. Download it only if it has changed."""
        try:
            read = self._bucket.read(BucketVersion, POINTER_OBJECT, self._tag)
        except StoreNotFoundError:
            self.last = self._tag = None
        else:
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


def missing_files(listed: Mapping[str, Listed], version: BucketVersion) -> list[str]:
    """Return the names of a version's files that are missing or have a wrong size."""
    return [
        name
        for name, num_bytes in version.files
        if name not in listed or listed[name].num_bytes != num_bytes
    ]


class OpenBucketVersion(OpenVersion):
    """Version in a bucket. Each file of the version is downloaded at the first read of the file.

    ``deltas`` has the downloaded deltas, keyed by the version that a delta leads to. The end of a
    ``with`` block removes the deltas that the next version does not need.

    Every method can raise:
        StoreNotFoundError: a file is missing.
        StoreCorruptError: a file has another size than was published.
    """

    def __init__(
        self, bucket: Bucket, version: BucketVersion, deltas: dict[VersionId, Descriptor]
    ) -> None:
        self._bucket = bucket
        self._record = version
        self.manifest = version.manifest
        self._deltas = deltas
        self._used: set[VersionId] = set()

    @property
    def name(self) -> str:
        return self._bucket.name_of(self._record.weights_file.name)

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            self._used.clear()  # a delta may have been damaged on its way: download it again
        self.close()

    def close(self) -> None:
        # Keep only the deltas that this copy has used. The next copy goes into the target's other
        # buffer, which holds an earlier version, so the next copy needs the same deltas again.
        for version in self._deltas.keys() - self._used:
            self._deltas.pop(version).close()

    def is_unchanged(self) -> bool:
        return True  # an object's name is never reused for other content

    def open_delta(self, version: VersionId) -> tuple[str, Descriptor]:
        name = f"{self.name}, delta to {version}"
        with filesystem.os_errors("keep a delta in memory", name):
            if version not in self._deltas:
                self._deltas[version] = self._fetch_delta(version)
            self._used.add(version)
            # Return a second descriptor of the delta's memory file: the caller closes it, but the
            # first descriptor must stay open for later copies.
            path = f"/proc/self/fd/{self._deltas[version].number}"
            return name, Descriptor.open(path, os.O_RDONLY)

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
        chain = ChainReader(self, memory.layout)
        checksums = chain.read(memory, copier, since=manifest.file_version, hashed=hashed)
        self._used.clear()  # the target has no version to apply these deltas to
        return checksums

    def _fetch_delta(self, version: VersionId) -> Descriptor:
        memory = filesystem.make_memory_file(str(version))
        self._bucket.download(
            self._record.deltas[version],
            lambda offset, data: filesystem.write_at(memory.number, offset, data),
        )
        return memory


class BucketSource(Followed):
    """Bucket as a mirror's source: finds the newest version, and opens it for the mirror."""

    reader: VersionVerifier

    def __init__(self, bucket: Bucket, poll_interval_s: float, copier: Copier) -> None:
        self.name = bucket.url
        self._bucket = bucket
        self.poll_interval_s = poll_interval_s
        self._copier = copier
        self._deltas: dict[VersionId, Descriptor] = {}
        self._current = CurrentRecord(bucket)
        self._seen: BucketVersion | None = None
        self._is_woken = threading.Event()

    def newest(self) -> Versioned | None:
        version = newest_version(self._bucket)
        return None if version is None else version.manifest

    def open_receiver(self, name: str) -> Self:
        self.record = OwnRecord(name)
        self.reader = VersionVerifier(self.record, self._copier)
        return self

    def records(self, record: OwnRecord) -> BucketRecords:
        return BucketRecords(self._bucket, record)

    @property
    def store(self) -> str:
        return self._bucket.url

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
        with OpenBucketVersion(self._bucket, version, self._deltas) as opened:
            yield opened

    def follow_fork(self) -> None:
        self._seen = None
        self.record.set(problem=None, problem_version=None)

    def wake(self) -> None:
        self._is_woken.set()

    def close(self) -> None:
        while self._deltas:
            self._deltas.popitem()[1].close()
        self.record.set(has_ended=True)
        self._seen = None

    def _look(self) -> int | None:
        """Return the newest version's number, or None if there is none yet."""
        version = self._current.read()
        if version is None and self._seen is not None:
            raise StoreNotFoundError(f"there is no {self._bucket.name_of(POINTER_OBJECT)}")
        if version is not None and version is not self._seen:
            if self._seen is not None:
                require_successor(self.store, self._seen.manifest, version.manifest)
            self._seen = version
        return None if version is None else version.id.number


class BucketTarget:
    """Bucket that a mirror publishes in.

    The mirror that was started last is the bucket's writer. It puts its token into the record of
    the newest version. The previous writer finds the new writer's token in the record, and stops.
    """

    def __init__(self, bucket: Bucket, source: Upstream, copier: Copier) -> None:
        assert isinstance(source, StoreSource)  # noqa: S101 - two buckets are refused
        self.name = bucket.url
        self.is_elected = False
        self.receivers = ReceiversOfBucket(bucket)
        self._bucket = bucket
        self._source = source
        self._copier = copier
        self._current = CurrentRecord(bucket)
        self._writer = ""
        """Token of this mirror, or empty until the mirror is the bucket's writer."""
        self._last: BucketVersion | None = None
        """Newest version in the bucket, or None if any of its files may be missing."""

    def elect(self) -> bool:
        self.is_elected = True
        return True

    def resign(self) -> None:
        self.is_elected = False

    def is_removed(self) -> bool:
        return False  # `check` finds missing objects

    def is_fit(self) -> bool:
        return True  # a bucket's readers are mirrors, which compare versions themselves

    def newest(self) -> Manifest | None:
        """Return the manifest of the version that this mirror has put last, without a request."""
        return None if self._last is None else self._last.manifest

    def open(self) -> None:
        """Become the bucket's writer, and supersede the previous writer."""
        # Refuse a source that is itself a copy of this bucket. This mirror would supersede the
        # mirror that puts the sender's versions into the bucket, and no new version would arrive.
        if self._source.is_copy_of(self.name):
            raise OptionError(
                f"{self._source.name} is a copy of {self.name}, so it cannot be copied back: "
                f"{SWAPPED}"
            )
        self._take_over()

    def close(self) -> None: ...

    def copy(self, opened: OpenUpstream, receiver: UpstreamReceiver) -> Publication:
        """Publish a copy of an open version in the bucket."""
        assert isinstance(opened, OpenStoreVersion)  # noqa: S101 - the source is a store
        if self._last is None:
            self._take_over()
        started, manifest = time.monotonic(), opened.manifest
        with receiver.reader.reporting_unreadable(opened), opened.noticing_loss():
            layout = opened.read_layout().joined
            # Without checksums, a delta cannot be verified after its transfer.
            last = self._last if manifest.checksums_xxh3 is not None else None
            base, weights = None if last is None else last.id, None
            deltas = copy_deltas(base, opened, layout, self.name, _read_delta)
            if self._needs_weights(deltas, layout):
                weights = self._read_weights(opened, receiver, layout)
            opened.require_unchanged()
        # The files are in memory: release the version, so that no sender waits for the upload.
        opened.close()
        receiver.record.write(held=None)
        version = self._put_files(manifest, deltas, weights, layout)
        if self._current.put(version):
            self._last = version
        else:  # another mirror has put a record, or the put's response was lost
            self._take_over(version)
        delta_bytes = sum(map(len, deltas.values()))
        return Publication.of(manifest.id, layout, started, delta_bytes or None)

    def check(self) -> None:
        """Check that the bucket holds the version that this mirror has put last."""
        if self._last is not None:
            self._take_over(self._last)

    def _take_over(self, expected: BucketVersion | None = None) -> None:
        """Put this mirror's token into the record of the newest version, and check the files.

        Raises:
            WriterSupersededError: a mirror that was started later has put the record.
            StoreAccessError: another mirror has put a record meanwhile, or the response was lost.
            StoreCorruptError: the bucket does not contain the version ``expected``.
        """
        record = self._read_record()
        if not self._writer:
            # The token begins with the current time, so that a later mirror has a higher token even
            # if the record was lost.
            before_ms = 0 if record is None else int(record.writer[:11], 16)
            now_ms = max(int(1000 * time.time()), before_ms + 1)
            self._writer = f"{now_ms:011x}{secrets.randbits(20):05x}"
        if record is not None and record.writer != self._writer:
            if record.writer > self._writer:
                raise WriterSupersededError(
                    f"another mirror took {self.name} over; this one must stop"
                )
            record = record.by(self._writer)
            if not self._current.put(record):
                raise StoreAccessError(
                    f"{self._bucket.name_of(POINTER_OBJECT)} could not be put on condition of its "
                    "ETag: does the service support conditional puts?"
                )
        self._last = record if record is not None and self._is_whole(record) else None
        if expected is None or self._last == expected:
            return
        if record is None:
            loss = f"{POINTER_OBJECT} is missing or damaged"
        elif self._last is None:
            loss = f"files of version {record.id.number} are missing, or have another size"
        else:
            loss = f"{POINTER_OBJECT} went back to version {record.id.number}"
        raise StoreCorruptError(f"{self.name}: {loss}; uploading the newest version again")

    def _is_whole(self, version: BucketVersion) -> bool:
        """Return whether all files of a version exist; if so, delete objects no reader needs."""
        listed = self._bucket.list(VERSIONS_PREFIX)
        if missing_files(listed, version):
            return False
        try:
            self._delete_unneeded(listed, version)
        except StoreAccessError as error:
            log_once(logger, "old objects stay: %s", str(error))
        return True

    def _delete_unneeded(self, listed: Mapping[str, Listed], newest: BucketVersion) -> None:
        """Delete the files of old versions, and the records of mirrors that stopped long ago.

        The files of the newest version stay, and so do the last `KEEP_ANCHORS` full versions with
        their deltas, and all files that were put less than `Timing.bucket_grace_s` before the
        newest file.
        """
        versions = {name: version for name in listed if (version := version_of(name)) is not None}
        lineage, needed = newest.manifest.lineage, {name for name, _ in newest.files}
        leading = {name: of.number for name, of in versions.items() if lineage.reaches(of)}
        anchors = {number for name, number in leading.items() if name.endswith(".weights")}
        oldest = min(sorted(anchors)[-KEEP_ANCHORS:])
        limit = max(listed[name].put_at for name in versions) - TIMING.bucket_grace_s
        records = self._bucket.list(RECEIVERS_PREFIX)
        forgotten_at = time.time() - TIMING.forget_receivers_after_s
        self._bucket.delete(
            [
                name
                for name in versions.keys() - needed
                if leading.get(name, -1) < oldest and listed[name].put_at <= limit
            ]
            + [
                name
                for name, record in records.items()
                if is_of_receivers(name) and record.put_at < forgotten_at
            ]
        )

    def _read_record(self) -> BucketVersion | None:
        """Return the newest version's record, or None if none exists. Delete a damaged record."""
        try:
            return self._current.read()
        except StoreCorruptError as error:
            is_known = self._current.last is not None
            if not is_known and not any(map(version_of, self._bucket.list(VERSIONS_PREFIX))):
                remedy = "remove it, unless it is another program's"
                raise StoreCorruptError(f"{error}; {remedy}") from None
            logger.warning("deleting a damaged record: %s", str(error))
            self._bucket.delete([POINTER_OBJECT])
            return self._current.read()

    def _needs_weights(self, deltas: dict[VersionId, bytes], layout: Layout) -> bool:
        last = self._last
        if last is None or not deltas:
            return True
        since = last.manifest.since_anchor
        if any(record.unreadable in since for record in self.receivers.last_read()):
            return True
        sizes = [last.deltas[version].num_bytes for version in since]
        return is_long([*sizes, *map(len, deltas.values())], layout.num_bytes)

    def _read_weights(
        self, opened: OpenStoreVersion, receiver: UpstreamReceiver, layout: Layout
    ) -> tuple[memoryview, dict[str, Any]]:
        """Return a version's weights file, in memory, and the manifest fields that describe it.

        The file has checksums, even if the version in the source has none.
        """
        memory = new_memory(layout.file_bytes)
        data = memory[: layout.checksums_offset]
        _, checksums = read_whole(opened, self._copier, data, hashed=True)
        assert checksums is not None  # noqa: S101 - they were requested
        if opened.manifest.checksums_xxh3 is not None:
            receiver.reader.verify(opened, layout, checksums)
        raw = as_bytes(memory)
        starts = [*layout.offsets[1:], layout.checksums_offset]
        for offset, size, start in zip(layout.offsets, layout.sizes, starts, strict=True):
            raw[offset + size : start] = bytes(start - offset - size)  # zero the gaps
        table = pack_checksums(checksums)
        table_end = table.ljust(layout.layout_offset - layout.checksums_offset, b"\0")
        raw[layout.checksums_offset :] = table_end + layout.encoded + layout.tail
        return raw, layout.describe_file(digest(table))

    def _put_files(
        self,
        manifest: Manifest,
        deltas: dict[VersionId, bytes],
        weights: tuple[memoryview, dict[str, Any]] | None,
        layout: Layout,
    ) -> BucketVersion:
        last, files, first = self._last, dict[VersionId, FileObject](), manifest.id
        if last is not None and deltas:
            first, files = (last.manifest.chain or [last.id])[0], last.deltas
            for version, delta in deltas.items():
                name = file_name(version, self._writer, "delta")
                files[version] = self._bucket.upload(name, memoryview(delta))
        if weights is not None:
            data, of_file = weights
            of_file["file"] = f"weights-{manifest.id}.td"
            name = file_name(manifest.id, self._writer, "weights")
            weights_file, anchor = self._bucket.upload(name, data), None
        else:
            assert last is not None  # noqa: S101 - the deltas lead from this version
            of_file = last.manifest.of_file | {"file": last.manifest.file}
            weights_file, anchor = last.weights_file, last.manifest.file_version
        sizes = {first: 0} | {version: file.num_bytes for version, file in files.items()}
        versions = chain_of(trimmed(sizes, layout.num_bytes, anchor))
        described = replace(
            manifest, **of_file, is_final=True, anchor=anchor, anchor_buffer=None, chain=versions
        )
        return BucketVersion.sealed(
            writer=self._writer,
            manifest=described,
            files=[weights_file, *(files[version] for version in versions[1:])],
        )


def _read_delta(_: VersionId, name: Path | str, file: Descriptor) -> bytes:
    with filesystem.os_errors("read a delta", name):
        return filesystem.read_at(file.number, 0, os.fstat(file.number).st_size)
