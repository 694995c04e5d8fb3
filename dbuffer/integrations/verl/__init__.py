"""verl: weights go from the actor to rollout workers through a store, without a process group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbuffer.runtime.lazy import lazily

if TYPE_CHECKING:
    from dbuffer.integrations.verl.checkpoint_engine import (
        CheckpointManager as CheckpointManager,
        StoreCheckpointEngine as StoreCheckpointEngine,
    )
else:
    __getattr__, __all__ = lazily(
        __name__,
        {
            "CheckpointManager": ".checkpoint_engine",
            "StoreCheckpointEngine": ".checkpoint_engine",
        },
    )
