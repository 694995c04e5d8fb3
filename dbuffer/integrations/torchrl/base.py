"""`StoreScheme` and `TransportOptions`: base class and options of dbuffer's TorchRL schemes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

from torchrl.weight_update import WeightSyncScheme
from torchrl.weight_update.utils import _resolve_attr

from dbuffer.engine.engine_options import EngineOptions
from dbuffer.errors import NotReadyError
from dbuffer.mirror.mirror import Mirror, start_mirror
from dbuffer.publish.publisher import SenderOptions
from dbuffer.publish.sender import WeightSender
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime import options as checks

Strategy = Literal["tensordict", "state_dict"]

DEFAULT_MODEL_ID = "policy"

_SHARED = ("num_threads", "allow_shared_store", "poll_interval_s")
_RECEIVER = (*_SHARED, "verify")
_MIRROR = (*_SHARED, "reader_timeout_s")


@dataclass(frozen=True, kw_only=True)
class TransportOptions(SenderOptions):
    """Options of the senders, receivers and mirrors (local copies of a store) that a scheme makes.

    TorchRL pickles a scheme and its options to send them to workers: ``rename`` must be picklable.
    """

    num_threads: int | None = 1
    """Number of threads that copy tensors, in each sender and in each receiver."""
    verify: bool | Literal["auto"] = "auto"
    poll_interval_s: float = 0.5
    unused_tensors: Literal["refuse", "warn"] = "refuse"
    """Treatment of published tensors that an engine does not use; see :class:`EngineOptions`."""

    def make_sender(self, store: str | os.PathLike[str]) -> WeightSender:
        return WeightSender(store, **self._only(field.name for field in fields(SenderOptions)))

    def make_receiver(
        self, store: str | os.PathLike[str], receiver_id: str | None = None
    ) -> WeightReceiver:
        return WeightReceiver(store, receiver_id=receiver_id, **self._only(_RECEIVER))

    def open_reader(
        self,
        remote: str | os.PathLike[str],
        local: str | os.PathLike[str],
        receiver_id: str | None = None,
    ) -> tuple[WeightReceiver, Mirror | None]:
        """Return a receiver of the store ``local``, and the mirror that fills ``local``, or None.

        This method starts the mirror, which copies versions from ``remote``. There is no mirror if
        the sender publishes into ``local`` itself.
        """
        mirror = start_mirror(remote, local, **self._only(_MIRROR))
        return self.make_receiver(local, receiver_id), mirror

    def for_engine(self, remote: str, local: str) -> EngineOptions:
        shared = self._only((*_RECEIVER, "unused_tensors"))
        return EngineOptions(store=remote, local_store=None if local == remote else local, **shared)

    def _only(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}


class StoreScheme(WeightSyncScheme):  # type: ignore[misc]  # torchrl is not typed
    """Base class of dbuffer's TorchRL schemes: a ``WeightSyncScheme`` that uses a store."""

    _model_id: str = DEFAULT_MODEL_ID
    _sender: Any = None
    _receiver: Any = None

    def __init__(
        self,
        remote_addr: str | os.PathLike[str],
        local_addr: str | os.PathLike[str] | None,
        num_threads: int,
        strategy: Strategy,
        options: dict[str, Any],
    ) -> None:
        checks.choice("strategy", strategy, ("tensordict", "state_dict"))
        super().__init__(strategy=strategy)
        self.options = TransportOptions.parse({"num_threads": num_threads} | options)
        # Make paths absolute, because workers may have other working directories.
        self.remote_addr = self.local_addr = str(checks.directory("remote_addr", remote_addr))
        if local_addr is not None:
            self.local_addr = str(checks.directory("local_addr", local_addr))
        # Check the engine's options now. Otherwise the error would appear only in a worker.
        self.options.for_engine(self.remote_addr, self.local_addr)
        self.num_threads = num_threads

    def shutdown(self) -> None:
        super().shutdown()
        for part in (self._sender, self._receiver):
            if part is not None:
                part.shutdown()
        self._sender = self._receiver = None

    def _require(self, side: Literal["sender", "receiver"]) -> Any:
        part = self._sender if side == "sender" else self._receiver
        if part is None:
            raise NotReadyError(
                f"this scheme is not a {side}, or was shut down: call init_on_{side}() first"
            )
        return part

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_sender": None, "_receiver": None}


def find_model(context: Any, model_id: str) -> Any:
    """Return a collector's model by its id or attribute path, or None if there is no such model."""
    if context is None:
        return None
    get_model = getattr(context, "get_model", None)
    try:
        model = get_model(model_id) if callable(get_model) else _resolve_attr(context, model_id)
    except (
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ):  # an index in a path can raise any of these
        model = None
    # If workers make their policies with a factory, the collector itself runs no policy. But it
    # can have a fallback policy, whose weights it sends to the workers.
    if model is None and model_id == DEFAULT_MODEL_ID:
        return getattr(context, "_fallback_policy", None)
    return model
