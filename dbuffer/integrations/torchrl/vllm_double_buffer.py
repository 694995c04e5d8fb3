"""Replacements for ``torchrl.weight_update.llm.vllm_double_buffer``, over a store.

Classes, arguments, methods and defaults are TorchRL's: change the import, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from tensordict import TensorDict

from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.follower import Follower
from dbuffer.engine.messages import raise_worst
from dbuffer.errors import (
    ClosedError,
    DBufferError,
    EngineBusyError,
    NotReadyError,
    OptionError,
    WaitTimeoutError,
)
from dbuffer.integrations.torchrl.base import StoreScheme, Strategy, TransportOptions, find_model
from dbuffer.integrations.torchrl.extraction import extract_for_vllm
from dbuffer.integrations.torchrl.ray_follower import RayFollower, is_ray_actor
from dbuffer.integrations.vllm.vllm_engine import (
    IN_ITS_EVENT_LOOP,
    AsyncVllm,
    is_async,
    vllm_engine_of,
)
from dbuffer.mirror.mirror import Mirror, has_source_at_local
from dbuffer.publish.publisher import Publication
from dbuffer.publish.sender import WeightSender
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime import options as checks
from dbuffer.runtime.trouble import log_once
from dbuffer.weights.targets import Matcher

logger = logging.getLogger(__name__)

_HOLDERS = ("llm_instance", "ray_actor", "model")
"""Engine attributes of TorchRL's ``LocalLLMWrapper``, ``RayLLMWorker`` and ``vLLMWrapper``."""


