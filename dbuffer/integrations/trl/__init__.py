"""TRL's weights through a store, with no process group between trainer and servers.

:func:`over_store` is for `GRPOTrainer` and every other trainer that generates with vLLM servers.
"""

from __future__ import annotations

from dbuffer.integrations.trl.syncing import WeightSync, over_store

__all__ = ["WeightSync", "over_store"]
