"""An engine that is to serve one version and stay on it, over real stores.

As in `test_follower.py`, the engine is a dictionary of tensors with a real `RankReceiver`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import dbuffer
from dbuffer.engine.background import BackgroundFollower
from dbuffer.engine.engine_options import EngineOptions, UpdateRequest
from dbuffer.format.manifest import ReceiverRecord
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing import waiting
from dbuffer.testing.engines import FakeEngine
from dbuffer.tools.status import read_status
from tests.support.light_engines import WAIT_S, Scene, nearly_idle
from tests.support.patterns import SMALL
from tests.support.stores import remove_store

pytestmark = pytest.mark.timing(retry_min_s=0.05)

NOT_IN_VAIN_S = 0.3
"""How long a test waits for what must not come."""

until = functools.partial(waiting.until, timeout_s=WAIT_S)


@pytest.fixture
def sender(store: Path) -> Iterator[dbuffer.WeightSender]:
    with dbuffer.WeightSender(store, keep=3) as made:
        yield made


def rank(scene: Scene) -> ReceiverRecord:
    record = DoubleBuffer(scene.store).receiver(f"{scene.engine_id}.rank-0")
    assert record is not None
    return record


@pytest.mark.parametrize("version", [1, 4, 5], ids=["kept", "previous", "newest"])
def test_engine_is_switched_once_and_stays(scene, mount, version):
    scene.publish(1, 2, 3, 4, 5)
    with scene.follower(version=version) as follower:
        assert follower.sync().version == version
        for later in (6, 7, 8, 9, 10):
            scene.publish(later)
            assert follower.sync() is None
        assert scene.engine.serves == (version, str(version))
        assert follower.applied == version
        assert scene.engine.rank.num_loads == 1
        # A thread lets go of it after the switch.
        until("it is let go", lambda: rank(scene).held is None)
        assert rank(scene).stats["staged"] == 1


def test_engine_goes_back_and_on_again(scene):
    scene.publish(1)
    with scene.follower() as follower:
        follower.sync()
        scene.publish(2, 3, 4)
        follower.sync()
    with scene.follower(version=2) as follower:
        scene.engine.rank.failing_loads = 1
        with pytest.raises(dbuffer.EngineUpdateError, match="went back"):
            follower.sync()
        assert scene.engine.serves == (4, "4")
        assert not follower.has_applied(2)
        assert follower.sync().version == 2
        assert follower.has_applied(2)
        assert scene.engine.serves == (2, "2")
    with scene.follower() as follower:
        assert follower.sync().version == 4
        assert scene.engine.serves == (4, "4")


def test_version_that_is_gone_is_refused_at_the_start(scene):
    scene.publish(*range(1, 9))
    for begin in (
        lambda: scene.follower(version=2).start(),
        lambda: BackgroundFollower(scene.follower(version=2)),
    ):
        with pytest.raises(dbuffer.VersionError, match=r"version 2 .* holds 4, 5, 6, 7, 8$"):
            begin()
    assert scene.engine.endpoint.receiver is None
    assert scene.engine.serves == (0, "default")


def test_version_that_is_not_published_yet_is_waited_for(scene):
    scene.publish(1)
    with scene.follower() as follower:
        follower.sync()
    with scene.background(version=4) as follower:
        scene.publish(2, 3)
        until("it looks", lambda: follower.error is None and follower.applied == 1)
        with nearly_idle(), pytest.raises(dbuffer.WaitTimeoutError):
            follower.wait_applied(1, 0.5)  # a version below does not count
        assert scene.engine.serves == (1, "1")
        scene.publish(4)
        assert follower.wait_applied(4, WAIT_S) == 4
        scene.publish(5, 6)
        with nearly_idle(), pytest.raises(dbuffer.WaitTimeoutError):
            follower.wait_applied(5, 0.5)
        assert scene.engine.serves == (4, "4")


def test_engine_waits_for_a_store_that_is_not_there(shm_path, engine_id, caplog):
    scene = Scene(shm_path / "later", engine_id, caplog)
    with scene.follower(version=2) as follower:
        assert follower.sync(at_least=1) is None
    with scene.background(version=2) as follower:
        with dbuffer.WeightSender(scene.store) as sender:
            for version in (1, 2, 3):
                sender.send(SMALL.weights(version))
        assert follower.wait_applied(2, WAIT_S) == 2


def test_restarted_server_gets_it_again(scene):
    scene.publish(1, 2, 3, 4)
    scene.engine.is_server = True
    with scene.background(version=2) as follower:
        follower.wait_applied(2, WAIT_S)
        scene.engine.restart()
        until("it is switched again", lambda: scene.engine.serves == (2, "2"))


def test_version_that_is_dropped_before_it_is_ready_leaves_the_engine(scene):
    scene.publish(1)
    with scene.follower() as follower:
        follower.sync()
    scene.publish(2, 3, 4, 5)
    with scene.follower(version=2, staging="copy") as follower:
        follower.start()
        scene.publish(6, 7, 8)
        with pytest.raises(dbuffer.VersionError, match=r"version 2 .* holds 4, 5, 6, 7, 8$"):
            follower.sync()
        assert scene.engine.serves == (1, "1")


def test_rank_that_cannot_have_it_says_so_and_does_not_spin(scene):
    """The follower has seen the version, and the rank comes too late."""
    scene.publish(1, 2, 3)
    with scene.follower(version=1) as follower:
        follower.start()
        goal = follower._view.newer_than(None)
        scene.publish(4, 5, 6, 7)
        scene.engine.endpoint.note_foreign_load("this test")  # and it is staged anew
        for attempt in (
            lambda: follower._view.wait_ready(goal, None, WAIT_S, None),
            lambda: scene.engine.receiver.update(UpdateRequest()),
        ):
            problem = r"version 1 of run [0-9a-f]{16} is not in .*, which holds \d"
            with pytest.raises(dbuffer.EngineUpdateError, match=problem):
                attempt()
        failures = rank(scene).stats["failures"]
        with nearly_idle(but_for_s=0.1):
            until("it is tried again", lambda: rank(scene).stats["failures"] > failures)
    assert scene.engine.serves == (0, "default")


def test_what_asks_for_another_version_is_refused(scene):
    scene.publish(1, 2, 3)
    with scene.follower(version=2) as follower:
        follower.sync()
        with pytest.raises(dbuffer.OptionError, match="2"):
            follower.sync(at_least=3)
        assert follower.sync(at_least=1) is None
        for request in (UpdateRequest(version=3), UpdateRequest(at_least=3)):
            with pytest.raises(dbuffer.OptionError, match="stays on version 2"):
                scene.engine.receiver.update(request)
        scene.engine.receiver.update(UpdateRequest())
        assert scene.engine.serves == (2, "2")
        # A forced sync brings it again, if it is there.
        scene.engine.rank.tensors = SMALL.weights(0)  # unnoticed
        assert follower.sync(force=True).version == 2
        assert scene.engine.serves == (2, "2")
        scene.publish(4, 5, 6, 7, 8)
        with pytest.raises(dbuffer.VersionError, match="version 2 "):
            follower.sync(force=True)
        assert scene.engine.serves == (2, "2")


def test_local_copy_is_refused():
    with pytest.raises(dbuffer.OptionError, match="local_store"):
        EngineOptions(store="/store", local_store="/dev/shm/copy", version=3)


def test_engine_stays_when_the_store_is_started_over(scene):
    scene.publish(1, 2, 3)
    scene.engine.is_server = True  # which is asked at each look
    with scene.background(version=2) as follower:
        follower.wait_applied(2, WAIT_S)
        remove_store(scene.store)
        with dbuffer.WeightSender(scene.store) as sender:
            for version in (11, 12):
                sender.send(SMALL.weights(version))
            looks = scene.engine.calls
            until("it has looked", lambda: scene.engine.calls > looks + 3)
        assert follower.error is None
        assert scene.engine.serves == (2, "2")


@pytest.mark.parametrize(("forked", "serves"), [("follow", (12, "2")), ("refuse", (2, "2"))])
def test_follower_that_begins_takes_the_version_of_a_store_that_was_started_over(
    scene, monkeypatch, forked, serves
):
    monkeypatch.setattr(scene.engine, "close", lambda: None)
    scene.publish(1, 2, 3)
    with scene.follower(version=2, forked=forked) as follower:
        follower.sync()
    remove_store(scene.store)
    with dbuffer.WeightSender(scene.store) as sender:
        for version in (11, 12):
            sender.send(SMALL.weights(version))
        for _ in range(2):
            with scene.follower(version=2, forked=forked) as follower:
                follower.sync()
                assert (scene.engine.serves, follower.applied) == (serves, 2)
        assert follower.has_applied(2) == (forked == "follow")


@pytest.mark.parametrize("forked", ["follow", "refuse"])
def test_follower_that_begins_resumes_an_engine_although_its_store_is_damaged(
    scene, monkeypatch, forked
):
    """A killed follower left it paused, and the engine has the version of the option."""
    monkeypatch.setattr(scene.engine, "close", lambda: None)
    scene.publish(1, 2)
    scene.engine.is_server = True
    with scene.follower(version=2) as follower:
        follower.sync()
    scene.engine.paused = True
    (scene.store / "CURRENT").write_bytes(b"garbled")
    with scene.follower(version=2, forked=forked) as follower:
        follower.sync()
        assert (scene.engine.serves, scene.engine.paused) == ((2, "2"), False)


def test_store_that_is_started_over_before_the_switch(scene):
    scene.publish(1, 2, 3)
    with scene.follower(version=2) as follower:
        follower.start()
        scene.wait_until_staged(2)
        remove_store(scene.store)
        with dbuffer.WeightSender(scene.store) as sender:
            for version in (11, 12):
                sender.send(SMALL.weights(version))
            assert follower.sync().version == 2
        assert scene.engine.serves == (12, "2")


def test_follower_that_begins_again_holds_nothing(scene, sender):
    """A version in a buffer would keep the sender waiting."""
    scene.publish(1, 2, 3)
    with scene.follower(version=3) as follower:
        follower.sync()
    with scene.follower(version=3) as follower:
        assert follower.sync() is None
        time.sleep(NOT_IN_VAIN_S)
        assert rank(scene).staged is None


def test_senders_do_not_wait_for_it(scene, sender):
    scene.publish(1, 2, 3)
    with scene.follower(version=2) as follower:
        follower.sync()
        sender.wait_applied(2, receivers=[scene.engine_id], timeout_s=WAIT_S)
        with pytest.raises(dbuffer.ReceiverFailedError, match="stays on version 2"):
            sender.wait_applied(3, receivers=[scene.engine_id], timeout_s=WAIT_S)
        [engine, _] = read_status(DoubleBuffer(scene.store))["receivers"]
        assert (engine["only_version"], engine["lag_versions"]) == (2, None)
        with pytest.raises(dbuffer.WaitTimeoutError, match=f"{scene.engine_id} stays on version 2"):
            sender.wait_applied(3, receivers=1, timeout_s=0.1)
        other = Scene(scene.store, "other", None, engine=FakeEngine(instance_id="two"))
        with other.follower() as follows:
            follows.sync()
            sender.wait_applied(3, receivers=1, timeout_s=WAIT_S)
    with scene.follower() as follower:
        follower.sync()
        sender.wait_applied(3, receivers=[scene.engine_id], timeout_s=WAIT_S)
