"""Replacements for ``torchrl.weight_update.llm.vllm_nccl``: the same methods, over a store.

There is no process group, so the two sides need not call anything at the same time, and need no Ray
to coordinate. Weights are pushed as there: a receiver's engine has them when ``update_weights``
returns.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

from dbuffer.errors import (
    EngineBusyError,
    OptionError,
    WaitTimeoutError,
    WeightsMismatchError,
)
from dbuffer.format.layout import TensorSpec
from dbuffer.integrations.engine.follower import Follower
from dbuffer.integrations.torchrl.base import Strategy
from dbuffer.integrations.torchrl.engine_turns import EngineTurns
from dbuffer.integrations.torchrl.extraction import extract_for_vllm, without_torchrl_wrapper
from dbuffer.integrations.torchrl.follow_thread import FollowThread, RegisteredReceivers
from dbuffer.integrations.torchrl.vllm_double_buffer import (
    VLLMDoubleBufferSyncScheme,
    VLLMDoubleBufferWeightReceiver,
    VLLMDoubleBufferWeightSender,
    engine_in,
)
from dbuffer.integrations.vllm.vllm_engine import AsyncVllm, is_async
from dbuffer.io.tensors import DTYPE_NAMES
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime import options as checks
from dbuffer.runtime.messages import listed
from dbuffer.weights.sources import clean_names

ModelMetadata = Mapping[str, tuple[torch.dtype, torch.Size]]
"""Dtype and shape by name, as :func:`get_model_metadata` returns them."""

_READY_CHECK_S = 0.005
"""Interval at which to ask whether an ``LLM``'s ranks have a version ready."""


class VLLMWeightSyncScheme(VLLMDoubleBufferSyncScheme):
    """The scheme of :class:`VLLMWeightSender` and :class:`VLLMWeightReceiver`.

    Args:
        master_address, master_port, gpus_per_replica, num_replicas, device: accepted and kept as
            attributes, as in TorchRL's class. A store needs none of them.
        strategy: how TorchRL extracts weights.
        remote_addr: the store, as the trainer sees it.
        local_addr: where the engine's workers read; see `VLLMDoubleBufferSyncScheme`.
        num_threads: threads that copy, on either side.
        timeout_s: how long ``update_weights`` waits for engines, and an engine for its weights.
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
        timeout_s: float = 180.0,
        **options: Any,
    ) -> None:
        if remote_addr is None:
            raise OptionError("no store given: pass remote_addr, a directory that both sides see")
        local = None if local_addr is None else os.fspath(local_addr)
        super().__init__(os.fspath(remote_addr), local, num_threads, strategy, **options)
        self.master_address = "localhost" if master_address is None else master_address
        self.master_port = master_port
        self.gpus_per_replica = gpus_per_replica
        self.num_replicas = num_replicas
        self.device = device
        self.timeout_s = checks.positive_seconds("timeout_s", timeout_s)

    def create_sender(self) -> VLLMWeightSender:
        return VLLMWeightSender(self)

    def create_receiver(self, vllm_engine: Any) -> VLLMWeightReceiver:
        """The part that updates an engine; see :func:`followers_of` for what it may be."""
        return VLLMWeightReceiver(self, vllm_engine)


class VLLMWeightSender(VLLMDoubleBufferWeightSender):
    """Publishes a model's weights, and waits for the engines that are to have them."""

    def __init__(self, scheme: VLLMWeightSyncScheme) -> None:
        super().__init__(scheme)
        self._timeout_s = scheme.timeout_s
        self._receiver: VLLMDoubleBufferWeightReceiver | None = None
        self._registered = RegisteredReceivers(
            Path(self._transport.remote_addr),
            allow_shared_store=scheme.options.allow_shared_store,
        )

    def init_all_workers_group(
        self, model_metadata: ModelMetadata, vllm_engine: Any | None = None
    ) -> None:
        """Check that what will be sent is what is expected.

        Args:
            model_metadata: dtype and shape of each tensor.
            vllm_engine: an engine that `update_weights` switches itself. One that has a
                :class:`VLLMWeightReceiver` need not be given.

        Raises:
            WeightsMismatchError: the registered model, or the engine, differs from it; the message
                lists how.
        """
        if self._model_ref is not None:
            weights = extract_for_vllm(self._registered_model(), self._strategy.extract_weights)
            sent = {name: (t.dtype, t.shape) for name, t in weights.tensors.items()}
            _require_same(model_metadata, sent, "the registered model")
        if vllm_engine is not None:
            self._receiver = VLLMDoubleBufferWeightReceiver(self._scheme, vllm_engine)
            _require_fit(self._receiver, model_metadata)

    def update_weights(self, weights: Any | None = None) -> None:
        """Publish weights; return when the registered receivers' engines have them.

        A receiver is registered from its creation until its ``shutdown``. The engine that was
        given to this sender's ``init_all_workers_group`` is waited for, too.

        Raises:
            WaitTimeoutError: (a ``TimeoutError``) an engine does not have them in time.
            ReceiverFailedError: an engine cannot have them, or the process of its receiver has
                ended; the message says why. They are published, and it is tried again.
            DBufferError: see :meth:`VLLMDoubleBufferWeightSender.update_weights`.
        """
        super().update_weights(weights)

    def _deliver(self, version: int) -> None:
        if self._receiver is not None:
            self._receiver.apply_weights(None)
        self._transport.wait_applied(version, self._registered.names(), self._timeout_s)

    def shutdown(self) -> None:
        super().shutdown()
        if self._receiver is not None:
            self._receiver.shutdown()
            self._receiver = None


