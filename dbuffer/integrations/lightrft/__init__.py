"""LightRFT's weights through a store: :class:`BroadcastManager`, in the place of LightRFT's own.

``manager`` is what the trainer calls; ``configuration`` reads its strategy, ``engines`` finds what
is to be switched, and ``directory`` is where the weights lie unless the user says otherwise.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbuffer.integrations.lightrft.manager import BroadcastManager

__all__ = ["BroadcastManager"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.manager"), name)
