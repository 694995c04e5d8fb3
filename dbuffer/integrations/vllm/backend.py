"""``backend="dbuffer"``: vLLM's weight transfer, out of a store."""

from __future__ import annotations

from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from dbuffer.errors import DBufferError, EngineUnsupportedError, OptionError
from dbuffer.integrations.engine.options import EngineOptions, UpdateRequest
from dbuffer.integrations.engine.rank_receiver import RankReceiver, start_on_all_ranks
from dbuffer.integrations.vllm.config import options_of
from dbuffer.integrations.vllm.rank import WorkerRank
from dbuffer.integrations.vllm.ranks import WorkerRanks, raising_once


class DBufferInitInfo(EngineOptions, WeightTransferInitInfo):  # type: ignore[misc]
    """``init_info``: ``{"store": directory}``, and maybe more; see :class:`EngineOptions`."""


class DBufferUpdateInfo(UpdateRequest, WeightTransferUpdateInfo):  # type: ignore[misc]
    """``update_info``: ``{}`` for the newest, or ``{"version": 7}``; see :class:`UpdateRequest`."""


class DBufferWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """The receiving half, in each worker.

    A worker follows its store from ``init_transfer_engine`` on, or, where the engine's
    ``additional_config["dbuffer"]`` names a store, from its own start on the newest version in it.
    Weights change in ``update_weights``, all at once; ``start_weight_update`` and
    ``finish_weight_update`` have nothing to do, so between them the engine may serve.
    """

    init_info_cls = DBufferInitInfo
    update_info_cls = DBufferUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._ranks = WorkerRanks(vllm_config)
        self._receiver: RankReceiver | None = None
        options = options_of(vllm_config.additional_config)
        if options is not None:
            self._receiver = self._follow(options)
            self._receiver.catch_up()

    def parse_init_info(self, init_dict: dict[str, Any]) -> DBufferInitInfo | None:
        """Check ``init_info``; None on ranks that must not raise.

        Raises:
            OptionError: (a ``ValueError``) it is not what it may be.
        """
        with raising_once(self._ranks.may_raise):
            return DBufferInitInfo.parse(init_dict)
        return None

    def parse_update_info(self, update_dict: dict[str, Any]) -> DBufferUpdateInfo | OptionError:
        """Check ``update_info``; what is wrong with it is not raised before all ranks know."""
        return DBufferUpdateInfo.parse_or_error(update_dict)

    def init_transfer_engine(self, init_info: DBufferInitInfo | None) -> None:
        """Begin to follow a store, or another one."""
        if init_info is None:
            return
        before, self._receiver = self._receiver, None
        with raising_once(self._ranks.may_raise):
            self._receiver = self._follow(init_info, before)

    def start_weight_update(self) -> None:
        """Touch nothing: whatever can fail comes first, and it comes with ``update_weights``."""
        if self._receiver is not None:
            self._receiver.record_session(True)

    def finish_weight_update(self) -> None:
        """Do nothing more: the weights changed in ``update_weights``."""
        if self._receiver is not None:
            self._receiver.record_session(False)

    def receive_weights(self, update_info: DBufferUpdateInfo | OptionError) -> None:
        """Switch to a version; see :meth:`RankReceiver.update`."""
        with raising_once(self._ranks.may_raise):
            if self._receiver is None:
                raise EngineUnsupportedError(
                    "this engine follows no store yet: call init_weight_transfer_engine with "
                    "init_info={'store': directory} first"
                )
            try:
                self._receiver.update(update_info)
            except DBufferError:
                # Where it is raised, vLLM ends its session.
                self._receiver.record_session(not self._ranks.may_raise)
                raise

    def shutdown(self) -> None:
        """Stop following."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _follow(self, options: EngineOptions, before: RankReceiver | None = None) -> RankReceiver:
        rank = WorkerRank(self.vllm_config, self.model, self.device)
        return start_on_all_ranks(rank, options, before)
