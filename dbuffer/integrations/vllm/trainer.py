"""Trainer's half of ``backend="dbuffer"``: publishes into a store, then updates the engine."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from dbuffer.engine.engine_options import EngineOptions
from dbuffer.errors import OptionError
from dbuffer.integrations.vllm.config import BACKEND
from dbuffer.integrations.vllm.plugin import register
from dbuffer.integrations.vllm.sparse_patches import publish_patches
from dbuffer.publish.sender import WeightSender
from dbuffer.publish.sharded import ShardedWeightSender
from dbuffer.runtime.messages import described
from dbuffer.weights.weight_source import SourceReader, is_split

logger = logging.getLogger(__name__)

_SPLIT = "this trainer's source is split between ranks"

# vLLM loads its plugins only in processes of engines, so the trainer calls dbuffer's plugin here.
register()


@dataclass
class DBufferTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """Options of dbuffer for ``WeightTransferTrainerFactory.trainer_init``, in place of NCCL's.

    ``store`` is the path of the store's directory for this process. Only rank 0 publishes, unless
    the source is split between ranks.
    """

    backend: ClassVar[str] = BACKEND

    store: str | os.PathLike[str]
    engine: dict[str, Any] = field(default_factory=dict)
    """More options of the engine (:class:`EngineOptions`). Add ``store`` if the engine reaches the
    store under another path than the trainer."""
    sender: dict[str, Any] = field(default_factory=dict)
    sparse: bool = False
    """Whether sparse patches are sent too. The whole source is then gathered in main memory."""
    checkpoint: str | os.PathLike[str] | None = None
    """Hugging Face checkpoint to publish first, for a trainer without a ``WeightSource``."""


class DBufferTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """Publishes a ``WeightSource`` or sparse patches, then makes the engine switch to the version.

    The caller pauses the engine and resets the engine's prefix cache, as for vLLM's own backends.
    """

    init_info_cls = DBufferTrainerInitInfo

    def __init__(
        self,
        *,
        client: Any,
        source: Any,
        sender: WeightSender | ShardedWeightSender | None,
        rank: int,
    ) -> None:
        self.client, self.source, self.is_sender, self.rank = client, source, rank == 0, rank
        self._sender = sender

    @classmethod
    def trainer_init(
        cls, init_info: DBufferTrainerInitInfo, *, client: Any, source: Any = None
    ) -> Self:
        """Open the store, and make the engine's workers follow it. Every rank must call this.

        ``client`` is vLLM's client of the engine. ``source`` is a ``WeightSource``. If the source
        is split between ranks, all ranks publish their part, and torch.distributed must be
        initialized.
        """
        if not isinstance(init_info, DBufferTrainerInitInfo):
            raise OptionError(f"init_info is {init_info!r:.200}: use a DBufferTrainerInitInfo")
        if (source is None) == (init_info.checkpoint is None):
            raise OptionError(
                "the first version needs all tensors, even if only patches follow: give either a "
                "WeightSource to trainer_init, or a checkpoint to DBufferTrainerInitInfo"
            )
        fields = {"store": init_info.store} | init_info.engine
        checked = EngineOptions.parse(fields)
        engine_options = {name: getattr(checked, name) for name in fields}
        sender: WeightSender | ShardedWeightSender | None = None
        rank, sender_options = init_info.rank, dict(init_info.sender)
        if source is not None and is_split(source):
            if init_info.sparse:
                raise OptionError(f"sparse: {_SPLIT}, but only rank 0 can send patches")
            sender = ShardedWeightSender(init_info.store, **sender_options)
        elif rank == 0:
            if init_info.sparse or source is None:
                sender_options["delta"] = True
            sender = WeightSender(init_info.store, **sender_options)
        if rank == 0 and sender is not None:
            try:
                if init_info.checkpoint is not None:
                    sender.send(Path(init_info.checkpoint))
                client.init_weight_transfer_engine(engine_options)
            except BaseException:
                sender.close()
                raise
        return cls(client=client, source=source, sender=sender, rank=rank)

    def send_weights(self, patches: Iterable[Any] | None = None) -> None:
        """Publish a version, and make the engine switch to it. Every rank must call this.

        By default the whole source is published. ``patches`` are vLLM's ``SparseWeightPatch``
        objects, which must contain all changes since this trainer's last version. Only the patches
        of rank 0 are used. An empty list does nothing. If publishing fails, the engine keeps its
        version.

        Raises:
            VersionError: patches were given, and this trainer has published no version yet, or
                failed to publish the last one. Send the whole source once.
            OptionError: patches were given, and ``sparse`` is not set, or the source is split.
        """
        if patches is not None or self.source is None:
            version = self._publish_patches(patches)
        else:
            version = self._publish_source()
        if version is None or not self.is_sender:
            return
        self._start()
        try:
            self.client.update_weights({"version": version})
        except BaseException:
            # End the update on those ranks of the engine where it succeeded. Ranks where it failed
            # have ended it already, and raise an error here, which is ignored.
            with contextlib.suppress(Exception):
                self.client.finish_weight_update()
            raise
        self.client.finish_weight_update(str(version))

    def _start(self) -> None:
        try:
            self.client.start_weight_update()
        except Exception as error:  # noqa: BLE001 - a client can raise any error
            # A killed trainer may have left an update open.
            logger.warning("ending an update that may have been left open: %s", described(error))
            with contextlib.suppress(Exception):
                self.client.finish_weight_update()
            self.client.start_weight_update()

    def send_weight_chunk(self, patches: Iterable[Any] | None = None) -> int | None:
        """Publish patches as a version, and switch the engine, inside an update of the caller.

        The caller starts and finishes the update, also after an error. If the engine is not paused
        between two calls, it serves the version of the first call. Other engines that follow the
        store serve it too. So pass patches that must apply atomically in one call.

        Return the version's number, for the client's ``finish_weight_update(str(version))``. Return
        None if there are no patches, or on ranks other than 0.
        """
        version = self._publish_patches(patches)
        if version is not None:
            self.client.update_weights({"version": version})
        return version

    def _publish_source(self) -> int | None:
        if self._sender is None:
            # All ranks must join the gathering of the source, but this rank publishes nothing.
            SourceReader(self.source).finish()
            return None
        return self._sender.send(self.source).version

    def _publish_patches(self, patches: Iterable[Any] | None) -> int | None:
        if isinstance(self._sender, ShardedWeightSender):
            raise OptionError(f"{_SPLIT}: call send_weights() without patches")
        if self._sender is None:
            return None
        return publish_patches(self._sender, patches)

    def shutdown(self) -> None:
        if self._sender is not None:
            self._sender.close()
