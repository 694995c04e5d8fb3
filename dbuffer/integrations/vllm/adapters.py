"""LoRA adapters from a store, for vLLM engines that were started with ``enable_lora=True``.

* :func:`adapter_request` returns an adapter's newest version, for one request of an engine.
* :class:`FollowedAdapter` keeps an adapter of a server on the store's newest version.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from dataclasses import replace
from typing import Any

from vllm.lora.request import LoRARequest

from dbuffer.engine.contract import WeightLabel
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.errors import EngineEndedError, OptionError, UnsupportedError, WaitTimeoutError
from dbuffer.format.manifest import metadata_for_record
from dbuffer.integrations.peft.saved import SavedAdapter, hold, save_adapter
from dbuffer.integrations.vllm.config import cores_of, default_engine_id
from dbuffer.integrations.vllm.core import ADAPTER
from dbuffer.integrations.vllm.vllm_engine import AsyncVllm
from dbuffer.receive.follow_loop import FollowLoop
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime.closing import join

logger = logging.getLogger(__name__)


class _KeptRequest(LoRARequest, array_like=True, omit_defaults=True, dict=True):  # type: ignore[call-arg,misc]
    """LoRA request that keeps the files of its adapter on disk until the request is freed.

    vLLM loads the adapter from these files again after it has evicted the adapter from its LoRA
    slot.
    """


def adapter_request(
    receiver: WeightReceiver, directory: str | os.PathLike[str], **options: Any
) -> LoRARequest:
    """Return the newest version of an adapter, to pass to vLLM as ``lora_request``.

    Each version has its own number and name, because vLLM identifies adapters by number, and tags
    its prefix cache with the name. A request in flight continues with the version that it began
    with. The files of a version stay on disk until the version's last request has ended.

    Args:
        receiver: receiver of a store that `send_adapter` publishes into.
        directory: directory to save versions in. The engine's processes must see it.
        **options: options of :func:`dbuffer.integrations.peft.save_adapter`, whose errors this
            function raises too.
    """
    lock = None
    while lock is None:  # another process removes the files if it saves two newer versions
        saved = save_adapter(receiver, directory, **options)
        lock = hold(saved.path)
    request = _KeptRequest(saved.path.name, saved.number, str(saved.path))
    request.__dict__ |= {
        "lock": lock,
        "saved": saved,
    }  # vLLM sends only the fields to its processes
    return request


def require_slots(lora_config: Any, num_adapters: int) -> None:
    """Require that the engine has more LoRA slots than adapters to follow.

    A new version of an adapter is loaded into a free slot, while the version in use keeps its slot.

    Raises:
        UnsupportedError: the engine has fewer slots.
    """
    num_slots, needed = 0 if lora_config is None else lora_config.max_loras, num_adapters + 1
    if num_slots < needed:
        raise UnsupportedError(
            f"this engine has {num_slots} LoRA slots, and with {num_adapters} adapters it needs "
            f"{needed}, because it loads a new version beside the version in use: start it with "
            f"--enable-lora --max-loras {needed}"
        )


def show_adapters_by_name(models: Any) -> None:
    """Make a server's responses show the plain names of adapters, without versions.

    ``models`` is the ``OpenAIServingModels`` of the server.
    """
    model_name, show = models.model_name, models.show_available_models

    def name_of(lora_request: Any = None) -> str:
        name, _ = getattr(lora_request, ADAPTER, (None, None))
        return str(name or model_name(lora_request))

    async def show_names() -> Any:
        shown = await show()
        names = {request.lora_name: name for name, request in models.lora_requests.items()}
        for card in shown.data:
            card.id = names.get(card.id, card.id)
        return shown

    models.model_name, models.show_available_models = name_of, show_names


class FollowedAdapter:
    """Keeps an adapter of a vLLM server on the store's newest version, in a thread, until closed.

    The engine loads a new version beside the version in use. After loading, new requests for the
    adapter's name use the new version. If loading fails, requests continue to use the version in
    use.

    Args:
        name: name of the adapter among the server's models.
        options: the adapter's store, and options of its receiver.
        engine: ``AsyncLLM`` of the server.
        models: ``OpenAIServingModels`` of the server.
    """

    def __init__(self, name: str, options: EngineOptions, engine: Any, models: Any) -> None:
        if models.is_base_model(name) or name in models.lora_requests:
            raise OptionError(f"adapter {name!r}: the server has a model of this name already")
        self.name = name
        self._loop = AsyncVllm.loop_of(engine)
        self._replicas = [AsyncVllm(engine, core) for core in cores_of(engine.vllm_config)]
        self._requests = models.lora_requests
        self._receiver = options.make_receiver(
            options.engine_id or default_engine_id(engine.vllm_config.instance_id)
        )
        store = self._receiver.store
        # The directory is beside the store, so that all processes of the engine see it.
        self._directory = store.with_name(f"{store.name}.saved")
        self._applied: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._follow, args=(options,), name=f"dbuffer-adapter-{name}", daemon=True
        )

    def start(self) -> None:
        """Load the newest version, if the store has one, and start the follower thread.

        Raises:
            EngineUpdateError: the engine refuses the version.
            DBufferError: the errors of `save_adapter`.
        """
        with contextlib.suppress(WaitTimeoutError):
            self._load(None)
        self._thread.start()

    @property
    def label(self) -> WeightLabel:
        """Label of the adapter's version for new requests. Unknown until a version is loaded."""
        request, newest = self._requests.get(self.name), self._receiver.last_seen
        _, label = getattr(request, ADAPTER, (None, WeightLabel()))
        if newest is None or label.run in (None, newest.id.run):
            return label
        return replace(label, newest_run=newest.id.run)

    def stop(self) -> None:
        """Begin to stop, without waiting. From now on, the end of the engine is not logged."""
        self._stop.set()
        self._receiver.wake()

    def close(self) -> None:
        """Stop following the store. Requests in flight continue."""
        self.stop()
        if self._thread.ident is not None:
            join(self._thread)
        self._receiver.close()

    def _follow(self, options: EngineOptions) -> None:
        loop = FollowLoop(
            self._receiver,
            "loading",
            logger,
            forked=options.forked,
            final=(EngineEndedError,),
            stop=self._stop,
        )
        try:
            while not self._stop.is_set():
                with loop.attempt():
                    if loop.wait(self._applied) is not None:
                        self._load(self._applied)
                        loop.used()
                if loop.has_forked:
                    self._applied = None
        except EngineEndedError as error:
            if not self._stop.is_set():
                logger.warning("adapter %s gets no more versions: %s", self.name, str(error))

    def _load(self, newer_than: int | None) -> None:
        started_at = time.monotonic()
        options = {"newer_than": newer_than, "timeout_s": 0.0, "acknowledge": False}
        request: Any = adapter_request(self._receiver, self._directory, **options)
        saved: SavedAdapter = request.saved
        label = WeightLabel(str(saved.version), saved.run, metadata_for_record(saved.metadata))
        request.__dict__[ADAPTER] = self.name, label
        for replica in self._replicas:
            replica.load_adapter(request)
        # The event loop runs this call before it handles requests that arrive later. So a client
        # that waits until the version is acknowledged gets this version.
        self._loop.call_soon_threadsafe(self._requests.__setitem__, self.name, request)
        self._receiver.acknowledge(saved.version)
        self._applied = saved.version
        took_ms = 1e3 * (time.monotonic() - started_at)
        logger.info("adapter %s serves version %d after %.1f ms", self.name, saved.version, took_ms)
