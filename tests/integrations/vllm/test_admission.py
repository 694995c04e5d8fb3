"""`Admission`: which weights a request takes, as read from its headers and compared with labels."""

from __future__ import annotations

import queue
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import dbuffer
from dbuffer.engine.weight_label import UNKNOWN_VERSION, WeightLabel
from dbuffer.format.lineage import Lineage, VersionId
from dbuffer.integrations.vllm.admission import Admission, given_once, weight_headers
from dbuffer.integrations.vllm.core_labels import label_cores

RUN = "0123456789abcdef"
SERVED = WeightLabel("7", RUN, {"step": 70})
NEXT_RUN = "fedcba9876543210"
GETS_NEXT_RUN = WeightLabel("7", RUN, {"step": 70}, NEXT_RUN)


def refusal(headers: dict[str, str], label: WeightLabel = SERVED) -> object:
    admission = Admission.parse({name.lower(): value for name, value in headers.items()})
    return admission.refusal(label)


def test_request_without_these_headers_takes_anything():
    assert Admission.parse({"content-type": "application/json"}) is None


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Weight-Min-Version": "7"},
        {"X-Weight-Min-Version": "1"},
        {"X-Weight-Exact-Version": "7"},
        {"X-Weight-Min-Step": "70"},
        {"X-Weight-Min-Step": "-3.5"},
        {"X-Weight-Run": RUN},
        {"X-Weight-Run": RUN, "X-Weight-Exact-Version": "7", "X-Weight-Wait-S": "3"},
    ],
)
def test_weights_that_meet_all_of_it_are_taken(headers):
    assert refusal(headers) is None


@pytest.mark.parametrize(
    ("headers", "is_final"),
    [
        ({"X-Weight-Min-Version": "8"}, False),
        ({"X-Weight-Exact-Version": "8"}, False),
        ({"X-Weight-Exact-Version": "6"}, True),
        ({"X-Weight-Min-Step": "70.5"}, False),
        ({"X-Weight-Run": "f" * 16}, False),
        # Of another run, numbers say nothing.
        ({"X-Weight-Run": "f" * 16, "X-Weight-Exact-Version": "6"}, False),
    ],
)
def test_weights_that_miss_any_of_it_are_refused(headers, is_final):
    found = refusal(headers)
    assert found[1] is is_final


@pytest.mark.parametrize("label", [WeightLabel(), WeightLabel("default"), WeightLabel("7.5")])
@pytest.mark.parametrize(
    "headers",
    [
        {"X-Weight-Min-Version": "1"},
        {"X-Weight-Exact-Version": "7"},
        {"X-Weight-Min-Step": "0"},
        {"X-Weight-Run": RUN},
    ],
)
def test_weights_of_no_version_meet_nothing(headers, label):
    found = refusal(headers, label)
    assert found[1] is False


@pytest.mark.parametrize("step", ["70", None, True, [70]])
def test_step_that_is_no_number_meets_nothing(step):
    assert refusal({"X-Weight-Min-Step": "1"}, WeightLabel("7", RUN, {"step": step}))


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Weight-Min-Version": "7"},
        {"X-Weight-Exact-Version": "7"},
        {"X-Weight-Min-Step": "70"},
    ],
)
def test_numbers_without_a_run_are_of_the_run_that_the_engine_gets_ready(headers):
    found = refusal(headers, GETS_NEXT_RUN)
    assert (RUN in found[0], NEXT_RUN in found[0], found[1]) == (True, True, False)
    assert refusal(headers | {"X-Weight-Run": RUN}, GETS_NEXT_RUN) is None
    assert refusal(headers | {"X-Weight-Run": NEXT_RUN}, GETS_NEXT_RUN) is not None
    assert Admission().refusal(GETS_NEXT_RUN) is None


def test_replica_that_is_past_decides_for_all():
    admission = Admission(exact_version=6)
    behind, past = WeightLabel("5"), WeightLabel("7")
    assert admission.refusal_by([WeightLabel("6")]) is None
    for labels in ([behind, past], [past, behind]):
        found = admission.refusal_by(labels)
        assert found.is_final


@pytest.mark.parametrize("text", ["", " 7", "+7", "7.0", "0", "-1", "٣", "1" * 30])
def test_version_that_is_no_whole_number_is_refused_by_name(text):
    with pytest.raises(dbuffer.OptionError, match="X-Weight-Min-Version"):
        Admission.parse({"x-weight-min-version": text})


@pytest.mark.parametrize("text", ["", "soon", "nan", "inf", "-0.1", "3601", "1_0"])
def test_wait_that_no_request_may_take_is_refused_by_name(text):
    with pytest.raises(dbuffer.OptionError, match="X-Weight-Wait-S"):
        Admission.parse({"x-weight-min-version": "1", "x-weight-wait-s": text})


def test_misspelt_header_is_not_ignored():
    known = {"x-weight-min-version": "1", "x-weight-versions": "true"}
    assert weight_headers([*known.items(), ("x-request-id", "a"), ("x-request-id", "b")]) == known
    with pytest.raises(dbuffer.OptionError, match="x-weight-minversion"):
        weight_headers([("x-weight-minversion", "1")])


