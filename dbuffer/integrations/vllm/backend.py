"""``backend="dbuffer"``: a weight transfer backend of vLLM that reads versions from a store."""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine

from dbuffer.engine.endpoint import RankEndpoint
from dbuffer.engine.engine_options import EngineOptions, UpdateRequest
from dbuffer.errors import OptionError
from dbuffer.integrations.vllm.config import options_of, require_droppable
from dbuffer.integrations.vllm.layers import draft_of
from dbuffer.integrations.vllm.rank import WorkerRank, raising_once


class DBufferWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Worker's half of vLLM's weight transfer: passes vLLM's calls to a :class:`RankEndpoint`.

    A worker follows its store after ``init_transfer_engine``, or from its start if the engine's
    ``additional_config["dbuffer"]`` names a store. ``update_weights`` replaces all weights in one
    call, so the engine may serve requests between ``start_weight_update`` and
    ``finish_weight_update``.
    """

    init_info_cls = EngineOptions
    update_info_cls = UpdateRequest

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._endpoint = RankEndpoint.of(model)
        self._draft = draft_of()
        self.supports_draft_weight_update = self._draft is not None
        options = options_of(vllm_config.additional_config)
        if options is not None:
            self._begin(options)
            self._endpoint.following().catch_up()

    def _begin(self, options: EngineOptions) -> None:
        require_droppable(self.vllm_config, options)
        make_rank = partial(WorkerRank, self.vllm_config, self.model, self.device, self._draft)
        self._endpoint.begin(make_rank, options)

    def parse_init_info(self, init_dict: dict[str, Any]) -> EngineOptions | None:
        with raising_once(self.vllm_config):
            return EngineOptions.parse(init_dict)
        return None

    def init_transfer_engine(self, init_info: EngineOptions | None) -> None:
        if init_info is not None:
            with raising_once(self.vllm_config):
                self._begin(init_info)

    def start_weight_update(self) -> None:
        """Do nothing: ``update_weights`` performs the complete update."""

    def finish_weight_update(self) -> None:
        """Do nothing: ``update_weights`` has replaced the weights."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Switch to a version; see :meth:`RankReceiver.update`.

        ``update_info`` is ``{}`` for the newest version, or ``{"version": 7}``. If this rank's
        request is invalid, the rank still takes part in the update and reports the error there.
        Otherwise the other ranks would wait for this rank.
        """
        request: UpdateRequest | OptionError
        try:
            request = UpdateRequest.parse(update_info)
        except OptionError as error:
            request = error
        self.receive_weights(request)

    def receive_weights(self, update_info: UpdateRequest | OptionError) -> None:
        with raising_once(self.vllm_config):
            self._endpoint.following().update(update_info)

    def shutdown(self) -> None:
        self._endpoint.end()
