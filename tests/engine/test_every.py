"""An engine that takes every n-th version, and keeps each for as long as an evaluation needs it.

As in `test_follower.py`, the engine is a dictionary of tensors with a real `RankReceiver`.
"""

from __future__ import annotations

import functools

import pytest

import dbuffer
from dbuffer.store.acknowledgements import receiver_lags
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing import waiting
from dbuffer.tools.status import read_status
from tests.support.light_engines import WAIT_S, Scene, nearly_idle
from tests.support.patterns import SMALL
from tests.support.stores import remove_store

until = functools.partial(waiting.until, timeout_s=WAIT_S)


def lag(scene: Scene) -> int | None:
    lags = receiver_lags(DoubleBuffer(scene.store))
    return lags[scene.engine_id].versions if scene.engine_id in lags else None


def staged(scene: Scene) -> int:
    record = DoubleBuffer(scene.store).receiver(f"{scene.engine_id}.rank-0")
    assert record is not None
    return int(record.stats["staged"])


def test_versions_between_are_neither_staged_nor_served(mount, scene):
    served = []
    with scene.follower(every=3) as follower:
        for version in range(1, 9):
            scene.publish(version)
            if follower.sync() is not None:
                served.append(scene.engine.serves)
    assert served == [(1, "1"), (4, "4"), (7, "7")]
    assert scene.engine.rank.num_loads == 3


def test_a_version_that_was_missed_is_made_up_for_by_the_next(scene):
    scene.publish(1)
    with scene.follower(every=3) as follower:
        follower.sync()
        scene.publish(2, 3, 4, 5, 6)
        assert follower.sync().version == 6
        scene.publish(7, 8)
        assert follower.sync() is None


def test_only_due_versions_are_staged(scene):
    scene.publish(1)
    with scene.background(every=3) as follower:
        follower.wait_applied(1, WAIT_S)
        before = staged(scene)
        scene.publish(2, 3)
        with nearly_idle(), pytest.raises(dbuffer.WaitTimeoutError):
            follower.wait_applied(2, 0.5)
        assert staged(scene) == before
        scene.publish(4)
        assert follower.wait_applied(4, WAIT_S) == 4
        assert scene.engine.serves == (4, "4")


def test_a_receiver_that_is_not_due_does_not_lag(scene):
    scene.publish(1)
    with scene.background(every=3) as follower:
        follower.wait_applied(1, WAIT_S)
        until("it is at the newest", lambda: lag(scene) == 0)
        scene.publish(2, 3)
        assert lag(scene) is None
        [status] = [
            each
            for each in read_status(DoubleBuffer(scene.store))["receivers"]
            if each["part_of"] is None
        ]
        assert (status["every"], status["lag_versions"]) == (3, None)


def test_a_receiver_that_is_due_lags(scene):
    scene.publish(1)
    with scene.follower(every=3) as follower:
        follower.sync()
        scene.publish(2, 3, 4)
        until("it lags", lambda: lag(scene) == 3)


def test_a_sender_that_waits_for_it_learns_why_in_vain(scene, sender):
    scene.publish(1)
    with scene.background(every=3) as follower:
        follower.wait_applied(1, WAIT_S)
        scene.publish(2)
        with pytest.raises(dbuffer.WaitTimeoutError, match="switches every 3 versions and is at 1"):
            sender.wait_applied(2, receivers=[scene.engine_id], timeout_s=0.5)


def test_a_version_that_is_required_is_waited_for_until_one_is_due(scene):
    scene.publish(1)
    with scene.follower(every=3) as follower:
        follower.sync()
        scene.publish(2, 3)
        with pytest.raises(dbuffer.WaitTimeoutError, match="version 4"):
            follower.sync(at_least=2, timeout_s=0.2)
        scene.publish(4)
        assert follower.sync(at_least=2).version == 4
        assert follower.sync(at_least=2) is None


@pytest.mark.parametrize("version", [1, 3, 4, 9])
def test_another_run_is_followed_at_once(scene, version):
    scene.publish(1, 2, 3)
    with scene.background(every=3, until_done=True) as follower:
        follower.wait_applied(3, WAIT_S)
        remove_store(scene.store)
        with dbuffer.WeightSender(scene.store) as again:
            again.send(SMALL.weights(7), version=version)
            until("the run is followed", lambda: scene.engine.serves == (7, str(version)))


@pytest.mark.parametrize("every", [1, 2])
def test_a_version_is_kept_until_its_user_is_done(scene, every):
    scene.publish(1)
    with scene.background(every=every, until_done=True) as follower:
        follower.wait_applied(1, WAIT_S)
        for version in (3, 5):
            scene.publish(version - 1, version)
            with nearly_idle(), pytest.raises(dbuffer.WaitTimeoutError):
                follower.wait_applied(version, 0.3)
            assert scene.engine.serves == (version - 2, str(version - 2))
            follower.done()
            assert follower.wait_applied(version, WAIT_S) == version
            assert scene.engine.serves == (version, str(version))


def test_done_is_of_no_effect_on_a_later_version(scene):
    scene.publish(1)
    with scene.follower(until_done=True) as follower:
        follower.done()
        follower.sync()
        follower.done()
        follower.done()
        scene.publish(2)
        assert follower.sync().version == 2
        scene.publish(3)
        assert follower.sync() is None


def test_a_version_is_kept_if_no_later_one_is_required(scene):
    scene.publish(1)
    with scene.follower(until_done=True) as follower:
        follower.sync()
        scene.publish(2)
        assert follower.sync(at_least=1) is None
        assert scene.engine.serves == (1, "1")
        assert follower.sync(at_least=2).version == 2


def test_a_follower_that_comes_back_keeps_the_version(scene):
    scene.publish(1)
    with scene.follower(until_done=True) as follower:
        follower.sync()
    scene.publish(2)
    with scene.follower(until_done=True) as follower:
        assert follower.sync() is None
        follower.done()
        assert follower.sync().version == 2


def test_done_counts_if_following_begins_again(scene):
    scene.publish(1)
    with scene.follower(until_done=True) as follower:
        follower.sync()
        follower.done()
        follower.stop_workers()
        assert follower.sync() is None
        scene.publish(2)
        assert follower.sync().version == 2
        follower.stop_workers()
        scene.publish(3)
        assert follower.sync() is None


@pytest.mark.parametrize("option", [{"every": 3}, {"until_done": True}])
def test_each_newest_version_of_another_store_is_applied_once(scene, shm_path, option):
    scene.publish(1)
    other_store = shm_path / "other"
    with scene.follower(**option) as follower, dbuffer.WeightSender(other_store) as other:
        follower.sync()
        for number in (7, 8):
            other.send(SMALL.weights(number))
            follower.apply_once(str(other_store))
            assert scene.engine.serves[0] == number


@pytest.mark.parametrize("option", [{"every": 2}, {"until_done": True}])
def test_an_engine_that_stays_on_a_version_takes_no_other(scene, option):
    with pytest.raises(dbuffer.OptionError, match="with version"):
        scene.follower(version=1, **option)


@pytest.mark.parametrize("every", [0, -1, 1.0, True, "10"])
def test_a_distance_is_a_whole_number(scene, every):
    with pytest.raises(dbuffer.OptionError, match="every"):
        scene.follower(every=every)
