"""verl's weights through a store, with no process group between actor and rollout.

* :class:`CheckpointManager`, for ``rollout.checkpoint_manager_class``;
* :class:`StoreCheckpointEngine`, which verl knows as the backend ``dbuffer`` when
  :mod:`.checkpoint_engine` is imported: ``checkpoint_engine.custom_backend_module``;
* :mod:`.syncing` has its methods, which need no verl.
"""

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
