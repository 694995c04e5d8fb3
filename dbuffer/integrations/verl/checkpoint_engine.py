"""`StoreCheckpointEngine`: verl's backend ``dbuffer``, which verl knows once this is imported."""

from __future__ import annotations

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from dbuffer.integrations.verl.syncing import StoreSync

VERL_BACKEND = "dbuffer"


@CheckpointEngineRegistry.register(VERL_BACKEND)
class StoreCheckpointEngine(StoreSync, CheckpointEngine):  # type: ignore[misc]  # verl is not typed
    """Brings weights from verl's actor to its rollout workers through a store.

    verl makes one in each actor rank and in each rollout worker, and calls it as its documentation
    says. Each sync is one version, with an id that the actor's first rank generates and verl
    hands to all workers. A rollout worker takes the version of that id and nothing else.

    Args:
        bucket_size: unused; verl's, for the way from a rollout worker into its engine.
        is_master: whether this is the actor's first rank, which publishes.
        store: the store's directory, as actor and rollout workers see it.
        local_store: a directory in the shared memory of the rollout workers' nodes, for a store on
            a network mount; one process of each node copies every version there.
        delta: publish only the bytes that changed since the last sync, if they are few. The weights
            are then collected first, in the memory of the first rank's host.
        dtype: dtype of published floating-point tensors, as text. Default: each tensor's own.
        timeout_s: how long a rollout worker waits for the version of a sync.

    Raises:
        OptionError: (a ``ValueError``) an option is invalid.
    """
