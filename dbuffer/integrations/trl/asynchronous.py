"""`StoreWeightTransfer`: for TRL's `AsyncGRPOTrainer`, whose servers follow a store."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import Unpack

import torch

from dbuffer.errors import NotReadyError
from dbuffer.publish.sender import WeightSender
from dbuffer.publish.sender_options import SenderKeywords, SenderOptions
from dbuffer.runtime import options


class StoreWeightTransfer:
    """TRL's ``WeightTransferProtocol`` over a store: ``AsyncGRPOTrainer(weight_transfer=...)``.

    Nothing is paused while weights are published: servers that follow the store generate on, stage
    the version meanwhile, and each pauses only for its own switch. Servers can start late or
    restart; there is no process group.

    Args:
        store: the store's directory, as the servers see it.
        receivers: how many engines must have a version before TRL takes rollouts for that
            version's; or their ids (``engine_id``), so that an engine which cannot apply it raises
            an error at once. 0: none; rollouts may then be of the version before.
        timeout_s: for how long they are waited for.
        **sender: fields of :class:`dbuffer.SenderOptions`.

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
        """The store's directory."""
        options.names("receivers", receivers)
        self._receivers = receivers
        self._timeout_s = options.positive_seconds("timeout_s", timeout_s)
        SenderOptions.parse(sender)
        self._options = sender
        self._sender: WeightSender | None = None
        self.version: int | None = None
        """Newest version published."""

    def init_weight_transfer(self) -> None:
        """Open the store, on TRL's main process, which makes every call here."""
        # Not sooner: ranks that publish nothing make one of these too.
        if self._sender is None:
            self._sender = WeightSender(self.store, **self._options)

    def pause(self) -> None:
        """Do nothing: each server pauses by itself, when it has the version ready."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish ``(name, tensor)`` pairs, tensor by tensor, while the servers generate.

        After an error nothing was published, unless the message says so, and the servers serve on.
        """
        self.version = self._opened().send(iterator).version

    def resume(self) -> None:
        """Return when the servers generate with the version; they never waited for it."""
        sender = self._opened()
        if self.version is not None:
            sender.wait_applied(self.version, receivers=self._receivers, timeout_s=self._timeout_s)

    def destroy(self) -> None:
        """Give the store up. The last version stays published; servers go on with it."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def _opened(self) -> WeightSender:
        if self._sender is None:
            raise NotReadyError(f"{self.store} is not open: call init_weight_transfer() first")
        return self._sender
