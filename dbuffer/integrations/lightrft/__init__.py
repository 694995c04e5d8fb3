"""LightRFT: :class:`BroadcastManager` sends weights through a store and replaces LightRFT's class.

The trainer calls :mod:`.manager`, and :mod:`.configuration` reads the trainer's strategy.
"""

from __future__ import annotations

from dbuffer.integrations.lightrft.manager import BroadcastManager

__all__ = ["BroadcastManager"]
