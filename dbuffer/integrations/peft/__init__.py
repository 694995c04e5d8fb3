"""peft: merged models and adapters in a store.

* :func:`merged_weights` returns a peft model's merged weights, to publish them (:mod:`.merged`);
* :func:`send_adapter` publishes an adapter without its base model (:mod:`.adapter`);
* :func:`save_adapter` saves a published adapter as a directory that engines and peft read
  (:mod:`.saved`). It does not import peft.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbuffer.runtime.lazy import lazily

if TYPE_CHECKING:
    from dbuffer.integrations.peft.adapter import send_adapter as send_adapter
    from dbuffer.integrations.peft.merged import merged_weights as merged_weights
    from dbuffer.integrations.peft.saved import (
        SavedAdapter as SavedAdapter,
        save_adapter as save_adapter,
    )
else:
    __getattr__, __all__ = lazily(
        __name__,
        {
            "SavedAdapter": ".saved",
            "merged_weights": ".merged",
            "save_adapter": ".saved",
            "send_adapter": ".adapter",
        },
    )
