"""Forks under an engine that follows: another run publishes in the place of what the engine has.

As the next experiment in the same directory does, which counts from 1 again. Its versions are
lower, the same or higher than the version that the engine has; none of the three is that version.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import dbuffer
from dbuffer.engine.contract import WeightLabel
from dbuffer.engine.engine_options import UpdateRequest
from dbuffer.errors import EngineUpdateError, VersionRegressedError
from dbuffer.mirror.mirror import Mirror
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing.engines import FakeEngine
from dbuffer.testing.waiting import until
from tests.support.light_engines import WAIT_S, Scene, options
from tests.support.patterns import SMALL
from tests.support.stores import WAYS, back_up, remove_store

OLD, NEW = 5, 7
"""Values of the tensors of the run before and of the next one; versions have other numbers."""
LOST = 100
"""Offset of a version's value from its number, in the run that follows a lost one."""

NUMBERS = pytest.mark.parametrize("version", [1, 5, 6], ids=["lower", "equal", "higher"])


class Engine(FakeEngine):
    """Engine that goes on when its follower has gone."""

    when_waiting: Callable[[], None] | None = None
    """Done once, while its ranks are waited for: a sync looks first whether it is alive, and then
    as it waits."""
    num_looks = 0

    def close(self) -> None:
        pass

    def require_alive(self) -> None:
        self.num_looks += 1
        if self.when_waiting is not None and self.num_looks > 1:
            action, self.when_waiting = self.when_waiting, None
            action()


@pytest.fixture
def scene(store: Path, engine_id: str, caplog: pytest.LogCaptureFixture) -> Iterator[Scene]:
    """An engine, and a store that holds version 5."""
    begin(store, 5, OLD)
    scene = Scene(store, engine_id, caplog, engine=Engine())
    yield scene
    FakeEngine.close(scene.engine)


def begin(store: Path, version: int, value: int) -> None:
    remove_store(store)
    with dbuffer.WeightSender(store) as sender:
        sender.send(SMALL.weights(value), version=version)


@NUMBERS
def test_an_engine_goes_on_with_it_and_says_so_once(scene, version):
    with scene.background() as follower:
        follower.wait_applied(5, WAIT_S)
        begin(scene.store, version, NEW)
        assert follower.wait_applied(version, WAIT_S) == version
        assert scene.engine.serves == (NEW, str(version))
        with dbuffer.WeightSender(scene.store) as sender:
            sender.wait_applied(version, receivers=[scene.engine_id], timeout_s=WAIT_S)
            sender.send(SMALL.weights(NEW + 1))
            assert follower.wait_applied(version + 1, WAIT_S) == version + 1
        assert scene.engine.version == NEW + 1
        until("it is counted", lambda: scene.metrics()["version_applied"] == version + 1, WAIT_S)
        assert scene.metrics()["lag_versions"] == 0
    [told] = [line for line in scene.lines() if "not lead" in line]
    assert "version 5 of run" in told
    assert len(scene.lines()) <= 4, "the store is away for a moment, and then works again"


@NUMBERS
def test_an_engine_that_is_told_to_refuse_it_serves_on(scene, version):
    engine = scene.engine
    with scene.background(forked="refuse") as follower:
        follower.wait_applied(5, WAIT_S)
        begin(scene.store, version, NEW)
        until("noticed", lambda: getattr(follower.error, "is_forked", False), WAIT_S)
        with dbuffer.WeightSender(scene.store) as sender:
            for value in range(NEW + 1, NEW + 6):  # numbers pass the old one's
                sender.send(SMALL.weights(value))
            with pytest.raises(dbuffer.WaitTimeoutError):
                sender.wait_applied(version, receivers=1, timeout_s=0.3)
        with pytest.raises(dbuffer.WaitTimeoutError, match="not lead"):
            follower.wait_applied(version, 0.1)
        assert engine.serves == (OLD, "5")
        assert scene.metrics()["following"] == 0
    assert sum("not lead" in line for line in scene.lines()) == 1
    # Until it is told otherwise; and following it again in the same way is not that.
    with scene.follower(forked="refuse") as again:
        with pytest.raises((VersionRegressedError, EngineUpdateError), match="not lead"):
            again.sync()
        assert engine.version == OLD
    with scene.follower() as told:
        assert (told.sync().version, engine.version) == (version + 5, NEW + 5)


