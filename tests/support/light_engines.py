"""Engines that are dictionaries of tensors, whose followers and rank receivers are real."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from dbuffer.engine.background import BackgroundFollower
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.follower import Follower
from dbuffer.errors import EngineUpdateError
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing.engines import FakeEngine
from dbuffer.testing.waiting import until
from tests.support.patterns import SMALL

WAIT_S = 60.0
ENGINE = "dbuffer.engine"
LOGS = {f"{ENGINE}.{module}" for module in ("background", "follower", "reporting", "store_view")}
"""Loggers of a follower."""


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
        engine: FakeEngine | None = None,
    ) -> None:
        self.store, self.engine_id = store, engine_id
        self.engine = engine or FakeEngine()
        self._sender, self._caplog = sender, caplog

    def publish(self, *versions: int) -> None:
        """Publish each version with ten times its number as its step."""
        assert self._sender is not None
        for version in versions:
            self._sender.send(SMALL.weights(version), metadata={"step": 10 * version})

    def wait_until_staged(self, version: int) -> None:
        """Wait until the engine's rank has a version ready."""

        def is_staged() -> bool:
            record = DoubleBuffer(self.store).receiver(f"{self.engine_id}.rank-0")
            return (
                record is not None and record.staged is not None and record.staged.number == version
            )

        until(f"{version} is staged", is_staged, WAIT_S)

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
