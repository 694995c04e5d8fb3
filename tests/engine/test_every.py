"""An engine that skips versions on purpose, and keeps each that it takes until it is evaluated.

As in `test_follower.py`, the engine is a dictionary of tensors with a real `RankReceiver`.
"""

from __future__ import annotations

import functools
import time

import pytest

import dbuffer
from dbuffer.store.acknowledgements import receiver_lags
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.kept import pin
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


@pytest.mark.parametrize(
    ("when", "taken"),
    [
        ({"step": 20}, [2, 4, 6, 8]),
        ({"step": 20, "epoch": 3}, [6]),
        ({"epoch": 1}, [3, 6]),
        ({"name": 1}, []),
    ],
)
def test_metadata_can_decide_which_versions_are_served(mount, scene, sender, when, taken):
    """A version without one of the keys is skipped; so is one with a text or a flag there."""
    served = []
    with scene.follower(when=when) as follower:
        for version in range(1, 9):
            epoch = {"epoch": float(version)} if version % 3 == 0 else {"epoch": version == 1}
            metadata = {"step": 10 * version, "name": "1", **epoch}
            sender.send(SMALL.weights(version), metadata=metadata)
            if follower.sync() is not None:
                served.append(scene.engine.version)
    assert served == taken
    assert scene.engine.rank.num_loads == len(taken)


@pytest.mark.parametrize("kept", [False, True])
def test_a_version_that_was_followed_by_others_is_taken_while_the_store_has_it(mount, scene, kept):
    with scene.follower(when={"step": 30}) as follower:
        scene.publish(1, 2, 3, 4)
        if kept:
            pin(DoubleBuffer(scene.store), 3)
            scene.publish(5)
        assert follower.sync().version == 3
        assert scene.engine.serves == (3, "3")
        assert follower.sync() is None


def test_a_version_that_is_gone_is_skipped(scene):
    with scene.follower(every=3) as follower:
        scene.publish(1, 2, 3, 4, 5)
        assert follower.sync() is None
        scene.publish(6, 7)
        assert follower.sync().version == 6


@pytest.mark.parametrize("option", [{"every": 3}, {"when": {"step": 30}}])
def test_only_due_versions_are_staged(scene, option):
    scene.publish(1)
    with scene.background(**option) as follower:
        scene.publish(2, 3)
        assert follower.wait_applied(1, WAIT_S) == 3
        until("it is ready for the next", lambda: lag(scene) == 0)
        before = staged(scene)
        scene.publish(4, 5)
        with nearly_idle(), pytest.raises(dbuffer.WaitTimeoutError):
            follower.wait_applied(4, 0.5)
        assert staged(scene) == before
        scene.publish(6)
        assert follower.wait_applied(4, WAIT_S) == 6
        assert scene.engine.serves == (6, "6")


def test_a_version_that_cannot_be_staged_is_named_and_a_later_one_taken(scene, sender):
    with scene.background(every=3) as follower:
        scene.publish(1, 2)
        sender.send({"other": SMALL.weights(3)[SMALL.names[0]]})
        with pytest.raises(dbuffer.ReceiverFailedError, match="could not apply version 3"):
            sender.wait_applied(3, receivers=[scene.engine_id], timeout_s=WAIT_S)
        scene.publish(4)
        with nearly_idle():
            time.sleep(0.5)
        with pytest.raises(dbuffer.ReceiverFailedError, match="could not apply version 3"):
            sender.wait_applied(3, receivers=[scene.engine_id], timeout_s=WAIT_S)
        scene.publish(5, 6)
        assert follower.wait_applied(3, WAIT_S) == 6


def test_no_version_in_use_keeps_a_sender_waiting(shm_path, caplog):
    """The version that is ready while an evaluation goes on is not replaced by newer ones."""
    with dbuffer.WeightSender(shm_path / "store", reader_timeout_s=WAIT_S) as sender:
        scene = Scene(shm_path / "store", "engine", caplog, sender=sender)
        scene.publish(1, 2, 3, 4)
        with scene.background(every=4, until_done=True) as follower:
            follower.wait_applied(4, WAIT_S)
            scene.publish(5, 6, 7, 8)
            until("the next is ready", lambda: staged(scene) == 2)
            before = time.monotonic()
            scene.publish(9, 10, 11)
            assert time.monotonic() - before < WAIT_S / 4
            follower.done()
            assert follower.wait_applied(5, WAIT_S) == 8


@pytest.mark.parametrize("option", [{"every": 3}, {"when": {"step": 30}}])
def test_a_receiver_that_is_not_due_does_not_lag(scene, option):
    scene.publish(1, 2, 3)
    with scene.background(**option) as follower:
        follower.wait_applied(3, WAIT_S)
        until("it is at the newest", lambda: lag(scene) == 0)
        scene.publish(4, 5)
        assert lag(scene) is None
        [status] = [
            each
            for each in read_status(DoubleBuffer(scene.store))["receivers"]
            if each["part_of"] is None
        ]
        options = {"every": 1, "when": {}} | option
        assert {name: status[name] for name in options} == options
        assert status["lag_versions"] is None


