"""``backend="dbuffer"``: vLLM's weight transfer, out of a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from dbuffer.errors import OptionError
from dbuffer.integrations.engine.endpoint import RankEndpoint
from dbuffer.integrations.engine.messages import BeginRequest
from dbuffer.integrations.engine.options import EngineOptions, UpdateRequest
from dbuffer.integrations.vllm.config import options_of
from dbuffer.integrations.vllm.patches import trainer_send_sparse_weights
from dbuffer.integrations.vllm.rank import WorkerRank, WorkerRanks


class DBufferInitInfo(EngineOptions, WeightTransferInitInfo):  # type: ignore[misc]
    """``init_info``: ``{"store": directory}``, and maybe more; see :class:`EngineOptions`."""


class DBufferUpdateInfo(UpdateRequest, WeightTransferUpdateInfo):  # type: ignore[misc]
    """``update_info``: ``{}`` for the newest, or ``{"version": 7}``; see :class:`UpdateRequest`."""


class DBufferWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """The receiving half, in each worker: vLLM's names for the calls of :class:`RankEndpoint`.

    A worker follows its store from ``init_transfer_engine`` on, or, where the engine's
    ``additional_config["dbuffer"]`` names a store, from its own start on the newest version in it.
    Weights change in ``update_weights``, all at once; ``start_weight_update`` and
    ``finish_weight_update`` have nothing to do, so between them the engine may serve. A follower
    needs neither, and is not hindered by a session that a killed trainer has left open.
    """

    init_info_cls = DBufferInitInfo
    update_info_cls = DBufferUpdateInfo
    supports_draft_weight_update = False

    # The trainer's half, where releases that know `receive_sparse_weights` look for it.
    trainer_send_sparse_weights = staticmethod(trainer_send_sparse_weights)

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._ranks = WorkerRanks(vllm_config)
        self._endpoint = RankEndpoint.of(model)
        options = options_of(vllm_config.additional_config)
        if options is not None:
            self._begin(options)
            assert self._endpoint.receiver is not None  # noqa: S101 - it has begun
            self._endpoint.receiver.catch_up()

    def parse_init_info(self, init_dict: dict[str, Any]) -> DBufferInitInfo | None:
        """Check ``init_info``; None on ranks that must not raise."""
        with self._ranks.raising_once():
            return DBufferInitInfo.parse(init_dict)
        return None

    def parse_update_info(self, update_dict: dict[str, Any]) -> DBufferUpdateInfo:
        return DBufferUpdateInfo.parse(update_dict)

    def init_transfer_engine(self, init_info: DBufferInitInfo | None) -> None:
        if init_info is not None:
            with self._ranks.raising_once():
                self._begin(init_info)

    def start_weight_update(self) -> None:
        """Touch nothing: whatever can fail comes first, and it comes with ``update_weights``."""

    def finish_weight_update(self) -> None:
        """Do nothing more: the weights changed in ``update_weights``."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Switch to a version; see :meth:`RankReceiver.update`.

        A rank that was given an invalid request takes part with the error: the others wait for it.
        """
        self._update(DBufferUpdateInfo.parse_or_error(update_info))

    def receive_weights(self, update_info: DBufferUpdateInfo) -> None:
        self._update(update_info)

    def receive_sparse_weights(
        self,
        update_info: DBufferUpdateInfo,
        apply_patches: Callable[[list[Any]], None],  # noqa: ARG002 - as vLLM calls it
    ) -> None:
        """Switch to a version that came by patches, as to any other.

        Some of vLLM's releases call this, with what writes patches into parameters in place. It is
        not called: a version in a store is whole, and its names are a checkpoint's.
        """
        self._update(update_info)

    def shutdown(self) -> None:
        self._endpoint.end()

    def _begin(self, options: EngineOptions) -> None:
        def rank() -> WorkerRank:
            return WorkerRank(self.vllm_config, self.model, self.device)

        self._endpoint.begin(rank, BeginRequest(options=options))

    def _update(self, request: DBufferUpdateInfo | OptionError) -> None:
        with self._ranks.raising_once():
            self._endpoint.update(request)
