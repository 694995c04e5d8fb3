"""`TransportOptions`: options of the senders and receivers that the schemes make."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

import torch

from dbuffer.errors import OptionError
from dbuffer.format.delta import require_compression
from dbuffer.integrations.engine.engine_options import EngineOptions
from dbuffer.mirror.mirror import Mirror, start_mirror
from dbuffer.publish.sender import WeightSender
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime import options as checks
from dbuffer.weights.names import Rename
from dbuffer.weights.sources import Describer

_SHARED = ("num_threads", "allow_shared_store")
_WRITER = (*_SHARED, "reader_timeout_s")
_SENDER = (*_WRITER, "durable", "checksum", "delta", "dtype", "rename")
_RECEIVER = (*_SHARED, "verify", "poll_interval_s")
_MIRROR = (*_WRITER, "poll_interval_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """Options of :class:`dbuffer.WeightSender` and :class:`dbuffer.WeightReceiver`.

    They are pickled for workers with the scheme, so a ``rename`` that is a function must pickle.
    """

    num_threads: int = 1
    """Threads that copy, on either side."""
    durable: bool = False
    checksum: bool | Literal["auto"] = "auto"
    delta: bool = False
    dtype: torch.dtype | None = None
    rename: Rename | None = None
    reader_timeout_s: float = 60.0
    verify: bool | Literal["auto"] = "auto"
    poll_interval_s: float = 0.5
    allow_shared_store: bool = False
    unused_tensors: Literal["refuse", "warn"] = "refuse"
    """Option of an engine that follows; see :class:`EngineOptions`."""

    def __post_init__(self) -> None:
        """Check here what a worker would refuse in its own process."""
        checks.whole_number("num_threads", self.num_threads)
        checks.flag("durable", self.durable)
        checks.choice("checksum", self.checksum, (True, False, "auto"))
        if checks.flag("delta", self.delta):
            require_compression()
        Describer(dtype=self.dtype, rename=self.rename)
        checks.seconds("reader_timeout_s", self.reader_timeout_s)
        checks.choice("verify", self.verify, (True, False, "auto"))
        checks.positive_seconds("poll_interval_s", self.poll_interval_s)
        checks.flag("allow_shared_store", self.allow_shared_store)
        checks.choice("unused_tensors", self.unused_tensors, ("refuse", "warn"))

    @classmethod
    def parse(cls, num_threads: int, options: dict[str, Any]) -> Self:
        known = {item.name for item in fields(cls)}
        if unknown := options.keys() - known:
            raise OptionError(
                f"unknown options {sorted(unknown)}; known are {', '.join(sorted(known))}"
            )
        return cls(num_threads=num_threads, **options)

    def make_sender(self, store: str | os.PathLike[str]) -> WeightSender:
        """Open a store for writing; missing directories above it are made."""
        checks.directory("store", store).parent.mkdir(parents=True, exist_ok=True)
        return WeightSender(store, **self._only(_SENDER))

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

    def _only(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}
