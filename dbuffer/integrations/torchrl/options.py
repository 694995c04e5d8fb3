"""`TransportOptions`: options of the senders and receivers that the schemes make."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

from dbuffer.integrations.engine.engine_options import EngineOptions
from dbuffer.mirror.mirror import Mirror, start_mirror
from dbuffer.publish.sender import WeightSender
from dbuffer.publish.sender_options import SenderOptions
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime import options as checks

_SHARED = ("num_threads", "allow_shared_store")
_RECEIVER = (*_SHARED, "verify", "poll_interval_s")
_MIRROR = (*_SHARED, "reader_timeout_s", "poll_interval_s")


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

    def __post_init__(self) -> None:
        """Check here what a worker would refuse in its own process."""
        super().__post_init__()
        checks.choice("verify", self.verify, (True, False, "auto"))
        checks.positive_seconds("poll_interval_s", self.poll_interval_s)
        checks.choice("unused_tensors", self.unused_tensors, ("refuse", "warn"))

    def make_sender(self, store: str | os.PathLike[str]) -> WeightSender:
        """Open a store for writing; missing directories above it are made."""
        checks.directory("store", store).parent.mkdir(parents=True, exist_ok=True)
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
        mirror = start_mirror(remote, local, **self._only(_MIRROR))
        return self.make_receiver(local, receiver_id), mirror

    def for_engine(self, store: str, local_store: str | None) -> EngineOptions:
        """Return the options of an engine that follows ``store``, or its mirror ``local_store``."""
        given = self._only((*_RECEIVER, "unused_tensors"))
        return EngineOptions(store=store, local_store=local_store, **given)

    def _only(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}
