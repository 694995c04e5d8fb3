"""Engines whose store is put back from a copy: they know the version that they have by its id."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import dbuffer
from dbuffer.engine.weight_label import WeightLabel
from dbuffer.errors import EngineUpdateError, VersionRegressedError
from tests.support.light_engines import WAIT_S, LightEngine, Scene
from tests.support.patterns import SMALL
from tests.support.stores import WAYS, back_up
from tests.support.waiting import until

LOST = 100
"""Added to a version's number: the value of its tensors in the run after the lost one."""

EVERY_WAY = pytest.mark.parametrize("way", WAYS)


class Engine(LightEngine):
    """Engine that goes on when its follower has gone."""

    def close(self) -> None:
        pass


@pytest.fixture
def scene(store: Path, engine_id: str, caplog: pytest.LogCaptureFixture) -> Iterator[Scene]:
    """An engine, and a store that holds version 5."""
    scene = Scene(store, engine_id, caplog, engine=Engine())
    send(store, *range(1, 6))
    back_up(store, store.with_name("backup"))
    yield scene
    LightEngine.close(scene.engine)


def send(store: Path, *versions: int, value: int = 0) -> None:
    with dbuffer.WeightSender(store) as sender:
        for version in versions:
            published = sender.send(SMALL.weights(version + value))
            assert published.version == version


@pytest.mark.parametrize("looks", [0, 2])
@EVERY_WAY
def test_an_engine_that_is_ahead_takes_the_versions_that_follow(scene, way, looks):
    """Their numbers are below, equal to and above the number of its version."""
    with scene.follower() as follower:
        follower.sync()
        send(scene.store, 6, 7, 8)
        follower.sync()
        way(scene.store, scene.store.with_name("backup"))
        for _ in range(looks):
            with pytest.raises(VersionRegressedError):
                follower.sync()
            assert scene.engine.serves == (8, "8")
            # A rank's thread writes the record into the store that was put back.
            until("its record names its version", lambda: scene.recorded[0] == 8)
        for version in range(6, 11):
            send(scene.store, version, value=LOST)
            assert follower.sync().version == version
            assert scene.engine.serves == (version + LOST, str(version))
            assert scene.recorded[0] == version


@EVERY_WAY
def test_a_follower_in_the_background_goes_on_and_says_so_once(scene, way):
    with scene.background() as follower:
        send(scene.store, 6, 7, 8)
        follower.wait_applied(8, WAIT_S)
        way(scene.store, scene.store.with_name("backup"))
        with dbuffer.WeightSender(scene.store) as sender:
            for version in (6, 7, 8, 9):
                sender.send(SMALL.weights(version + LOST))
                sender.wait_applied(version, receivers=scene.engine_id, timeout_s=WAIT_S)
                assert scene.engine.serves == (version + LOST, str(version))
        # The store knows of a switch a moment before it is counted.
        until("no lag is told", lambda: scene.metrics()["lag_versions"] == 0, WAIT_S)
    told = [line for line in scene.lines() if "version 8" in line]
    assert len([line for line in told if "does not lead" in line]) == 1
    # Before that, it may have looked at a store that went back, or was away.
    assert len(told) <= 2


@EVERY_WAY
def test_an_engine_that_is_told_to_refuse_another_line_acknowledges_none_of_it(scene, way):
    with scene.follower(forked="refuse") as follower:
        send(scene.store, 6, 7, 8)
        follower.sync()
        way(scene.store, scene.store.with_name("backup"))
        with dbuffer.WeightSender(scene.store) as sender:
            for version in (6, 7, 8, 9):
                sender.send(SMALL.weights(version + LOST))
                with pytest.raises((VersionRegressedError, EngineUpdateError)):
                    follower.sync()
                assert scene.engine.serves == (8, "8")
                with pytest.raises((dbuffer.WaitTimeoutError, dbuffer.ReceiverFailedError)):
                    sender.wait_applied(version, receivers=scene.engine_id, timeout_s=0.0)
    with scene.follower() as follower:
        assert (follower.sync().version, scene.engine.serves) == (9, (9 + LOST, "9"))


def test_a_label_that_another_client_sets_is_corrected(scene):
    """vLLM's ``POST /update_weight_version`` takes any text from any client."""
    with scene.background() as follower:
        follower.wait_applied(5, WAIT_S)
        for label in ("7", "mine"):
            scene.engine.label = label
            until("it is corrected", lambda: scene.engine.label == "5", 10)
        assert scene.engine.serves == (5, "5")


def test_the_label_tells_of_a_run_that_the_engine_gets_ready(scene, monkeypatch):
    labels: list[WeightLabel] = []
    monkeypatch.setattr(scene.engine, "set_weight_version", labels.append)
    with scene.follower() as follower:
        follower.sync()
        send(scene.store, 6)
        follower.sync()
    before, ready, after = labels
    assert (before.newest_run, after.newest_run) == (None, None)
    assert before.run != after.run
    assert ready == replace(before, newest_run=after.run)
