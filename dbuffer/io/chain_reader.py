"""`ChainReader`: reads the deltas that lead from an earlier version to an open version."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

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
from dbuffer.store.filesystem import Descriptor, os_errors
from dbuffer.store.open_version import OpenStoreVersion, OpenVersion

T = TypeVar("T")


class ChainReader:
    """Reader of an open version's deltas."""

    def __init__(self, opened: OpenVersion, layout: Layout) -> None:
        self._opened = opened
        self._layout = layout

    def read(
        self,
        memory: FileTensors,
        copier: Copier,
        *,
        since: VersionId | None = None,
        hashed: bool = False,
    ) -> list[int] | None:
        """Read the open version into memory; return the checksums of all tensors if ``hashed``.

        ``since`` is the version that is in memory already, or None. If no deltas lead from it to
        the open version, the weights file is read first. After an error, the memory holds no
        version.
        """
        manifest, opened = self._opened.manifest, self._opened
        if since is None or since not in (manifest.file_version, *manifest.chain):
            assert isinstance(opened, OpenStoreVersion)  # noqa: S101 - a mirror fetches objects first
            file, path = opened.file.number, opened.path
            at_once = hashed and manifest.anchor is None
            checksums = read_tensors(file, path, self._layout, memory, copier, hashed=at_once)
            if manifest.anchor is None:
                return checksums
            since = manifest.file_version
        for version in manifest.deltas_after(since):
            self._use(version, lambda header, read: apply_delta(header, read, memory.data, copier))
        return copier.checksums(memory) if hashed else None

    def changed_since(self, version: VersionId, copier: Copier) -> dict[int, Integers]:
        """Return the elements that differ between an earlier version and the open version.

        The result has ascending flat positions in each tensor, keyed by the tensor's index.
        """
        parts = [
            self._use(later, lambda header, read: changed_elements(header, read, copier))
            for later in self._opened.manifest.deltas_after(version)
        ]
        return merge_elements(itertools.chain(*parts), copier)

    def expected(self, verified: Mapping[VersionId, list[int]]) -> list[int] | None:
        """Return the checksums that the open version's tensors had when they were published.

        ``verified`` has the checksums of some versions. Start with the latest of these versions, or
        with the weights file's table of checksums if none is the anchor or later. Then replace the
        checksums that the headers of later deltas contain. Return None if the table is damaged.
        """
        manifest = self._opened.manifest
        earlier = [manifest.file_version, *manifest.since_anchor]
        later: list[VersionId] = []
        while len(earlier) > 1 and earlier[-1] not in verified:
            later.insert(0, earlier.pop())
        expected = verified.get(earlier[-1]) or self._table()
        if expected is None:
            return None
        expected = list(expected)
        for version in later:
            header = self._use(version, lambda header, _: header)
            if (checksums := header.record.checksums) is None:
                raise StoreCorruptError(
                    f"{self._opened.name}: the delta that leads to {version} was written without "
                    "checksums of its tensors"
                )
            for index, checksum in checksums:
                expected[index] = int(checksum, 16)
        return expected

    def _table(self) -> list[int] | None:
        manifest = self._opened.manifest
        table = self._opened.read_at(manifest.checksums_offset, 8 * manifest.num_tensors)
        is_whole = digest(table) == manifest.checksums_xxh3
        return unpack_checksums(table) if is_whole else None

    def _use(self, version: VersionId, action: Callable[[DeltaHeader, ReadChunk], T]) -> T:
        """Open the delta that leads to a version, and return the result of ``action`` on it.

        The delta file is closed afterwards: a version may have more deltas than a process may open
        files.
        """
        path, file = self._opened.open_delta(version)
        with file, naming(path):
            header = self._read_header(path, file, version)

            def read_chunk(number: int) -> bytes:
                start, end = header.places[number : number + 2]
                return _read_at(path, file, start, end - start)

            return action(header, read_chunk)

    def _read_header(self, path: Path | str, file: Descriptor, version: VersionId) -> DeltaHeader:
        chain, layout_xxh3 = self._opened.manifest.chain, self._opened.manifest.layout_xxh3
        assert layout_xxh3 is not None  # noqa: S101 - the manifest is complete
        header = decode_header(partial(_read_at, path, file), self._layout, layout_xxh3)
        base, record = chain[chain.index(version) - 1], header.record
        if (record.base, record.id) != (base, version):
            raise StoreCorruptError(
                f"leads from {record.base} to {record.id}, but must lead from {base} to {version}; "
                "publish again to replace it"
            )
        return header


def _read_at(path: Path | str, file: Descriptor, offset: int, num_bytes: int) -> bytes:
    with os_errors("read a delta", path):
        return filesystem.read_at(file.number, offset, num_bytes)
