"""LightRFT: a :class:`BroadcastManager` that sends weights through a store."""

from __future__ import annotations

from dbuffer.integrations.lightrft.manager import BroadcastManager

__all__ = ["BroadcastManager"]
