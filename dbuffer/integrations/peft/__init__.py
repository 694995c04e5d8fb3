"""peft's adapters and a store: merged models, and adapters by themselves.

* :func:`merged_weights` publishes a peft model as the model that it acts as (:mod:`.merged`);
* :func:`send_adapter` publishes an adapter alone, and :func:`load_adapter` loads it into another
  process's peft model (:mod:`.adapter`);
* :func:`save_adapter` saves what was published where engines look for adapters (:mod:`.saved`);
  it needs no peft.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbuffer.integrations.peft.adapter import (
        adapter_metadata,
        adapter_weights,
        load_adapter,
        send_adapter,
    )
    from dbuffer.integrations.peft.merged import merged_weights
    from dbuffer.integrations.peft.saved import SavedAdapter, save_adapter

_MODULES = {
    "SavedAdapter": "saved",
    "adapter_metadata": "adapter",
    "adapter_weights": "adapter",
    "load_adapter": "adapter",
    "merged_weights": "merged",
    "save_adapter": "saved",
    "send_adapter": "adapter",
}

__all__ = [
    "SavedAdapter",
    "adapter_metadata",
    "adapter_weights",
    "load_adapter",
    "merged_weights",
    "save_adapter",
    "send_adapter",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
