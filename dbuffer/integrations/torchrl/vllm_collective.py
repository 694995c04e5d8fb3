"""Replacements for ``torchrl.weight_update.llm.vllm_nccl`` that send weights through a store.

The classes have the methods of TorchRL's classes. Engines have the weights when ``update_weights``
returns, as in TorchRL. There is no process group, so the trainer and the engines can make their
calls at different times.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from dbuffer.errors import OptionError, WeightsMismatchError
from dbuffer.format.layout import TensorSpec
from dbuffer.integrations.torchrl.base import Strategy
from dbuffer.integrations.torchrl.vllm_double_buffer import (
    VLLMDoubleBufferSyncScheme,
    VLLMDoubleBufferWeightReceiver,
    VLLMDoubleBufferWeightSender,
    engine_in,
)
from dbuffer.io.tensors import DTYPE_NAMES
from dbuffer.runtime import options as checks
from dbuffer.runtime.closing import join
from dbuffer.runtime.trouble import RetryLoop

logger = logging.getLogger(__name__)

ModelMetadata: TypeAlias = Mapping[str, tuple[torch.dtype, torch.Size]]

_TURN_S = 0.01


class VLLMWeightSyncScheme(VLLMDoubleBufferSyncScheme):
    """Scheme that makes a :class:`VLLMWeightSender` and a :class:`VLLMWeightReceiver`.

    Args:
        master_address, master_port, gpus_per_replica, device: unused, but available as attributes,
            as in TorchRL's class.
        num_replicas: number of engines that ``update_weights`` waits for.
        strategy, remote_addr, local_addr, num_threads: as in :class:`VLLMDoubleBufferSyncScheme`.
        timeout_s: how long ``update_weights`` waits for the engines.
        **options: more options of :class:`VLLMDoubleBufferSyncScheme`.
    """

    def __init__(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        gpus_per_replica: int = 1,
        num_replicas: int = 1,
        strategy: Strategy = "tensordict",
        device: torch.device | str | int = 0,
        *,
        remote_addr: str | os.PathLike[str] | None = None,
        local_addr: str | os.PathLike[str] | None = None,
        num_threads: int = 1,
        timeout_s: float = 180.0,
        **options: Any,
    ) -> None:
        if remote_addr is None:
            raise OptionError(
                "no store given: pass remote_addr, a directory that trainer and engines see"
            )
        super().__init__(remote_addr, local_addr, num_threads, strategy, **options)
        self.master_address = "localhost" if master_address is None else master_address
        self.master_port = master_port
        self.gpus_per_replica = gpus_per_replica
        self.num_replicas = num_replicas
        self.device = device
        self.timeout_s = checks.positive_seconds("timeout_s", timeout_s)

    def create_sender(self) -> VLLMWeightSender:
        return VLLMWeightSender(self)

    def create_receiver(self, vllm_engine: Any) -> VLLMWeightReceiver:
        return VLLMWeightReceiver(self, vllm_engine)


class VLLMWeightSender(VLLMDoubleBufferWeightSender):
    """Publishes a model's weights, and waits until engines have applied them."""

    def __init__(self, scheme: VLLMWeightSyncScheme) -> None:
        super().__init__(scheme)
        self._timeout_s, self._num_replicas = scheme.timeout_s, scheme.num_replicas
        self._num_awaited = 0
        # Switches the `vllm_engine` of `init_all_workers_group`. None if no engine was passed.
        self._receiver: VLLMWeightReceiver | None = None

    def init_all_workers_group(
        self, model_metadata: ModelMetadata, vllm_engine: Any | None = None
    ) -> None:
        """Make each later ``update_weights`` call wait until engines have applied the weights.

        With a ``vllm_engine``, ``update_weights`` itself switches this engine, whose model must fit
        ``model_metadata``. Without a ``vllm_engine``, ``update_weights`` waits for ``num_replicas``
        engines that follow the store, by themselves or with a :class:`VLLMWeightReceiver`. If too
        few of these engines apply the weights in time, ``update_weights`` raises a
        ``WaitTimeoutError``. Its message lists the problem of each engine.
        """
        if vllm_engine is None:
            self._num_awaited = self._num_replicas
            return
        self._receiver = VLLMWeightReceiver(self._scheme, vllm_engine, follows=False)
        self._receiver.init_all_workers_group(model_metadata)

    def _deliver(self, version: int) -> None:
        if self._receiver is not None:
            self._receiver.poll_and_apply(0.0)
        elif self._num_awaited:
            self._transport.open_sender().wait_applied(
                version, receivers=self._num_awaited, timeout_s=self._timeout_s
            )

    def shutdown(self) -> None:
        super().shutdown()
        if self._receiver is not None:
            self._receiver.shutdown()
            self._receiver = None


class VLLMWeightReceiver(VLLMDoubleBufferWeightReceiver):
    """Keeps an engine on the store's newest weights, until ``shutdown()``.

    For an ``AsyncLLM`` or a server, a background thread does this. An ``LLM`` works in a single
    thread only: call ``poll_and_apply`` to switch it, or let a sender's ``update_weights`` do so.
    """

    def __init__(
        self, scheme: VLLMDoubleBufferSyncScheme, vllm_engine: Any, *, follows: bool = True
    ) -> None:
        super().__init__(scheme, vllm_engine)
        self._thread: threading.Thread | None = None
        if follows and not hasattr(engine_in(vllm_engine), "llm_engine"):
            self._thread = threading.Thread(
                target=self._follow, name="dbuffer-torchrl", daemon=True
            )
            self._thread.start()

    def init_all_workers_group(self, model_metadata: ModelMetadata) -> None:
        """Raise a `WeightsMismatchError` if tensors with this metadata do not fit the engine."""
        tensors = [
            TensorSpec(name, DTYPE_NAMES.get(dtype, str(dtype)), tuple(shape))
            for name, (dtype, shape) in model_metadata.items()
        ]
        with self._open():
            mismatches = [m for follower in self._followers for m in follower.mismatches(tensors)]
        if mismatches:
            raise WeightsMismatchError("; ".join(dict.fromkeys(mismatches)))

    def poll_and_apply(self, timeout: float = 0.1) -> bool:
        return super().poll_and_apply(timeout)

    def shutdown(self) -> None:
        self._closed.set()
        if self._thread is not None:
            join(self._thread)
        super().shutdown()

    def _follow(self) -> None:
        loop = RetryLoop(logger, stop=self._closed)
        while not self._closed.is_set():
            with loop.attempt():
                self.poll_and_apply(self._scheme.options.poll_interval_s)
                loop.succeeded("following")
            self._closed.wait(_TURN_S if loop.error is None else loop.retry_s)
