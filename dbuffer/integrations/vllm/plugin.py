"""What vLLM calls in each of its processes, through the entry point ``vllm.general_plugins``."""

from __future__ import annotations

import logging
from typing import Any

from dbuffer.integrations.vllm.options import BACKEND

logger = logging.getLogger(__name__)


def register() -> None:
    """Make ``backend="dbuffer"`` known to vLLM. It may be called more than once."""
    try:
        from vllm.distributed.weight_transfer.factory import (
            WeightTransferEngineFactory,
            WeightTransferTrainerFactory,
        )
    except ImportError as error:
        # An old vLLM, or another's fork: it must start as it would without dbuffer.
        logger.warning("this vLLM takes no weight transfer backend (%s): no dbuffer", error)
        return
    try:
        _register(WeightTransferEngineFactory, "backend", "DBufferWeightTransferEngine")
        _register(WeightTransferTrainerFactory, "trainer", "DBufferTrainerWeightTransferEngine")
    except (AttributeError, TypeError) as error:
        logger.warning("this vLLM registers backends in another way (%s): no dbuffer", error)


def _register(factory: Any, module: str, name: str) -> None:
    try:
        factory.register_engine(BACKEND, f"dbuffer.integrations.vllm.{module}", name)
    except ValueError:
        logger.debug("vLLM knows the backend %r already", BACKEND)
