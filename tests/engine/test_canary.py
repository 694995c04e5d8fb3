"""A canary: an engine whose probe judges each version, and other engines that skip refused ones.

As in `test_follower.py`, the engines are dictionaries of tensors with real `RankReceiver`s.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from dbuffer.engine.background import BackgroundFollower
from dbuffer.engine.follower import Follower
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.kept import pin
from dbuffer.testing import waiting
from dbuffer.testing.engines import FakeEngine
from dbuffer.tools.status import read_status
from tests.support.light_engines import WAIT_S, nearly_idle, options
from tests.support.patterns import SMALL

until = functools.partial(waiting.until, timeout_s=WAIT_S)

BAD = 3
"""Version that the probe refuses."""


class Canary:
    """An engine with a probe that refuses :data:`BAD`."""

    def __init__(self, store: Path, engine: FakeEngine | None = None, **more: Any) -> None:
        self.engine = engine or FakeEngine(instance_id="canary")
        self.judged: list[int | None] = []
        options_ = options(store, "canary", **more)
        self.follower = Follower(self.engine, options_, canary=self.probe)

    def probe(self) -> str | None:
        self.judged.append(self.engine.version)
        return "it talks nonsense" if self.engine.version == BAD else None


@pytest.fixture
def canary(scene) -> Iterator[Canary]:
    canary = Canary(scene.store)
    with canary.follower:
        yield canary


def test_a_version_is_acknowledged_once_it_is_accepted(scene, sender, canary):
    scene.publish(1)
    states = []

    def probe() -> None:
        record = DoubleBuffer(scene.store).receiver("canary")
        states.append((record.state, canary.engine.paused, canary.engine.serves))
        with pytest.raises(dbuffer.WaitTimeoutError):
            sender.wait_applied(1, receivers="canary", timeout_s=0.1)

    canary.follower._canary = probe
    canary.follower.sync()
    assert states == [("on_trial", False, (1, "1"))]
    sender.wait_applied(1, receivers="canary", timeout_s=WAIT_S)
    assert canary.follower.has_applied(1)


def test_a_refused_version_is_left_by_the_canary_and_skipped_by_others(
    mount, scene, sender, canary
):
    scene.publish(1, 2)
    canary.follower.sync()
    with scene.background() as other:
        other.wait_applied(2, WAIT_S)
        other.close()
    scene.publish(BAD)
    with pytest.raises(
        dbuffer.EngineUpdateError, match=r"version 3 .* it talks nonsense.*version 2"
    ):
        canary.follower.sync()
    assert canary.engine.serves == (2, "2")
    assert canary.judged == [2, BAD]
    for receivers in (1, "canary", scene.engine_id):
        with pytest.raises(
            dbuffer.ReceiverFailedError, match=r"3 .* was refused by canary: it talks"
        ):
            sender.wait_applied(BAD, receivers=receivers, timeout_s=WAIT_S)
    [problem] = read_status(DoubleBuffer(scene.store))["problems"]
    assert "version 3 was refused by canary: it talks nonsense" in problem
    with scene.background() as other, nearly_idle(0.5):
        with pytest.raises(dbuffer.WaitTimeoutError):
            other.wait_applied(BAD, 1.0)
        assert scene.engine.serves == (2, "2")
        assert canary.follower.sync() is None
    scene.publish(4)
    assert canary.follower.sync().version == 4
    assert canary.judged == [2, BAD, 4]
    with scene.background() as other:
        assert other.wait_applied(4, WAIT_S) == 4
    assert read_status(DoubleBuffer(scene.store))["problems"] == []


def test_a_probe_that_fails_refuses(scene, canary):
    scene.publish(1)
    canary.follower.sync()

    def fail() -> None:
        raise ValueError("no answer")

    canary.follower._canary = fail
    scene.publish(2)
    with pytest.raises(dbuffer.EngineUpdateError, match="ValueError: no answer"):
        canary.follower.sync()
    assert canary.engine.serves == (1, "1")


def test_an_engine_that_starts_takes_the_last_version_that_was_not_refused(scene, canary):
    scene.publish(1, 2)
    canary.follower.sync()
    scene.publish(BAD)
    with pytest.raises(dbuffer.EngineUpdateError):
        canary.follower.sync()
    with scene.follower() as other:
        assert other.sync().version == 2
        with pytest.raises(dbuffer.EngineUpdateError, match="was refused by canary"):
            other.sync(at_least=BAD)
        assert other.sync() is None


def test_without_an_earlier_version_the_weights_are_labeled_unknown(scene, sender, canary):
    sender.send(SMALL.weights(BAD), version=BAD)
    with pytest.raises(dbuffer.EngineUpdateError, match="weights from outside the store"):
        canary.follower.sync()
    assert canary.engine.serves == (BAD, "unknown")
    assert canary.follower.sync() is None
    scene.publish(4)
    assert canary.follower.sync().version == 4


@pytest.mark.parametrize("option", [{}, {"every": 1}, {"when": {"step": 10}}, {"until_done": True}])
def test_an_engine_that_has_a_refused_version_says_so_and_goes_on(scene, canary, option):
    scene.publish(1, 2, BAD)
    with scene.follower(**option) as other:
        other.sync()
        with pytest.raises(dbuffer.EngineUpdateError):
            canary.follower.sync()
        other.done()
        for _ in range(2):
            assert other.sync() is None
        [line] = [line for line in scene.lines() if "refused" in line]
        assert f"{scene.engine_id} serves version 3 of" in line
        scene.publish(4)
        assert other.sync().version == 4


def test_a_refusal_that_does_not_show_at_once_is_no_reason_to_switch_for_ever(
    scene, canary, monkeypatch
):
    """As on a network mount, which can show for some seconds that there is no such file."""
    scene.publish(1, 2)
    canary.follower.sync()
    scene.publish(BAD)
    with monkeypatch.context() as late:
        late.setattr(DoubleBuffer, "refusal", lambda store, version: None)
        with pytest.raises(
            dbuffer.EngineUpdateError, match=r"refused by canary.*outside the store"
        ):
            canary.follower.sync()
    with contextlib.suppress(dbuffer.EngineUpdateError):  # the version may be ready once more
        canary.follower.sync()
    assert canary.engine.serves == (2, "2")
    assert canary.judged == [2, BAD]


def test_a_version_that_was_ready_when_it_was_refused_is_not_taken(scene, canary):
    scene.publish(1, 2)
    with scene.follower() as other:
        other.sync()
        scene.publish(BAD)
        store, rank = DoubleBuffer(scene.store), f"{scene.engine_id}.rank-0"
        until("it is ready", lambda: (store.receiver(rank).staged or [None, 0])[1] == BAD)
        with pytest.raises(dbuffer.EngineUpdateError):
            canary.follower.sync()
        assert other.sync() is None
        assert scene.engine.serves == (2, "2")


def test_a_kept_version_stays_refused(scene, canary):
    scene.publish(1, 2, BAD)
    with pytest.raises(dbuffer.EngineUpdateError):
        canary.follower.sync()
    pin(DoubleBuffer(scene.store), BAD)
    scene.publish(4, 5)
    with scene.follower(when={"step": 30}) as other:
        assert other.sync() is None
        scene.publish(6)
        assert other.sync().version == 6


def test_the_verdict_is_made_up_for_after_a_restart(scene, sender):
    """The follower of a server is killed in its probe; the server goes on with the version."""
    server = FakeEngine(instance_id="canary", is_server=True)
    scene.publish(1, 2)
    first = Canary(scene.store, server).follower
    first.sync()
    scene.publish(BAD)
    first._canary = killed
    with pytest.raises(KeyboardInterrupt):
        first.sync()
    assert server.serves == (BAD, "3")
    first._forget()  # it was in another process
    first._view.close()
    again = Canary(scene.store, server)
    with again.follower as follower:
        follower.start()
        with pytest.raises(dbuffer.WaitTimeoutError):
            sender.wait_applied(BAD, receivers="canary", timeout_s=0.1)
        with pytest.raises(dbuffer.EngineUpdateError, match="it talks nonsense"):
            follower.sync()
        assert again.judged == [BAD, 2]
        assert server.serves == (2, "2")


def killed() -> str:
    raise KeyboardInterrupt


def test_a_canary_in_the_background_goes_back_by_itself(scene, sender, canary):
    scene.publish(1, 2)
    with BackgroundFollower(canary.follower) as follower:
        follower.wait_applied(2, WAIT_S)
        scene.publish(BAD)
        until("it has gone back", lambda: canary.engine.serves == (2, "2") and follower.error)
        with pytest.raises(dbuffer.ReceiverFailedError, match="was refused by canary"):
            sender.wait_applied(BAD, receivers="canary", timeout_s=WAIT_S)
        scene.publish(4)
        sender.wait_applied(4, receivers="canary", timeout_s=WAIT_S)


# Prompts instead of a function.


def scores(engine: FakeEngine) -> list[float]:
    """Log-probabilities of prompts; :data:`BAD` finds them unlikely."""
    return [-1.0, -9.0] if engine.version == BAD else [-1.0, -2.0]


PROMPTS = {"prompts": ["1 + 1 = 2"], "min_mean_logprob": -1.5}


@pytest.fixture
def scoring() -> FakeEngine:
    engine = FakeEngine(instance_id="canary")
    engine.scores_prompts = True
    engine.prompt_logprobs = lambda prompts: scores(engine)
    return engine


@pytest.mark.parametrize(
    ("logprobs", "mean"),
    [([-1.0, -2.1], "-1.55"), ([-1.0, math.nan], "nan"), ([math.inf], "inf"), ([], "nan")],
)
def test_prompts_refuse_a_version_that_finds_them_unlikely(scene, sender, scoring, logprobs, mean):
    scene.publish(1, 2)
    with Follower(scoring, options(scene.store, "canary", canary=PROMPTS)) as follower:
        assert follower.sync().version == 2
        sender.wait_applied(2, receivers="canary", timeout_s=WAIT_S)
        scoring.prompt_logprobs = lambda _: logprobs if scoring.version == BAD else [-1.5]
        scene.publish(BAD)
        with pytest.raises(dbuffer.EngineUpdateError, match=rf"{len(logprobs)} tokens is {mean},"):
            follower.sync()
        assert scoring.serves == (2, "2")
        with pytest.raises(dbuffer.ReceiverFailedError, match=r"3 .*refused by canary: the mean"):
            sender.wait_applied(BAD, receivers="canary", timeout_s=WAIT_S)


def test_an_engine_that_does_not_answer_prompts_refuses_nothing(scene, scoring, monkeypatch):
    def fail(_: Any) -> Any:
        raise dbuffer.EngineUnreachableError("it is paused")

    scene.publish(1)
    with Follower(scoring, options(scene.store, "canary", canary=PROMPTS)) as follower:
        with monkeypatch.context() as paused:
            paused.setattr(scoring, "prompt_logprobs", fail)
            with pytest.raises(dbuffer.EngineUnreachableError):
                follower.sync()
        assert DoubleBuffer(scene.store).receiver("canary").state == "on_trial"
        assert follower.sync() is None
        assert follower.has_applied(1)


@pytest.mark.parametrize("canary", [PROMPTS, True])
def test_an_engine_that_starts_with_a_canary_acknowledges_nothing_before(
    scene, sender, scoring, canary
):
    """As a vLLM worker with options in its configuration, which loads a version at its start."""
    scene.publish(1)
    scoring.endpoint.begin(lambda: scoring.rank, options(scene.store, "canary", canary=canary))
    scoring.receiver.catch_up()
    assert scoring.version == 1
    with pytest.raises(dbuffer.WaitTimeoutError):
        sender.wait_applied(1, receivers="canary", timeout_s=0.2)
    receiver = scoring.receiver
    probe = None if canary is PROMPTS else lambda: "it talks nonsense"
    if probe is None:
        scoring.prompt_logprobs = lambda _: [-7.0]
    with Follower(scoring, options(scene.store, "canary", canary=canary), canary=probe) as follower:
        with pytest.raises(dbuffer.EngineUpdateError, match="was refused by canary"):
            follower.sync()
        assert scoring.receiver is receiver
        with pytest.raises(dbuffer.ReceiverFailedError):
            sender.wait_applied(1, receivers="canary", timeout_s=WAIT_S)


def test_a_canary_that_cannot_judge_is_refused_at_the_start(scene):
    with pytest.raises(dbuffer.UnsupportedError, match="cannot test versions with prompts"):
        scene.background(canary=PROMPTS)
    with pytest.raises(dbuffer.OptionError, match="has no function"):
        scene.background(canary=True)


def test_a_version_of_another_store_is_not_judged(scene, scoring, shm_path):
    scene.publish(1)
    with Follower(scoring, options(scene.store, "canary", canary=PROMPTS)) as follower:
        follower.sync()
        with dbuffer.WeightSender(shm_path / "other") as other:
            other.send(SMALL.weights(BAD), version=BAD)
        follower.apply_once(str(shm_path / "other"))
        assert scoring.version == BAD
        assert DoubleBuffer(shm_path / "other").receiver("canary").state == "serving"


def test_old_marks_of_versions_that_are_gone_are_removed(shm_path):
    store = DoubleBuffer(shm_path / "store")
    ids = []
    with dbuffer.WeightSender(store.root) as sender:
        for number in range(1, 5):
            sender.send(SMALL.weights(number))
            ids.append(store.newest_pointer().id)
            store.refuse(ids[-1], "was refused by canary")
    assert all(map(store.refusal, ids))
    week_ago = time.time() - 8 * 24 * 3600
    (other := store.root / "refused" / ".snapshot").mkdir()
    for path in (other, *(store.root / "refused" / str(version) for version in ids[1:])):
        os.utime(path, (week_ago, week_ago))
    with dbuffer.WeightSender(store.root):
        assert [store.refusal(version) is not None for version in ids] == [True, False, True, True]
