"""`StoreWeightTransfer`: weights for the servers of TRL's `AsyncGRPOTrainer`, through a store."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import Unpack

import torch

from dbuffer.errors import NotReadyError
from dbuffer.publish.publisher import SenderKeywords, SenderOptions
from dbuffer.publish.sender import WeightSender
from dbuffer.runtime import options


class StoreWeightTransfer:
    """TRL's ``WeightTransferProtocol`` over a store: ``AsyncGRPOTrainer(weight_transfer=...)``.

    After each publish, TRL waits up to ``timeout_s`` until the engines have applied the version.
    TRL then attributes later rollouts to the version. ``receivers`` is the number of engines to
    wait for, or their ids (``engine_id``). With ids, TRL gets an error at once if an engine cannot
    apply the version. With 0 engines, TRL does not wait, so rollouts attributed to a version can
    come from the previous version. ``sender`` has fields of :class:`dbuffer.SenderOptions`.

    Raises:
        OptionError: (a ``ValueError``) an option is invalid.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        *,
        receivers: int | str | Collection[str] = 1,
        timeout_s: float = 600.0,
        **sender: Unpack[SenderKeywords],
    ) -> None:
        self.store = options.directory("store", store)
        options.names("receivers", receivers)
        self._receivers = receivers
        self._timeout_s = options.positive_seconds("timeout_s", timeout_s)
        SenderOptions.parse(sender)
        self._options = sender
        self._sender: WeightSender | None = None
        self.version: int | None = None

    def init_weight_transfer(self) -> None:
        """Open the store. TRL calls the methods of this object only in TRL's main process."""
        # The constructor does not open the store, because it also runs in ranks that never publish.
        if self._sender is None:
            self._sender = WeightSender(self.store, **self._options)

    def pause(self) -> None:
        """Do nothing. Each server pauses by itself once it has read the version into its memory."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish ``(name, tensor)`` pairs, tensor by tensor, while the servers generate.

        If publishing fails, the servers continue with their present weights, unless the error's
        message says that the version is published.
        """
        self.version = self._opened().send(iterator).version

    def resume(self) -> None:
        sender = self._opened()
        if self.version is not None:
            sender.wait_applied(self.version, receivers=self._receivers, timeout_s=self._timeout_s)

    def destroy(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def _opened(self) -> WeightSender:
        if self._sender is None:
            raise NotReadyError(f"{self.store} is not open: call init_weight_transfer() first")
        return self._sender
