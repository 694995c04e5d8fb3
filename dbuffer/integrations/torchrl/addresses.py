"""`Addresses`: which of a scheme's two directories an engine is to read.

The scheme is the same everywhere, and the hosts are not. Where ``remote_addr`` is seen,
``local_addr`` is a mirror's, or the same store under another name; where it is not, ``local_addr``
is where the store is. That a directory *could* be there says nothing: any host has a ``/tmp``.
What is there decides, and may be another thing at the next look.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TypeAlias

from dbuffer.format.lineage import Relation, relation
from dbuffer.format.manifest import Manifest
from dbuffer.format.places import MIRROR_LOCK_FILE
from dbuffer.runtime import options
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.filesystem import is_locked
from dbuffer.store.foreign import other_weights

logger = logging.getLogger(__name__)


Stores: TypeAlias = tuple[str, str | None]
"""Store to follow, and its local mirror, which is read in its place; None: there is none."""


class Addresses:
    """The two addresses of a scheme, which may be one directory."""

    def __init__(
        self,
        remote: str | os.PathLike[str],
        local: str | os.PathLike[str],
        *,
        allow_shared_store: bool = False,
    ) -> None:
        self.remote = options.directory("remote", remote)
        self.local = options.directory("local", local)
        self._allow_shared_store = allow_shared_store
        self._has_logged = False

    @property
    def are_one(self) -> bool:
        """Whether they are one directory, by their names and links."""
        return self.remote.resolve() == self.local.resolve()

    def find(self) -> Stores | None:
        """Return the store to follow; None if nothing is published yet."""
        remote, local = self._newest(self.remote), self._newest(self.local)
        if self.are_one:
            return None if local is None else self.expected
        if remote is not None:
            if local is None or local.is_copy:
                return self.expected
            if relation(local.lineage, remote.lineage) is Relation.FORKED:
                return self.expected
            return str(self.local), None  # one store, through two mounts
        # What a mirror has left behind is of some earlier time. One at work has it from somewhere.
        if local is not None and (not local.is_copy or is_locked(self.local / MIRROR_LOCK_FILE)):
            return str(self.local), None
        return None

    @property
    def expected(self) -> Stores:
        """Store to follow before anything is published."""
        if self.are_one:
            return str(self.local), None
        return str(self.remote), str(self.local)

    def log_once_if_nothing_is_there(self) -> None:
        """Log where weights were looked for, if there are none."""
        if not self._has_logged and self.find() is None:
            logger.warning(
                "no weights so far in %s: has the trainer published, and do both sides see one "
                "directory?",
                self._description(),
            )
            self._has_logged = True

    def _description(self) -> str:
        if self.are_one:
            return f"{self.local} (remote_addr and local_addr), {self._state(self.local)}"
        return (
            f"{self.remote} (remote_addr), {self._state(self.remote)}, and in "
            f"{self.local} (local_addr), {self._state(self.local)}"
        )

    def _state(self, path: Path) -> str:
        if not path.is_dir():
            return "which is not there"
        if self._newest(path) is not None:
            return "which a mirror has left behind"
        other = other_weights(path)
        return "where nothing is published" if other is None else f"which holds {other}"

    def _newest(self, path: Path) -> Manifest | None:
        store = self._view(path)
        pointer = store.newest_pointer() if store.exists() else None
        return None if pointer is None else store.manifest(pointer.buffer)

    def _view(self, path: Path) -> DoubleBuffer:
        return DoubleBuffer(path, allow_shared_store=self._allow_shared_store)
