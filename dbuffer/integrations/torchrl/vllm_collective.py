"""In the place of TorchRL's ``torchrl.weight_update.llm.vllm_nccl``: its methods, over a store.

There is no process group to set up, so no calls must be made at the same time on both sides, and no
Ray is needed to coordinate.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

from dbuffer.errors import OptionError, VersionTimeoutError, WeightsMismatchError
from dbuffer.format.layout import TensorSpec
from dbuffer.integrations.torchrl.base import Strategy
from dbuffer.integrations.torchrl.extraction import extract_for_vllm, without_torchrl_wrapper
from dbuffer.integrations.torchrl.vllm_double_buffer import (
    VLLMDoubleBufferSyncScheme,
    VLLMDoubleBufferWeightReceiver,
    VLLMDoubleBufferWeightSender,
)
from dbuffer.io.tensors import DTYPE_NAMES
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime.messages import listed
from dbuffer.weights.sources import clean_names

ModelMetadata = Mapping[str, tuple[torch.dtype, torch.Size]]
"""Dtype and shape by name, as :func:`get_model_metadata` returns them."""


class VLLMWeightSyncScheme(VLLMDoubleBufferSyncScheme):
    """The scheme of :class:`VLLMWeightSender` and :class:`VLLMWeightReceiver`.

    Args:
        master_address, master_port, gpus_per_replica, num_replicas, device: as TorchRL's takes
            them, attributes as there. A store needs none of them: nobody listens on that port.
        strategy: how TorchRL extracts weights.
        remote_addr: the store, as the trainer sees it.
        local_addr: where the engine's workers read; see `VLLMDoubleBufferSyncScheme`.
        num_threads: threads that copy, on either side.
        **options: more of :class:`VLLMDoubleBufferSyncScheme`.

    Raises:
        OptionError: (a ``ValueError``) there is no store, or no such option.
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
        **options: Any,
    ) -> None:
        if remote_addr is None:
            raise OptionError("no store given: pass remote_addr, a directory that both sides see")
        local = None if local_addr is None else os.fspath(local_addr)
        super().__init__(os.fspath(remote_addr), local, num_threads, strategy, **options)
        self.master_address = "localhost" if master_address is None else master_address
        self.master_port = _free_port() if master_port is None else master_port
        self.gpus_per_replica = gpus_per_replica
        self.num_replicas = num_replicas
        self.device = device

    def create_sender(self) -> VLLMWeightSender:
        return VLLMWeightSender(self)

    def create_receiver(self, vllm_engine: Any) -> VLLMWeightReceiver:
        """The part that updates an engine; see :func:`followers_of` for what it may be."""
        return VLLMWeightReceiver(self, vllm_engine)


class VLLMWeightSender(VLLMDoubleBufferWeightSender):
    """Publishes a model's weights; into the engine as well, where it has been given one."""

    def __init__(self, scheme: VLLMDoubleBufferSyncScheme) -> None:
        super().__init__(scheme)
        self._receiver: VLLMWeightReceiver | None = None

    def init_all_workers_group(
        self, model_metadata: ModelMetadata, vllm_engine: Any | None = None
    ) -> None:
        """Check that what will be sent is what is expected.

        Args:
            model_metadata: dtype and shape of each tensor.
            vllm_engine: then `update_weights` returns when it has the weights.

        Raises:
            WeightsMismatchError: the registered model, or the engine, differs from it; the message
                lists how.
        """
        if self._model_ref is not None:
            weights = extract_for_vllm(self._registered_model(), self._strategy.extract_weights)
            sent = {name: (t.dtype, t.shape) for name, t in weights.tensors.items()}
            _require_same(model_metadata, sent, "the registered model")
        if vllm_engine is not None:
            self._receiver = VLLMWeightReceiver(self._scheme, vllm_engine)
            self._receiver.init_all_workers_group(model_metadata)

    def update_weights(self, weights: Any | None = None) -> None:
        """Publish weights, and apply them to the engine that was given, if one was."""
        super().update_weights(weights)
        if self._receiver is not None:
            self._receiver.apply_weights(None)

    def shutdown(self) -> None:
        super().shutdown()
        if self._receiver is not None:
            self._receiver.shutdown()
            self._receiver = None


class VLLMWeightReceiver(VLLMDoubleBufferWeightReceiver):
    """Brings an engine to the store's newest weights, when told to look.

    The engine may also be found later: ``set_context(collector)``, ``register_model("policy")``.
    """

    def init_all_workers_group(self, model_metadata: ModelMetadata) -> None:
        """Check early that what is, or will be, published fits the engine.

        Args:
            model_metadata: dtype and shape of each tensor.

        Raises:
            WeightsMismatchError: it differs from the store's newest version, or does not fit the
                engine; the message lists how.
        """
        watch = self._find_engines()
        published = _published(watch)
        if published is not None:
            _require_same(model_metadata, published, f"the newest version in {watch.store}")
        tensors = [
            (name, DTYPE_NAMES[dtype], list(shape))
            for name, (dtype, shape) in model_metadata.items()
        ]
        misfits = [m for follower in self._followers for m in follower.misfits(tensors)]
        if misfits:
            raise WeightsMismatchError("; ".join(dict.fromkeys(misfits)))

    def poll_and_apply(self, timeout: float = 0.1) -> bool:
        """As :class:`VLLMDoubleBufferWeightReceiver`'s, with TorchRL's shorter time-out."""
        return super().poll_and_apply(timeout)


def get_model_metadata(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Dtype and shape of each tensor that a sender publishes of this model.

    LoRA adapters are merged, as TorchRL's function of this name does.
    """
    model = without_torchrl_wrapper(model)
    strategy = "state_dict" if hasattr(model, "merge_and_unload") else "tensordict"
    extract = WeightStrategy(extract_as=strategy).extract_weights
    tensors = extract_for_vllm(model, extract).tensors
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _published(receiver: WeightReceiver) -> ModelMetadata | None:
    """What the store's newest version holds; None if there is none."""
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    try:
        with receiver.open(timeout_s=0.0, acknowledge=False) as snapshot:
            specs = {spec.name: spec for spec in snapshot.specs}
            specs |= {alias: specs[name] for alias, name in snapshot.aliases.items()}
    except VersionTimeoutError:
        return None
    return {name: (dtypes[spec.dtype], torch.Size(spec.shape)) for name, spec in specs.items()}


def _require_same(expected: ModelMetadata, found: ModelMetadata, what: str) -> None:
    """Raise a WeightsMismatchError that lists every difference, or return."""
    expected = dict(zip(clean_names(expected), expected.values(), strict=True))
    found = dict(zip(clean_names(found), found.values(), strict=True))
    differences = [f"{name!r} is missing" for name in expected if name not in found]
    differences += [f"{name!r} is not expected" for name in found if name not in expected]
    for name in expected.keys() & found.keys():
        wanted, there = (_spec(name, *metadata[name]) for metadata in (expected, found))
        if wanted != there:
            differences.append(f"{there}, expected {wanted}")
    if differences:
        told = listed(sorted(differences), "; ")
        raise WeightsMismatchError(f"{what} differs from the model's metadata: {told}")


def _spec(name: str, dtype: torch.dtype, shape: torch.Size) -> TensorSpec:
    return TensorSpec(name, DTYPE_NAMES.get(dtype, str(dtype)), tuple(shape))