def test_a_receiver_that_is_due_lags(scene):
    scene.publish(1, 2, 3)
    with scene.follower(every=3) as follower:
        follower.sync()
        scene.publish(4, 5, 6)
        until("it lags", lambda: lag(scene) == 3)


@pytest.mark.parametrize(
    ("option", "multiples"),
    [
        ({"every": 3}, "its number is a multiple of 3"),
        ({"when": {"step": 30}}, "its step is a multiple of 30"),
    ],
)
def test_a_sender_that_waits_for_a_skipped_version_is_told(scene, sender, option, multiples):
    scene.publish(1, 2, 3)
    with scene.background(**option) as follower:
        follower.wait_applied(3, WAIT_S)
        sender.wait_applied(2, receivers=[scene.engine_id], timeout_s=WAIT_S)
        scene.publish(4)
        with pytest.raises(dbuffer.ReceiverFailedError, match=f"skips version 4 .*{multiples}"):
            sender.wait_applied(4, receivers=[scene.engine_id], timeout_s=WAIT_S)
        with pytest.raises(dbuffer.WaitTimeoutError, match="skips version 4 and is at version 3"):
            sender.wait_applied(4, receivers=1, timeout_s=0.1)
        scene.publish(5, 6)
        sender.wait_applied(6, receivers=[scene.engine_id], timeout_s=WAIT_S)


def test_a_version_that_is_required_is_waited_for_until_one_is_due(scene):
    scene.publish(1, 2, 3)
    with scene.follower(every=3) as follower:
        follower.sync()
        scene.publish(4, 5)
        with pytest.raises(dbuffer.WaitTimeoutError, match="version 4"):
            follower.sync(at_least=4, timeout_s=0.2)
        scene.publish(6)
        assert follower.sync(at_least=4).version == 6
        assert follower.sync(at_least=4) is None


@pytest.mark.parametrize("version", [3, 9])
def test_another_run_is_followed_even_if_a_version_is_kept(scene, version):
    scene.publish(1, 2, 3)
    with scene.background(every=3, until_done=True) as follower:
        follower.wait_applied(3, WAIT_S)
        remove_store(scene.store)
        with dbuffer.WeightSender(scene.store) as again:
            again.send(SMALL.weights(5), version=version - 2)
            again.send(SMALL.weights(6), version=version - 1)
            time.sleep(0.2)
            assert scene.engine.serves == (3, "3")
            again.send(SMALL.weights(7), version=version)
            until("the run is followed", lambda: scene.engine.serves == (7, str(version)))


def test_another_run_is_followed_from_below_the_versions_that_were_skipped(scene):
    scene.publish(1, 2, 3)
    with scene.background(every=3) as follower:
        follower.wait_applied(3, WAIT_S)
        scene.publish(4, 5)
        with nearly_idle():
            time.sleep(0.5)
        remove_store(scene.store)
        with dbuffer.WeightSender(scene.store) as again:
            again.send(SMALL.weights(5))
            with nearly_idle():
                time.sleep(0.5)
            for seed in (6, 7):
                again.send(SMALL.weights(seed))
            until("the run is followed", lambda: scene.engine.serves == (7, "3"))


@pytest.mark.parametrize("every", [1, 2])
def test_a_version_is_kept_until_its_user_is_done(scene, every):
    scene.publish(1, 2)
    with scene.background(every=every, until_done=True) as follower:
        follower.wait_applied(2, WAIT_S)
        for version in (4, 6):
            scene.publish(version - 1, version)
            with nearly_idle(), pytest.raises(dbuffer.WaitTimeoutError):
                follower.wait_applied(version, 0.3)
            assert scene.engine.serves == (version - 2, str(version - 2))
            follower.done()
            assert follower.wait_applied(version, WAIT_S) == version
            assert scene.engine.serves == (version, str(version))


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


@pytest.mark.parametrize("option", [{"every": 3}, {"when": {"step": 10}}, {"until_done": True}])
def test_each_newest_version_of_another_store_is_applied_once(scene, shm_path, option):
    scene.publish(1)
    other_store = shm_path / "other"
    with scene.follower(**option) as follower, dbuffer.WeightSender(other_store) as other:
        follower.sync()
        for number in (7, 8):
            other.send(SMALL.weights(number))
            follower.apply_once(str(other_store))
            assert scene.engine.serves[0] == number


@pytest.mark.parametrize("option", [{"every": 2}, {"when": {"step": 2}}, {"until_done": True}])
def test_an_engine_that_stays_on_a_version_takes_no_other(scene, option):
    with pytest.raises(dbuffer.OptionError, match="if version is set"):
        scene.follower(version=1, **option)
