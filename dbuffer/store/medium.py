"""`Medium`: the contract of what a store's directory lies on, and all that rests on it.

Whether a file can be rewritten under its readers, whether locks hold, what other hosts see and
when: a mount decides it, and a medium is the one place that knows. `media` chooses it, once for a
store; nothing else asks what kind of mount there is. A new medium is a module with a subclass of
each of the three classes here, or of an existing medium's, and a row in `media`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from pathlib import Path
from typing import ClassVar, Protocol

from dbuffer.format import places
from dbuffer.format.manifest import Manifest, ReceiverRecord
from dbuffer.store import filesystem
from dbuffer.store.filesystem import Descriptor


class Records(Protocol):
    """Records of a store that tell which of its files are still needed."""

    root: Path
    owner_only: bool

    def undamaged_manifest(self, buffer: str) -> Manifest | None:
        """Read the manifest of a buffer; None if there is none, or it is damaged."""

    def readers(self) -> list[ReceiverRecord]:
        """Read the records of receivers that hold a version, and may live."""


class Medium(ABC):
    """A store's directory, as far as its mount decides how it is written and read."""

    name: ClassVar[str]
    """Name in logs and in ``DBUFFER_MOUNT``."""
    maps_files: ClassVar[bool]
    """Whether writers and readers map weights files, each of which holds a version whole.

    Else bytes go through pwrite and pread, because a mapped file that goes away is a SIGBUS, and a
    version may be the file of an earlier one and the deltas since.
    """
    reaches_other_hosts: ClassVar[bool]
    """Whether processes of other hosts may use the store.

    Then inotify does not report every change, locks may hold nobody back, files are seen when they
    are flushed, the pointer may be missing while it is replaced, and checksums are the default.
    """

    def __init__(self, root: Path, filesystem_name: str) -> None:
        self.root = root
        self.filesystem = filesystem_name
        """The kernel's name of the type: ``tmpfs``, ``ext4``, ``nfs4`` ..."""

    @property
    @abstractmethod
    def can_rewrite_in_place(self) -> bool:
        """Whether a weights file is written again and again; else each version has a new file."""

    @abstractmethod
    def now(self) -> float:
        """Seconds since the epoch, by the clock that files' times are of."""

    @abstractmethod
    def shows_life(self, record: Path) -> bool:
        """Whether the owner of a receiver's record, of another container or host, may live."""

    @abstractmethod
    def lock_to_read(self, file: Descriptor) -> bool:
        """Keep writers from an open weights file; False if one has it."""

    @abstractmethod
    def publish_file(
        self,
        path: Path,
        data: bytes,
        *,
        durable: bool = False,
        shows_life: bool = False,
        before: Descriptor | None = None,
    ) -> Descriptor | None:
        """Replace a small file of the store in one step, so that others see it.

        ``shows_life``: of a receiver's record, from before it has its name; see :meth:`shows_life`.

        Returns:
            The file, to be kept open until it is replaced (then it is ``before``), or its owner
            ends; None: it need not be.
        """

    @abstractmethod
    def weights_files(self, records: Records, reader_timeout_s: float) -> WeightsFiles:
        """Return the weights files of the store's one writer."""


class WeightsFiles(ABC):
    """The weights files of a store's writer, which holds each open that it may write again."""

    access: ClassVar[int]
    """Flag of `os.open` for a new file."""

    def __init__(self, records: Records, reader_timeout_s: float) -> None:
        self.records = records
        self.reader_timeout_s = reader_timeout_s
        self.open: dict[Path, Descriptor] = {}
        self.made_for: dict[Path, int] = {}

    def reuse(
        self,
        buffer: str,  # noqa: ARG002
        old: Manifest | None,  # noqa: ARG002
        layout_xxh3: str | None,  # noqa: ARG002
        file_bytes: int,  # noqa: ARG002
    ) -> Descriptor | None:
        """Lock the idle buffer's own file, if it is fit to be written again; None: make a new one.

        Waits for those who read it, for as long as the writer is to wait.
        """
        return None

    @abstractmethod
    def retire(self, buffer: str, old: Manifest | None, *, keep: Collection[Path]) -> None:
        """Remove the files that ``old`` named, now or later, and sweep the buffer.

        Files to ``keep`` stay.
        """

    def make(self, path: Path, num_bytes: int) -> Descriptor:
        """Make a weights file, with room for ``num_bytes`` where that can be reserved.

        Raises:
            StoreFullError: there is no room.
            StoreAccessError: it cannot be made.
        """
        file = filesystem.make_file(path, self.access)
        try:
            self._make_room(file, path, num_bytes)
        except BaseException:
            file.close()
            path.unlink(missing_ok=True)
            raise
        self.open[path] = file
        return file

    @abstractmethod
    def _make_room(self, file: Descriptor, path: Path, num_bytes: int) -> None:
        """Reserve room for a file, or refuse it for lack of room."""

    @abstractmethod
    def sweep(self, directory: str, *, keep: Collection[Path]) -> None:
        """Remove, now or later, files of a buffer or deltas that no manifest names."""

    @abstractmethod
    def note_published(self, read_back: Callable[[], None]) -> None:
        """Follow up on a publish; ``read_back`` compares the store with what was written."""

    def note_version(self, path: Path, version: int) -> None:
        """Remember for which version a file is made; it may serve later ones, too."""
        self.made_for[path] = version

    def forget(self, file: Descriptor) -> None:
        self.open = {path: known for path, known in self.open.items() if known is not file}
        file.close()

    def close_at(self, path: Path) -> None:
        """Close what is at ``path``, just before it is removed; see `replace_file`."""
        self.made_for.pop(path, None)
        if (file := self.open.get(path)) is not None:
            self.forget(file)

    def close(self) -> None:
        for file in self.open.values():
            file.close()
        self.open.clear()

    def all_in(self, directory: str) -> list[Path]:
        """The files that a writer may have made there; what else lies there is not ours."""
        is_ours = (
            places.is_delta_file if directory == places.DELTAS_DIRECTORY else places.is_weights_file
        )
        return [
            path
            for path in filesystem.list_matching(self.records.root / directory, "*")
            if is_ours(path.name) and (path.is_symlink() or not path.is_dir())
        ]

    def named_by(self, buffer: str, manifest: Manifest) -> list[Path]:
        """All files that a buffer's manifest names: weights, parts of them, deltas."""
        deltas = self.records.root / places.DELTAS_DIRECTORY
        return [
            *self.parts_of(manifest.anchor_buffer or buffer, manifest.file),
            *(deltas / places.delta_file(identity) for identity in manifest.chain[1:]),
        ]

    def parts_of(self, buffer: str, file: str) -> list[Path]:
        """The weights file of this name, and its parts."""
        directory = self.records.root / buffer
        files = filesystem.list_matching(directory, "weights-*.td")
        parts = [path for path in files if places.is_part_of(path.name, file)]
        return [directory / file, *parts]
