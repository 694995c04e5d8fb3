"""verl's weights through a store, with no process group between actor and rollout.

* :class:`CheckpointManager`, for ``rollout.checkpoint_manager_class`` (:mod:`.manager`);
* :class:`StoreCheckpointEngine`, which verl knows as the backend ``dbuffer`` when
  :mod:`.checkpoint_engine` is imported: ``checkpoint_engine.custom_backend_module``;
* :mod:`.syncing` has its methods, which need no verl.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbuffer.runtime.lazy import lazily

if TYPE_CHECKING:
    from dbuffer.integrations.verl.checkpoint_engine import (
        StoreCheckpointEngine as StoreCheckpointEngine,
    )
    from dbuffer.integrations.verl.manager import CheckpointManager as CheckpointManager
else:
    __getattr__, __all__ = lazily(
        __name__,
        {
            "CheckpointManager": ".manager",
            "StoreCheckpointEngine": ".checkpoint_engine",
        },
    )
