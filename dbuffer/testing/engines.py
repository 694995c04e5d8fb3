"""Fake engines, to test real `Follower` objects. An engine's model is a dictionary of tensors."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dbuffer.engine.background import BackgroundFollower
from dbuffer.engine.contract import (
    Engine,
    EngineFacts,
    EngineRank,
    RankAnswer,
    RankRequest,
    WeightLabel,
    decode_answer,
    encode_answer,
)
from dbuffer.engine.endpoint import RankEndpoint, capture_answer
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.follower import Follower
from dbuffer.engine.plan.load_trace import LoadTrace
from dbuffer.engine.rank_channel import RankChannel
from dbuffer.engine.rank_receiver import RankReceiver
from dbuffer.errors import EngineUpdateError, WeightsMismatchError
from dbuffer.format.layout import TensorSpec
from dbuffer.testing.patterns import SMALL, Pattern


class FakeRank(EngineRank):
    """Fake engine rank whose model is a dictionary of tensors. Tests can make its loads fail."""

    device = torch.device("cpu")
    module = torch.nn.Module()
    not_weights = ()
    instance_id: str

    def __init__(
        self,
        pattern: Pattern = SMALL,
        ranks: RankChannel | None = None,
        instance_id: str = "one",
    ) -> None:
        alone = SimpleNamespace(rank_in_group=0, world_size=1, cpu_group=None)
        self.ranks = ranks or RankChannel(alone)
        self.instance_id = instance_id
        self.pattern = pattern
        self.tensors = pattern.weights(0)
        self.num_loads = 0
        self.failing_loads = 0
        """Number of coming loads that will fail after their first tensor."""
        self.on_load: Callable[[], None] = lambda: None
        """Function that is called at the end of each load."""
        self.refuses: str | None = None
        """Reason why the rank refuses to serve, or None if the rank serves."""

    @property
    def version(self) -> int | None:
        """Version of the rank's tensors, or None if the tensors are a mix of versions."""
        return self.pattern.version_of(self.tensors)

    def engine_id(self, options: EngineOptions) -> str:
        return options.engine_id or "engine"

    def make_check(self) -> Any:
        def check(specs: Sequence[TensorSpec], aliases: Any = None) -> LoadTrace:
            self.require_fitting(names := [spec.name for spec in specs])
            return LoadTrace({}, frozenset(names))

        return check

    def require_fitting(self, names: list[str]) -> None:
        if names != self.pattern.names:
            raise WeightsMismatchError(f"not this model's tensors: {names}")

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, partial: bool = False) -> None:
        self.num_loads += 1
        for name, tensor in tensors:
            if name in self.tensors:
                self.tensors[name] = tensor.clone()
            if self.failing_loads:
                self.failing_loads -= 1
                raise RuntimeError("this load fails")
        self.on_load()

    def read_checkpoint(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.pattern.weights(0).items()

    def refuse_to_serve(self, reason: str) -> None:
        self.refuses = reason

    def serve_again(self) -> None:
        self.refuses = None


class FakeEngine(Engine):
    """Fake engine in this process. Tests can make its calls fail, or make it lose an answer."""

    def __init__(
        self, pattern: Pattern = SMALL, *, is_server: bool = False, instance_id: str = "one"
    ) -> None:
        self.is_server = is_server
        self.rank = FakeRank(pattern, instance_id=instance_id)
        self.label = "default"
        self.paused = False
        self.error: Callable[[], Exception] | None = None
        """Function that returns the error that every call to the engine raises, or None."""
        self.lost_answer: Exception | None = None
        """Error that the next update raises after the update has succeeded, or None."""
        self.failing_resumes = 0
        self.calls = 0
        self.endpoint = RankEndpoint()

    def follow(self, store: Path | str, **options: Any) -> BackgroundFollower:
        """Follow a store in the background. See :class:`~dbuffer.engine.EngineOptions`."""
        options = {"poll_interval_s": 0.05, "plan": False} | options
        return BackgroundFollower(Follower(self, EngineOptions(store=str(store), **options)))

    def restart(self) -> None:
        """Restart the engine with its checkpoint. The restart is atomic for other threads."""
        again = FakeEngine(self.rank.pattern, is_server=self.is_server, instance_id="another")
        before = self.endpoint
        self.__dict__.update(again.__dict__)
        before.end()

    def _call(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error()

    def close(self) -> None:
        self.endpoint.end()

    def facts(self) -> EngineFacts:
        self._call()
        return EngineFacts(instance_id=self.rank.instance_id, name="engine", num_ranks=1)

    def call(self, request: RankRequest) -> list[RankAnswer]:
        self._call()
        request = RankRequest.parse(json.loads(json.dumps(request.as_json())))
        answer = capture_answer(lambda: self.endpoint.do(request, lambda: self.rank))
        if request.call == "update" and self.lost_answer is not None:
            error, self.lost_answer = self.lost_answer, None
            raise error
        for thread in threading.enumerate():
            # A thread that another engine is just starting is not alive yet, and cannot be joined.
            if thread.name == "dbuffer-acknowledge" and thread.is_alive():
                thread.join()  # so that tests can read the thread's record
        return [decode_answer(json.loads(json.dumps(encode_answer(answer))))]

    @property
    def receiver(self) -> RankReceiver:
        assert self.endpoint.receiver is not None
        return self.endpoint.receiver

    def is_paused(self) -> bool:
        self._call()
        return self.paused

    def pause(self, mode: str) -> None:
        self._call()
        self.paused = True

    def resume(self) -> None:
        self._call()
        if self.failing_resumes:
            self.failing_resumes -= 1
            raise EngineUpdateError("not now")
        self.paused = False

    def weight_version(self) -> str:
        self._call()
        return self.label

    def set_weight_version(self, label: WeightLabel) -> None:
        self._call()
        self.label = label.version

    @property
    def version(self) -> int | None:
        """Version of the engine's tensors, or None if the tensors are a mix of versions."""
        return self.rank.version

    @property
    def serves(self) -> tuple[int | None, str]:
        """Version of the engine's tensors (None for a mix), and the engine's version label."""
        return self.version, self.label
