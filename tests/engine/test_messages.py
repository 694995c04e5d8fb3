"""What travels between a follower and an engine's ranks, and the object that answers there."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from dbuffer.engine.contract import (
    RankAnswer,
    RankRequest,
    as_answer,
    decode_answer,
    encode_answer,
    raise_worst,
    worst_of,
)
from dbuffer.engine.endpoint import RankEndpoint, capture_answer
from dbuffer.engine.engine_options import EngineOptions, UpdateRequest
from dbuffer.engine.rank_channel import RankChannel
from dbuffer.engine.rank_receiver import RankReceiver
from dbuffer.format.layout import TensorSpec
from dbuffer.format.manifest import ReceiverRecord
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.records import OwnRecord
from dbuffer.testing.engines import FakeRank
from tests.support.light_engines import options
from tests.support.patterns import SMALL

OPTIONS = EngineOptions(store="/s", engine_id="e", instance_id="i", timeout_s=5)
REQUESTS = [
    RankRequest("begin", options=OPTIONS),
    RankRequest("begin", options=OPTIONS, takes_over=False),
    RankRequest("update", update=UpdateRequest(at_least=3, run="0" * 16, attempt="1" * 16)),
    RankRequest(
        "check",
        tensors=(TensorSpec("a", "bfloat16", (2, 3)), TensorSpec("b", "int8", ())),
        allows_unused=True,
    ),
    RankRequest("forget"),
    RankRequest("forget", of_draft=True),
    RankRequest("awake"),
    RankRequest("end"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.call)
def test_requests_survive_json(request_):
    assert RankRequest.parse(json.loads(json.dumps(request_.as_json()))) == request_


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        "begin",
        {},
        {"call": "end", "of_draft": None},
        {"call": "begin", "of_draft": False, "options": {"store": "/s"}, "takes_over": "false"},
        {"call": "end", "of_draft": False, "more": 1},
        {"call": "another"},
        {"call": ["end"]},
        {"call": "update", "of_draft": False, "update": {"at_least": 0}},
        {"call": "begin", "of_draft": False, "options": {}, "takes_over": False},
    ],
    ids=repr,
)
def test_what_is_no_request_is_refused(values):
    with pytest.raises(dbuffer.OptionError):
        RankRequest.parse(values)


@pytest.mark.parametrize("call", ["begin", "reserve", "update"])
def test_a_request_without_its_argument_is_refused_and_changes_nothing(rank, call):
    answer = rank.ask(RankRequest.parse({"call": call}))
    assert isinstance(answer, dbuffer.OptionError)
    assert rank.endpoint.receiver is None


ERRORS = [
    dbuffer.WeightsMismatchError("a"),
    dbuffer.OptionError("b"),
    dbuffer.UnsupportedError("c"),
    dbuffer.EngineBusyError("d"),
    dbuffer.EngineUpdateError("e"),
    dbuffer.EngineBrokenError("f"),
]
"""Answers of ranks, from least to worst."""


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_answers_survive_json(error):
    answer = decode_answer(json.loads(json.dumps(encode_answer(as_answer(error)))))
    assert (type(answer), str(answer)) == (type(error), str(error))
    assert decode_answer(json.loads(json.dumps(encode_answer(None)))) is None
    record = OwnRecord("engine").current
    assert decode_answer(json.loads(json.dumps(encode_answer(record)))) == record


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        "done",
        {"error": "EngineUpdateError"},
        {"error": "OSError", "problem": "a"},
        {"record": {"receiver": "engine"}},
    ],
    ids=repr,
)
def test_what_is_no_answer_is_an_error(values):
    with pytest.raises(dbuffer.EngineUpdateError, match="dbuffer"):
        decode_answer(values)


def test_the_worst_answer_counts():
    for less, more in itertools.pairwise([None, *ERRORS]):
        assert worst_of([None, more, less]) is more
    refused = dbuffer.EngineUpdateError("refused")
    assert worst_of([refused, dbuffer.EngineUpdateError("another")]) is refused
    with pytest.raises(dbuffer.EngineUpdateError):
        worst_of([])  # no answer at all is not taken for done


def test_the_worst_error_of_several_engines_is_raised_with_all_messages():
    for less, more in itertools.pairwise([*ERRORS[:-1], dbuffer.EngineEndedError("g"), ERRORS[-1]]):
        with pytest.raises(type(more), match=f"{less}; {more}"):
            raise_worst([less, more, less])
    with pytest.raises(dbuffer.VersionRegressedError) as raised:
        raise_worst([alone := dbuffer.VersionRegressedError("h", is_forked=True)])
    assert raised.value is alone
    raise_worst([])


class OneRank:
    """A rank that is asked directly."""

    def __init__(self, store: Path) -> None:
        self.rank = FakeRank()
        self.endpoint = RankEndpoint()
        self.options = options(store)

    def ask(self, request: RankRequest) -> RankAnswer:
        return capture_answer(lambda: self.endpoint.do(request, lambda: self.rank))

    def begin(self, **more: Any) -> RankReceiver:
        answer = self.ask(RankRequest("begin", options=self.options, **more))
        assert self.endpoint.receiver is not None
        assert answer == self.endpoint.receiver.engine_record
        return self.endpoint.receiver


@pytest.fixture
def rank(store: Path) -> Iterator[OneRank]:
    made = OneRank(store)
    with dbuffer.WeightSender(store) as sender:
        sender.send(SMALL.weights(1))
        yield made
    made.endpoint.end()


def test_a_model_keeps_its_endpoint():
    model, other = FakeRank(), FakeRank()
    assert RankEndpoint.of(model) is RankEndpoint.of(model)
    assert RankEndpoint.of(model) is not RankEndpoint.of(other)


def test_a_rank_that_follows_already_begins_again_only_where_it_must(rank):
    second = rank.begin()
    assert rank.begin() is second
    for changed in ({"timeout_s": 6}, {"engine_id": "another"}, {"instance_id": "another"}):
        rank.options = replace(rank.options, **changed)
        before, second = second, rank.begin()
        assert second is not before, "whoever asks would not find it under the name that it has"


def test_an_update_before_the_beginning_or_after_the_end_is_refused(rank):
    update = RankRequest("update", update=UpdateRequest())
    assert isinstance(rank.ask(update), dbuffer.UnsupportedError)
    rank.begin()
    for _ in range(2):
        assert rank.ask(RankRequest("end")) is None
    assert isinstance(rank.ask(update), dbuffer.UnsupportedError)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (dbuffer.UnsupportedError("for good"), dbuffer.UnsupportedError),
        (dbuffer.StoreAccessError("for a moment"), dbuffer.EngineUpdateError),
    ],
    ids=repr,
)
def test_what_the_model_has_outlives_an_end_and_a_beginning_that_fails(
    rank, monkeypatch, error, kind
):
    rank.begin()
    answer = rank.ask(RankRequest("update", update=UpdateRequest(at_least=1)))
    assert isinstance(answer, ReceiverRecord)
    rank.ask(RankRequest("end"))

    def fail(*_: object, **__: object) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(FakeRank, "make_check", fail)
        answer = rank.ask(RankRequest("begin", options=rank.options))
    assert (type(answer), rank.endpoint.receiver) == (kind, None)
    assert str(error) in str(answer)
    rank.begin()
    assert DoubleBuffer(rank.options.store).receiver("engine").applied_version == 1


def test_tensors_that_do_not_fit_are_told_and_nothing_else_is(rank):
    fitting = tuple(TensorSpec(name, "float32", (1,)) for name in SMALL.names)
    assert rank.ask(RankRequest("check", tensors=fitting)) is None
    answer = rank.ask(RankRequest("check", tensors=(TensorSpec("another", "float32", (1,)),)))
    assert isinstance(answer, dbuffer.WeightsMismatchError)
    assert "another" in str(answer)


def test_a_bug_on_one_rank_is_an_answer(rank):
    def fail() -> Any:
        raise ZeroDivisionError("a bug")

    answer = capture_answer(
        lambda: rank.endpoint.do(RankRequest("begin", options=rank.options), fail)
    )
    assert isinstance(answer, dbuffer.EngineUpdateError)
    assert str(answer) == "ZeroDivisionError: a bug"


@pytest.mark.parametrize("others", [True, False], ids=["follow", "do not"])
def test_a_rank_begins_again_where_another_must(rank, monkeypatch, others):
    """A rank that began alone would wait for those that follow already."""
    first = rank.begin()
    gather = RankChannel.gather

    def gather_with_another(self: RankChannel, mine: Any, **more: Any) -> list[Any]:
        found = gather(self, mine, **more)
        return [*found, (others, True)] if isinstance(mine[0], bool) else found

    monkeypatch.setattr(RankChannel, "gather", gather_with_another)
    assert (rank.begin() is first) == others
