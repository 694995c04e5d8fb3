"""Replacements for ``torchrl.weight_update.llm.vllm_double_buffer`` that use a store.

Classes, arguments, methods and defaults are the same as TorchRL's, so you change only the import.
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

from dbuffer.engine.contract import raise_worst
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.follower import Follower
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
from dbuffer.mirror.ends import has_source_at_local
from dbuffer.mirror.mirror import Mirror
from dbuffer.publish.publisher import Publication
from dbuffer.publish.sender import WeightSender
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime import options as checks
from dbuffer.runtime.trouble import log_once
from dbuffer.weights.targets import Matcher

logger = logging.getLogger(__name__)

_HOLDERS = ("llm_instance", "ray_actor", "model")
"""Names of the attribute that holds the engine, in TorchRL's ``LocalLLMWrapper``, ``RayLLMWorker``
and ``vLLMWrapper``."""


class VLLMDoubleBufferSyncScheme(StoreScheme):
    """Scheme that sends weights from a trainer to vLLM engines through a store.

    Args:
        remote_addr: the store's directory, as the trainer sees it.
        local_addr: directory that the engine's workers read. Default: ``remote_addr``. If the
            directory is in shared memory, one of the workers copies every version into it. It can
            also be the store's path on a host where ``remote_addr`` does not exist.
        num_threads: number of copying threads, in the trainer and in each worker.
        strategy: how TorchRL extracts weights, ``"tensordict"`` or ``"state_dict"``. With
            ``"state_dict"``, LoRA adapters are merged.
        **options: fields of :class:`dbuffer.SenderOptions`, the receivers' ``verify`` and
            ``poll_interval_s``, and the engine's ``unused_tensors``.
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
        return VLLMDoubleBufferWeightReceiver(self, vllm_engine)

    def create_transport(
        self,
        pipe_or_context: Any = None,  # noqa: ARG002 - for other schemes
        **_: Any,
    ) -> VLLMDoubleBufferTransport:
        return VLLMDoubleBufferTransport(self.remote_addr, self.local_addr, options=self.options)

    # Names of TorchRL before 0.12.

    def init_on_worker(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        self.init_on_receiver(model_id=model_id, context=context, **kwargs)

    def get_sender(self) -> VLLMDoubleBufferWeightSender:
        return cast("VLLMDoubleBufferWeightSender", self._require("sender"))

    def get_receiver(self) -> VLLMDoubleBufferWeightReceiver:
        return cast("VLLMDoubleBufferWeightReceiver", self._require("receiver"))

    # TorchRL calls the next methods: on the trainer's side for a sender, in workers for a receiver.

    def _init_on_sender_impl(
        self, model_id: str = "policy", context: Any = None, *, model: Any = None, **_: Any
    ) -> None:
        self.model_id = model_id
        self._sender = self.create_sender()
        model = find_model(context, model_id) if model is None else model
        if model is not None:
            self.model = model
            self._sender.register_model(model)

    def _init_on_receiver_impl(
        self, model_id: str = "policy", context: Any = None, *, model: Any = None, **_: Any
    ) -> None:
        self.model_id = model_id
        engine = find_model(context, model_id) if model is None else model
        self._receiver = self.create_receiver(engine)

    def _setup_connection_and_weights_on_sender_impl(self, *, weights: Any = None) -> None:
        if weights is not None:
            self.send(weights)

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:  # noqa: ARG002 - all engines
        self._require("sender").update_weights(weights)

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        self._require("receiver").apply_weights(weights, inplace)

    def receive(self, timeout: float | None = None) -> Any:
        return self._require("receiver").poll_and_apply(timeout or 0.0) or None


class VLLMDoubleBufferTransport:
    """Transport of TorchRL that publishes into a store and reads from the store.

    Weights are published into ``remote_addr`` and read from ``local_addr``. If you pass
    ``options``, their ``num_threads`` replaces the argument.
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
        """Publish the tensors of ``weights`` under their names in a checkpoint.

        ``weights`` is a module, a TensorDict or a state dict. ``model_id`` appears only in the log.
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
        """Return the newest version's tensors, or None if no version came since the last call.

        Wait up to ``timeout`` seconds for a newer version. If ``local_addr`` is a mirror (a local
        copy of the store), first wait up to 60 s until the mirror has the newest version. The
        tensors are copied into ``weights``, a TensorDict or a dictionary by dotted name, or by
        default into a new TensorDict with flat keys. ``model`` and ``strategy`` are ignored, as in
        TorchRL.

        Raises:
            WeightsMismatchError: the version does not fit ``weights``, which was not changed.
            SnapshotEvictedError: the sender overwrote the version during the copy. Discard the
                copy.
            WaitTimeoutError: the mirror did not copy the version in time.
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
        return True

    def close(self) -> None:
        for part in (self._sender, self._receiver, self._mirror):
            if part is not None:
                part.close()
        self._sender = self._receiver = self._mirror = None


class VLLMDoubleBufferWeightSender:
    """Publishes a model's weights; made by :meth:`VLLMDoubleBufferSyncScheme.create_sender`."""

    def __init__(self, scheme: VLLMDoubleBufferSyncScheme) -> None:
        self._scheme = scheme
        self._model_ref: weakref.ref[Any] | None = None
        self._transport = scheme.create_transport()
        self._collectors: list[Any] = []

    def register_model(self, model: Any) -> None:
        """Set the default model of `update_weights`. The sender keeps only a weak reference."""
        self._model_ref = weakref.ref(model)

    def register_collector(self, collector: Any) -> None:
        self._collectors.append(collector)

    def update_weights(self, weights: Any | None = None) -> None:
        """Publish weights, by default the registered model's.

        Raises:
            NotReadyError: (a ``RuntimeError``) no model is registered, or it no longer exists.
            DBufferError: the errors of :meth:`.WeightSender.send`.
        """
        if weights is None:
            if self._model_ref is None:
                raise NotReadyError(
                    "no weights given and no model registered: call register_model()"
                )
            weights = self._model_ref()
            if weights is None:
                raise NotReadyError("the registered model no longer exists: keep a reference to it")
        tensors = extract_for_vllm(weights, self._scheme.strategy.extract_weights)
        self._deliver(self._transport.open_sender().send(tensors).version)
        for collector in self._collectors:
            try:
                collector.increment_version()
            # Only log errors, of any kind: the weights are already published.
            except Exception:
                logger.warning("could not increment a collector's policy version", exc_info=True)

    def shutdown(self) -> None:
        self._transport.close()
        self._collectors.clear()

    def _deliver(self, version: int) -> None:
        """Do nothing after a publish: receivers read the store by themselves, when polled."""


class VLLMDoubleBufferWeightReceiver:
    """Switches an engine to the store's newest weights at each call of ``poll_and_apply()``.

    :func:`followers_of` lists the supported kinds of engines. Install dbuffer in vLLM's
    environment. You can then start the engine without any options for dbuffer.
    """

    def __init__(self, scheme: VLLMDoubleBufferSyncScheme, vllm_engine: Any) -> None:
        self._scheme = scheme
        self._context: Any = None
        self._receiver: WeightReceiver | None = None
        self._closed = threading.Event()
        self._in_call = threading.RLock()
        self._vllm_engine = vllm_engine
        self._followers = self._followers_of(vllm_engine)

    def poll_and_apply(self, timeout: float = 180.0) -> bool:
        """Wait up to ``timeout`` seconds for weights that the engine does not have, and apply them.

        Returns:
            True if newer weights were applied, False if there were none.

        Raises:
            ClosedError: this receiver was shut down before or during the call.
            DBufferError: the errors of :meth:`.Follower.sync`.
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
                # Wait in short steps, because the store to read can change: a store can appear or
                # disappear at ``remote_addr`` or ``local_addr``.
                wait_s = min(left_s, self._scheme.options.poll_interval_s)
                receiver.wait_or_follow_fork(newest, wait_s, self._closed)
                self._require_open()
        if newest is None:
            log_nothing(self._scheme.remote_addr, self._scheme.local_addr)
        return False

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights to the engine now, for example from a transport's ``receive_weights``.

        The weights do not become a version of the store. As in TorchRL, the next poll replaces them
        by the store's newest version. ``inplace`` must be True.

        Raises:
            DBufferError: the errors of :meth:`poll_and_apply`.
        """
        if not inplace:
            raise OptionError("an engine's weights can be replaced only in place: use inplace=True")
        tensors = extract_for_vllm(weights, TensorDict.from_module)
        with self._open():
            # Publish into a temporary store. It is next to the followed store, because all workers
            # can read there.
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
        self._context = context

    def register_model(self, model_ref: Any) -> None:
        """Let this receiver update another engine from now on.

        ``model_ref`` is that engine or, if :meth:`set_context` was called with an object that has
        the engine as an attribute, the attribute's dotted path, such as ``"policy"``.
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
        """Do nothing: schemes of dbuffer use no pipes."""

    def shutdown(self) -> None:
        """Wait until a running switch ends, then stop following. The engine keeps its weights.

        If another thread is in ``poll_and_apply()``, its call ends with a ``ClosedError``.
        """
        require_another_thread(self._vllm_engine)
        self._closed.set()
        with self._in_call:
            self._stop_following()
            if self._receiver is not None:
                self._receiver.close()
            self._followers, self._receiver = [], None

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        require_another_thread(self._vllm_engine)
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
            # Only log errors: an engine that has ended can raise any error, and follows no more.
            except Exception:
                logger.debug("could not tell an engine to stop following", exc_info=True)
            follower.close()

    def _sync(self, version: int) -> bool:
        """Switch all engines to a version; return whether any engine had an older version.

        If an engine cannot switch, the other engines still switch. This method then raises the most
        severe error.
        """
        if len(self._followers) == 1:
            # Use this thread: a single engine can be an LLM, which works only in its own thread.
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
    """Return a follower for each engine in ``target``.

    ``target`` is a ``vllm.LLM``, an ``AsyncLLM``, the URL of a server, a Ray actor with an ``LLM``
    or ``AsyncLLM``, or TorchRL's ``AsyncVLLM`` (several engines), ``RayLLMWorker``,
    ``LocalLLMWrapper`` or ``vLLMWrapper``.
    """
    engine = engine_in(target)
    if is_ray_actor(engine):
        return [RayFollower(engine, options)]
    if actors := getattr(engine, "actors", None):
        return [RayFollower(actor, options) for actor in actors]
    return [Follower(vllm_engine_of(engine), options)]


def require_another_thread(target: Any) -> None:
    """Raise an error in the event loop of an ``AsyncLLM``, where waiting would deadlock."""
    engine, running = engine_in(target), asyncio._get_running_loop()  # noqa: SLF001 - or None
    if running is not None and is_async(engine) and AsyncVllm.loop_of(engine) is running:
        raise EngineBusyError(IN_ITS_EVENT_LOOP)


def engine_in(target: Any) -> Any:
    """Return the engine or ``AsyncVLLM`` inside wrappers of TorchRL, or else ``target`` itself."""
    if is_ray_actor(target) or getattr(target, "actors", None):
        return target
    for name in _HOLDERS:
        engine = getattr(target, name, None)
        if engine is not None:
            return engine_in(engine)
    return target


def log_nothing(remote: str, local: str) -> None:
    """Log once that neither ``remote`` nor ``local`` has weights."""
    log_once(
        logger,
        "no weights so far in %s (remote_addr) and %s (local_addr): check that the trainer has "
        "published, and that trainer and engines see the same directory",
        remote,
        local,
    )
