"""The next experiment in the same place: a store that is started over under an engine that follows.

Every second experiment does so, and counts from 1 again. Its versions are lower, the same or higher
than the one that the engine has; all three must be told apart from it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.errors import EngineUpdateError, VersionRegressedError
from dbuffer.integrations.engine.engine_options import UpdateRequest
from dbuffer.integrations.engine.follower import Follower
from dbuffer.mirror.mirror import Mirror
from dbuffer.store.buffer import DoubleBuffer
from tests.engine.test_follower import (
    WAIT_S,
    LightEngine,
    background,
    lines,
    metrics,
    options,
    until,
)
from tests.support.patterns import SMALL

OLD, NEW = 5, 7
"""What the tensors of the run before and of the next one say; their versions' numbers do not."""

NUMBERS = pytest.mark.parametrize("version", [1, 5, 6], ids=["lower", "equal", "higher"])


class Engine(LightEngine):
    """One that goes on when who follows it has gone."""

    when_waiting: Callable[[], None] | None = None
    """Done once, while its ranks are waited for."""
    num_looks = 0
    """How often it was looked whether it is alive: a sync does so first, and then as it waits."""

    def close(self) -> None:
        pass

    def require_alive(self) -> None:
        self.num_looks += 1
        if self.when_waiting is not None and self.num_looks > 1:
            action, self.when_waiting = self.when_waiting, None
            action()


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    LightEngine.close(made)


def begin(store: Path, version: int, value: int) -> None:
    shutil.rmtree(store, ignore_errors=True)
    with dbuffer.WeightSender(store) as sender:
        sender.send(SMALL.weights(value), version=version)


