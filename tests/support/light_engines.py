"""Engines that are dictionaries of tensors, whose followers and rank receivers are real."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.engine.background import BackgroundFollower
from dbuffer.engine.contract import Engine, EngineFacts, WeightLabel
from dbuffer.engine.endpoint import RankEndpoint, capture_answer
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.follower import Follower
from dbuffer.engine.messages import (
    RankAnswer,
    RankRequest,
    decode_answer,
    encode_answer,
)
from dbuffer.engine.plan.load_trace import LoadTrace
from dbuffer.engine.rank_channel import RankChannel
from dbuffer.engine.rank_receiver import RankReceiver
from dbuffer.errors import EngineUpdateError
from dbuffer.format.layout import TensorSpec
from dbuffer.store.buffer import DoubleBuffer
from tests.support.patterns import SMALL

WAIT_S = 60.0
ENGINE = "dbuffer.engine"
LOGS = {f"{ENGINE}.{module}" for module in ("background", "follower", "reporting", "store_view")}
"""Loggers of a follower."""


class OneRank(RankChannel):
    """Channel of an engine of one process."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(rank_in_group=0, world_size=1, cpu_group=None))


class Model:
    """Tensors that answer from themselves, and loads that fail on request."""

    def __init__(self) -> None:
        self.tensors = SMALL.weights(0)
        self.failing_loads = 0
        self.num_loads = 0
        self.on_load: Callable[[], None] = lambda: None
        """Called at the end of each load."""
        self.refuses: str | None = None

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, partial: bool = False) -> None:
        self.num_loads += 1
        for name, tensor in tensors:
            if name in self.tensors:
                self.tensors[name] = tensor.clone()
            if self.failing_loads:
                self.failing_loads -= 1
                raise RuntimeError("this load fails")
        self.on_load()

    def require_reloadable(self) -> None:
        """Nothing replaces its tensors."""

    def load_checkpoint(self) -> None:
        self.load(SMALL.weights(0).items())

    def refuse_to_serve(self, reason: str) -> None:
        self.refuses = reason

    def serve_again(self) -> None:
        self.refuses = None

    @property
    def version(self) -> int | None:
        return SMALL.version_of(self.tensors)


class Rank:
    """What a receiver needs of a rank."""

    device = torch.device("cpu")
    on_device = False
    is_pipeline_stage = False
    module = torch.nn.Module()
    not_weights: tuple[str, ...] = ()
    packing = None
    replica = ""

    def __init__(
        self, model: Any, ranks: RankChannel | None = None, instance_id: str = "one"
    ) -> None:
        self.ranks = ranks or OneRank()
        self.instance_id = instance_id
        self.model = model

    def engine_id(self, options: EngineOptions) -> str:
        return (options.engine_id or "engine") + self.replica

    def __getattr__(self, name: str) -> Any:
        """Let the model load, refuse to serve, and so on."""
        return getattr(self.model, name)

    def make_check(self) -> Any:
        def check(specs: Sequence[TensorSpec], aliases: Any = None) -> LoadTrace:
            self.require_fitting(names := [spec.name for spec in specs])
            return LoadTrace({}, frozenset(names))

        return check

    def require_fitting(self, names: list[str]) -> None:
        if names != SMALL.names:
            raise dbuffer.WeightsMismatchError(f"not this model's tensors: {names}")


class LightEngine(Engine):
    """An engine in this process, that can be away, dead, or lose its answers."""

    def __init__(self, *, is_server: bool = False, instance_id: str = "one") -> None:
        self.is_server = is_server
        self.instance_id = instance_id
        self.model = Model()
        self.label = "default"
        self.paused = False
        self.error: Callable[[], Exception] | None = None
        """Makes the error that every call raises."""
        self.lost_answer: Exception | None = None
        """Raised by the next update after it is done."""
        self.failing_resumes = 0
        self.calls = 0
        self.endpoint = RankEndpoint()

    def restart(self) -> None:
        """Start again on the checkpoint, all at once: a follower may look at any moment."""
        again = LightEngine(is_server=self.is_server, instance_id="another start")
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
        return EngineFacts(instance_id=self.instance_id, name="engine", num_ranks=1)

    def call(self, request: RankRequest) -> list[RankAnswer]:
        self._call()
        request = RankRequest.parse(json.loads(json.dumps(request.as_json())))
        answer = capture_answer(lambda: self.endpoint.do(request, self.make_rank))
        if request.call == "update" and self.lost_answer is not None:
            error, self.lost_answer = self.lost_answer, None
            raise error
        for thread in threading.enumerate():
            # An engine of another thread may not have started its own yet.
            if thread.name == "dbuffer-acknowledge" and thread.is_alive():
                thread.join()  # so that tests find the record that it writes
        return [decode_answer(json.loads(json.dumps(encode_answer(answer))))]

    def make_rank(self) -> Rank:
        return Rank(self.model, instance_id=self.instance_id)

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
        """Version of its tensors."""
        return self.model.version

    @property
    def serves(self) -> tuple[int | None, str]:
        """Version of its tensors, and its label."""
        return self.version, self.label


