"""A draft model that follows a store of its own, beside its target.

As in `test_follower.py`, the engines are dictionaries of tensors with real `RankReceiver`s.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import pytest
import torch

import dbuffer
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing import waiting
from dbuffer.testing.engines import FakeRank
from tests.support.light_engines import WAIT_S
from tests.support.patterns import SMALL

until = functools.partial(waiting.until, timeout_s=WAIT_S)


class FakeDraft(FakeRank):
    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Module()

    def engine_id(self, options: EngineOptions) -> str:
        return f"{super().engine_id(options)}.draft"


@pytest.fixture
def draft(scene) -> FakeDraft:
    draft = FakeDraft()
    scene.engine.rank.draft_rank = lambda: draft
    return draft


@pytest.fixture
def drafts(shm_path) -> Iterator[dbuffer.WeightSender]:
    with dbuffer.WeightSender(shm_path / "drafts") as sender:
        yield sender


def test_target_and_draft_follow_without_each_other(scene, draft, drafts, sender):
    with scene.background(draft_store=drafts.store) as follower:
        drafts.send(SMALL.weights(1))
        drafts.wait_applied(1, receivers=f"{scene.engine_id}.draft", timeout_s=WAIT_S)
        assert (draft.version, scene.engine.serves) == (1, (0, "default"))
        assert follower.applied is None
        scene.publish(1, 2)
        follower.wait_applied(2, WAIT_S)
        assert (draft.version, scene.engine.serves) == (1, (2, "2"))
        drafts.send({"of_none": torch.ones(3)})
        with pytest.raises(dbuffer.ReceiverFailedError, match="not this model's tensors"):
            drafts.wait_applied(2, receivers=f"{scene.engine_id}.draft", timeout_s=WAIT_S)
        scene.publish(3)
        follower.wait_applied(3, WAIT_S)
        drafts.send(SMALL.weights(3))
        drafts.wait_applied(3, receivers=1, timeout_s=WAIT_S)
        assert (draft.version, scene.engine.serves) == (3, (3, "3"))
        assert follower.error is None
        for store, name in (
            (scene.store, scene.engine_id),
            (drafts.store, f"{scene.engine_id}.draft"),
        ):
            ids = {record.receiver for record in DoubleBuffer(store).receivers()}
            assert ids == {name, f"{name}.rank-0"}
    [line] = [line for line in scene.lines() if "draft keeps its weights" in line]
    assert "not this model's tensors" in line


def test_a_draft_store_that_cannot_be_read_stops_no_switch(scene, draft, shm_path):
    (shm_path / "drafts").mkdir(mode=0o777)
    (shm_path / "drafts").chmod(0o777)  # other users may write there
    with scene.follower(draft_store=str(shm_path / "drafts")) as follower:
        for version in (1, 2):
            scene.publish(version)
            assert follower.sync().version == version
    assert draft.version == 0


def test_a_draft_that_cannot_be_loaded_leaves_the_target(scene, draft, drafts):
    scene.publish(1)
    with scene.follower(draft_store=drafts.store) as follower:
        draft.failing_loads = 3
        drafts.send(SMALL.weights(1))
        until("it fails", lambda: (follower.sync(), draft.refuses)[1])
        assert scene.engine.rank.refuses is None
        assert not scene.engine.paused
        until("it works", lambda: (follower.sync(), draft.version == 1)[1])
        assert draft.refuses is None
        assert scene.engine.serves == (1, "1")


@pytest.mark.parametrize("ranks_follow", [True, False])
def test_a_pause_of_the_draft_that_could_not_be_ended_is_ended_by_the_next_sync(
    scene, draft, drafts, monkeypatch, ranks_follow
):
    engine = scene.engine
    with scene.serving(is_server=True, draft_store=drafts.store) as follower:
        drafts.send(SMALL.weights(1))
        engine.failing_resumes = 1
        until("it is paused", lambda: (follower.sync(), engine.paused)[1])
        drafts.store.chmod(0o770)  # other users may write there
        if not ranks_follow:
            engine.endpoint.end()
            monkeypatch.setattr(FakeRank, "make_check", lambda _: 1 / 0)
            with pytest.raises(dbuffer.EngineUpdateError, match="ZeroDivisionError"):
                follower.start()
        with contextlib.suppress(dbuffer.EngineUpdateError):
            follower.sync()
        assert (engine.paused, draft.version) == (False, 1)


def test_a_draft_sleeps_with_its_target(scene, draft, drafts):
    drafts.send(SMALL.weights(1))
    scene.publish(1)
    with scene.follower(draft_store=drafts.store) as follower:
        until("it has it", lambda: (follower.sync(), draft.version == 1)[1])
        scene.engine.endpoint.note_asleep(is_lost=True)
        draft.tensors = SMALL.weights(0)
        with pytest.raises(dbuffer.EngineBusyError):
            follower.sync()
        assert draft.version == 0
        scene.engine.endpoint.note_awake()
        until("it has it again", lambda: (follower.sync(), draft.version == 1)[1])


def test_a_follower_without_the_option_leaves_the_draft(scene, draft, drafts):
    drafts.send(SMALL.weights(1))
    scene.publish(1)
    with scene.follower(draft_store=drafts.store) as follower:
        until("it has it", lambda: (follower.sync(), draft.version == 1)[1])
    with scene.follower() as follower:
        drafts.send(SMALL.weights(2))
        scene.publish(2)
        assert follower.sync().version == 2
        assert follower.sync() is None
    assert draft.version == 1


def test_an_engine_without_a_draft_is_refused(scene, shm_path):
    refused = pytest.raises(dbuffer.UnsupportedError, match="this engine has none")
    with scene.follower(draft_store=str(shm_path / "drafts")) as follower, refused:
        follower.start()
    with pytest.raises(dbuffer.OptionError, match="another directory"):
        scene.follower(draft_store=str(scene.store))
