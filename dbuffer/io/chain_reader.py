"""Reads the deltas that lead from an earlier version to an open version."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from dbuffer.errors import StoreCorruptError
from dbuffer.format.delta import DeltaHeader, decode_header
from dbuffer.format.layout import Layout, digest
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import naming
from dbuffer.format.ranges import Integers
from dbuffer.io.copier import Copier
from dbuffer.io.delta import ReadChunk, apply_delta, changed_elements, merge_elements
from dbuffer.io.tensors import FileTensors, unpack_checksums
from dbuffer.io.transfer import read_tensors
from dbuffer.store import filesystem
from dbuffer.store.filesystem import os_errors
from dbuffer.store.open_version import OpenStoreVersion, OpenVersion


def read_version(
    opened: OpenVersion,
    layout: Layout,
    memory: FileTensors,
    copier: Copier,
    *,
    since: VersionId | None = None,
    hashed: bool = False,
) -> list[int] | None:
    """Read an open version into memory; return the checksums of all tensors if ``hashed``.

    ``since`` is the version that is in memory already, or None. If no deltas lead from it to the
    open version, the weights file is read first. After an error, the memory holds no version.
    """
    manifest = opened.manifest
    if since is None or since not in (manifest.file_version, *manifest.chain):
        assert isinstance(opened, OpenStoreVersion)  # noqa: S101 - a mirror fetches objects first
        file, path, is_whole = opened.file.number, opened.path, manifest.anchor is None
        checksums = read_tensors(file, path, layout, memory, copier, hashed=hashed and is_whole)
        if is_whole:
            return checksums
        since = manifest.file_version
    for version in manifest.deltas_after(since):
        with _delta_to(opened, layout, version) as (header, read_chunk):
            apply_delta(header, read_chunk, memory.data, copier)
    return copier.checksums(memory) if hashed else None


def changed_since(
    opened: OpenVersion, layout: Layout, version: VersionId, copier: Copier
) -> dict[int, Integers]:
    """Return the elements that differ between an earlier version and an open version.

    The result has ascending flat positions in each tensor, keyed by the tensor's index.
    """
    parts: list[dict[int, Integers]] = []
    for later in opened.manifest.deltas_after(version):
        with _delta_to(opened, layout, later) as (header, read_chunk):
            parts += changed_elements(header, read_chunk, copier)
    return merge_elements(parts, copier)


def published_checksums(
    opened: OpenVersion, layout: Layout, verified: Mapping[VersionId, list[int]]
) -> list[int] | None:
    """Return the checksums that an open version's tensors had when they were published.

    ``verified`` has the checksums of some versions. Start with the latest of these versions, or
    with the weights file's table of checksums if none is the anchor or later. Then replace the
    checksums that the headers of later deltas contain. Return None if the table is damaged.
    """
    manifest = opened.manifest
    earlier = [manifest.file_version, *manifest.since_anchor]
    start = next((version for version in reversed(earlier) if version in verified), earlier[0])
    if (checksums := verified.get(start)) is None:
        table = opened.read_at(manifest.checksums_offset, 8 * manifest.num_tensors)
        if digest(table) != manifest.checksums_xxh3:
            return None
        checksums = unpack_checksums(table)
    checksums = list(checksums)
    for version in earlier[earlier.index(start) + 1 :]:
        with _delta_to(opened, layout, version) as (header, _):
            changed = header.record.checksums
        if changed is None:
            raise StoreCorruptError(
                f"{opened.name}: the delta that leads to {version} was written without checksums "
                "of its tensors"
            )
        for index, checksum in changed:
            checksums[index] = int(checksum, 16)
    return checksums


@contextlib.contextmanager
def _delta_to(
    opened: OpenVersion, layout: Layout, version: VersionId
) -> Iterator[tuple[DeltaHeader, ReadChunk]]:
    """Open the delta that leads to a version of the open version's chain, for a ``with`` block.

    The file is closed afterwards: a version may have more deltas than a process may open files.
    """
    manifest, (path, file) = opened.manifest, opened.open_delta(version)

    def read_at(offset: int, num_bytes: int) -> bytes:
        with os_errors("read a delta", path):
            return filesystem.read_at(file.number, offset, num_bytes)

    def read_chunk(number: int) -> bytes:
        start, end = header.places[number : number + 2]
        return read_at(start, end - start)

    with file, naming(path):
        assert manifest.layout_xxh3 is not None  # noqa: S101 - the manifest is complete
        header = decode_header(read_at, layout, manifest.layout_xxh3)
        base, record = manifest.chain[manifest.chain.index(version) - 1], header.record
        if (record.base, record.id) != (base, version):
            raise StoreCorruptError(
                f"leads from {record.base} to {record.id}, but must lead from {base} to {version}; "
                "publish again to replace it"
            )
        yield header, read_chunk