def options(store: Path, engine_id: str = "engine", **more: Any) -> EngineOptions:
    defaults = {"poll_interval_s": 0.05, "timeout_s": WAIT_S, "plan": False}
    return EngineOptions(store=str(store), engine_id=engine_id, **defaults | more)


class Scene:
    """A store, its sender, and an engine that can follow it."""

    def __init__(
        self,
        store: Path,
        engine_id: str,
        caplog: pytest.LogCaptureFixture,
        *,
        sender: dbuffer.WeightSender | None = None,
        engine: LightEngine | None = None,
    ) -> None:
        self.store, self.engine_id = store, engine_id
        self.engine = engine or LightEngine()
        self._sender, self._caplog = sender, caplog

    def publish(self, *versions: int) -> None:
        """Publish each version with ten times its number as its step."""
        assert self._sender is not None
        for version in versions:
            self._sender.send(SMALL.weights(version), metadata={"step": 10 * version})

    @property
    def recorded(self) -> tuple[int | None, dict[str, Any]]:
        """Version in the engine's record, and its metadata there."""
        record = DoubleBuffer(self.store).receiver(self.engine_id)
        return (None, {}) if record is None else (record.applied_version, record.metadata)

    def follower(self, **more: Any) -> Follower:
        return Follower(self.engine, options(self.store, self.engine_id, **more))

    def background(self, **more: Any) -> BackgroundFollower:
        return BackgroundFollower(self.follower(**more))

    @contextlib.contextmanager
    def following(self, *, is_server: bool = False) -> Iterator[BackgroundFollower]:
        """Follow in the background, from version 1 on."""
        self.publish(1)
        self.engine.is_server = is_server
        with self.background() as follower:
            follower.wait_applied(1, WAIT_S)
            yield follower

    @contextlib.contextmanager
    def serving(self, *, is_server: bool = False, **more: Any) -> Iterator[Follower]:
        """Serve version 1."""
        self.publish(1)
        self.engine.is_server = is_server
        with self.follower(**more) as follower:
            follower.sync()
            yield follower

    @contextlib.contextmanager
    def about_to_switch(self, *, is_server: bool = False) -> Iterator[Follower]:
        """Serve version 1 when version 2 is published."""
        with self.serving(is_server=is_server) as follower:
            self.publish(2)
            yield follower

    @contextlib.contextmanager
    def left_paused(self) -> Iterator[Follower]:
        """Serve version 2 after a switch whose resume failed."""
        with self.about_to_switch(is_server=True) as follower:
            self.engine.failing_resumes = 1
            with pytest.raises(EngineUpdateError, match="not now"):
                follower.sync()
            assert self.engine.paused
            yield follower

    def metrics(self) -> dict[str, float]:
        """dbuffer's metrics of this engine."""
        prometheus = pytest.importorskip("prometheus_client")
        return {
            sample.name.removeprefix("dbuffer_"): sample.value
            for family in prometheus.REGISTRY.collect()
            for sample in family.samples
            if sample.labels.get("engine") == self.engine_id
        }

    def lines(self, above: int = logging.INFO) -> list[str]:
        """Lines that the follower logged above a level."""
        ours = (r for r in self._caplog.records if r.name in LOGS and r.levelno > above)
        return [record.getMessage() for record in ours]


@contextlib.contextmanager
def nearly_idle(but_for_s: float = 0.0) -> Iterator[None]:
    """Require that less than half of a processor is used in the block."""
    used, began = time.process_time(), time.monotonic()
    yield
    spent_s, passed_s = time.process_time() - used, time.monotonic() - began
    assert spent_s < 0.5 * passed_s + but_for_s, "it spins"
