"""TRL: a trainer's weights go to vLLM servers through a store, without a process group."""

from __future__ import annotations

from dbuffer.integrations.trl.asynchronous import StoreWeightTransfer
from dbuffer.integrations.trl.syncing import WeightSync, over_store

__all__ = ["StoreWeightTransfer", "WeightSync", "over_store"]