class VLLMDoubleBufferSyncScheme(StoreScheme):
    """Scheme that brings weights from a trainer to vLLM engines through a store.

    Args:
        remote_addr: the store, as the trainer sees it.
        local_addr: where the engine's workers read: a directory in shared memory, and one of them
            copies every version there; or the same directory under another name, on a host that
            does not see ``remote_addr``. Default: ``remote_addr`` itself.
        num_threads: threads that copy, on either side.
        strategy: how TorchRL extracts weights, ``"tensordict"`` or ``"state_dict"``; the latter
            merges LoRA adapters.
        **options: fields of :class:`dbuffer.SenderOptions`, the receivers' ``verify`` and
            ``poll_interval_s``, and the engine's ``unused_tensors``.

    Raises:
        OptionError: (a ``ValueError``) there is no such option.
    """

    def __init__(
        self,
        remote_addr: str | os.PathLike[str],
        local_addr: str | os.PathLike[str] | None = None,
        num_threads: int = 1,
        strategy: Strategy = "tensordict",
        **options: Any,
    ) -> None:
        super().__init__(remote_addr, local_addr, num_threads, strategy, options)
        self.strategy_name = strategy

    def create_sender(self) -> VLLMDoubleBufferWeightSender:
        return VLLMDoubleBufferWeightSender(self)

    def create_receiver(self, vllm_engine: Any) -> VLLMDoubleBufferWeightReceiver:
        """Return the part that updates an engine; see :func:`followers_of` for its kinds."""
        return VLLMDoubleBufferWeightReceiver(self, vllm_engine)

    def create_transport(
        self,
        pipe_or_context: Any = None,  # noqa: ARG002 - of other schemes
        **kwargs: Any,  # noqa: ARG002
    ) -> VLLMDoubleBufferTransport:
        """Return a transport, which writes and reads the store by hand."""
        return VLLMDoubleBufferTransport(self.remote_addr, self.local_addr, options=self.options)

    # Names of TorchRL before 0.12.

    def init_on_worker(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        self.init_on_receiver(model_id=model_id, context=context, **kwargs)

    def get_sender(self) -> VLLMDoubleBufferWeightSender:
        return cast("VLLMDoubleBufferWeightSender", self._require("sender"))

    def get_receiver(self) -> VLLMDoubleBufferWeightReceiver:
        return cast("VLLMDoubleBufferWeightReceiver", self._require("receiver"))

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
            self.model = model
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
        """Publish weights, if any are given; an engine has the weights of its start."""
        if weights is not None:
            self.send(weights)

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:  # noqa: ARG002 - all engines
        """Publish weights, where ``init_on_sender`` was called."""
        self._require("sender").update_weights(weights)

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        self._require("receiver").apply_weights(weights, inplace)

    def receive(self, timeout: float | None = None) -> Any:
        """Apply newer weights, where ``init_on_receiver`` was called; return None without any."""
        return self._require("receiver").poll_and_apply(timeout or 0.0) or None


class VLLMDoubleBufferTransport:
    """Publish into a store by hand, and read from it by hand; nothing follows it.

    Args:
        remote_addr, local_addr: as in :class:`VLLMDoubleBufferSyncScheme`; the receiver reads the
            latter.
        num_threads: threads that copy, on either side.
        options: for both sides, in place of ``num_threads``.
    """

    def __init__(
        self,
        remote_addr: str | os.PathLike[str],
        local_addr: str | os.PathLike[str] | None = None,
        num_threads: int = 1,
        *,
        options: TransportOptions | None = None,
    ) -> None:
        self.remote_addr = os.fspath(remote_addr)
        self.local_addr = os.fspath(local_addr) if local_addr is not None else self.remote_addr
        self._options = options or TransportOptions(num_threads=num_threads)
        self.num_threads = self._options.num_threads
        self._sender: WeightSender | None = None
        self._receiver: WeightReceiver | None = None
        self._mirror: Mirror | None = None
        self._received: int | None = None
        self._matcher = Matcher()

    def send_weights(self, model_id: str, weights: Any) -> Publication:
        """Publish the tensors that a checkpoint of these weights would have.

        Args:
            model_id: for the log.
            weights: a module, a TensorDict or a state dict.

        Raises:
            InvalidWeightsError: something in it cannot be published.
            StoreBusyError: another sender has the store.
        """
        tensors = extract_for_vllm(weights, TensorDict.from_module)
        publication = self.open_sender().send(tensors)
        logger.info("%s: version %d in %s", model_id, publication.version, self.remote_addr)
        return publication

    def open_sender(self) -> WeightSender:
        if self._sender is None:
            self._sender = self._options.make_sender(self.remote_addr)
        return self._sender

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,  # noqa: ARG002
        strategy: Any = None,  # noqa: ARG002
    ) -> Any | None:
        """Return a copy of the newest version, or None if there is none or it was received before.

        Args:
            timeout: seconds to wait for it. Default: return at once.
            weights: a TensorDict, or a dictionary by dotted name, to copy into and to return.
                Default: a new TensorDict with flat keys.
            model: ignored, as in TorchRL.
            strategy: ignored, as in TorchRL.

        Raises:
            WeightsMismatchError: (a ``ValueError``) ``weights`` does not fit, and was not touched.
            SnapshotEvictedError: copying took longer than the sender waits; the copy must not be
                used.
        """
        if self._receiver is None:
            opened = self._options.open_reader(self.remote_addr, self.local_addr)
            self._receiver, self._mirror = opened
        if self._mirror is not None:
            self._mirror.wait_until_current()
        try:
            with self._receiver.open(self._received, timeout or 0.0) as snapshot:
                if weights is None:
                    received = TensorDict(dict(snapshot.copy()), batch_size=[])
                    for alias, name in snapshot.aliases.items():
                        received[alias] = received[name]
                else:
                    snapshot.fill(self._matcher.match(weights, snapshot.layout))
                    received = weights
        except WaitTimeoutError:
            if self._received is None:
                log_nothing(self.remote_addr, self.local_addr)
            return None
        self._received = snapshot.version
        return received

    def check_connection(self) -> bool:
        """Return True, as TorchRL's does: there is no connection that could be lost."""
        return True

    def close(self) -> None:
        """Close the store. Its versions stay."""
        for part in (self._sender, self._receiver, self._mirror):
            if part is not None:
                part.close()
        self._sender = self._receiver = self._mirror = None


class VLLMDoubleBufferWeightSender:
    """Publishes a model's weights. Made by :meth:`VLLMDoubleBufferSyncScheme.create_sender`."""

    def __init__(self, scheme: VLLMDoubleBufferSyncScheme) -> None:
        self._scheme = scheme
        self._model_ref: weakref.ref[Any] | None = None
        self._transport = scheme.create_transport()
        self._collectors: list[Any] = []

    def register_model(self, model: Any) -> None:
        """Take weights from this model, without keeping it alive."""
        self._model_ref = weakref.ref(model)

    def register_collector(self, collector: Any) -> None:
        """Advance the collector's policy version after each update.

        A collector that cannot is logged, and the update has succeeded, as in TorchRL.
        """
        self._collectors.append(collector)

    def update_weights(self, weights: Any | None = None) -> None:
        """Publish weights: those given, a module's, or the registered model's.

        Raises:
            NotReadyError: (a ``RuntimeError``) none are given and no model is registered, or it is
                gone.
            InvalidWeightsError: (a ``ValueError``) something in them cannot be published.
            StoreBusyError: another sender has the store.
        """
        if weights is None:
            if self._model_ref is None:
                raise NotReadyError(
                    "no weights given and no model registered: call register_model()"
                )
            weights = self._model_ref()
            if weights is None:
                raise NotReadyError("the registered model is gone: keep a reference to it")
        tensors = extract_for_vllm(weights, self._scheme.strategy.extract_weights)
        self._deliver(self._transport.open_sender().send(tensors).version)
        for collector in self._collectors:
            try:
                collector.increment_version()
            # Whatever it raises: the weights are published.
            except Exception:
                logger.warning("could not advance a collector's policy version", exc_info=True)

    def shutdown(self) -> None:
        """Close the store. A second call does nothing."""
        self._transport.close()
        self._collectors.clear()

    def _deliver(self, version: int) -> None:
        """Do nothing more: receivers look at the store when they are polled."""


