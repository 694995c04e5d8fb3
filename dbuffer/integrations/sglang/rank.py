"""`SchedulerRank`: the SGLang scheduler process that a receiver runs in."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_parallel

from dbuffer.engine.contract import EngineRank, ServingModel
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.rank_channel import RankChannel
from dbuffer.engine.shape_check import ShapeCheck
from dbuffer.integrations.sglang.model import SglangModel, sglang_shape_check


class SchedulerRank(EngineRank):
    """One rank of an SGLang engine."""

    def __init__(self, model: Any) -> None:
        self.module = model
        self.device = next(model.parameters()).device
        self.ranks = RankChannel.of(get_parallel().tp_group)

    def engine_id(self, options: EngineOptions) -> str:
        """Return the engine's name among the store's receivers, which its follower has chosen."""
        return options.engine_id or ""

    def make_model(self, before: ServingModel | None) -> SglangModel:  # noqa: ARG002
        """Return the model, to swap weights in."""
        return SglangModel(self.module)

    def make_check(self) -> ShapeCheck:
        return sglang_shape_check(self.module, tp_size=self.ranks.size)
