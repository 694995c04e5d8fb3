"""LightRFT's weights through a store: :class:`BroadcastManager`, in the place of LightRFT's own.

The trainer calls ``manager``; ``configuration`` reads its strategy.
"""

from __future__ import annotations

from dbuffer.integrations.lightrft.manager import BroadcastManager

__all__ = ["BroadcastManager"]
