"""peft's adapters and a store: merged models, and adapters by themselves.

* :func:`merged_weights` publishes a peft model as the model that it acts as (:mod:`.merged`);
* :func:`send_adapter` publishes an adapter alone, and :func:`load_adapter` loads it into another
  process's peft model (:mod:`.adapter`);
* :func:`save_adapter` saves what was published where engines look for adapters (:mod:`.saved`);
  it needs no peft.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbuffer.integrations.lazy import lazily

if TYPE_CHECKING:
    from dbuffer.integrations.peft.adapter import (
        adapter_metadata,
        adapter_weights,
        load_adapter,
        send_adapter,
    )
    from dbuffer.integrations.peft.merged import merged_weights
    from dbuffer.integrations.peft.saved import SavedAdapter, save_adapter

_HERE = "dbuffer.integrations.peft"
_MODULES = {
    "SavedAdapter": f"{_HERE}.saved",
    "adapter_metadata": f"{_HERE}.adapter",
    "adapter_weights": f"{_HERE}.adapter",
    "load_adapter": f"{_HERE}.adapter",
    "merged_weights": f"{_HERE}.merged",
    "save_adapter": f"{_HERE}.saved",
    "send_adapter": f"{_HERE}.adapter",
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

__getattr__ = lazily(__name__, _MODULES)
