"""`StoreScheme` and `TransportOptions`: the base of the schemes, and their options."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

from torchrl.weight_update import WeightSyncScheme
from torchrl.weight_update.utils import _resolve_attr

from dbuffer.engine.engine_options import EngineOptions
from dbuffer.errors import NotReadyError
from dbuffer.mirror.mirror import Mirror
from dbuffer.publish.sender import WeightSender
from dbuffer.publish.sender_options import SenderOptions
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime import options as checks

Strategy = Literal["tensordict", "state_dict"]

DEFAULT_MODEL_ID = "policy"

_RECEIVER = ("num_threads", "allow_shared_store", "poll_interval_s", "verify")


@dataclass(frozen=True, kw_only=True)
class TransportOptions(SenderOptions):
    """Options of the senders and receivers that a scheme makes.

    They are pickled for workers with the scheme, so a ``rename`` that is a function must pickle.
    """

    num_threads: int | None = 1
    """Threads that copy, on either side."""
    verify: bool | Literal["auto"] = "auto"
    poll_interval_s: float = 0.5
    unused_tensors: Literal["refuse", "warn"] = "refuse"
    """Option of an engine that follows; see :class:`EngineOptions`."""

    def make_sender(self, store: str | os.PathLike[str]) -> WeightSender:
        """Open a store for writing; missing directories above it are made."""
        return WeightSender(store, **self._only(field.name for field in fields(SenderOptions)))

    def make_receiver(
        self, store: str | os.PathLike[str], receiver_id: str | None = None
    ) -> WeightReceiver:
        """Open a store, which need not exist yet, for reading."""
        return WeightReceiver(store, receiver_id=receiver_id, **self._only(_RECEIVER))

    def open_reader(
        self,
        remote: str | os.PathLike[str],
        local: str | os.PathLike[str],
        receiver_id: str | None = None,
    ) -> tuple[WeightReceiver, Mirror | None]:
        """Open ``local`` for reading, and keep it a mirror of ``remote``, unless they are one."""
        mirror = self.for_engine(remote, local).start_mirror()
        return self.make_receiver(local, receiver_id), mirror

    def for_engine(
        self, remote: str | os.PathLike[str], local: str | os.PathLike[str]
    ) -> EngineOptions:
        """Return the options of an engine that follows ``remote``, or its mirror ``local``."""
        local_store = None if local == remote else os.fspath(local)
        shared = self._only((*_RECEIVER, "unused_tensors"))
        return EngineOptions(store=os.fspath(remote), local_store=local_store, **shared)

    def _only(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}


class StoreScheme(WeightSyncScheme):  # type: ignore[misc]  # torchrl is not typed
    """Base of our schemes: a ``WeightSyncScheme`` whose two sides meet in a store.

    Errors that our schemes raise are ``DBufferError``, and of the standard types of TorchRL's.
    """

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
        # Absolute: workers may have other working directories.
        self.remote_addr = self.local_addr = str(checks.directory("remote_addr", remote_addr))
        if local_addr is not None:
            self.local_addr = str(checks.directory("local_addr", local_addr))
        # Refuses options here, before a worker refuses them in its own process.
        self.options.for_engine(self.remote_addr, self.local_addr)
        self.num_threads = num_threads

    def shutdown(self) -> None:
        """Close the store on this side. A second call does nothing."""
        super().shutdown()
        self._close()

    def _require(self, side: Literal["sender", "receiver"]) -> Any:
        part = self._sender if side == "sender" else self._receiver
        if part is None:
            raise NotReadyError(
                f"this scheme is no {side}, or was shut down: call init_on_{side}() first"
            )
        return part

    def _close(self) -> None:
        for part in (self._sender, self._receiver):
            if part is not None:
                part.shutdown()
        self._sender = self._receiver = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_sender": None, "_receiver": None}


def find_model(context: Any, model_id: str) -> Any:
    """Return the model of an id, or of a path, in a collector, or None if there is none."""
    if context is None:
        return None
    get_model = getattr(context, "get_model", None)
    try:
        model = get_model(model_id) if callable(get_model) else _resolve_attr(context, model_id)
    except (AttributeError, LookupError, TypeError, ValueError):  # a path may have an index
        model = None
    # A collector whose policy is made by its workers may keep one to take weights from.
    if model is None and model_id == DEFAULT_MODEL_ID:
        return getattr(context, "_fallback_policy", None)
    return model
