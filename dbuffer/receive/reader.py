"""`VersionReader` maps or reads stored versions; `Snapshot` is one open version, for users.

`VersionVerifier` verifies versions in memory. `verify_store` checks a store's records, layouts,
sizes and checksums.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from dbuffer.errors import (
    DBufferError,
    StoreAccessError,
    StoreCorruptError,
    StoreNotFoundError,
    WaitTimeoutError,
)
from dbuffer.format.layout import Layout, TensorSpec
from dbuffer.format.lineage import Lineage, VersionId
from dbuffer.format.manifest import UNDECODABLE, Manifest
from dbuffer.format.places import BUFFERS
from dbuffer.format.ranges import Integers
from dbuffer.io.chain_reader import changed_since, published_checksums, read_version
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import FileTensors, KeptMappings, MappedTensors, new_memory, view_tensor
from dbuffer.runtime.closing import ProcessBound
from dbuffer.runtime.messages import listed
from dbuffer.store.buffer import Contents, DoubleBuffer
from dbuffer.store.open_version import (
    OpenStoreVersion,
    OpenVersion,
    OvertakenError,
    Patience,
    open_buffer,
    open_newest,
)
from dbuffer.store.records import OwnRecord
from dbuffer.weights.targets import Match

if TYPE_CHECKING:  # its import takes as long as torch's
    from tensordict import TensorDict

logger = logging.getLogger(__name__)


class VersionVerifier:
    """Verifies versions in memory against the published checksums."""

    def __init__(self, record: OwnRecord, copier: Copier) -> None:
        self._record = record
        self._copier = copier
        self._verified: dict[VersionId, list[int]] = {}

    def verify(self, opened: OpenVersion, layout: Layout, checksums: list[int] | None) -> None:
        """Compare ``checksums`` with the published checksums, or do nothing if None.

        If the checksums differ because a writer has overwritten the version, raise
        `OvertakenError`. If they differ otherwise, raise :class:`StoreCorruptError`.
        """
        if checksums is None:
            return
        wrong = wrong_tensors(opened, layout, checksums, self._verified)
        if not wrong:
            return
        # Before a writer overwrites a version, it changes the manifest. If the manifest still names
        # this version, no writer has overwritten it, so the version is damaged.
        if opened.is_still_named():
            raise StoreCorruptError(
                f"{opened.name}: version {opened.manifest.version} was damaged after it was "
                f"published: {listed(wrong)}; publish again to replace it"
            )
        raise OvertakenError

    @contextlib.contextmanager
    def reporting_unreadable(self, opened: OpenVersion) -> Iterator[None]:
        """Report in the receiver's record if a ``with`` block cannot read a version with deltas.

        A sender that sees this report publishes its next version in full.
        """
        with self._reporting_damage(opened):
            yield
        self._record.set(unreadable=None)

    @contextlib.contextmanager
    def _reporting_damage(self, opened: OpenVersion) -> Iterator[None]:
        try:
            yield
        except UNDECODABLE:
            if opened.manifest.anchor is not None:
                self._record.write(unreadable=opened.manifest.id)
            raise

    def apply_changes(
        self,
        tensors: FileTensors,
        since: VersionId | None,
        opened: OpenVersion,
    ) -> list[int] | None:
        """Apply deltas to the version ``since`` in memory, and verify the result.

        Return the checksums of all tensors. Return None if the full version must be read instead:
        if no deltas lead to it from ``since``, if the deltas cannot be read, or if the memory was
        modified.
        """
        manifest = opened.manifest
        if since not in manifest.chain:
            return None
        try:
            read_version(opened, tensors.layout, tensors, self._copier, since=since)
            checksums = self._copier.checksums(tensors)
            wrong = wrong_tensors(opened, tensors.layout, checksums, self._verified)
        except (*UNDECODABLE, StoreNotFoundError) as error:
            message = "cannot use the deltas of version %d, reading it in full: %s"
            logger.warning(message, manifest.version, str(error))
            return None
        if wrong:
            logger.warning(
                "%s: reading version %d in full. With its deltas, %s is wrong, because this "
                "process modified the earlier version in memory",
                opened.name,
                manifest.version,
                listed(wrong),
            )
            return None
        return checksums


class VersionReader(VersionVerifier):
    """Reader of a store's open versions: maps them on a local mount, else reads them into memory.

    Methods that read raise `OvertakenError` if a writer has overwritten the version.
    """

    def __init__(
        self,
        store: DoubleBuffer,
        record: OwnRecord,
        copier: Copier,
        verify: bool | Literal["auto"],
    ) -> None:
        super().__init__(record, copier)
        self._store = store
        self._verify = verify
        self._mappings = KeptMappings()
        self.keeps_snapshots = False
        """Whether a snapshot's mapping of its file is kept for later versions in the same file,
        because mapping a file takes half as long as copying it. If True, tensors must not outlive
        their snapshot."""
        self._in_memory: tuple[Manifest, FileTensors] | None = None
        """Version that was read over a network, kept to apply the next version's deltas to."""
        self._patience = Patience()

    @property
    def maps_files(self) -> bool:
        return self._store.medium.maps_files

    def unmap(self) -> None:
        """Drop the kept mappings: a removed file's space is free only after it is unmapped."""
        self._mappings.keep_only()

    def close(self) -> None:
        self.unmap()
        self._in_memory = None

    def layout(self, opened: OpenStoreVersion) -> Layout:
        kept = self._in_memory
        if kept is not None and kept[0].layout_xxh3 == opened.manifest.layout_xxh3:
            return kept[1].layout
        with self._reporting_damage(opened):  # deltas can still be damaged
            try:
                is_kept = self._is_rewritten(opened)
                return self._map_kept(opened).layout if is_kept else opened.read_layout()
            except StoreNotFoundError as error:
                opened.wait_after_loss(error, self._patience)

    def read(self, opened: OpenStoreVersion, *, keep: bool = False) -> FileTensors:
        """Return all tensors of a version.

        With ``keep``, the tensors are valid only until the next read, which can reuse their memory.
        """
        if self.maps_files:
            is_kept = (keep or self.keeps_snapshots) and self._is_rewritten(opened)
            mapped = self._map_kept(opened) if is_kept else map_file(opened)
            if self.verifies_copies:
                self.verify(opened, mapped.layout, self._copier.checksums(mapped))
            return mapped
        tensors = self._read_into_memory(opened)
        if keep:
            self._in_memory = opened.manifest, tensors
        return tensors

    def keep_memory(self, opened: OpenStoreVersion, tensors: FileTensors) -> None:
        """Keep the memory of a closed snapshot, to apply later deltas to it.

        If versions are not verified, keep nothing: the snapshot's user may have modified the
        memory, and only a verification would find out.
        """
        if opened.manifest.chain and not self.maps_files and self._must_verify(opened.manifest):
            self._in_memory = opened.manifest, tensors

    def expect_device(self, tensors: FileTensors) -> None:
        """Prepare tensors for copies to a GPU, if they are mapped from a file in main memory."""
        if isinstance(tensors, MappedTensors) and self._store.medium.is_in_memory:
            tensors.expect_device()

    @property
    def verifies_copies(self) -> bool:
        """Whether to verify mapped tensors, and each copy of them."""
        # By default mapped tensors are not verified, because locks and generations show whether a
        # writer has changed them. A version that was read into memory is verified only when it is
        # read, because no writer can change it afterwards.
        return self.maps_files and self._verify is True

    def _must_verify(self, manifest: Manifest) -> bool:
        if not manifest.is_final:
            return True  # only checksums show whether the file was rewritten during the read
        return manifest.checksums_xxh3 is not None if self._verify == "auto" else self._verify

    def _is_rewritten(self, opened: OpenStoreVersion) -> bool:
        """Whether the sender reuses this file for later versions. If so, keep the file mapped."""
        return self.maps_files and not opened.manifest.is_final

    def _map_kept(self, opened: OpenStoreVersion) -> MappedTensors:
        """Return the kept mapping of a version's file, or map the file and keep the mapping."""
        access = mmap.ACCESS_COPY if self.keeps_snapshots else mmap.ACCESS_READ
        number = opened.file.number
        return self._mappings.get(opened.path, number, lambda: map_file(opened, access))

    def _read_into_memory(self, opened: OpenStoreVersion) -> FileTensors:
        before, self._in_memory = self._in_memory, None
        hashed, layout_xxh3 = self._must_verify(opened.manifest), opened.manifest.layout_xxh3
        memory = tensors = None
        with self.reporting_unreadable(opened):
            try:
                if before is not None:
                    earlier, memory = before[0], before[1].data
                    if hashed and earlier.layout_xxh3 == layout_xxh3:
                        is_applied = self.apply_changes(before[1], earlier.id, opened) is not None
                        tensors = before[1] if is_applied else None
                if tensors is None:
                    tensors, checksums = read_whole(opened, self._copier, memory, hashed=hashed)
                    self.verify(opened, tensors.layout, checksums)
            except StoreNotFoundError as error:
                opened.wait_after_loss(error, self._patience)
        self._patience = Patience()
        # The version is in memory, so the sender no longer needs to wait for this receiver.
        self._record.write(held=None)
        return tensors


