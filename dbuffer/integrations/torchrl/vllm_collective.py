"""Replacements for ``torchrl.weight_update.llm.vllm_nccl``: the same methods, over a store.

There is no process group, so the two sides need not call anything at the same time, and need no Ray
to coordinate. Weights are pushed as there: a receiver's engine has them when ``update_weights``
returns.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from dbuffer.errors import (
    DBufferError,
    EngineBusyError,
    OptionError,
    WaitTimeoutError,
)
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import host_in_id
from dbuffer.format.places import RECEIVERS_DIRECTORY, SCRATCH_DIRECTORY
from dbuffer.integrations.torchrl.addresses import Addresses
from dbuffer.integrations.torchrl.base import Strategy
from dbuffer.integrations.torchrl.engine_turns import EngineTurns
from dbuffer.integrations.torchrl.extraction import Extracted, extract_for_vllm
from dbuffer.integrations.torchrl.model_metadata import (
    ModelMetadata,
    metadata_of,
    require_same,
)
from dbuffer.integrations.torchrl.vllm_double_buffer import (
    VLLMDoubleBufferSyncScheme,
    VLLMDoubleBufferWeightReceiver,
    VLLMDoubleBufferWeightSender,
    engine_in,
    require_another_thread,
)
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime import options as checks
from dbuffer.runtime.trouble import RetryLoop
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer

logger = logging.getLogger(__name__)

_RECEIVER_PREFIX = "torchrl-vllm-"
"""Beginning of the names of all `VLLMWeightReceiver` among a store's receivers."""
_NOTHING_APPLIED: dict[str, Any] = {"applied": None, "runs": [], "metadata": {}}
"""Fields in the record of a receiver whose engine has no version of the store."""
_READY_CHECK_S = 0.005
"""Interval at which to ask whether an ``LLM``'s ranks have a version ready."""
_BUSY_RETRY_S = 0.005
"""Interval at which to ask whether an ``LLM`` has finished; the next generation waits."""


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
        """Return the part that updates an engine; see :func:`followers_of` for its kinds."""
        return VLLMWeightReceiver(self, vllm_engine)


class VLLMWeightSender(VLLMDoubleBufferWeightSender):
    """Publishes a model's weights, and waits until all engines of the store have them."""

    def __init__(self, scheme: VLLMWeightSyncScheme) -> None:
        super().__init__(scheme)
        self._timeout_s = scheme.timeout_s
        self._receiver: VLLMDoubleBufferWeightReceiver | None = None
        self._store = DoubleBuffer(
            scheme.remote_addr, allow_shared_store=scheme.options.allow_shared_store
        )
        self._living: set[str] = set()
        """Receivers that followed the store at the last look."""

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
            require_same(model_metadata, metadata_of(weights.tensors), "the registered model")
        if vllm_engine is not None:
            self._receiver = VLLMDoubleBufferWeightReceiver(self._scheme, vllm_engine)
            self._receiver._require_fit(model_metadata)  # noqa: SLF001 - it is made here

    def update_weights(self, weights: Any | None = None) -> None:
        """Publish weights; return when the registered receivers' engines have them.

        A receiver is registered from its creation until its ``shutdown``. The engine that was
        given to this sender's ``init_all_workers_group`` is waited for, too.

        Raises:
            WaitTimeoutError: (a ``TimeoutError``) an engine does not have them in time.
            ReceiverFailedError: an engine cannot have them, or the process of its receiver has
                ended; the message says why. They are published, and engines retry.
            NotReadyError: (a ``RuntimeError``) none are given and no model is registered, or it is
                gone.
            InvalidWeightsError: (a ``ValueError``) something in them cannot be published.
            StoreBusyError: another sender has the store.
        """
        super().update_weights(weights)

    def _deliver(self, version: int) -> None:
        if self._receiver is not None:
            self._receiver.apply_weights(None)
        self._transport.wait_applied(version, self._registered_receivers(), self._timeout_s)

    def _registered_receivers(self) -> set[str]:
        """Return the receivers that follow the store, and those that died since the last call."""
        records = [
            record
            for record in self._store.receivers()
            if record.receiver.startswith(_RECEIVER_PREFIX)
        ]
        living = {record.receiver for record in records if self._store.may_live(record)}
        died = self._living & {record.receiver for record in records} - living
        self._living = living
        return living | died

    def shutdown(self) -> None:
        super().shutdown()
        if self._receiver is not None:
            self._receiver.shutdown()
            self._receiver = None


