"""`BucketTarget`: the bucket that a mirror copies into.

A mirror first puts the files of a version, under names that no other mirror uses. Then it puts the
version's record, unless another mirror has put a record meanwhile.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from dbuffer.errors import OptionError, StoreAccessError, StoreCorruptError, WriterSupersededError
from dbuffer.format.chain import is_within_limits, trimmed
from dbuffer.format.layout import Layout, digest
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import Manifest
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
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import as_bytes, new_memory, pack_checksums
from dbuffer.mirror.bucket import Bucket, Listed
from dbuffer.mirror.bucket_source import CurrentRecord
from dbuffer.mirror.ends import SWAPPED, OpenSourceVersion, Source, is_copy_of
from dbuffer.mirror.records import ReceiversOfBucket
from dbuffer.mirror.store_target import copy_deltas
from dbuffer.publish.publisher import Publication
from dbuffer.receive.reader import read_whole
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime.timing import TIMING
from dbuffer.runtime.trouble import log_once
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.filesystem import Descriptor
from dbuffer.store.open_version import OpenStoreVersion

logger = logging.getLogger(__name__)

KEEP_ANCHORS = 2
"""Number of newest full versions ("anchors") that stay, with their deltas, for slow readers."""


def missing_files(listed: Mapping[str, Listed], version: BucketVersion) -> list[str]:
    """Return the names of a version's files that are missing or have a wrong size."""
    return [
        name
        for name, num_bytes in version.files
        if name not in listed or listed[name].num_bytes != num_bytes
    ]


class BucketTarget:
    """Bucket that a mirror publishes in.

    The mirror that was started last is the bucket's writer. It puts its token into the record of
    the newest version. The previous writer finds the new writer's token in the record, and stops.
    """

    def __init__(self, bucket: Bucket, source: Source, copier: Copier) -> None:
        assert isinstance(source, WeightReceiver)  # noqa: S101 - two buckets are refused
        self.name = bucket.url
        self.receivers = ReceiversOfBucket(bucket)
        self._bucket = bucket
        self._source = source
        self._copier = copier
        self._current = CurrentRecord(bucket)
        self._writer = ""
        """Token of this mirror, or empty until the mirror is the bucket's writer."""
        self._last: BucketVersion | None = None
        """Newest version in the bucket, or None if any of its files may be missing."""

    def newest(self) -> Manifest | None:
        """Return the manifest of the bucket's newest version, without a request."""
        return None if self._last is None else self._last.manifest

    def take_over(self) -> None:
        """Become, or stay, the bucket's writer, and check that the bucket has lost nothing.

        Raises:
            OptionError: the source is a copy of this bucket. This mirror would supersede the mirror
                that puts the sender's versions into the bucket, and no new version would arrive.
            WriterSupersededError, StoreAccessError, StoreCorruptError: see :meth:`_put_token`.
        """
        source = self._source.store
        if is_copy_of(DoubleBuffer(source, allow_shared_store=True), self.name):
            raise OptionError(
                f"{source} is a copy of {self.name}, so it cannot be copied back: {SWAPPED}"
            )
        self._put_token(self._last)

    def close(self) -> None:
        self._bucket.close()

    def copy(self, opened: OpenSourceVersion) -> Publication:
        """Publish a copy of an open version in the bucket."""
        assert isinstance(opened, OpenStoreVersion)  # noqa: S101 - the source is a store
        started, manifest = time.monotonic(), opened.manifest
        with self._source.reader.reporting_unreadable(opened), opened.noticing_loss():
            layout = opened.read_layout().joined
            # Without checksums, a delta cannot be verified after its transfer.
            last = self._last if manifest.checksums_xxh3 is not None else None
            base, weights = None if last is None else last.id, None
            deltas = copy_deltas(base, opened, layout, self.name, _read_delta)
            if self._needs_weights(deltas, layout):
                weights = self._read_weights(opened, layout)
            opened.require_unchanged()
        # The files are in memory: release the version, so that no sender waits for the upload.
        opened.close()
        self._source.record.write(held=None)
        version = self._put_files(manifest, deltas, weights, layout)
        if self._current.put(version):
            self._last = version
        else:  # another mirror has put a record, or the put's response was lost
            self._put_token(version)
        delta_bytes = sum(map(len, deltas.values()))
        return Publication.of(manifest.id, layout, started, delta_bytes or None)

    def _put_token(self, expected: BucketVersion | None) -> None:
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
            if self._current.last is None and not self._has_objects():
                remedy = "remove it, unless it is another program's"
                raise StoreCorruptError(f"{error}; {remedy}") from None
            logger.warning("deleting a damaged record: %s", str(error))
            self._bucket.delete([POINTER_OBJECT])
            return self._current.read()

    def _has_objects(self) -> bool:
        """Whether mirrors have put versions or records into the bucket."""
        return any(version_of(name) or is_of_receivers(name) for name in self._bucket.list(""))

    def _needs_weights(self, deltas: dict[VersionId, bytes], layout: Layout) -> bool:
        last = self._last
        if last is None or not deltas:
            return True
        since, files = last.manifest.since_anchor, last.deltas
        if any(record.unreadable in since for record in self.receivers.last_read()):
            return True
        sizes = [files[version].num_bytes for version in since]
        return not is_within_limits([*sizes, *map(len, deltas.values())], layout.num_bytes)

    def _read_weights(
        self, opened: OpenStoreVersion, layout: Layout
    ) -> tuple[memoryview, dict[str, Any]]:
        """Return a version's weights file, in memory, and the manifest fields that describe it.

        The file has checksums, even if the version in the source has none.
        """
        memory = new_memory(layout.file_bytes)
        data = memory[: layout.checksums_offset]
        _, checksums = read_whole(opened, self._copier, data, hashed=True)
        assert checksums is not None  # noqa: S101 - they were requested
        if opened.manifest.checksums_xxh3 is not None:
            self._source.reader.verify(opened, layout, checksums)
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
        versions = list(trimmed(sizes, layout.num_bytes, anchor))
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