def map_file(opened: OpenStoreVersion, access: int = mmap.ACCESS_COPY) -> MappedTensors:
    """Map a version, by default privately: a write into the mapping does not change the file."""
    layout = opened.read_layout()
    if layout.is_in_parts or opened.manifest.anchor is not None:
        raise StoreAccessError(
            f"{opened.path} was written in parts or with deltas, as on a network mount, but counts "
            "as a local file here: set DBUFFER_MOUNT=network in this process's environment"
        )
    return MappedTensors(opened.file.number, opened.manifest.file_bytes, layout, access=access)


def read_whole(
    opened: OpenStoreVersion,
    copier: Copier,
    memory: torch.Tensor | None = None,
    *,
    hashed: bool,
) -> tuple[FileTensors, list[int] | None]:
    """Read all tensors of a version into ``memory``, or into new memory if the size differs.

    Return the tensors, and with ``hashed`` their checksums.
    """
    layout = opened.read_layout()
    num_bytes = layout.checksums_offset
    if memory is None or memory.numel() != num_bytes:
        memory = new_memory(num_bytes)
    tensors = FileTensors(memory, layout)
    return tensors, read_version(opened, layout, tensors, copier, hashed=hashed)


def wrong_tensors(
    opened: OpenVersion,
    layout: Layout,
    checksums: list[int],
    verified: MutableMapping[VersionId, list[int]] | None = None,
) -> list[str]:
    """Return the names of the tensors whose checksums differ from the published ones.

    ``verified`` can have the verified checksums of an earlier version: then only the deltas since
    that version are read. If no tensor is wrong, put this version's checksums in their place.
    """
    manifest = opened.manifest
    if manifest.checksums_xxh3 is None:
        raise StoreCorruptError(
            f"{opened.name}: version {manifest.version} was published without checksums, so it "
            "cannot be verified; make the sender with checksum=True",
            is_lasting=True,
        )
    verified = {} if verified is None else verified
    expected = published_checksums(opened, layout, verified)
    if expected is None:
        return ["the table of checksums"]
    wrong = [
        spec.name
        for spec, checksum, right in zip(layout.specs, checksums, expected, strict=True)
        if checksum != right
    ]
    if not wrong:
        verified.clear()
        verified[manifest.id] = checksums
    return wrong


