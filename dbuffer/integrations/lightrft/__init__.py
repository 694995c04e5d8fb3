"""LightRFT's weights through a store: :class:`BroadcastManager`, in the place of LightRFT's own.

``manager`` is what the trainer calls; ``configuration`` reads its strategy, ``engines`` finds what
is to be switched, and ``directory`` is where the weights lie unless the user says otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbuffer.runtime.lazy import lazily

if TYPE_CHECKING:
    from dbuffer.integrations.lightrft.manager import BroadcastManager as BroadcastManager
else:
    __getattr__, __all__ = lazily(__name__, {"BroadcastManager": ".manager"})
