"""The trainer's half of vLLM's weight transfer: a trainer written for it publishes into a store."""

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

# vLLM loads its plugins in engines, and not in trainers.
register()


@dataclass
class DBufferTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """Init info for ``WeightTransferTrainerFactory.trainer_init``, in place of NCCL's.

    ``DBufferTrainerInitInfo(store="/dev/shm/policy", rank=0)``: rank 0 publishes.
    """

    backend: ClassVar[str] = BACKEND

    store: str | os.PathLike[str]
    """The store's directory, as this process sees it."""
    engine: dict[str, Any] = field(default_factory=dict)
    """More of :class:`EngineOptions` for the engine, ``store`` for one if it sees another path."""
    sender: dict[str, Any] = field(default_factory=dict)
    """Options of the :class:`~dbuffer.WeightSender`."""
    sparse: bool = False
    """Let patches be sent, by a sender of ``delta=True``. A source is gathered in main memory then.
    Without a source, patches can be sent in any case."""
    checkpoint: str | os.PathLike[str] | None = None
    """HuggingFace checkpoint that the first patches follow, for a trainer without a source. It is
    published in ``trainer_init``."""


class DBufferTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """Publishes a source's weights, or patches, then lets the engine switch to that version.

    The engine's weight version becomes the store's. The caller pauses the engine and resets its
    prefix cache, as with vLLM's own backends.
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
        self._is_behind = False
        """Whether the source could not be published, so that patches of it fit nothing."""

    @classmethod
    def trainer_init(
        cls, init_info: DBufferTrainerInitInfo, *, client: Any, source: Any = None
    ) -> Self:
        """Open the store, and let the engine's workers follow it. Called on every rank.

        Args:
            init_info: the store and so on.
            client: the engine.
            source: a ``WeightSource``. If it is split between ranks, all of them write, and
                torch.distributed must be initialised.

        Raises:
            OptionError: (a ``ValueError``) there is neither a source nor a checkpoint, or there are
                both, or an option is wrong; ``sparse`` with a source that is split.
            StoreBusyError: another sender has this store.
            DBufferError: the checkpoint could not be published.
        """
        if not isinstance(init_info, DBufferTrainerInitInfo):
            raise OptionError(f"init_info is {init_info!r:.200}: use a DBufferTrainerInitInfo")
        if (source is None) == (init_info.checkpoint is None):
            raise OptionError(
                "a first version is published whole, also of a trainer that sends patches then: "
                "trainer_init needs a WeightSource, or its init info a checkpoint, and not both"
            )
        names = {"store": init_info.store} | init_info.engine
        checked = EngineOptions.parse(names)
        engine_options = {name: getattr(checked, name) for name in names}
        sender: WeightSender | ShardedWeightSender | None = None
        rank, sender_options = init_info.rank, dict(init_info.sender)
        if source is not None and is_split(source):
            if init_info.sparse:
                raise OptionError(f"sparse: {_SPLIT}, and one rank alone sends patches")
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
        """Publish, and switch the engine. Called on every rank.

        Args:
            patches: vLLM's ``SparseWeightPatch``, the only differences from the version that this
                trainer published last. Patches of ranks other than the sender's are ignored; an
                empty list does nothing. Default: publish the source whole, if there is one.

        Raises:
            VersionError: patches before the first version of this trainer, or after a failed
                version: send the source whole once.
            WeightsMismatchError: a patch does not fit the published tensor.
            InvalidWeightsError: a patch is malformed, or brings a NaN.
            OptionError: patches, and ``sparse`` is not set, or the source is split between ranks.
            DBufferError: the weights could not be published. As with all of these, the engine was
                not asked to switch.
            Exception: of the client; the engine is ready for the next update.
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
            # Ends the session on the ranks that did not raise. The failed rank has no session any
            # more, and raises once more.
            with contextlib.suppress(Exception):
                self.client.finish_weight_update()
            raise
        self.client.finish_weight_update(str(version))

    def _start(self) -> None:
        try:
            self.client.start_weight_update()
        except Exception as error:  # noqa: BLE001 - a client's errors are of any class
            # A trainer that was killed may have left an update open.
            logger.warning("ending an update that was left open, perhaps: %s", described(error))
            with contextlib.suppress(Exception):
                self.client.finish_weight_update()
            self.client.start_weight_update()

    def send_weight_chunk(self, patches: Iterable[Any] | None = None) -> int | None:
        """Publish patches and switch, between the caller's start and finish of an update.

        Each chunk is a version, which the engine has when this returns. An engine that is not
        paused from start to finish serves each version, and so do other followers of the store:
        put patches that must apply atomically into one call.

        Return the version, for the client's ``finish_weight_update(str(version))``, or None if
        there are no patches, or this rank is not the sender. Raises as :meth:`send_weights` does;
        the caller finishes the update also then.
        """
        version = self._publish_patches(patches)
        if version is not None:
            self.client.update_weights({"version": version})
        return version

    def _publish_source(self) -> int | None:
        if self._sender is None:
            # All ranks take part in gathering.
            SourceReader(self.source).finish()
            return None
        self._is_behind = True
        version = self._sender.send(self.source).version
        self._is_behind = False
        return version

    def _publish_patches(self, patches: Iterable[Any] | None) -> int | None:
        if isinstance(self._sender, ShardedWeightSender):
            raise OptionError(f"{_SPLIT}: call send_weights() without patches")
        if self._sender is None:
            return None
        return publish_patches(self._sender, patches, is_behind=self._is_behind)

    def shutdown(self) -> None:
        """Release the store. The last version stays published."""
        if self._sender is not None:
            self._sender.close()
