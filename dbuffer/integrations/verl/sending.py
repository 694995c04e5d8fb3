"""`Outgoing`: the actor's half of a sync. Its first rank publishes; the others only take part."""

from __future__ import annotations

import collections
import secrets
from collections.abc import Iterable, Iterator

import torch

from dbuffer.errors import NotReadyError
from dbuffer.integrations.verl.configuration import Configuration
from dbuffer.publish.sender import WeightSender

SYNC = "sync"
"""In a version's metadata: which sync it is of. Global steps repeat, and may be None."""


def take_part(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Go through weights that another rank publishes: ranks gather each tensor together."""
    collections.deque(weights, maxlen=0)


class Outgoing:
    """What the actor's first rank publishes with. The store is opened with the first sync."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._sender: WeightSender | None = None
        self._sync: str | None = None

    def announce(self) -> str:
        """Begin a sync; the name that its version will bear, and no other version ever.

        Raises:
            WriterActiveError, StoreInsecureError, StoreAccessError: as for `WeightSender`.
        """
        if self._sender is None:
            told = self._configuration
            self._sender = WeightSender(told.store, delta=told.delta, dtype=told.dtype)
        self._sync = secrets.token_hex(16)
        return self._sync

    def publish(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None
    ) -> dict[str, float]:
        """Publish the version of the sync that was announced.

        Whatever goes wrong, all weights are asked for: other ranks gather them with this one, and
        would wait for it. They then do not learn of the failure from a collective that hangs.

        Returns:
            What a trainer may log: the version, its bytes, and the seconds that it took.

        Raises:
            NotReadyError: no sync was announced, or it has been published.
            InvalidWeightsError, StoreFullError, StoreAccessError, WriterSupersededError: as
                `WeightSender.send`. Nothing was published.
        """
        if self._sender is None or self._sync is None:
            raise NotReadyError(
                "no sync has begun: prepare() comes before send_weights(), each time"
            )
        metadata, self._sync = {SYNC: self._sync, "global_steps": global_steps}, None
        rest = iter(weights)
        try:
            source = dict(_copies(rest)) if self._configuration.delta else rest
            published = self._sender.send(source, metadata=metadata)
        except Exception:
            take_part(rest)
            raise
        return {
            "dbuffer/version": float(published.version),
            "dbuffer/bytes": float(published.num_bytes),
            "dbuffer/publish_s": published.duration_s,
        }


def _copies(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """In this host's memory, whatever the iterator does with its own."""
    for name, tensor in weights:
        yield name, tensor.detach().to("cpu", copy=True)
