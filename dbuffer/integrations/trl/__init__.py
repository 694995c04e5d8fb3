"""TRL's weights through a store, with no process group between trainer and servers.

* :func:`over_store`, for `GRPOTrainer` and every other trainer that generates with vLLM, in a
  server or in its own processes (:mod:`.making`; :mod:`.clients` is what it lets TRL make, and
  :mod:`.syncing` what it leaves in a trainer);
* :class:`StoreWeightTransfer`, for ``AsyncGRPOTrainer(weight_transfer=...)``
  (:mod:`.asynchronous`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbuffer.runtime.lazy import lazily

if TYPE_CHECKING:
    from dbuffer.integrations.trl.asynchronous import StoreWeightTransfer as StoreWeightTransfer
    from dbuffer.integrations.trl.making import over_store as over_store
    from dbuffer.integrations.trl.syncing import WeightSync as WeightSync
else:
    __getattr__, __all__ = lazily(
        __name__,
        {
            "StoreWeightTransfer": ".asynchronous",
            "WeightSync": ".syncing",
            "over_store": ".making",
        },
    )
