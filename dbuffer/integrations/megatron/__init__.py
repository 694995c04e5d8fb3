"""Megatron-Core: :class:`MegatronWeights` publishes a model that mbridge can export."""

from __future__ import annotations

from dbuffer.integrations.megatron.weights import MegatronWeights

__all__ = ["MegatronWeights"]