@pytest.mark.parametrize("values", [("1", "9"), ("9", "1"), ("1", "1")])
def test_header_or_parameter_that_is_given_twice_is_refused_by_name(values):
    with pytest.raises(dbuffer.OptionError, match=r"x-weight-min-version is given 2 times: ."):
        weight_headers([("x-weight-min-version", value) for value in values])
    with pytest.raises(dbuffer.OptionError, match="min_version is given 2 times"):
        given_once([("wait_s", "1"), *(("min_version", value) for value in values)])


@pytest.mark.parametrize(
    "label",
    [
        WeightLabel(),
        WeightLabel("default"),
        SERVED,
        GETS_NEXT_RUN,
        WeightLabel("3", None, {"note": "ü\n"}),
        WeightLabel.of(Lineage(VersionId(RUN, 5), ()), {}),
    ],
)
def test_label_is_read_as_it_was_written(label):
    assert WeightLabel.decode(label.encode()) == label


@pytest.mark.parametrize("text", ["my weights", "7 [1]", "7 {", UNKNOWN_VERSION, ""])
def test_label_of_other_software_is_a_version_by_itself(text):
    assert WeightLabel.decode(text) == WeightLabel(text)


class Core:
    """vLLM's engine core, as far as labels and requests meet in it."""

    def __init__(self) -> None:
        self.version = "default"
        self.output_queue: queue.Queue[tuple[int, Any]] = queue.Queue()
        self.scheduler = SimpleNamespace(requests={}, finish_requests=self.finish)

    def finish(self, ids: list[str], _: Any) -> None:
        for one in ids:
            del self.scheduler.requests[one]

    def set_weight_version(self, version: str) -> None:
        self.version = version

    def get_weight_version(self) -> str:
        return self.version

    def _attach_weight_version(self, outputs: dict[int, Any]) -> None:
        raise NotImplementedError

    def add_request(self, request: Any, _: int = 0) -> None:
        self.scheduler.requests[request.request_id] = request

    def ask(self, name: str, requirement: object) -> None:
        parameters = SimpleNamespace(extra_args={"dbuffer": requirement})
        request = SimpleNamespace(request_id=name, client_index=0, sampling_params=parameters)
        self.add_request(request)

    def ended(self) -> set[str]:
        ended = set()
        while not self.output_queue.empty():
            ended |= self.output_queue.get()[1].finished_requests
        return ended


@pytest.fixture
def core(monkeypatch):
    """An engine core without vLLM; test_versions.py has the real one."""
    made = {"EngineCoreOutput": lambda *_, **__: None, "EngineCoreOutputs": SimpleNamespace}
    engine = SimpleNamespace(**made, FinishReason=SimpleNamespace(ABORT=None))
    status = SimpleNamespace(RequestStatus=SimpleNamespace(FINISHED_ABORTED=None))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine", engine)
    monkeypatch.setitem(sys.modules, "vllm.v1.request", status)
    kind = type("LabeledCore", (Core,), {})
    label_cores(kind, kind)
    core = kind()
    core.set_weight_version(SERVED.encode())
    return core


@pytest.mark.parametrize("values", ["x", 7, [], {"nope": 1}, {"exact_version": "seven"}, {1: 2}])
def test_core_ends_a_request_whose_requirement_it_cannot_read(core, values):
    core.ask("any client's", values)
    assert (core.ended(), core.scheduler.requests) == ({"any client's"}, {})


def test_each_requirement_holds_for_requests_that_are_queued(core):
    kinds = {"min_version": 7, "exact_version": 7, "min_step": 70.0, "run": RUN}
    for name, value in kinds.items():
        core.ask(name, Admission(**{name: value}).as_json())
    assert core.ended() == set()
    core.set_weight_version(WeightLabel("8", RUN, {"step": 20}).encode())
    assert core.ended() == {"exact_version", "min_step"}
    core.set_weight_version(WeightLabel("9", "f" * 16, {}).encode())
    assert core.ended() == {"run"}
    core.set_weight_version(UNKNOWN_VERSION)
    assert core.ended() == {"min_version"}


def test_run_that_the_engine_gets_ready_is_for_requests_that_come(core):
    """What was admitted before goes on; vLLM begins no span for a label that says the same."""
    output = SimpleNamespace()
    core.ask("before", Admission(min_version=7).as_json())
    core.set_weight_version(GETS_NEXT_RUN.encode())
    assert core.ended() == set()
    core.ask("after", Admission(min_version=7).as_json())
    core.ask("of its run", Admission(min_version=7, run=RUN).as_json())
    assert core.ended() == {"after"}
    core._attach_weight_version({0: output})
    assert WeightLabel.decode(output.weight_version) == SERVED
    core.set_weight_version(WeightLabel("8", NEXT_RUN).encode())
    assert core.ended() == {"of its run"}
