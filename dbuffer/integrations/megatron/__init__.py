"""Megatron-Core's models and a store: :class:`MegatronWeights` of a model that mbridge exports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbuffer.runtime.lazy import lazily

if TYPE_CHECKING:
    from dbuffer.integrations.megatron.weights import MegatronWeights as MegatronWeights
else:
    __getattr__, __all__ = lazily(__name__, {"MegatronWeights": ".weights"})
