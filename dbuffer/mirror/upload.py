"""`BucketTarget`: a bucket as a mirror's target.

Parts of a version's files are put first, under names that no other content has, and last the
version's record, on condition that no other mirror has put it meanwhile.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from typing import Any

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
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import UNDECODABLE, Manifest, encode
from dbuffer.format.objects import (
    PART_BYTES,
    POINTER_OBJECT,
    RECEIVERS_PREFIX,
    VERSIONS_PREFIX,
    BucketVersion,
    Parts,
    delta_directory,
    is_of_receivers,
    part_object,
    version_of,
    weights_directory,
)
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import as_bytes, new_memory, pack_checksums
from dbuffer.mirror.bucket import Bucket, Tag
from dbuffer.mirror.bucket_records import ReceiversOfBucket
from dbuffer.mirror.sources import (
    SWAPPED,
    OpenUpstream,
    StoreSource,
    Upstream,
    UpstreamReceiver,
    deltas_since,
)
from dbuffer.mirror.sweep import forgotten_objects, missing_objects, unneeded_objects
from dbuffer.publish.publisher import Publication
from dbuffer.receive.reader import read_whole
from dbuffer.runtime.trouble import log_once
from dbuffer.store import filesystem
from dbuffer.store.open_version import OpenStoreVersion

logger = logging.getLogger(__name__)


class BucketTarget:
    """A bucket as target: a mirror publishes versions there.

    The mirror that was started last is the writer: it puts its own name into the record, and the
    one before finds out with its next look.

    A version's deltas are put if they lead from the version that was put last; its weights, if none
    do, or if late readers are better off with a new anchor.
    """

    def __init__(self, bucket: Bucket, copier: Copier) -> None:
        self._bucket = bucket
        self._copier = copier
        self._writer = secrets.token_hex(8)
        self._epoch = 0
        """Number of this mirror among the writers of the bucket; 0 before it takes it over."""
        self._record: BucketVersion | None = None
        """Record in the bucket, as this mirror has read or put it last."""
        self._tag: Tag | None = None
        self._last: BucketVersion | None = None
        """Current record, if this mirror has put it and the version lacks no object."""
        self._layout: Layout | None = None
        """Layout of the version read last, which the next version mostly shares."""
        self.receivers = ReceiversOfBucket(bucket)
        """Reader of receivers' records."""
        self.is_elected = False

    @property
    def name(self) -> str:
        return self._bucket.url

    def elect(self, source: Upstream) -> bool:  # noqa: ARG002 - whatever it holds
        self.is_elected = True
        return True

    def resign(self) -> None:
        self.is_elected = False

    def is_removed(self) -> bool:
        return False  # a check finds out

    def is_fit(self, source: Upstream) -> bool:  # noqa: ARG002
        return True  # its readers are mirrors, which compare versions themselves

    def newest(self) -> Manifest | None:
        """Return the version as this mirror has read or put it last: a look costs a request."""
        return None if self._last is None else self._last.manifest

    def open(self, source: Upstream) -> None:
        """Become the writer, once there is something to write."""
        # It would take the bucket over from the trainer's mirror, and nothing new would come.
        if isinstance(source, StoreSource) and source.copied_from() == self.name:
            raise OptionError(
                f"{source.name} is copied from {self.name}, and was to be copied into it: {SWAPPED}"
            )
        self._take_over()

    def close(self) -> None:
        """Do nothing: another mirror takes over without that."""

    def copy(self, held: OpenUpstream, receiver: UpstreamReceiver) -> Publication:
        """Publish a held version in the bucket; raise `OvertakenError` if it was overwritten.

        Raises:
            WriterSupersededError: another mirror has put the record.
            StoreCorruptError: the record was deleted, or an earlier one is there again.
        """
        if self._last is None:
            self._take_over()
        started, manifest = time.monotonic(), held.manifest
        with receiver.reader.reporting_unreadable(held), held.noticing_loss():
            if self._layout is None or self._layout.xxh3 != manifest.layout_xxh3:
                self._layout = held.read_layout()
            layout = self._layout.joined
            deltas, weights = self._read_deltas(held, layout), None
            if self._needs_weights(deltas, layout):
                weights = self._read_weights(held, receiver, layout)
            held.require_unchanged()
        # It is in memory, and no sender need wait for the network.
        held.release()
        receiver.record.write(held=None)
        version = self._put_files(manifest, deltas, weights, layout)
        if not self._put_record(version):
            # The record is another mirror's; or ours, and the answer to a put was lost.
            self._take_over()
            if self._record != version:
                raise self._describe_loss()
        self._last = version
        delta_bytes = sum(map(len, deltas.values()))
        return Publication.of(manifest.id, layout, started, delta_bytes or None)

    def check(self) -> None:
        """Compare the record and the newest version's objects with the last publish.

        Raises:
            WriterSupersededError: another mirror has put the record.
            StoreCorruptError: an object is missing, or an earlier record is there again.
        """
        last = self._last
        if last is not None:
            self._take_over()
            if self._last != last:
                raise self._describe_loss()

    def _take_over(self) -> None:
        """Read the record, put it again with this mirror's name, and look at the objects.

        Raises:
            WriterSupersededError: a mirror that was started later has put the record.
            StoreAccessError: another mirror was faster, or the answer was lost.
        """
        record = self._read_record()
        if not self._epoch:
            # A mirror that is started later has a higher number, also if the record was lost.
            self._epoch = max(int(time.time()), 0 if record is None else record.epoch + 1)
        if record is not None and record.writer != self._writer:
            if record.epoch >= self._epoch:
                raise WriterSupersededError(
                    f"another mirror took {self.name} over; this one must stop"
                )
            record = record.by(self._writer, self._epoch)
            if not self._put_record(record):
                raise StoreAccessError(
                    f"{self._bucket.name_of(POINTER_OBJECT)} could not be put on condition of its "
                    "ETag: does the service support conditional puts?"
                )
        self._last = record if record is not None and self._is_whole(record) else None

    def _describe_loss(self) -> StoreCorruptError:
        """Return the error for a bucket that is not as this mirror has left it."""
        record = self._record
        if record is None:
            loss = f"{POINTER_OBJECT} is missing or damaged"
        elif self._last is None:
            loss = f"parts of version {record.id.number} are missing, or have another size"
        else:
            loss = f"{POINTER_OBJECT} went back to version {record.id.number}"
        return StoreCorruptError(f"{self.name}: {loss}; it gets its newest version anew")

    def _is_whole(self, version: BucketVersion) -> bool:
        """Whether a version lacks no object; if so, delete objects that are not needed.

        Raises:
            StoreAccessError: the objects cannot be listed.
        """
        listed = self._bucket.list(VERSIONS_PREFIX)
        if missing_objects(listed, version):
            return False
        try:
            forgotten = forgotten_objects(self._bucket.list(RECEIVERS_PREFIX))
            self._bucket.delete(unneeded_objects(listed, version) + forgotten)
        except StoreAccessError as error:
            log_once(logger, "old objects stay: %s", str(error))
        return True

    def _put_record(self, version: BucketVersion) -> bool:
        """Put a version's record, if no other mirror has put one since the last look."""
        tag = self._bucket.put_if(POINTER_OBJECT, encode(version), self._tag)
        if tag is not None:
            self._record, self._tag = version, tag
        return tag is not None

    def _read_record(self) -> BucketVersion | None:
        """Read the record, unless it is as this mirror knows it; a damaged one is deleted."""
        try:
            read = self._bucket.read(BucketVersion, POINTER_OBJECT, self._tag)
        except StoreNotFoundError:
            self._record = self._tag = None
        except StoreCorruptError as error:
            if self._record is None and not self._has_mirrors_objects():
                remedy = "remove it, unless it is another program's"
                raise StoreCorruptError(f"{error}; {remedy}") from None
            logger.warning("deleting a damaged record: %s", str(error))
            self._bucket.delete([POINTER_OBJECT])
            self._record = self._tag = None
        else:
            if read is not None:
                self._record, self._tag = read
        return self._record

    def _has_mirrors_objects(self) -> bool:
        return any(map(version_of, self._bucket.list(VERSIONS_PREFIX))) or any(
            map(is_of_receivers, self._bucket.list(RECEIVERS_PREFIX))
        )

    def _read_deltas(self, held: OpenUpstream, layout: Layout) -> dict[VersionId, bytes]:
        """Read the deltas that lead from the version put last, if some do and can be read."""
        last, deltas = self._last, dict[VersionId, bytes]()
        is_of_this_release = last is not None and last.part_bytes == PART_BYTES
        base = last.id if last is not None and is_of_this_release else None
        try:
            for version in deltas_since(base, held, layout, self.name):
                name, file = held.open_delta(version)
                with file, filesystem.os_errors("read a delta", name):
                    num_bytes = os.fstat(file.number).st_size
                    deltas[version] = filesystem.read_at(file.number, 0, num_bytes)
        except (*UNDECODABLE, StoreNotFoundError) as error:
            number = held.manifest.version
            logger.warning("copying version %d without its deltas: %s", number, str(error))
            return {}
        return deltas

    def _needs_weights(self, deltas: dict[VersionId, bytes], layout: Layout) -> bool:
        """Whether no deltas lead to a version, or readers are better off with a new anchor."""
        last = self._last
        if last is None or not deltas:
            return True
        since = last.manifest.since_anchor
        sizes = [last.delta(version).num_bytes for version in since]
        if is_long([*sizes, *map(len, deltas.values())], layout.num_bytes):
            reason = "its chain of deltas is long"
        elif any(record.unreadable in since for record in self.receivers.known()):
            reason = "a receiver cannot read the deltas before it"
        else:
            return False
        logger.info("%s: version %d is put whole: %s", self.name, [*deltas][-1].number, reason)
        return True

    def _read_weights(
        self, held: OpenUpstream, receiver: UpstreamReceiver, layout: Layout
    ) -> tuple[memoryview, dict[str, Any]]:
        """Read a version into memory, whole, as a weights file; return it, and fields about it.

        Not while it is put: a buffer that is held for so long would hold up the sender.
        """
        assert isinstance(held, OpenStoreVersion)  # noqa: S101 - the other end is a store
        memory = new_memory(layout.file_bytes)
        data = memory[: layout.checksums_offset]
        hashed = held.manifest.checksums_xxh3 is not None
        _, checksums = read_whole(held, self._copier, data, hashed=hashed)
        receiver.reader.verify(held, layout, checksums)
        raw = as_bytes(memory)
        starts = [*layout.offsets[1:], layout.checksums_offset]
        for offset, size, start in zip(layout.offsets, layout.sizes, starts, strict=True):
            raw[offset + size : start] = bytes(start - offset - size)  # gaps are put, too
        table = pack_checksums(checksums or [])
        table_end = table.ljust(layout.layout_offset - layout.checksums_offset, b"\0")
        raw[layout.checksums_offset :] = table_end + layout.encoded + layout.tail
        return raw, layout.describe_file(None if checksums is None else digest(table))

    def _put_files(
        self,
        manifest: Manifest,
        deltas: dict[VersionId, bytes],
        weights: tuple[memoryview, dict[str, Any]] | None,
        layout: Layout,
    ) -> BucketVersion:
        """Put the files of a version, and return its record."""
        last = self._last
        files = {} if last is None else last.files
        chain = [manifest.id]
        if last is not None and deltas:
            chain = [*(last.manifest.chain or [last.id]), *deltas]
        for version, delta in deltas.items():
            directory = delta_directory(version)
            files[directory] = self._put_parts(directory, memoryview(delta))
        if weights is not None:
            data, fields = weights
            directory, anchor = weights_directory(manifest.id), None
            files[directory] = self._put_parts(directory, data)
            of_file = fields | {"file": f"weights-{manifest.id}.td"}
        else:
            assert last is not None  # noqa: S101 - deltas lead from it
            directory, anchor = (
                weights_directory(last.manifest.file_version),
                last.manifest.file_version,
            )
            of_file = last.manifest.of_file | {"file": last.manifest.file}
        sizes = {each: files[delta_directory(each)].num_bytes for each in chain[1:]}
        chain = chain_of(trimmed({chain[0]: 0, **sizes}, layout.num_bytes, anchor))
        described = replace(
            manifest,
            **of_file,
            is_final=True,
            anchor=anchor,
            anchor_buffer=None,
            chain=chain,
        )
        return BucketVersion.sealed(
            writer=self._writer,
            epoch=self._epoch,
            manifest=described,
            part_bytes=PART_BYTES,
            weights=files[directory].digests,
            deltas=[files[delta_directory(version)] for version in chain[1:]],
        )

    def _put_parts(self, directory: str, data: memoryview) -> Parts:
        """Put the missing parts of a file."""
        digests = [""] * -(-len(data) // PART_BYTES)
        # Parts of a delta are few: to put them again costs less than to look.
        there = self._bucket.list(directory) if len(digests) > 1 else {}

        def put(index: int) -> None:
            part = data[index * PART_BYTES : (index + 1) * PART_BYTES]
            digests[index] = digest(part)
            name = part_object(directory, index, digests[index])
            if name not in there or there[name].num_bytes != len(part):
                self._bucket.put(name, part)

        self._bucket.in_parallel(put, range(len(digests)))
        return Parts(len(data), digests)