class VLLMWeightReceiver(VLLMDoubleBufferWeightReceiver):
    """Keeps an engine on the store's newest weights, in a thread of its own.

    It follows until :meth:`shutdown`. An ``LLM`` is switched between two generations: one that is
    under way ends first, and the next one waits for the switch.

    It is a receiver of the store that senders wait for: its record says which version the engine
    has, or why it does not have the newest.
    """

    def __init__(self, scheme: VLLMWeightSyncScheme, vllm_engine: Any) -> None:
        self._receiver_id = f"{_RECEIVER_PREFIX}{host_in_id()}-{secrets.token_hex(4)}"
        self._timeout_s = scheme.timeout_s
        super().__init__(scheme, vllm_engine)
        self._report()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._follow, name="dbuffer-torchrl", daemon=True)
        self._thread.start()

    def init_all_workers_group(self, model_metadata: ModelMetadata) -> None:
        """Check that the weights that are, or will be, published fit the engine.

        Args:
            model_metadata: dtype and shape of each tensor.

        Raises:
            WeightsMismatchError: it differs from the store's newest version, or does not fit the
                engine; the message lists how.
        """
        self._do(self._require_fit, model_metadata)

    def poll_and_apply(self, timeout: float = 0.1) -> bool:
        """Wait for weights that the engine does not have, and apply them.

        Weights come to the engine whether this is called or not. Errors are those of
        :meth:`VLLMDoubleBufferWeightReceiver.poll_and_apply`.
        """
        return bool(self._do(super().poll_and_apply, timeout))

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        self._do(super().apply_weights, weights, inplace)

    def _follow_anew(self, engine: Any, addresses: Addresses) -> None:
        self._do(super()._follow_anew, engine, addresses)

    def shutdown(self) -> None:
        require_another_thread(engine_in(self._vllm_engine))
        with self._closing:
            self._closed.set()
        self._wake.set()
        self._thread.join()
        super().shutdown()

    def _stop_following(self) -> None:
        self._let_generate()
        super()._stop_following()

    def _do(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Make a call that needs the engine, in the thread that follows; return its outcome."""
        require_another_thread(engine_in(self._vllm_engine))
        future: Future[Any] = Future()
        with self._closing:
            self._require_open()
            self._jobs.put((functools.partial(call, *arguments), future))
        self._wake.set()
        return future.result()

    def _do_jobs(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                call, future = self._jobs.get_nowait()
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001 - the caller raises it
                    future.set_exception(error)

    def _follow(self) -> None:
        loop = RetryLoop(logger, stop=self._closed)
        while not self._closed.is_set():
            self._wake.clear()
            self._do_jobs()
            version, is_due, wait_s = None, False, self._options.poll_interval_s
            with loop.attempt():
                version = self._wait_for_newer(0.0)
                is_due = version is not None and not self._switch_in_turn(version)
                if not is_due:
                    loop.succeeded(str(self._receiver_id))
                    self._report()
            if is_due:
                wait_s = _BUSY_RETRY_S
            else:
                self._let_generate()
            if loop.error is not None:
                wait_s = loop.retry_s
                self._report_problem(loop.error, version)
            self._wait_for_news(wait_s)
        self._do_jobs()

    def _wait_for_news(self, timeout_s: float) -> None:
        """Wait until there is a version that was not there yet, or a job."""
        if self._receiver is not None:
            seen = self._receiver.seen_version or None
            # The next look reports a problem with the store.
            with contextlib.suppress(DBufferError, OSError):
                self._receiver.wait_for_version(seen, timeout_s, self._wake)
                return
        self._wake.wait(timeout_s)

    def _report(self) -> None:
        """Record in the store which version the engine has."""
        receiver = self._follow_newest()
        record = receiver.record
        reported = record.current.applied, record.current.problem
        if reported == (_named(receiver, self._applied), None) and record.path.exists():
            return
        record.set(is_ephemeral=True)
        if self._applied is not None:
            # An engine that looked later may have a version of this number of another run: this
            # raises then, and the next look follows that.
            receiver.wait_for_version(None, 0.0)
            receiver.acknowledge(self._applied)
            return
        if self._addresses.are_one:
            # Before the first version: a sender shall see this receiver when it publishes that.
            with contextlib.suppress(DBufferError):
                for directory in (SCRATCH_DIRECTORY, RECEIVERS_DIRECTORY):
                    filesystem.make_directory(receiver.store / directory, parents=True)
        record.write(**_NOTHING_APPLIED, problem=None, problem_version=None)

    def _report_problem(self, error: Exception, version: int | None) -> None:
        """Record in the store why the engine cannot have a version."""
        if self._receiver is not None:
            record = self._receiver.record
            if self._applied is None:
                record.set(**_NOTHING_APPLIED)
            record.count(failures=1)
            record.write_problem(error, _named(self._receiver, version))

    def _switch_in_turn(self, version: int) -> bool:
        """Switch the engine; False: it generates, and is switched when the generation ends."""
        try:
            self._sync(version)
        except EngineBusyError:
            turns = self._turns()
            if turns is None or not turns.is_switch_due:  # it sleeps, for example
                raise
            return False
        return True

    def _sync(self, version: int) -> bool:
        turns = self._turns()
        if turns is None:
            return super()._sync(version)
        [follower] = self._followers
        deadline = time.monotonic() + self._timeout_s
        while not follower.is_ready(version):  # type: ignore[union-attr]
            turns.give_up()
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"version {version} was not ready within {self._timeout_s:g} s; the engine "
                    "serves on"
                )
            self._closed.wait(_READY_CHECK_S)
            self._require_open()
        with turns.taken():
            return super()._sync(version)

    def _apply_by_hand(self, weights: Extracted) -> None:
        turns = self._turns()
        with contextlib.nullcontext() if turns is None else turns.taken():
            super()._apply_by_hand(weights)

    def _let_generate(self) -> None:
        """Let generations of an ``LLM`` begin that wait for a switch."""
        if (turns := self._turns()) is not None:
            turns.give_up()

    def _turns(self) -> EngineTurns | None:
        """Return the turns at an ``LLM``; None: the engine takes calls from any thread."""
        engine = getattr(engine_in(self._vllm_engine), "llm_engine", None)
        return None if engine is None else EngineTurns.of(engine)


def _named(receiver: WeightReceiver, version: int | None) -> VersionId | None:
    """Return the id of a version that a receiver has seen, by its number."""
    return None if version is None or receiver.seen is None else receiver.seen.at(version)
