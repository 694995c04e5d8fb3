"""In the place of TorchRL's ``torchrl.weight_update.llm.vllm_double_buffer``.

The same classes with the same arguments, methods and defaults; a store instead of one directory
that is rewritten in place. Change the import, and nothing else.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from tensordict import TensorDict
from torch import nn
from torchrl.weight_update import WeightSyncScheme
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

from dbuffer.integrations.engine.follower import Follower
from dbuffer.integrations.engine.options import EngineOptions
from dbuffer.integrations.torchrl.engines import followers_of
from dbuffer.integrations.torchrl.extraction import Extracted, extract
from dbuffer.integrations.torchrl.models import find_model
from dbuffer.integrations.torchrl.older_names import OlderNames
from dbuffer.integrations.torchrl.options import TransportOptions
from dbuffer.integrations.torchrl.transport import DoubleBufferTransport
from dbuffer.integrations.vllm.ray_follower import RayFollower
from dbuffer.receiver import WeightReceiver
from dbuffer.sender import Publication

logger = logging.getLogger(__name__)

Strategy = Literal["tensordict", "state_dict"]


class VLLMDoubleBufferTransport(DoubleBufferTransport):
    """A store, to write to and to read from by hand.

    Args:
        remote_addr: the store, as the sender sees it.
        local_addr: where the receiver reads; see `VLLMDoubleBufferSyncScheme`.
        num_threads: threads that copy.
        options: more for sender and receiver; then ``num_threads`` is theirs.
    """

    def __init__(
        self,
        remote_addr: str,
        local_addr: str | None = None,
        num_threads: int = 1,
        *,
        options: TransportOptions | None = None,
    ) -> None:
        options = options or TransportOptions(num_threads=num_threads)
        super().__init__(remote_addr, local_addr, options=options)
        self.num_threads = options.num_threads

    def send_weights(self, model_id: str, weights: Any) -> Publication:  # type: ignore[override]
        """Publish weights.

        Args:
            model_id: for the log.
            weights: a TensorDict, a state dict or a module.

        Raises:
            InvalidWeightsError: (a ``ValueError``) something in it cannot be published.
            WriterActiveError: another sender has the store.
        """
        publication = super().send_weights(weights)
        logger.info("%s: version %d in %s", model_id, publication.version, self.remote_addr)
        return publication

    def _extract(self, weights: Any) -> Extracted:
        return extract_for_vllm(weights, TensorDict.from_module)


class VLLMDoubleBufferSyncScheme(OlderNames, WeightSyncScheme):  # type: ignore[misc]  # torchrl is not typed
    """Weights from a trainer to vLLM engines, through a store.

    Args:
        remote_addr: the store, as the trainer sees it.
        local_addr: where the engine's workers read: a directory in shared memory, to which one of
            them copies every version once; or the same directory under another name. Default:
            ``remote_addr`` itself.
        num_threads: threads that copy, on either side.
        strategy: how TorchRL extracts weights, ``"tensordict"`` or ``"state_dict"``; the latter
            merges LoRA adapters.
        **options: of the sender (``durable``, ``checksum``, ``dtype``, ``rename``,
            ``reader_timeout_s``), of the receivers (``verify``, ``poll_interval_s``), and
            ``allow_shared_store``.

    Raises:
        OptionError: (a ``ValueError``) there is no such option.
    """

    def __init__(
        self,
        remote_addr: str,
        local_addr: str | None = None,
        num_threads: int = 1,
        strategy: Strategy = "tensordict",
        **options: Any,
    ) -> None:
        super().__init__(strategy=strategy)
        self.options = TransportOptions.parse(num_threads, options)
        self.remote_addr = os.fspath(remote_addr)
        self.local_addr = os.fspath(local_addr) if local_addr is not None else self.remote_addr
        self.num_threads = num_threads
        self.strategy_name = strategy
        self._sender: VLLMDoubleBufferWeightSender | None = None
        self._receiver: VLLMDoubleBufferWeightReceiver | None = None

    def create_transport(
        self,
        pipe_or_context: Any = None,  # noqa: ARG002 - of TorchRL's first schemes
        **kwargs: Any,  # noqa: ARG002
    ) -> VLLMDoubleBufferTransport:
        """A way to write and read the store by hand."""
        return VLLMDoubleBufferTransport(self.remote_addr, self.local_addr, options=self.options)

    def create_sender(self) -> VLLMDoubleBufferWeightSender:
        """The trainer's part."""
        return VLLMDoubleBufferWeightSender(self)

    def create_receiver(self, vllm_engine: Any) -> VLLMDoubleBufferWeightReceiver:
        """The part that updates an engine; see :func:`followers_of` for what it may be."""
        return VLLMDoubleBufferWeightReceiver(self, vllm_engine)

    # A scheme that is given to both sides, as collectors give theirs, makes one part on each.

    def _init_on_sender_impl(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        model: Any = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        self.model_id = model_id
        self._sender = self.create_sender()
        model = find_model(context, model_id) if model is None else model
        if model is not None:
            self._sender.register_model(model)

    def _init_on_receiver_impl(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        model: Any = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        self.model_id = model_id
        engine = find_model(context, model_id) if model is None else model
        self._receiver = self.create_receiver(engine)

    def _setup_connection_and_weights_on_sender_impl(
        self,
        *,
        worker_idx: int | None = None,  # noqa: ARG002
        weights: Any = None,
    ) -> None:
        """Publish weights, if any are given: an engine has those that it was started with."""
        if weights is not None:
            self.send(weights)

    def _setup_connection_and_weights_on_receiver_impl(
        self,
        *,
        worker_idx: int | None = None,
    ) -> None:
        """Nothing to wait for: :meth:`receive` looks at the store."""

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:  # noqa: ARG002 - all engines
        """Publish weights, where ``init_on_sender`` was called.

        Raises:
            RuntimeError: it was not, or see :meth:`VLLMDoubleBufferWeightSender.update_weights`.
        """
        self.get_sender().update_weights(weights)

    def receive(self, timeout: float | None = None) -> Any:
        """Apply what is new, where ``init_on_receiver`` was called.

        Returns:
            True, or None if there was nothing new.

        Raises:
            RuntimeError: it was not called.
        """
        return self.get_receiver().poll_and_apply(timeout or 0.0) or None

    def shutdown(self) -> None:
        """Give the store up, and stop following. Again does nothing."""
        super().shutdown()
        # __del__ comes here as well, also of a scheme whose __init__ has raised.
        for name in ("_sender", "_receiver"):
            part = self.__dict__.get(name)
            if part is not None:
                part.shutdown()
                setattr(self, name, None)

    def _sending_part(self) -> VLLMDoubleBufferWeightSender:
        assert self._sender is not None  # noqa: S101 - by init_on_sender
        return self._sender

    def _receiving_part(self) -> VLLMDoubleBufferWeightReceiver:
        assert self._receiver is not None  # noqa: S101 - by init_on_receiver
        return self._receiver

    def __getstate__(self) -> dict[str, Any]:
        """What travels to a worker: where the store is, and the options."""
        state: dict[str, Any] = super().__getstate__()
        return state | {"_sender": None, "_receiver": None}


class VLLMDoubleBufferWeightSender:
    """Publishes a model's weights. Made by :meth:`VLLMDoubleBufferSyncScheme.create_sender`."""

    def __init__(self, scheme: VLLMDoubleBufferSyncScheme) -> None:
        self._scheme = scheme
        self._strategy = WeightStrategy(extract_as=scheme.strategy_name)
        self._model_ref: weakref.ref[Any] | None = None
        self._transport: VLLMDoubleBufferTransport | None = None
        self._post_hooks: list[Callable[[], None]] = []

    def register_model(self, model: Any) -> None:
        """The model that weights are taken from. It is not kept alive."""
        self._model_ref = weakref.ref(model)

    def register_collector(self, collector: Any) -> None:
        """Advance the collector's policy version after each update."""
        self.register_post_hook(collector.increment_version)

    def register_post_hook(self, hook: Callable[[], None]) -> None:
        """Call ``hook()`` after each update."""
        self._post_hooks.append(hook)

    def update_weights(self, weights: Any | None = None) -> None:
        """Publish weights: those given, a module's, or the registered model's.

        Raises:
            RuntimeError: none are given and no model is registered, or it is gone.
            InvalidWeightsError: (a ``ValueError``) something in them cannot be published.
            WriterActiveError: another sender has the store.
        """
        weights = self._registered_model() if weights is None else weights
        extracted = extract_for_vllm(weights, self._strategy.extract_weights)
        if self._transport is None:
            self._transport = self._scheme.create_transport()
        self._transport.publish(extracted)
        failures = []
        for hook in self._post_hooks:
            try:
                hook()
            # One that fails must not keep the others from hearing of what is published.
            except Exception as error:
                logger.exception("a hook failed after the weights were published")
                failures.append(error)
        if failures:
            raise failures[0]

    def shutdown(self) -> None:
        """Give the store up. Again does nothing."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        self._post_hooks.clear()

    def _registered_model(self) -> Any:
        if self._model_ref is None:
            raise RuntimeError("no weights given and no model registered: call register_model()")
        model = self._model_ref()
        if model is None:
            raise RuntimeError("the registered model is gone: keep a reference to it")
        return model


class VLLMDoubleBufferWeightReceiver:
    """Brings an engine to the store's newest weights, when told to look.

    The engine's workers stage a new version while it generates; the engine pauses only while they
    load it. All of them switch, or none does.

    Args:
        scheme: the scheme that makes it.
        vllm_engine: see :func:`followers_of`. It needs no option of ours where dbuffer is
            installed beside its vLLM.
    """

    def __init__(self, scheme: VLLMDoubleBufferSyncScheme, vllm_engine: Any) -> None:
        self._scheme = scheme
        self._vllm_engine = vllm_engine
        self._followers: list[Follower | RayFollower] = []
        self._seen: int | None = None
        self._watch: WeightReceiver | None = None
        if vllm_engine is not None:
            self._find_engines()

    def poll_and_apply(self, timeout: float = 180.0) -> bool:
        """Wait for weights that the engine does not have, and apply them.

        Args:
            timeout: seconds to wait for them to be published. 0: look once.

        Returns:
            True if they were applied, False if there was nothing new.

        Raises:
            EngineBusyError: (a ``vllm.LLM``) it has unfinished requests; it was not touched.
            EngineUpdateError: it serves on with the weights that it had; the message says why.
            EngineBrokenError: its weights are half loaded, and it refuses to serve.
            EngineUnsupportedError: it cannot take weights from a store.
            EngineUnreachableError: (a server, or an actor) it does not answer.
        """
        watch = self._find_engines()
        if any(follower.has_restarted() for follower in self._followers):
            self._seen = None  # it has what it was started with
        version = watch.wait_for_version(self._seen, max(0.0, timeout))
        return version is not None and self._sync(version)

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights to the engine now.

        Args:
            weights: what a transport's ``receive_weights`` returned, or any others that fit. None:
                the store's newest.
            inplace: must be True.

        Raises:
            ValueError: ``inplace`` is False.
            EngineUpdateError, EngineBrokenError: see :meth:`poll_and_apply`.
        """
        if not inplace:
            raise ValueError("Cannot apply weights out of place for vLLM double-buffer")
        newest = self._find_engines().wait_for_version(None, 0.0)
        if weights is not None:
            self._apply_by_hand(extract_for_vllm(weights, TensorDict.from_module))
            self._seen = newest
        elif newest is not None:
            self._sync(newest)

    def shutdown(self) -> None:
        """Stop following. The engine keeps its weights. Again does nothing."""
        for follower in self._followers:
            try:
                follower.stop_workers()
            # Whatever an engine raises that has ended itself: it follows nothing then.
            except Exception:
                logger.debug("an engine could not be told to stop following", exc_info=True)
            follower.close()
        if self._watch is not None:
            self._watch.close()
        self._followers, self._watch = [], None

    def _engine(self) -> Any:
        return self._vllm_engine

    def _find_engines(self) -> WeightReceiver:
        if self._watch is None:
            options = self._scheme.options
            store, local_store = self._stores()
            self._followers = followers_of(
                self._engine(),
                EngineOptions(
                    store=store,
                    local_store=local_store,
                    verify=options.verify,
                    poll_interval_s=options.poll_interval_s,
                    num_threads=options.num_threads,
                    allow_shared_store=options.allow_shared_store,
                ),
            )
            self._watch = options.make_receiver(store)
        return self._watch

    def _stores(self) -> tuple[str, str | None]:
        """The store to follow, and the one that mirrors it for the engine, if any does."""
        remote = Path(self._scheme.remote_addr).absolute()
        local = Path(self._scheme.local_addr).absolute()
        # Seen here under the other name only, it is one store with two names.
        if remote.resolve() == local.resolve() or not remote.parent.exists():
            return str(local), None
        return str(remote), str(local)

    def _sync(self, version: int) -> bool:
        """Switch all engines; those that can, even if another one cannot."""
        # An engine in this process is loaded in the thread that runs it; others, side by side.
        if len(self._followers) == 1:
            switched = [self._followers[0].sync(at_least=version) is not None]
        else:
            with ThreadPoolExecutor(len(self._followers)) as pool:
                switches = [
                    pool.submit(follower.sync, at_least=version) for follower in self._followers
                ]
            switched = [switch.result() is not None for switch in switches]
        self._seen = version
        return any(switched)

    def _apply_by_hand(self, weights: Extracted) -> None:
        """Apply weights that are in no store, through one that lives as long as that takes."""
        store = Path(self._stores()[0])
        store.parent.mkdir(parents=True, exist_ok=True)
        # Beside the store, so that workers on other hosts see it as well.
        scratch = Path(tempfile.mkdtemp(prefix=f"{store.name}~", dir=store.parent))
        try:
            with self._scheme.options.make_sender(scratch / "store") as sender:
                sender.send(weights.tensors)
            for follower in self._followers:
                follower.apply_once(str(scratch / "store"))
        finally:
            shutil.rmtree(scratch)


def extract_for_vllm(weights: Any, extract_weights: Callable[[nn.Module], Any]) -> Extracted:
    """What a checkpoint of the model would hold: no buffers that are never saved."""
    weights = without_torchrl_wrapper(weights)
    extracted = extract(weights, extract_weights)
    if not isinstance(weights, nn.Module):
        return extracted
    never_saved = dict(weights.named_buffers()).keys() - weights.state_dict(keep_vars=True).keys()
    kept = {name: t for name, t in extracted.tensors.items() if name not in never_saved}
    return Extracted(kept, extracted.extra_state)


def without_torchrl_wrapper(model: Any) -> Any:
    """The model in a ``TransformersWrapper``, whose names an engine knows; others as they are."""
    is_wrapper = type(model).__module__.startswith("torchrl.modules.llm.")
    inner = getattr(model, "model", None) if is_wrapper else None
    return inner if isinstance(inner, nn.Module) else model
