"""``backend="dbuffer"``: a weight transfer backend of vLLM that reads versions from a store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine

from dbuffer.engine.endpoint import RankEndpoint
from dbuffer.engine.engine_options import EngineOptions, UpdateRequest
from dbuffer.errors import OptionError
from dbuffer.integrations.vllm.caches import require_droppable
from dbuffer.integrations.vllm.callback_engine import CallbackEngine, DBufferUpdateInfo
from dbuffer.integrations.vllm.config import options_of
from dbuffer.integrations.vllm.drafts import draft_of
from dbuffer.integrations.vllm.rank import WorkerRank, raising_once
from dbuffer.integrations.vllm.sparse_patches import (
    trainer_send_sparse_weights,
    trainer_send_weights,
)

_ARGUMENTS = ("config", "vllm_config", "device", "model")


class DBufferWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Half of vLLM's weight transfer that runs in a worker, and calls :class:`RankEndpoint`.

    A worker follows its store after ``init_transfer_engine``, or from its start if the engine's
    ``additional_config["dbuffer"]`` names a store. ``update_weights`` replaces all weights in one
    call, so the engine may serve requests between ``start_weight_update`` and
    ``finish_weight_update``.

    If the constructor gets the arguments of vLLM 0.23 and 0.24 (``config, parallel_config,
    model``), it returns a :class:`.CallbackEngine`.
    """

    init_info_cls = EngineOptions
    update_info_cls = DBufferUpdateInfo

    # vLLM before 0.26 looks for the functions of the trainer in this class.
    trainer_send_weights = staticmethod(trainer_send_weights)
    trainer_send_sparse_weights = staticmethod(trainer_send_sparse_weights)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if "parallel_config" in kwargs or len(args) + len(kwargs) < len(_ARGUMENTS):
            return CallbackEngine(*args, **kwargs)
        return super().__new__(cls)

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

        A rank with an invalid request takes part and reports its error, because the other ranks
        wait for all ranks.
        """
        request: UpdateRequest | OptionError
        try:
            request = DBufferUpdateInfo.parse(update_info)
        except OptionError as error:
            request = error
        self._update(request)

    # vLLM before 0.25 passes a function that loads weights. The function is unused: vLLM's reload
    # loads the weights.

    def receive_weights(
        self, update_info: DBufferUpdateInfo, _load_weights: Callable[..., Any] | None = None
    ) -> None:
        self._update(update_info)

    def receive_sparse_weights(
        self, update_info: DBufferUpdateInfo, _apply_patches: Callable[..., Any]
    ) -> None:
        self._update(update_info)

    def _update(self, request: UpdateRequest | OptionError) -> None:
        with raising_once(self.vllm_config):
            self._endpoint.following().update(request)

    def shutdown(self) -> None:
        self._endpoint.end()
