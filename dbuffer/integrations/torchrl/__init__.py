"""TorchRL: a store as the way that weights take from a trainer to collectors and vLLM engines.

* :class:`DoubleBufferSyncScheme` for collectors (:mod:`.scheme`);
* ``VLLMDoubleBuffer...`` in the place of TorchRL's classes of these names
  (:mod:`.vllm_double_buffer`);
* ``VLLMWeight...`` with the methods of TorchRL's collective ones (:mod:`.vllm_collective`).

Nothing is imported before it is asked for: collectors need no vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbuffer.integrations.lazy import lazily

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

_HERE = "dbuffer.integrations.torchrl"
_MODULES = {
    "DoubleBufferSyncScheme": f"{_HERE}.scheme",
    "DoubleBufferTransport": f"{_HERE}.transport",
    "VLLMDoubleBufferSyncScheme": f"{_HERE}.vllm_double_buffer",
    "VLLMDoubleBufferTransport": f"{_HERE}.vllm_double_buffer",
    "VLLMDoubleBufferWeightReceiver": f"{_HERE}.vllm_double_buffer",
    "VLLMDoubleBufferWeightSender": f"{_HERE}.vllm_double_buffer",
    "VLLMWeightReceiver": f"{_HERE}.vllm_collective",
    "VLLMWeightSender": f"{_HERE}.vllm_collective",
    "VLLMWeightSyncScheme": f"{_HERE}.vllm_collective",
    "get_model_metadata": f"{_HERE}.vllm_collective",
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

__getattr__ = lazily(__name__, _MODULES)
