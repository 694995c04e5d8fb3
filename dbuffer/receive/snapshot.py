"""`Snapshot`: one open version, mapped or in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dbuffer.errors import DBufferError, StoreCorruptError
from dbuffer.format.layout import Layout, TensorSpec
from dbuffer.format.lineage import Lineage, VersionId
from dbuffer.format.ranges import Integers
from dbuffer.io.chain_reader import ChainReader
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import FileTensors, new_memory, view_tensor
from dbuffer.receive.reader import wrong_tensors
from dbuffer.runtime.closing import ProcessBound
from dbuffer.runtime.messages import listed
from dbuffer.store.open_version import OpenStoreVersion
from dbuffer.weights.targets import Match

if TYPE_CHECKING:  # its import takes as long as torch's
    from tensordict import TensorDict

logger = logging.getLogger(__name__)


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

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors in the file, including the gaps between them."""
        return self._contents.data.numel()

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
        """Copy views of this snapshot's tensors, and cast them where dtypes differ."""
        self._copier.copy_tensors(targets, parts)
        if self._verify:
            self._check_copied(self._copier.checksums(self._contents))

    def copy(self) -> SnapshotTensors:
        """Copy all tensors into new memory, which outlives this snapshot.

        Raises:
            StoreCorruptError: tensors were damaged after this snapshot was opened.
        """
        return self.copy_into(new_memory(self.data_bytes))

    def changed_since(self, version: VersionId) -> dict[str, Integers] | None:
        """Return the positions of the elements that changed since an earlier version.

        The positions are ascending, in the flattened tensor, and keyed by the tensor's name.
        Unchanged tensors have no entry. Return None if no deltas lead from the earlier version to
        this one, or if the deltas cannot be read.
        """
        if version not in self._opened.manifest.chain:
            return None
        layout = self._contents.layout
        try:
            changes = ChainReader(self._opened, layout).changed_since(version, self._copier)
        except DBufferError as error:  # also if the package that unpacks deltas is missing
            logger.warning("%s: reading all of it: %s", self.path, str(error))
            return None
        return {layout.specs[index].name: positions for index, positions in changes.items()}

    @property
    def layout(self) -> Layout:
        return self._contents.layout

    def fill(self, match: Match) -> None:
        """Copy all tensors into their matched targets."""
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