@NUMBERS
def test_an_engine_goes_on_with_it_and_says_so_once(
    store: Path, engine: Engine, engine_id: str, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    begin(store, 5, OLD)
    with background(engine, store, engine_id) as follower:
        follower.wait_applied(5, WAIT_S)
        begin(store, version, NEW)
        assert follower.wait_applied(version, WAIT_S) == version
        assert engine.version == NEW
        assert engine.label == str(version)
        with dbuffer.WeightSender(store) as sender:
            sender.wait_applied(version, receivers=[engine_id], timeout_s=WAIT_S)
            sender.send(SMALL.weights(NEW + 1))
            assert follower.wait_applied(version + 1, WAIT_S) == version + 1
        assert engine.version == NEW + 1
        until("it is counted", lambda: metrics(engine_id)["version_applied"] == version + 1)
        assert metrics(engine_id)["lag_versions"] == 0
    told = [line for line in lines(caplog) if "started over" in line]
    assert len(told) == 1
    assert "has version 5 of the run before" in told[0]
    assert len(lines(caplog)) <= 4, "the store is away for a moment, and then works again"


@NUMBERS
def test_an_engine_that_is_told_to_refuse_it_serves_on(
    store: Path, engine: Engine, engine_id: str, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    begin(store, 5, OLD)
    with background(engine, store, engine_id, new_history="refuse") as follower:
        follower.wait_applied(5, WAIT_S)
        begin(store, version, NEW)
        until("it is noticed", lambda: getattr(follower.error, "history", None) is not None)
        with dbuffer.WeightSender(store) as sender:
            for value in range(NEW + 1, NEW + 6):  # numbers pass the old one's
                sender.send(SMALL.weights(value))
            with pytest.raises(dbuffer.WaitTimeoutError):
                sender.wait_applied(version, receivers=1, timeout_s=1)
        with pytest.raises(dbuffer.WaitTimeoutError, match="started over"):
            follower.wait_applied(version, 0.1)
        assert (engine.version, engine.label) == (OLD, "5")
        assert metrics(engine_id)["following"] == 0
    assert sum("started over" in line for line in lines(caplog)) == 1
    # Until it is told otherwise; and following it again in the same way is not that.
    with Follower(engine, options(store, engine_id, new_history="refuse")) as again:
        with pytest.raises((VersionRegressedError, EngineUpdateError), match="started over"):
            again.sync()
        assert engine.version == OLD
    with Follower(engine, options(store, engine_id)) as told:
        switch = told.sync()
        assert switch is not None
        assert (switch.version, engine.version) == (version + 5, NEW + 5)


@NUMBERS
def test_a_follower_that_was_not_there_meanwhile_tells_it_by_what_the_engine_has(
    store: Path, engine: Engine, engine_id: str, version: int
) -> None:
    begin(store, 5, OLD)
    with Follower(engine, options(store, engine_id)) as first:
        first.sync()
    begin(store, version, NEW)
    second = Follower(engine, options(store, engine_id))
    switch = second.sync()
    assert switch is not None
    assert (switch.version, engine.version) == (version, NEW)
    second.close()


@NUMBERS
def test_a_version_that_went_with_the_store_is_not_waited_for(
    store: Path, engine: Engine, engine_id: str, version: int
) -> None:
    begin(store, 5, OLD)
    with Follower(engine, options(store, engine_id, timeout_s=20)) as follower:
        follower.sync()

        def begin_anew() -> None:
            """Begin the store anew, and see the rank go on there: it has no problem to report."""
            begin(store, version, NEW)
            records = DoubleBuffer(store).receivers
            until("it is staged", lambda: version in [each.staged_version for each in records()])

        engine.num_looks, engine.when_waiting = 0, begin_anew
        with pytest.raises(VersionRegressedError, match="before version 7 of it was ready"):
            follower.sync(at_least=7)
        assert engine.version == OLD
        switch = follower.sync()
        assert switch is not None
        assert (switch.version, engine.version) == (version, NEW)


def test_a_rank_refuses_by_itself(store: Path, engine: Engine, engine_id: str) -> None:
    """Also where vLLM's own calls drive it, and no follower of ours."""
    begin(store, 5, OLD)
    with Follower(engine, options(store, engine_id, new_history="refuse")) as follower:
        follower.sync()
        begin(store, 6, NEW)
        for request in (UpdateRequest(), UpdateRequest(version=6), UpdateRequest(at_least=6)):
            with pytest.raises(EngineUpdateError, match="VersionRegressedError"):
                engine.receiver.update(request)
            assert engine.version == OLD


def test_a_partial_version_of_the_next_run_leaves_no_mix(
    store: Path, engine: Engine, engine_id: str
) -> None:
    """What the run before has brought, and this one lacks, would stay."""
    begin(store, 5, OLD)
    with Follower(engine, options(store, engine_id, partial=True)) as follower:
        follower.sync()
        shutil.rmtree(store)
        with dbuffer.WeightSender(store) as sender:
            weights = SMALL.weights(NEW)
            sender.send({name: weights[name] for name in SMALL.names[:3]})

            def is_refused() -> bool:
                """For what does not fit; at first perhaps for there being nothing, a moment ago."""
                with pytest.raises(EngineUpdateError) as caught:
                    follower.sync()
                return "WeightsMismatchError" in str(caught.value)

            until("it is refused", is_refused)
            assert engine.version == OLD
            sender.send(weights)
            follower.sync()
            assert engine.version == NEW


@NUMBERS
def test_an_engine_behind_a_mirror_goes_on_with_it(
    store: Path, tmp_path: Path, engine: Engine, engine_id: str, version: int
) -> None:
    begin(store, 5, OLD)
    local: dict[str, Any] = {"local_store": str(tmp_path / "local")}
    with (
        Mirror(store, tmp_path / "local", poll_interval_s=0.05).start() as mirror,
        Follower(engine, options(store, engine_id, **local)) as follower,
    ):
        mirror.wait_until_current(WAIT_S)
        follower.sync()
        assert engine.version == OLD
        begin(store, version, NEW)
        # Known to be published, and on its way: neither the old version nor nothing will do.
        switch = follower.sync(at_least=version)
        assert switch is not None
        assert (switch.version, engine.version) == (version, NEW)


def test_going_back_does_not_take_the_next_runs_version_of_that_number(
    store: Path, engine: Engine, engine_id: str
) -> None:
    """The run before is gone: its version 5 cannot be had again, and another's must not be."""
    begin(store, 5, OLD)
    with Follower(engine, options(store, engine_id)) as follower:
        follower.sync()
        shutil.rmtree(store)
        with dbuffer.WeightSender(store) as sender:
            sender.send(SMALL.weights(NEW), version=5)
            sender.send(SMALL.weights(NEW + 1))
            engine.model.failing_loads = 1
            switch = follower.sync()
    assert switch is not None
    assert (switch.version, engine.version) == (6, NEW + 1), "loaded once more, and acknowledged"
    assert all(isinstance(tensor, torch.Tensor) for tensor in engine.model.tensors.values())
