"""TorchRL: sends weights from a trainer to collectors and vLLM engines through a store.

:class:`DoubleBufferSyncScheme` is a weight sync scheme for collectors. The classes
``VLLMDoubleBuffer...`` and ``VLLMWeight...`` replace TorchRL's classes with the same names. A name
is imported when it is first used, so that collectors do not import vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbuffer.runtime.lazy import lazily

if TYPE_CHECKING:
    from dbuffer.integrations.torchrl.extraction import get_model_metadata as get_model_metadata
    from dbuffer.integrations.torchrl.scheme import DoubleBufferSyncScheme as DoubleBufferSyncScheme
    from dbuffer.integrations.torchrl.vllm_collective import (
        VLLMWeightReceiver as VLLMWeightReceiver,
        VLLMWeightSender as VLLMWeightSender,
        VLLMWeightSyncScheme as VLLMWeightSyncScheme,
    )
    from dbuffer.integrations.torchrl.vllm_double_buffer import (
        VLLMDoubleBufferSyncScheme as VLLMDoubleBufferSyncScheme,
        VLLMDoubleBufferTransport as VLLMDoubleBufferTransport,
        VLLMDoubleBufferWeightReceiver as VLLMDoubleBufferWeightReceiver,
        VLLMDoubleBufferWeightSender as VLLMDoubleBufferWeightSender,
    )
else:
    __getattr__, __all__ = lazily(
        __name__,
        {
            "DoubleBufferSyncScheme": ".scheme",
            "VLLMDoubleBufferSyncScheme": ".vllm_double_buffer",
            "VLLMDoubleBufferTransport": ".vllm_double_buffer",
            "VLLMDoubleBufferWeightReceiver": ".vllm_double_buffer",
            "VLLMDoubleBufferWeightSender": ".vllm_double_buffer",
            "VLLMWeightReceiver": ".vllm_collective",
            "VLLMWeightSender": ".vllm_collective",
            "VLLMWeightSyncScheme": ".vllm_collective",
            "get_model_metadata": ".extraction",
        },
    )
