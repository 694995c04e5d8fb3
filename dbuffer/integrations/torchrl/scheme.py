"""`DoubleBufferSyncScheme`: sends weights to a collector's workers through a store."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.collectors import Collector
from torchrl.collectors.distributed import DistributedCollector
from torchrl.weight_update import WeightSyncScheme

from dbuffer.errors import NotReadyError, OptionError, UnsupportedError
from dbuffer.integrations.torchrl.base import DEFAULT_MODEL_ID, StoreScheme, Strategy, find_model
from dbuffer.integrations.torchrl.extraction import EXTRA_STATE, Extracted, extract
from dbuffer.integrations.torchrl.forward_guard import ForwardGuard
from dbuffer.integrations.torchrl.loading import StagedVersion, is_on_meta, unshared
from dbuffer.integrations.torchrl.model_stores import (
    ModelPublisher,
    PublishedVersion,
    last_version_below,
)
from dbuffer.integrations.torchrl.worker import WorkerReceiver
from dbuffer.publish.sender import WeightSender
from dbuffer.runtime import options as checks
from dbuffer.weights.named_tensors import own_tensors
from dbuffer.weights.targets import Matcher

logger = logging.getLogger(__name__)


class DoubleBufferSyncScheme(StoreScheme):
    """Scheme that sends a model's weights from a collector to its workers through a store.

    Make a separate scheme for each model of each collector. Schemes of one collector can have the
    same ``remote_addr``.

    Args:
        remote_addr: a directory. The model's store is ``remote_addr/MODEL_ID``.
        local_addr: directory that workers read. Default: ``remote_addr``. If the directory is in
            shared memory, one worker on each node copies every version into it. If the workers'
            hosts mount ``remote_addr`` under another path, pass that other path.
        num_threads: number of copying threads, in the trainer and in each worker.
        strategy: how TorchRL extracts weights, ``"tensordict"`` or ``"state_dict"``.
        sync: whether ``send`` waits until the workers have applied the weights.
        timeout_s: how long ``send`` waits for workers, and how long a worker waits for its first
            weights.
        **options: fields of :class:`dbuffer.SenderOptions`, and the receivers' ``verify`` and
            ``poll_interval_s``.
    """

    def __init__(
        self,
        remote_addr: str | os.PathLike[str],
        local_addr: str | os.PathLike[str] | None = None,
        num_threads: int = 1,
        strategy: Strategy = "tensordict",
        *,
        sync: bool = True,
        timeout_s: float = 60.0,
        **options: Any,
    ) -> None:
        if "unused_tensors" in options:
            raise OptionError("unused_tensors is for engines only: a policy must use all tensors")
        super().__init__(remote_addr, local_addr, num_threads, strategy, options)
        self.sync = sync
        self.timeout_s = checks.positive_seconds("timeout_s", timeout_s)
        # The trainer's side sets the next three values. Workers get them in the pickled scheme.
        self._has_first_weights = True
        self._earlier = 0
        self._first_worker_idx = 0
        self._kept_model: Any = None  # other objects may have only weak references to the model
        self._guard = ForwardGuard()

    @property
    def model(self) -> Any:
        model = self._model_ref() if self._model_ref is not None else None
        model = find_model(self.context, self._model_id) if model is None else model
        return self._kept_model if model is None else model

    @model.setter
    def model(self, model: Any) -> None:
        before = self._model_ref() if self._model_ref is not None else None
        WeightSyncScheme.model.fset(self, model)
        # The collector in a worker can replace its policy later, for instance by a copy. Load the
        # weights into the new policy too.
        if self._receiver is not None and model is not before:
            self._receiver.use(model)

    # The trainer's side.

    def _init_on_sender_impl(
        self,
        model_id: str | None = None,
        context: Any = None,
        *,
        model: Any = None,
        num_workers: int | None = None,
        **_: Any,
    ) -> None:
        self.model_id = model_id or DEFAULT_MODEL_ID
        self.context = context
        self.model = self._kept_model = model
        if num_workers is None:
            # Wait for no workers if there is no collector, or if the collector has no workers.
            is_single = context is None or isinstance(context, Collector)
            num_workers = 0 if is_single else int(getattr(context, "num_workers", 0))
        # A DistributedCollector counts workers from 1: the index is a rank, and 0 is the trainer.
        self._first_worker_idx = int(isinstance(context, DistributedCollector))
        self._sender = ModelPublisher(self.remote_addr, self._model_id, num_workers, self.options)
        self._earlier = self._sender.last_version
        try:
            if self.model is None:
                self._kept_model = model_of_factory(context, self._model_id)
            source = self._trained_model()
            self._has_first_weights = source is not None and bool(self._extract(source))
            if isinstance(context, DistributedCollector) and context.launcher == "mp":
                # Give each node its own copy of the policy's tensors. The node itself could copy
                # the tensors only after it has started its workers with the policy. TorchRL has no
                # public name for the policy.
                context._policy_to_send = unshared(context._policy_to_send)  # noqa: SLF001
        except BaseException:
            self.shutdown()
            raise

    def _trained_model(self) -> Any:
        policy = None
        if self._has_no_workers and self._model_id == DEFAULT_MODEL_ID:
            # Return the original policy, which the trainer trains. If policy_device is another
            # device, the collector runs a copy. TorchRL has no public name for the original.
            policy = self.context._orig_policy  # noqa: SLF001
        return self.model if policy is None else policy

    @property
    def _has_no_workers(self) -> bool:
        return self._sender is not None and isinstance(self.context, Collector)

    def _setup_connection_and_weights_on_sender_impl(self, *, weights: Any = None) -> None:
        """Publish the first weights without waiting for workers, which may still be starting."""
        published: list[PublishedVersion] = []
        if weights is not None or self._has_first_weights:
            published = self._publish(weights, None, is_initial=True)
        if isinstance(self.context, DistributedCollector):
            # Wait for the nodes, as TorchRL's scheme does. After this method, the collector gives
            # each node 10 s for its first answer, even if the node is still starting.
            publisher = self._require("sender")
            publisher.wait_present(self.timeout_s)
            publisher.wait(published, self.timeout_s)

    def send(self, weights: Any = None, worker_ids: int | Iterable[int] | None = None) -> None:
        """Publish weights, and (unless ``sync`` is False) wait until the workers have applied them.

        ``weights`` is a module, a TensorDict or a state dict, or a dictionary of these by worker.
        Default: the scheme's model. ``worker_ids`` selects workers. Default: the dictionary's
        workers, or all workers.

        Raises:
            WaitTimeoutError: (a ``TimeoutError``) a worker did not apply the weights in time.
            ReceiverFailedError: a worker cannot apply the weights, or has ended.
        """
        if not (self.initialized_on_sender and self.synchronized_on_sender):
            raise NotReadyError("call init_on_sender(), then connect(), before sending weights")
        published = self._publish(weights, worker_ids)
        if self.sync:
            self._require("sender").wait(published, self.timeout_s)

    def _publish(
        self, weights: Any, worker_ids: int | Iterable[int] | None, *, is_initial: bool = False
    ) -> list[PublishedVersion]:
        weights = self._trained_model() if weights is None else weights
        workers = [worker_ids] if isinstance(worker_ids, int) else worker_ids
        parts: list[tuple[Any, Iterable[int] | None]] = [(weights, workers)]
        if _is_by_worker(weights):
            chosen = weights if workers is None else list(workers)
            if missing := set(chosen) - weights.keys():
                raise OptionError(f"no weights were given for worker {min(missing)}")
            parts = [(weights[worker], [worker]) for worker in chosen]
        published: list[PublishedVersion] = []
        for part, for_workers in parts:
            extracted = None if part is None else self._extract(part)
            if not extracted:
                logger.info("model %r has no weights to publish", self._model_id)
                continue
            published += self._require("sender").publish(extracted, for_workers, is_initial)
            if self._has_no_workers:
                self._load_into_collector(part, published[-1][0])
        return published

    def _load_into_collector(self, weights: Any, sender: WeightSender) -> None:
        model = find_model(self.context, self._model_id)
        if model is not None and model is not weights:
            self._guard.attach(model)
            with (
                self.options.make_receiver(sender.store) as receiver,
                receiver.open(acknowledge=False) as snapshot,
            ):
                staged = StagedVersion.of(snapshot)
            staged.load(model, self._guard, Matcher())

    def _extract(self, weights: Any) -> Extracted:
        model = self._trained_model()
        extracted = extract(weights, self._strategy.extract_weights)
        if isinstance(weights, TensorDictBase) and isinstance(model, nn.Module):
            # RayCollector makes a TensorDict of this model, without nested modules' extra state.
            tensors = {id(value) for name, value in extracted.items() if name != EXTRA_STATE}
            if tensors == set(map(id, own_tensors(model))):
                of_model = extract(model, self._strategy.extract_weights)
                if extracted.keys() <= of_model.keys():  # else the caller has renamed tensors
                    return of_model
        return extracted

    # The worker's side.

    def _init_on_receiver_impl(
        self,
        model_id: str | None = None,
        context: Any = None,
        *,
        model: Any = None,
        worker_idx: int | None = None,
        **_: Any,
    ) -> None:
        self.model_id = model_id or DEFAULT_MODEL_ID
        self.context = context
        self._worker_idx = (
            getattr(context, "worker_idx", None) if worker_idx is None else worker_idx
        )
        self._receiver = WorkerReceiver(
            self.remote_addr,
            self.local_addr,
            self._model_id,
            0 if self._worker_idx is None else self._worker_idx - self._first_worker_idx,
            self.options,
            self._earlier,
            get_model=lambda: self.model,
            applied=self._note_applied,
        )
        if model is None:
            model = find_model(context, self._model_id)
        if model is None:
            model = self._kept_model = model_of_factory(context, self._model_id)
            if model is not None:
                context.policy = (
                    model  # keeps the model alive, and workers of this collector can use it
                )
        self.model = model

    def _setup_connection_and_weights_on_receiver_impl(self, **_: Any) -> None:
        receiver = self._require("receiver")
        if self._has_first_weights or is_on_meta(self.model):
            receiver.wait_for_first(self.timeout_s)
        else:
            receiver.load_newer()
        receiver.follow()

    def receive(self, timeout: float | None = None) -> TensorDictBase | None:
        """Return the weights if new ones were applied since the last call; otherwise, None.

        Wait up to ``timeout`` seconds for new weights (default: the scheme's ``timeout_s``). A
        background thread applies new weights whether or not you call this method.
        """
        receiver = self._require("receiver")
        if not self.synchronized_on_receiver:
            raise NotReadyError("call connect() before receiving weights")
        wait_s = self.timeout_s if timeout is None else checks.seconds("timeout", timeout)
        receiver.load_newer()
        return self._current_weights() if receiver.wait_loaded(wait_s) else None

    def _note_applied(self, is_initial: bool) -> None:
        context = self.context
        if context is None:
            return
        inner = (getattr(context, "_weight_sync_schemes", None) or {}).get(self._model_id)
        if inner is not None and not inner.synchronized_on_sender:
            return  # the collector's workers are starting, and will begin with this model's weights
        if isinstance(context, Collector) and inner is None:
            # The collector runs this model, which already has the weights: only count the version.
            if self._model_id == DEFAULT_MODEL_ID and not is_initial:
                context.increment_version()
        elif hasattr(context, "update_policy_weights_"):
            context.update_policy_weights_(
                model_id=self._model_id, policy_or_weights=self._current_weights()
            )

    def _current_weights(self) -> Any:
        model = self.model
        return TensorDict.from_module(model).data if isinstance(model, nn.Module) else model

    # Both sides.

    def create_transport(self, **_: Any) -> Any:
        raise UnsupportedError("this scheme has no transport: call send(), or follow its store")

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        if not self.initialized_on_sender and not self.initialized_on_receiver:
            # Only an RPC collector pickles a scheme that is not initialized. It sends the first
            # weights after all workers have connected, so connect() must not wait for weights.
            state["_has_first_weights"] = False
            state["_earlier"] = last_version_below(self.remote_addr, self.options)
        return state | {"_kept_model": None}


def _is_by_worker(weights: Any) -> bool:
    is_mapping = isinstance(weights, Mapping) and not isinstance(weights, TensorDictBase)
    return is_mapping and bool(weights) and all(isinstance(worker, int) for worker in weights)


def model_of_factory(context: Any, model_id: str) -> Any:
    """Make a policy with the factory that all workers share, or return None if they share none."""
    if model_id != DEFAULT_MODEL_ID:
        return None
    factories = getattr(context, "policy_factory", None)
    if callable(factories):
        return factories()
    if not factories or factories[0] is None or any(f is not factories[0] for f in factories):
        return None
    return factories[0]()
