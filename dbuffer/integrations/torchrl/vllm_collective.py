"""In the place of TorchRL's ``torchrl.weight_update.llm.vllm_nccl``: its methods, over a store.

There is no process group to set up, so nobody has to call anything at the same time as anybody
else, and no Ray is needed to coordinate.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

from dbuffer.errors import OptionError, VersionTimeoutError, WeightsMismatchError
from dbuffer.integrations.torchrl.models import find_model
from dbuffer.integrations.torchrl.transport import DoubleBufferTransport
from dbuffer.integrations.torchrl.vllm_double_buffer import (
    VLLMDoubleBufferSyncScheme,
    VLLMDoubleBufferWeightReceiver,
    VLLMDoubleBufferWeightSender,
    extract_for_vllm,
    without_torchrl_wrapper,
)
from dbuffer.layout import TensorSpec
from dbuffer.receiver import WeightReceiver
from dbuffer.sources import clean_names
from dbuffer.tensors import DTYPE_NAMES

ModelMetadata = Mapping[str, tuple[torch.dtype, torch.Size]]
"""Dtype and shape by name, as :func:`get_model_metadata` returns them."""

_MAX_LISTED = 20


class VLLMWeightSyncScheme(VLLMDoubleBufferSyncScheme):
    """The scheme of :class:`VLLMWeightSender` and :class:`VLLMWeightReceiver`.

    Args:
        master_address, master_port, gpus_per_replica, num_replicas, device: as TorchRL's takes
            them. A store needs none of them.
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
        master_address: str | None = None,  # noqa: ARG002
        master_port: int | None = None,  # noqa: ARG002
        gpus_per_replica: int = 1,  # noqa: ARG002
        num_replicas: int = 1,  # noqa: ARG002
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
        device: torch.device | str | int = 0,  # noqa: ARG002
        *,
        remote_addr: str | os.PathLike[str] | None = None,
        local_addr: str | os.PathLike[str] | None = None,
        num_threads: int = 1,
        **options: Any,
    ) -> None:
        if remote_addr is None:
            raise OptionError("which store? Give remote_addr, a directory that both sides see")
        local = None if local_addr is None else os.fspath(local_addr)
        super().__init__(os.fspath(remote_addr), local, num_threads, strategy, **options)

    def create_sender(self) -> VLLMWeightSender:
        """The trainer's part."""
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
        """Publish weights, and apply them to the engine that was given, if one was.

        Raises:
            DBufferError: see :class:`VLLMDoubleBufferWeightSender` and its receiver.
        """
        super().update_weights(weights)
        if self._receiver is not None:
            self._receiver.apply_weights(None)

    def shutdown(self) -> None:
        """Give the store up, and stop following. Again does nothing."""
        super().shutdown()
        if self._receiver is not None:
            self._receiver.shutdown()
            self._receiver = None


class VLLMWeightReceiver(VLLMDoubleBufferWeightReceiver):
    """Brings an engine to the store's newest weights, when told to look.

    The engine may also be found later: ``set_context(collector)``, ``register_model("policy")``.
    """

    def __init__(self, scheme: VLLMDoubleBufferSyncScheme, vllm_engine: Any = None) -> None:
        super().__init__(scheme, vllm_engine)
        self._context: Any = None

    def set_context(self, context: Any, model_id: str | None = None) -> None:
        """Where a model that is registered by its path is looked for: a collector, mostly.

        Args:
            context: the object that the path begins at.
            model_id: a path to register at once.
        """
        self._context = context
        if model_id is not None:
            self.register_model(model_id)

    def register_model(self, model: Any) -> None:
        """The engine, or what holds it; or the path of that, such as ``"policy"``."""
        self.shutdown()
        self._vllm_engine = model

    def register_worker_transport(self, transport: Any) -> None:
        """Read the store of this transport from now on.

        Anything else, such as a pipe, is what other schemes need: then it is the scheme's own.
        """
        self.shutdown()
        self._seen = None
        if isinstance(transport, DoubleBufferTransport):
            self._scheme = copy.copy(self._scheme)
            self._scheme.remote_addr = transport.remote_addr
            self._scheme.local_addr = transport.local_addr

    def _engine(self) -> Any:
        engine = self._vllm_engine
        if not isinstance(engine, str) or "://" in engine:
            return engine
        found = find_model(self._context, engine)
        if found is None:
            raise ValueError(f"there is no {engine!r} in {self._context!r}: call set_context()")
        return found

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
        """Wait for weights that the engine does not have, and apply them.

        Args:
            timeout: seconds to wait for them to be published. 0: look once.

        Returns:
            True if they were applied, False if there was nothing new.

        Raises:
            DBufferError: see :meth:`VLLMDoubleBufferWeightReceiver.poll_and_apply`.
        """
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
        more = len(differences) - _MAX_LISTED
        listed = "; ".join(sorted(differences)[:_MAX_LISTED])
        raise WeightsMismatchError(
            f"{what} differs from the model's metadata: {listed}"
            + (f" and {more} more" if more > 0 else "")
        )


def _spec(name: str, dtype: torch.dtype, shape: torch.Size) -> TensorSpec:
    return TensorSpec(name, DTYPE_NAMES.get(dtype, str(dtype)), tuple(shape))