class VLLMDoubleBufferWeightReceiver:
    """Brings an engine to the store's newest weights at each call.

    The engine's workers stage a new version while it generates; the engine pauses only while they
    load it. All of them switch, or none does. For what may be an engine, see :func:`followers_of`;
    it needs no option of ours where dbuffer is installed beside its vLLM.
    """

    def __init__(self, scheme: VLLMDoubleBufferSyncScheme, vllm_engine: Any) -> None:
        self._scheme = scheme
        self._context: Any = None
        """Object that is searched for an engine that is registered by its path."""
        self._receiver: WeightReceiver | None = None
        """Receiver of the store, which waits for versions."""
        self._closed = threading.Event()
        self._in_call = threading.RLock()
        """Held in each call that needs the followers."""
        self._vllm_engine = vllm_engine
        self._followers = self._followers_of(vllm_engine)
        """A follower for each engine."""

    def poll_and_apply(self, timeout: float = 180.0) -> bool:
        """Wait for weights that the engine does not have, and apply them.

        Args:
            timeout: seconds to wait for them to be published. 0: look once.

        Returns:
            True if they were applied, False if there was nothing new.

        Raises:
            OptionError: (a ``ValueError``) ``timeout`` is not a number of seconds.
            EngineBusyError: it sleeps, or (a ``vllm.LLM``) has unfinished requests; it was not
                touched.
            EngineUpdateError: it serves on with the weights that it had; the message says why.
            EngineBrokenError: its weights are half loaded, and it refuses to serve.
            UnsupportedError: it cannot take weights from a store.
            EngineUnreachableError: (a server, or an actor) it does not answer.
            ClosedError: this receiver was shut down, before or meanwhile.
        """
        timeout_s = checks.seconds("timeout", timeout)
        deadline = time.monotonic() + timeout_s
        with self._open():
            while True:
                receiver = self._find_receiver()
                newest = receiver.wait_or_follow_fork(None, 0.0)
                if newest is not None and self._sync(newest):
                    return True
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                # No longer than this: weights may come to the other address, or be lost.
                wait_s = min(left_s, self._scheme.options.poll_interval_s)
                receiver.wait_or_follow_fork(newest, wait_s, self._closed)
                self._require_open()
        if newest is None:
            log_nothing(self._scheme.remote_addr, self._scheme.local_addr)
        return False

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights to the engine now.

        Weights that are given are no version of the store: the next poll replaces them by its
        newest, as in TorchRL.

        Args:
            weights: weights of a transport's ``receive_weights``, or any others that fit.
            inplace: must be True.

        Raises:
            OptionError: (a ``ValueError``) ``inplace`` is False.
            EngineUpdateError: the engine serves on with the weights that it had.
            EngineBrokenError: its weights are half loaded, and it refuses to serve.
            ClosedError: this receiver was shut down.
        """
        if not inplace:
            raise OptionError("weights are applied to an engine in place only: leave inplace=True")
        tensors = extract_for_vllm(weights, TensorDict.from_module)
        with self._open():
            # In a store beside the followed one, which workers on other hosts see too.
            store = self._find_receiver().store
            store.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f"{store.name}~", dir=store.parent) as scratch:
                once = str(Path(scratch, "store"))
                with self._scheme.options.make_sender(once) as sender:
                    sender.send(tensors)
                for follower in self._followers:
                    follower.apply_once(once)

    # Names of TorchRL before 0.12.

    def receive(self, timeout: float = 0.001) -> bool:
        return self.poll_and_apply(timeout)

    def set_context(self, context: Any) -> None:
        """Set the object, mostly a collector, that :meth:`register_model` searches."""
        self._context = context

    def register_model(self, model_ref: Any) -> None:
        """Update this engine from now on, in the place of the one before.

        Args:
            model_ref: an engine, or its path in the context, such as ``"policy"``.

        Raises:
            OptionError: (a ``ValueError``) there is nothing at this path.
            UnsupportedError: it is no engine; the one before is updated.
        """
        is_path = isinstance(model_ref, str) and "://" not in model_ref
        engine = find_model(self._context, model_ref) if is_path else model_ref
        if engine is None:
            raise OptionError(
                f"there is no {model_ref!r} in {self._context!r:.200}: call set_context() first"
            )
        with self._open():
            followers = self._followers_of(engine)
            self._stop_following()
            self._vllm_engine, self._followers = engine, followers

    def register_worker_transport(self, pipe: Any) -> None:
        """Do nothing: a pipe is for other schemes."""

    def shutdown(self) -> None:
        """Stop following, after the switch that is under way. The engine keeps its weights.

        A call in another thread that waits for weights ends. A second call does nothing.

        Raises:
            EngineBusyError: called in the event loop of an ``AsyncLLM``.
        """
        require_another_thread(engine_in(self._vllm_engine))
        self._closed.set()
        with self._in_call:
            self._stop_following()
            if self._receiver is not None:
                self._receiver.close()
            self._followers, self._receiver = [], None

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """Make a call that :meth:`shutdown` waits for."""
        require_another_thread(engine_in(self._vllm_engine))
        with self._in_call:
            self._require_open()
            yield

    def _require_open(self) -> None:
        if self._closed.is_set():
            raise ClosedError("this receiver was shut down")

    def _followers_of(self, engine: Any) -> list[Follower | RayFollower]:
        addresses = self._scheme.remote_addr, self._scheme.local_addr
        return followers_of(engine, self._scheme.options.for_engine(*addresses))

    def _find_receiver(self) -> WeightReceiver:
        """Return the receiver of the store, which this host may know by either address."""
        receiver, store = self._receiver, Path(self._scheme.remote_addr)
        if receiver is not None and receiver.last_seen is not None:
            return receiver
        if has_source_at_local(store, local := Path(self._scheme.local_addr)):
            store = local
        if receiver is None or receiver.store != store:
            if receiver is not None:
                receiver.close()
            self._receiver = receiver = self._scheme.options.make_receiver(store)
        return receiver

    def _stop_following(self) -> None:
        for follower in self._followers:
            try:
                follower.stop_workers()
            # Whatever an engine raises that has ended itself: it follows nothing then.
            except Exception:
                logger.debug("could not tell an engine to stop following", exc_info=True)
            follower.close()

    def _sync(self, version: int) -> bool:
        """Switch all engines; return whether one did not have the version.

        An engine that fails does not keep the others from switching; the worst error is raised.
        """
        if len(self._followers) == 1:
            # An engine in this process is loaded in the thread that runs it.
            switches = [self._followers[0].sync(at_least=version, stop_event=self._closed)]
        else:
            with ThreadPoolExecutor(len(self._followers)) as pool:
                futures = [
                    pool.submit(follower.sync, at_least=version, stop_event=self._closed)
                    for follower in self._followers
                ]
            failures = [future.exception() for future in futures]
            raise_worst([failure for failure in failures if isinstance(failure, DBufferError)])
            switches = [future.result() for future in futures]
        return any(switch is not None for switch in switches)


def followers_of(target: Any, options: EngineOptions) -> list[Follower | RayFollower]:
    """Return the follower of each engine in ``target``.

    Args:
        target: a ``vllm.LLM``, an ``AsyncLLM``, a server's URL, a Ray actor that has one of the
            first two; or TorchRL's ``AsyncVLLM``, which has several, ``RayLLMWorker``,
            ``LocalLLMWrapper`` or ``vLLMWrapper``.
        options: the store and so on.

    Raises:
        UnsupportedError: there is no engine in it.
    """
    engine = engine_in(target)
    if is_ray_actor(engine):
        return [RayFollower(engine, options)]
    if actors := getattr(engine, "actors", None):
        return [RayFollower(actor, options) for actor in actors]
    return [Follower(vllm_engine_of(engine), options)]


def require_another_thread(engine: Any) -> None:
    """Refuse to wait for an ``AsyncLLM`` in its own event loop."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        return
    if is_async(engine) and AsyncVllm.loop_of(engine) is running:
        raise EngineBusyError(IN_ITS_EVENT_LOOP)


def engine_in(target: Any) -> Any:
    """Return the engine, or the actors of engines, that one of TorchRL's holders has."""
    if is_ray_actor(target) or getattr(target, "actors", None):
        return target
    for name in _HOLDERS:
        engine = getattr(target, name, None)
        if engine is not None:
            return engine_in(engine)
    return target


def log_nothing(remote: str, local: str) -> None:
    """Log once where weights were looked for, if there are none."""
    log_once(
        logger,
        "no weights so far in %s (remote_addr) and %s (local_addr): has the trainer published, and "
        "do both sides see one directory?",
        remote,
        local,
    )
