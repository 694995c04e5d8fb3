"""TRL's weights through a store, with no process group between trainer and servers.

* :func:`over_store`, for `GRPOTrainer` and every other trainer that generates with vLLM servers
  (:mod:`.syncing`);
* :class:`StoreWeightTransfer`, for ``AsyncGRPOTrainer(weight_transfer=...)``
  (:mod:`.asynchronous`).
"""

from __future__ import annotations

from dbuffer.integrations.trl.asynchronous import StoreWeightTransfer
from dbuffer.integrations.trl.syncing import WeightSync, over_store

__all__ = ["StoreWeightTransfer", "WeightSync", "over_store"]
