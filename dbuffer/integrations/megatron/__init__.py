"""Megatron-Core's models and a store: :class:`MegatronWeights` of a model that mbridge exports."""

from __future__ import annotations

from dbuffer.integrations.megatron.weights import MegatronWeights

__all__ = ["MegatronWeights"]