class VLLMWeightReceiver(VLLMDoubleBufferWeightReceiver):
    """Keeps an engine on the store's newest weights, in a thread of its own.

    It follows until :meth:`shutdown`. An ``LLM`` is switched between two generations: one that is
    under way ends first, and the next one waits for the switch.
    """

    def __init__(self, scheme: VLLMWeightSyncScheme, vllm_engine: Any) -> None:
        self._begun: list[Any] | None = None
        self._timeout_s = scheme.timeout_s
        super().__init__(scheme, vllm_engine)
        self._begin()
        self._thread = FollowThread(
            self,
            is_to_be_made=self._transport.addresses.are_one,
            allow_shared_store=scheme.options.allow_shared_store,
            poll_interval_s=scheme.options.poll_interval_s,
        )

    def init_all_workers_group(self, model_metadata: ModelMetadata) -> None:
        """Check that the weights that are, or will be, published fit the engine.

        Args:
            model_metadata: dtype and shape of each tensor.

        Raises:
            WeightsMismatchError: it differs from the store's newest version, or does not fit the
                engine; the message lists how.
        """
        self._do(lambda: _require_fit(self, model_metadata))

    def poll_and_apply(self, timeout: float = 0.1) -> bool:
        """Wait for weights that the engine does not have, and apply them.

        Weights come to the engine whether this is called or not. Errors are those of
        :meth:`VLLMDoubleBufferWeightReceiver.poll_and_apply`.
        """
        return bool(self._do(lambda: super(VLLMWeightReceiver, self).poll_and_apply(timeout)))

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        self._do(lambda: super(VLLMWeightReceiver, self).apply_weights(weights, inplace))

    def shutdown(self) -> None:
        self._thread.close()
        if (turns := self._turns()) is not None:
            turns.give_up()
        super().shutdown()

    def _do(self, call: Callable[[], Any]) -> Any:
        """Make a call that needs the engine, in the thread that follows."""
        _require_another_thread(engine_in(self._vllm_engine))
        return self._thread.do(call)

    # For the thread that follows.

    def catch_up(self) -> bool:
        version = self._wait_for_newer(0.0)
        if version is None:
            return True
        try:
            self._sync(version)
        except EngineBusyError:
            turns = self._turns()
            if turns is None or not turns.is_wanted:  # it sleeps, say
                raise
            return False
        return True

    @property
    def store(self) -> Path:
        return Path(self._find_engines().store)

    @property
    def applied(self) -> int | None:
        return self._seen

    def wait_for_news(self, beyond: int | None, timeout_s: float, wake: threading.Event) -> None:
        self._find_engines().wait_for_version(beyond, timeout_s, wake)

    def _sync(self, version: int) -> bool:
        turns = self._turns()
        if turns is None:
            return super()._sync(version)
        self._begin()
        [follower] = self._followers
        deadline = time.monotonic() + self._timeout_s
        while not follower.is_ready(version):  # type: ignore[union-attr]
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"version {version} was not ready within {self._timeout_s:g} s; the engine "
                    "serves on"
                )
            time.sleep(_READY_CHECK_S)
        with turns.taken():
            return super()._sync(version)

    def _begin(self) -> None:
        """Let the ranks of an ``LLM`` look at the store, once. It is asked in no other call."""
        turns = self._turns()
        if turns is None or self._begun is self._followers:
            return
        for follower in self._followers:
            if isinstance(follower, Follower):
                with turns.taken():
                    follower.start()
        self._begun = self._followers

    def _turns(self) -> EngineTurns | None:
        """Return those of an ``LLM``; None: the engine may be asked from any thread."""
        engine = getattr(engine_in(self._vllm_engine), "llm_engine", None)
        return None if engine is None else EngineTurns.of(engine)


def _require_another_thread(engine: Any) -> None:
    """Refuse to wait for an ``AsyncLLM`` in its own event loop."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        return
    if is_async(engine) and AsyncVllm.loop_of(engine) is running:
        raise EngineBusyError(
            "called in the engine's event loop, which this would wait for: call it in another "
            "thread, as with await asyncio.to_thread(...)"
        )


def _require_fit(receiver: VLLMDoubleBufferWeightReceiver, model_metadata: ModelMetadata) -> None:
    """Refuse metadata that differs from the newest version, or does not fit the engine."""
    watch = receiver._find_engines()  # noqa: SLF001 - a part of either class
    published = _published(watch)
    if published is not None:
        _require_same(model_metadata, published, f"the newest version in {watch.store}")
    tensors = [
        (name, DTYPE_NAMES[dtype], list(shape)) for name, (dtype, shape) in model_metadata.items()
    ]
    mismatches = [m for follower in receiver._followers for m in follower.mismatches(tensors)]  # noqa: SLF001
    if mismatches:
        raise WeightsMismatchError("; ".join(dict.fromkeys(mismatches)))


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
    """Return dtypes and shapes of the store's newest version; None if there is none."""
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    try:
        with receiver.open(timeout_s=0.0, acknowledge=False) as snapshot:
            specs = {spec.name: spec for spec in snapshot.specs}
            specs |= {alias: specs[name] for alias, name in snapshot.aliases.items()}
    except WaitTimeoutError:
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
