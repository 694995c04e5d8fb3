"""TorchRL: a store as the way that weights take from a trainer to collectors and vLLM engines.

* :class:`DoubleBufferSyncScheme` for collectors (:mod:`.scheme`);
* ``VLLMDoubleBuffer...`` in the place of TorchRL's classes of these names
  (:mod:`.vllm_double_buffer`);
* ``VLLMWeight...`` with the methods of TorchRL's collective ones (:mod:`.vllm_collective`).

Nothing is imported before it is asked for: collectors need no vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbuffer.integrations.torchrl.scheme import DoubleBufferSyncScheme
    from dbuffer.integrations.torchrl.transport import DoubleBufferTransport
    from dbuffer.integrations.torchrl.vllm_collective import (
        VLLMWeightReceiver,
        VLLMWeightSender,
        VLLMWeightSyncScheme,
        get_model_metadata,
    )
    from dbuffer.integrations.torchrl.vllm_double_buffer import (
        VLLMDoubleBufferSyncScheme,
        VLLMDoubleBufferTransport,
        VLLMDoubleBufferWeightReceiver,
        VLLMDoubleBufferWeightSender,
    )

_MODULES = {
    "DoubleBufferSyncScheme": "scheme",
    "DoubleBufferTransport": "transport",
    "VLLMDoubleBufferSyncScheme": "vllm_double_buffer",
    "VLLMDoubleBufferTransport": "vllm_double_buffer",
    "VLLMDoubleBufferWeightReceiver": "vllm_double_buffer",
    "VLLMDoubleBufferWeightSender": "vllm_double_buffer",
    "VLLMWeightReceiver": "vllm_collective",
    "VLLMWeightSender": "vllm_collective",
    "VLLMWeightSyncScheme": "vllm_collective",
    "get_model_metadata": "vllm_collective",
}

__all__ = [
    "DoubleBufferSyncScheme",
    "DoubleBufferTransport",
    "VLLMDoubleBufferSyncScheme",
    "VLLMDoubleBufferTransport",
    "VLLMDoubleBufferWeightReceiver",
    "VLLMDoubleBufferWeightSender",
    "VLLMWeightReceiver",
    "VLLMWeightSender",
    "VLLMWeightSyncScheme",
    "get_model_metadata",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
