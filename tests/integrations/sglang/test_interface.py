"""The SGLang adapter against the record of SGLang's interface, without an SGLang.

The server here only checks that it is called in a way that the record allows.
"""

from __future__ import annotations

import base64
import inspect
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import dbuffer
from dbuffer.engine.contract import RankRequest, WeightLabel
from dbuffer.engine.engine_options import UpdateRequest
from dbuffer.integrations.sglang import LOADER, EngineOptions, ServerEngine, follow
from dbuffer.integrations.sglang.sglang_engine import from_tensors

FORMS = json.loads(Path(__file__).with_name("interface.json").read_text())
"""Functions of SGLang 0.5.23, with their parameters and the paths that they serve."""
INFO = {
    "custom_weight_loader": [LOADER],
    "dp_size": 1,
    "pp_size": 1,
    "tp_size": 2,
    "speculative_algorithm": None,
    "random_seed": 1,
    "startup_time": {"load_weight": 0.1},
}
REQUEST_OF = {
    "/begin_weight_update": "BeginWeightUpdateReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/end_weight_update": "EndWeightUpdateReqInput",
    "/pause_generation": "PauseGenerationReqInput",
    "/update_weight_version": "UpdateWeightVersionReqInput",
    "/update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
}


def form_of(name: str) -> str:
    return str(FORMS[f"sglang.srt.{name}"])


def bind(form: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    scope: dict[str, Any] = {}
    exec(f"def recorded({form.partition('(')[2]}: ...", scope)
    return dict(inspect.signature(scope["recorded"]).bind(*args, **kwargs).arguments)


class Recorded:
    """Answers as an SGLang server whose ranks do nothing, whatever the record allows."""

    def __init__(self) -> None:
        self.info = dict(INFO)
        self.version = "default"
        self.asked: list[tuple[str, Any]] = []
        self.lost: str | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        form = form_of(f"entrypoints.http_server:{path[1:]}")
        assert form.startswith(f"{request.method.lower()} {path} ")
        body = json.loads(request.content) if request.content else None
        self.asked.append((path, body))
        if path in REQUEST_OF:
            bind(form_of(f"managers.io_struct:{REQUEST_OF[path]}.__init__"), self, **body)
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == self.lost:
            raise httpx.ReadTimeout("no answer")
        answers = {"/server_info": self.info, "/model_info": {"weight_version": self.version}}
        return httpx.Response(200, json=answers.get(path, {"success": True, "message": ""}))


@pytest.fixture
def server() -> Recorded:
    return Recorded()


@pytest.fixture
def engine(server: Recorded) -> Iterator[ServerEngine]:
    engine = ServerEngine("http://engine:30000")
    engine.close()
    engine._client = httpx.Client(
        base_url="http://engine:30000", transport=httpx.MockTransport(server)
    )
    yield engine
    engine.close()


def test_server_is_switched_in_calls_that_are_on_record(server, engine, tmp_path):
    """Every rank is told, and no weights travel. Nothing is loaded before caches were flushed."""
    assert engine.facts().num_ranks == 2
    assert not engine.is_paused()
    options = EngineOptions(store=str(tmp_path / "store"), engine_id="engine")
    engine.do(RankRequest("begin", options=options))
    server.asked.clear()
    engine.pause("keep")
    request = RankRequest("update", update=UpdateRequest(at_least=1))
    engine.do(request)
    engine.set_weight_version(WeightLabel("1"))
    # The label is changed without ending requests.
    assert server.asked[-1][1] == {"new_version": "1", "abort_all_requests": False}
    engine.resume()
    assert engine.weight_version() == "1"
    assert [path for path, _ in server.asked] == [
        "/pause_generation",
        *("/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"),
        *("/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"),
        "/update_weight_version",
        "/continue_generation",
        "/model_info",
    ]
    updates = [body for path, body in server.asked if path == "/update_weights_from_tensor"]
    assert [body["flush_cache"] for body in updates] == [True, False]
    assert [command_in(body) for body in updates] == [None, request]
    for body in updates:
        assert len(body["serialized_named_tensors"]) == 2
        assert len(body["serialized_named_tensors"][0]) < 2000


def test_server_that_paused_and_whose_answer_was_lost_is_resumed(server, engine):
    server.lost = "/pause_generation"
    with pytest.raises(dbuffer.EngineUnreachableError):
        engine.do(RankRequest("end"))
    assert [path for path, _ in server.asked] == ["/pause_generation", "/continue_generation"]


def test_server_that_ended_in_a_pause_is_paused_again_for_the_next_request(server, engine):
    """Otherwise the server, once restarted, would first wait for all of its requests."""
    engine.pause("keep")
    server.lost = "/continue_generation"
    with pytest.raises(dbuffer.EngineUnreachableError):
        engine.resume()
    server.lost = None
    server.asked.clear()
    engine.do(RankRequest("end"))
    assert [path for path, _ in server.asked] == [
        "/pause_generation",
        *("/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"),
        "/continue_generation",
    ]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"custom_weight_loader": []}, LOADER),
        ({"custom_weight_loader": None}, LOADER),
        ({"dp_size": 2}, "dp_size"),
        ({"pp_size": 2}, "pp_size"),
        ({"speculative_algorithm": "EAGLE"}, "draft"),
    ],
)
def test_engine_that_cannot_follow_is_refused(server, engine, changed, says):
    before = engine.facts().instance_id
    assert engine.facts().instance_id == before
    server.info["startup_time"] = {"load_weight": 0.2}
    assert engine.facts().instance_id != before
    server.info.update(changed)
    with pytest.raises(dbuffer.UnsupportedError, match=re.escape(says)):
        engine.facts()


@pytest.mark.parametrize("tensors", [[], [("weight", None)], [("{}", None)], [("a", 1), ("b", 2)]])
def test_loader_says_whose_it_is(tensors):
    with pytest.raises(dbuffer.OptionError):
        from_tensors(tensors)


def test_options_are_refused_before_anything_is_asked(tmp_path):
    with pytest.raises(dbuffer.OptionError, match="pause 'wait'"):
        follow("http://engine", tmp_path, pause="wait")  # type: ignore[arg-type]
    with pytest.raises(dbuffer.UnsupportedError, match="object"):
        follow(object(), tmp_path)


def command_in(body: dict[str, Any]) -> RankRequest | None:
    return from_tensors(pickle.loads(base64.b64decode(body["serialized_named_tensors"][0])))