@NUMBERS
def test_a_follower_tells_a_fork_by_what_the_engine_has(scene, version):
    engine = scene.engine
    with scene.follower() as first:
        first.sync()
    begin(scene.store, version, NEW)
    with scene.follower(timeout_s=20) as follower:
        assert (follower.sync().version, engine.version) == (version, NEW)

        def begin_anew() -> None:
            """Begin the store anew, and see the rank go on there: it has no problem to report."""
            begin(scene.store, 7, OLD)
            scene.wait_until_staged(7)

        engine.num_looks, engine.when_waiting = 0, begin_anew
        # A number is one of the run that is there, whichever was there when it was asked for.
        assert (follower.sync(at_least=7).version, engine.version) == (7, OLD)


def test_a_rank_refuses_by_itself(scene):
    """Also where vLLM's own calls drive it, and no follower of ours."""
    with scene.follower(forked="refuse") as follower:
        follower.sync()
        begin(scene.store, 6, NEW)
        for request in (UpdateRequest(), UpdateRequest(version=6), UpdateRequest(at_least=6)):
            with pytest.raises(EngineUpdateError, match="VersionRegressedError"):
                scene.engine.receiver.update(request)
            assert scene.engine.version == OLD


@NUMBERS
def test_an_engine_behind_a_mirror_goes_on_with_it(scene, tmp_path, version):
    local = str(tmp_path / "local")
    with (
        Mirror(scene.store, local, poll_interval_s=0.05).start() as mirror,
        scene.follower(local_store=local) as follower,
    ):
        mirror.wait_until_current(WAIT_S)
        follower.sync()
        assert scene.engine.version == OLD
        begin(scene.store, version, NEW)
        # Known to be published, and on its way: neither the old version nor nothing will do.
        assert follower.sync(at_least=version).version == version
        assert scene.engine.version == NEW


def test_going_back_does_not_take_the_next_runs_version_of_that_number(scene):
    """The run before is gone: its version 5 cannot be had again, and another's must not be."""
    with scene.follower() as follower:
        follower.sync()
        remove_store(scene.store)
        with dbuffer.WeightSender(scene.store) as sender:
            sender.send(SMALL.weights(NEW), version=5)
            sender.send(SMALL.weights(NEW + 1))
            scene.engine.rank.failing_loads = 1
            assert follower.sync().version == 6, "loaded once more, and acknowledged"
    assert scene.engine.version == NEW + 1


def test_a_follower_that_begins_believes_no_record_of_a_backup(scene, tmp_path):
    """Ranks that follow already, as those of a configured engine do, write theirs again."""
    configured = options(scene.store, scene.engine_id)
    facts = dataclasses.replace(scene.engine.facts(), configured=configured)
    scene.engine.facts = lambda: facts
    with scene.follower() as follower:
        follower.sync()
    shutil.copytree(scene.store, tmp_path / "before")
    with dbuffer.WeightSender(scene.store) as sender, scene.follower() as follower:
        sender.send(SMALL.weights(OLD + 1))
        follower.sync()
    remove_store(scene.store)
    shutil.move(tmp_path / "before", scene.store)
    with scene.follower() as follower:
        follower.start()
        assert (follower.applied, scene.engine.serves) == (6, (OLD + 1, "6"))


# Stores that are put back from a copy


def send(store: Path, *versions: int, value: int = 0) -> None:
    with dbuffer.WeightSender(store) as sender:
        for version in versions:
            assert sender.send(SMALL.weights(version + value)).version == version


@pytest.mark.parametrize("looks", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_is_ahead_takes_the_versions_that_follow(scene, way, looks):
    """Their numbers are below, equal to and above the number of its version."""
    backup = scene.store.with_name("backup")
    back_up(scene.store, backup)
    with scene.follower() as follower:
        follower.sync()
        send(scene.store, 6, 7, 8)
        follower.sync()
        way(scene.store, backup)
        rank = f"{scene.engine_id}.rank-0"
        for _ in range(looks):
            # The rank's thread writes its own record into the store that was put back.
            until("its record is back", lambda: DoubleBuffer(scene.store).receiver(rank), WAIT_S)
            with pytest.raises(VersionRegressedError):
                follower.sync()
            assert scene.engine.serves == (8, "8")
            assert scene.recorded[0] == 8
        for version in range(6, 11):
            send(scene.store, version, value=LOST)
            assert follower.sync().version == version
            assert scene.engine.serves == (version + LOST, str(version))
            assert scene.recorded[0] == version


# Labels


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
    assert ready == dataclasses.replace(before, newest_run=after.run)


def test_a_fork_that_does_not_fit_is_logged_once(scene):
    with scene.follower() as follower:
        follower.sync()
        remove_store(scene.store)
        with dbuffer.WeightSender(scene.store) as sender:
            sender.send({"other": torch.zeros(3)}, version=6)
        for _ in range(2):
            with pytest.raises(EngineUpdateError):
                follower.sync()
    assert sum("follows the newest" in line for line in scene.lines()) == 1
