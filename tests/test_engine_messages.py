"""What travels between a follower and an engine's ranks, and the object that answers there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import SMALL
from test_engine_follower import Model, Rank

import dbuffer
from dbuffer.errors import EngineBrokenError, EngineUpdateError, OptionError, UnsupportedError
from dbuffer.format.layout import TensorSpec
from dbuffer.integrations.engine.endpoint import RankEndpoint, capture_answer
from dbuffer.integrations.engine.engine_options import EngineOptions, UpdateRequest
from dbuffer.integrations.engine.messages import (
    BeginRequest,
    CheckRequest,
    EndRequest,
    RankAnswer,
    RankOutcome,
    RankRequest,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
    worst_of,
)
from dbuffer.integrations.engine.rank_channel import RankChannel
from dbuffer.integrations.engine.rank_receiver import RankReceiver
from dbuffer.store.buffer import DoubleBuffer

OPTIONS = EngineOptions(store="/s", engine_id="e", instance_id="i", timeout_s=5)
REQUESTS: list[RankRequest] = [
    BeginRequest(options=OPTIONS),
    BeginRequest(options=OPTIONS, if_idle=True),
    UpdateRequest(at_least=3, history="0" * 16, attempt="1" * 16),
    CheckRequest(tensors=(TensorSpec("a", "bfloat16", (2, 3)), TensorSpec("b", "int8", ()))),
    EndRequest(),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_requests_survive_json(request_: RankRequest) -> None:
    assert decode_request(json.loads(json.dumps(encode_request(request_)))) == request_


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        "begin",
        {},
        {"call": "begin"},
        {"call": "begin", "arguments": {}},
        {"call": "end", "arguments": {"more": 1}},
        {"call": "another", "arguments": {}},
        {"call": "update", "arguments": {"at_least": 0}},
        {"call": "begin", "arguments": {"options": {}, "if_idle": False}},
    ],
    ids=repr,
)
def test_what_is_no_request_is_refused(values: Any) -> None:
    with pytest.raises(OptionError):
        decode_request(values)


@pytest.mark.parametrize("outcome", RankOutcome)
def test_answers_survive_json(outcome: RankOutcome) -> None:
    answer = RankAnswer(outcome, "why")
    assert decode_answer(json.loads(json.dumps(encode_answer(answer)))) == answer


@pytest.mark.parametrize("values", [None, [], "done", {}, {"outcome": "done"}], ids=repr)
def test_what_is_no_answer_is_an_error(values: Any) -> None:
    with pytest.raises(EngineUpdateError, match="no answer of this version of dbuffer"):
        decode_answer(values)


@pytest.mark.parametrize(
    "error",
    [OptionError("a"), UnsupportedError("b"), EngineUpdateError("c"), EngineBrokenError("d")],
    ids=repr,
)
def test_an_outcome_is_raised_as_the_error_that_it_was(error: dbuffer.DBufferError) -> None:
    with pytest.raises(type(error), match=str(error)):
        RankAnswer.of_error(error).require_done()


def test_the_worst_answer_counts() -> None:
    refused, broken = RankAnswer(RankOutcome.REFUSED, "r"), RankAnswer(RankOutcome.BROKEN, "b")
    assert worst_of([RankAnswer(), refused, broken, RankAnswer(RankOutcome.INVALID)]) == broken
    assert worst_of([refused, RankAnswer(RankOutcome.REFUSED, "another")]) == refused


def test_no_answer_at_all_is_not_taken_for_done() -> None:
    with pytest.raises(EngineUpdateError, match="no rank of the engine has answered"):
        worst_of([])


class OneRank:
    """A rank that is asked directly."""

    def __init__(self, store: Path) -> None:
        self.model = Model()
        self.endpoint = RankEndpoint()
        self.options = EngineOptions(
            store=str(store), timeout_s=5, poll_interval_s=0.05, plan=False
        )

    def ask(self, request: RankRequest) -> RankAnswer:
        return capture_answer(lambda: self.endpoint.do(request, lambda: Rank(self.model)))

    def begin(self, **more: Any) -> RankReceiver:
        assert self.ask(BeginRequest(options=self.options, **more)) == RankAnswer()
        assert self.endpoint.receiver is not None
        return self.endpoint.receiver


@pytest.fixture
def rank(store: Path) -> Iterator[OneRank]:
    made = OneRank(store)
    with dbuffer.WeightSender(store) as sender:
        sender.send(SMALL.weights(1))
        yield made
    made.endpoint.end()


def test_a_model_keeps_its_endpoint() -> None:
    model, other = Model(), Model()
    assert RankEndpoint.of(model) is RankEndpoint.of(model)
    assert RankEndpoint.of(model) is not RankEndpoint.of(other)


def test_a_rank_that_follows_already_begins_again_only_where_it_must(rank: OneRank) -> None:
    first = rank.begin(if_idle=True)
    assert rank.begin(if_idle=True) is first
    second = rank.begin()
    assert second is not first
    for changed in ({"timeout_s": 6}, {"engine_id": "another"}, {"instance_id": "another"}):
        rank.options = replace(rank.options, **changed)
        before, second = second, rank.begin(if_idle=True)
        assert second is not before, "whoever asks would not find it under the name that it has"


def test_an_update_before_the_beginning_is_refused(rank: OneRank) -> None:
    assert rank.ask(UpdateRequest()).outcome is RankOutcome.UNSUPPORTED
    rank.begin()
    assert rank.ask(EndRequest()) == RankAnswer()
    assert rank.ask(EndRequest()) == RankAnswer()
    assert rank.ask(UpdateRequest()).outcome is RankOutcome.UNSUPPORTED


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (UnsupportedError("for good"), RankOutcome.UNSUPPORTED),
        (dbuffer.StoreAccessError("for a moment"), RankOutcome.REFUSED),
    ],
    ids=repr,
)
def test_what_the_model_has_outlives_an_end_and_a_beginning_that_fails(
    rank: OneRank, monkeypatch: pytest.MonkeyPatch, error: Exception, outcome: RankOutcome
) -> None:
    rank.begin()
    assert rank.ask(UpdateRequest(at_least=1)) == RankAnswer()
    rank.ask(EndRequest())

    def fail(*_: object, **__: object) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Rank, "make_check", fail)
        answer = rank.ask(BeginRequest(options=rank.options))
    assert (answer.outcome, rank.endpoint.receiver) == (outcome, None)
    assert str(error) in answer.problem
    rank.begin()
    record = DoubleBuffer(rank.options.store).receiver("engine")
    assert record is not None
    assert record.applied_version == 1


def test_tensors_that_do_not_fit_are_told_and_nothing_else_is(rank: OneRank) -> None:
    fitting = tuple(TensorSpec(name, "float32", (1,)) for name in SMALL.names)
    assert rank.ask(CheckRequest(tensors=fitting)) == RankAnswer()
    answer = rank.ask(CheckRequest(tensors=(TensorSpec("another", "float32", (1,)),)))
    assert answer.outcome is RankOutcome.MISMATCH
    assert "another" in answer.problem


def test_a_bug_on_one_rank_is_an_answer(rank: OneRank) -> None:
    def fail() -> Any:
        raise ZeroDivisionError("a bug")

    answer = capture_answer(lambda: rank.endpoint.do(BeginRequest(options=rank.options), fail))
    assert answer == RankAnswer(RankOutcome.REFUSED, "ZeroDivisionError: a bug")


@pytest.mark.parametrize("others", [True, False], ids=["follow", "do not"])
def test_a_rank_begins_again_where_another_must(
    rank: OneRank, monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    """A rank that began alone would wait for those that follow already."""
    first = rank.begin(if_idle=True)
    gather = RankChannel.gather

    def gather_with_another(self: RankChannel, mine: Any, **more: Any) -> list[Any]:
        found = gather(self, mine, **more)
        return [*found, others] if isinstance(mine, bool) else found

    monkeypatch.setattr(RankChannel, "gather", gather_with_another)
    assert (rank.begin(if_idle=True) is first) == others