class SnapshotTensors(Mapping[str, torch.Tensor]):
    """Tensors of a version by name. Each access makes a new view."""

    def __init__(self, data: torch.Tensor, layout: Layout) -> None:
        self._data = data
        self._layout = layout
        self._indices = layout.indices

    def part(self, layout: Layout) -> SnapshotTensors:
        """Return the tensors of a part of a version: of its model, or of its draft."""
        return SnapshotTensors(self._data, layout)

    def __getitem__(self, name: str) -> torch.Tensor:
        return view_tensor(self._data, self._layout, self._indices[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    def __repr__(self) -> str:
        return f"<{len(self)} tensors of a snapshot>"


class Snapshot(ProcessBound):
    """Open version of a store, which no writer changes while it is open.

    The tensors are views of the mapped file or, on a network mount, of memory. They are valid only
    in the ``with`` block: copy the tensors that you keep. Writing into a tensor changes only this
    snapshot.
    """

    def __init__(
        self, opened: OpenStoreVersion, contents: FileTensors, copier: Copier, *, verify: bool
    ) -> None:
        super().__init__()
        self._verify = verify
        self._opened = opened
        self._contents = contents
        self._copier = copier
        self.tensors = SnapshotTensors(contents.data, contents.layout)

    @property
    def version(self) -> int:
        return self._opened.manifest.version

    @property
    def id(self) -> VersionId:
        """Unique id of the version: its number, and the id of its run (one start of a sender)."""
        return self._opened.manifest.id

    @property
    def lineage(self) -> Lineage:
        return self._opened.manifest.lineage

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata that the sender published with the version."""
        return self._opened.manifest.metadata

    @property
    def path(self) -> Path:
        """Path of the weights file. ``TensorDict.from_consolidated`` can open it, too.

        If the version is stored as deltas on a network mount, the file holds the earlier full
        version that the deltas start from.
        """
        return self._opened.path

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and shape of every tensor, in the file's order."""
        return self._contents.layout.specs

    def read_ahead(self) -> None:
        """Map every page into this process's page table, so that reading causes no page faults."""
        self._contents.read_ahead()

    def copy_into(self, memory: torch.Tensor) -> SnapshotTensors:
        """Copy all tensors into ``memory``, flat bytes; return views of the copies."""
        layout = self._contents.layout
        tensors = SnapshotTensors(memory, layout)
        if self._verify:
            targets = list(tensors.values())
            self._check_copied(self._copier.read(self._contents, targets, hashed=True))
        else:
            # Pieces of equal size, not tensors, so that all threads get the same amount of work.
            num_pieces = self._copier.num_threads
            sources = self._contents.data.chunk(num_pieces)
            self._copier.copy_tensors(list(memory.chunk(num_pieces)), list(sources))
        return tensors

    def copy_parts(self, targets: list[torch.Tensor], parts: list[torch.Tensor]) -> None:
        """Copy ``parts`` (views of the tensors) into ``targets``; cast where dtypes differ."""
        self._copier.copy_tensors(targets, parts)
        if self._verify:
            self._check_copied(self._copier.checksums(self._contents))

    def copy(self) -> SnapshotTensors:
        """Copy all tensors into new memory, which outlives this snapshot.

        Raises:
            StoreCorruptError: tensors were damaged after this snapshot was opened.
        """
        return self.copy_into(new_memory(self.layout.checksums_offset))

    def changed_since(self, version: VersionId) -> dict[str, Integers] | None:
        """Return the positions of the elements that changed since an earlier version.

        Positions are ascending indices into the flattened tensor, keyed by the tensor's name.
        Unchanged tensors have no entry. Return None if no deltas lead from the earlier version to
        this one, or if the deltas cannot be read.
        """
        if version not in self._opened.manifest.chain:
            return None
        layout = self._contents.layout
        try:
            changes = changed_since(self._opened, layout, version, self._copier)
        except DBufferError as error:  # also if the package that unpacks deltas is missing
            message = "%s: cannot tell what changed, because deltas cannot be read: %s"
            logger.warning(message, self.path, str(error))
            return None
        return {layout.specs[index].name: positions for index, positions in changes.items()}

    @property
    def layout(self) -> Layout:
        return self._contents.layout

    def fill(self, match: Match) -> None:
        """Copy this snapshot's tensors into the target's tensors that ``match`` assigns to them."""
        match.require_ties(self._contents.tensor)
        self._check_copied(match.fill(self._contents, self._copier, hashed=self._verify))

    def _check_copied(self, checksums: list[int] | None) -> None:
        if checksums is None:
            return
        if wrong := wrong_tensors(self._opened, self._contents.layout, checksums):
            raise StoreCorruptError(f"{self.path}: damaged while it was copied: {listed(wrong)}")

    @property
    def aliases(self) -> dict[str, str]:
        """Other names of tied tensors: a map from each alias to the name in :attr:`tensors`."""
        return dict(self._contents.layout.aliases)

    @property
    def tensordict(self) -> TensorDict:
        """The tensors as a flat TensorDict of batch size ``[]``, without a copy."""
        from tensordict import TensorDict

        return TensorDict(dict(self.tensors), batch_size=[])

    def __repr__(self) -> str:
        return f"Snapshot(version={self.version}, tensors={len(self.tensors)})"


def verify_store(store: DoubleBuffer) -> list[dict[str, Any]]:
    """Check all versions of a store; return the results of `dbuffer verify --json`, newest first.

    A version is locked while it is read, so a publish can be delayed.
    """
    store.check()
    pointer = store.newest_pointer()
    if pointer is None:
        raise WaitTimeoutError(f"nothing was published in {store.root} yet")

    newest = _verify_buffer(store, pointer.buffer, pointer.version)
    idle = [name for name in BUFFERS if name != newest["buffer"] and _has_version(store, name)]
    return [newest, *(_verify_buffer(store, name, None) for name in (*idle, *store.kept()))]


def _has_version(store: DoubleBuffer, buffer: str) -> bool:
    try:
        manifest = store.manifest(buffer)
    except UNDECODABLE:
        return True
    return manifest is not None and Contents(store).has_published(manifest)


def _verify_buffer(store: DoubleBuffer, buffer: str, newest: int | None) -> dict[str, Any]:
    """Check the version in a buffer.

    ``newest``: number of this version if it is the newest, or None.
    """
    check: dict[str, Any] = {
        "buffer": buffer,
        "version": newest,
        "is_newest": newest is not None,
        "has_checksums": False,
        "problems": [],
    }
    patience = Patience()
    while True:
        try:
            opened = open_newest(store, newer_than=None) if newest else open_buffer(store, buffer)
            if opened is None:
                return check
            check["buffer"] = opened.buffer  # differs if a newer version was published
            check["version"] = opened.manifest.version
            check["has_checksums"] = opened.manifest.checksums_xxh3 is not None
            try:
                with opened:
                    check["problems"] = _find_damage(opened)
            except StoreNotFoundError as error:
                opened.wait_after_loss(error, patience)
        except OvertakenError:  # on a network, a newer version's publish removed the file
            store.check()
            continue
        except UNDECODABLE as error:
            check["problems"] = [str(error)]
        return check


def _find_damage(opened: OpenStoreVersion) -> list[str]:
    """Return the names of a version's damaged tensors, or an error message about its layout.

    Without checksums, check only the layout (the table of tensors).
    """
    copier = Copier()
    try:
        layout = opened.read_layout()
        if opened.manifest.checksums_xxh3 is None:
            return []
        if not layout.is_in_parts and opened.store.medium.maps_files:
            checksums: list[int] | None = copier.checksums(map_file(opened))
        else:
            _, checksums = read_whole(opened, copier, hashed=True)
        return [] if checksums is None else wrong_tensors(opened, layout, checksums)
    except UNDECODABLE as error:
        return [str(error)]
    finally:
        copier.close()
