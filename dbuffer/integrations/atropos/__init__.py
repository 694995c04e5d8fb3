"""Atropos: a weight bridge that replaces the bridge of Atropos' example trainer."""

from __future__ import annotations

from dbuffer.integrations.atropos.bridge import VLLMWeightBridge, create_bridge_from_training_config
from dbuffer.integrations.atropos.config import BridgeConfig
from dbuffer.integrations.atropos.mapping import (
    get_name_conversions,
    permute_for_rotary,
    permute_for_rotary_1d,
)
from dbuffer.integrations.atropos.slurm import get_inference_urls, get_local_hostname

__all__ = [
    "BridgeConfig",
    "VLLMWeightBridge",
    "create_bridge_from_training_config",
    "get_inference_urls",
    "get_local_hostname",
    "get_name_conversions",
    "permute_for_rotary",
    "permute_for_rotary_1d",
]
