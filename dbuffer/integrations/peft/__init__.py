"""peft: publishes merged models and LoRA adapters, and saves published adapters.

Only :mod:`.merged` and :mod:`.adapter` import peft. Engines without peft can call
:func:`save_adapter`.
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
