"""LightRFT's weights through a store: :class:`BroadcastManager`, in the place of LightRFT's own.

The trainer calls ``manager``; ``configuration`` reads its strategy, and ``engines`` finds the
engines to switch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbuffer.runtime.lazy import lazily

if TYPE_CHECKING:
    from dbuffer.integrations.lightrft.manager import BroadcastManager as BroadcastManager
else:
    __getattr__, __all__ = lazily(__name__, {"BroadcastManager": ".manager"})
