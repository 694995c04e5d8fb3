"""`VersionInfo`: what a version's metadata says to workers of a collector."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Self

from dbuffer.errors import StoreCorruptError
from dbuffer.integrations.torchrl.extraction import Structure
from dbuffer.receive.snapshot import Snapshot

KEY = "torchrl"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionInfo:
    """Published by a scheme, beside the tensors."""

    extra_state: dict[str, Structure] = field(default_factory=dict)
    """The structure of the extra state, by the path of the module that it is of."""
    is_initial: bool = False
    """What a run begins with: it does not count as a version of the policy."""
    after_version: int = 0
    """For one worker: the newest version for all workers at that time."""

    def to_metadata(self) -> dict[str, Any]:
        return {KEY: asdict(self)}

    @classmethod
    def of(cls, snapshot: Snapshot) -> Self:
        """Take it from metadata; that of another sender has none."""
        values = snapshot.metadata.get(KEY, {})
        try:
            info = cls(**values)
        except TypeError as error:
            raise StoreCorruptError(f"{snapshot.path}: {KEY!r} in its metadata: {error}") from None
        types = (type(info.extra_state), type(info.is_initial), type(info.after_version))
        if types != (dict, bool, int):
            raise StoreCorruptError(
                f"{snapshot.path}: invalid {KEY!r} in its metadata: {values!r:.200}"
            )
        return info
