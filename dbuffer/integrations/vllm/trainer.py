"""The trainer's half of vLLM's weight transfer: a trainer written for it publishes into a store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
)

from dbuffer.errors import OptionError
from dbuffer.integrations.engine.options import EngineOptions
from dbuffer.integrations.vllm.config import BACKEND
from dbuffer.integrations.vllm.plugin import register
from dbuffer.publish.sender import WeightSender

# vLLM loads its plugins in engines; in a trainer nobody else makes this half known.
register()


@dataclass
class DBufferTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """What ``WeightTransferTrainerFactory.trainer_init`` is given instead of NCCL's.

    ``DBufferTrainerInitInfo(store="/dev/shm/policy", rank=0)``: rank 0 publishes.
    """

    backend: ClassVar[str] = BACKEND

    store: str
    """The store's directory, as this process sees it."""
    engine: dict[str, Any] = field(default_factory=dict)
    """More of :class:`EngineOptions` for the engine, ``store`` for one if it sees another path."""
    sender: dict[str, Any] = field(default_factory=dict)
    """Options of the :class:`~dbuffer.WeightSender`."""


class DBufferTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """Publishes a source's weights, then lets the engine switch to exactly that version.

    The engine's weight version becomes the store's. Pausing it and resetting its prefix cache are
    the caller's, as with vLLM's own backends.
    """

    init_info_cls = DBufferTrainerInitInfo

    def __init__(self, *, client: Any, source: Any, sender: WeightSender | None) -> None:
        super().__init__(client=client, source=source, is_sender=sender is not None)
        self._sender = sender

    @classmethod
    def trainer_init(
        cls, init_info: DBufferTrainerInitInfo, *, client: Any, source: Any = None
    ) -> Self:
        """Open the store, and let the engine's workers follow it. Called on every rank.

        Raises:
            OptionError: (a ``ValueError``) there is no source, or an option is wrong.
            WriterActiveError: another sender has this store.
        """
        if source is None:
            raise OptionError("dbuffer publishes whole weights: trainer_init needs a WeightSource")
        if not init_info.is_sender:
            return cls(client=client, source=source, sender=None)
        options = {"store": str(Path(init_info.store).absolute())} | init_info.engine
        EngineOptions.parse(options)
        sender = WeightSender(init_info.store, **init_info.sender)
        try:
            client.init_weight_transfer_engine(options)
        except BaseException:
            sender.close()
            raise
        return cls(client=client, source=source, sender=sender)

    def send_weights(self) -> None:
        """Publish, and switch the engine. Called on every rank.

        Raises:
            DBufferError: the weights could not be published; the engine was not asked to switch.
            Exception: what the client raised; the engine is ready for the next update.
        """
        if self._sender is None:
            for _ in _pairs(self.source):
                pass  # gathering is a collective, in which every rank takes part
            return
        version = self._sender.send(_weights(self.source)).version
        self.client.start_weight_update()
        try:
            self.client.update_weights({"version": version})
        except BaseException:
            # Ends the session on the ranks that had no reason to raise. On the one that did, there
            # is none any more, and that it says so is no news.
            with contextlib.suppress(Exception):
                self.client.finish_weight_update()
            raise
        self.client.finish_weight_update(str(version))

    def shutdown(self) -> None:
        """Give the store up. The last version stays published."""
        if self._sender is not None:
            self._sender.close()


def _pairs(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """One pass over a source: vLLM 0.33 has given it a name, before it was the iterator itself."""
    return iter(source.iter_full() if hasattr(source, "iter_full") else source)


def _weights(source: Any) -> dict[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]:
    """All at once where that costs no memory, which is much faster; else tensor by tensor."""
    if not isinstance(source, ModuleSource):
        return _pairs(source)
    is_sharded = any(hasattr(parameter, "full_tensor") for parameter in _parameters(source))
    return _pairs(source) if is_sharded else dict(_pairs(source))


def _parameters(source: Any) -> Iterable[torch.Tensor]:
    module = getattr(source, "_module", None)
    return module.parameters() if isinstance(module, torch.nn.Module) else ()
