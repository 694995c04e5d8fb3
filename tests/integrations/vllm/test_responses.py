"""The middleware's part in requests and responses, with an application in the place of vLLM's.

How vLLM's routes, outputs and cores behave is what `test_versions.py` shows with the real ones.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import dbuffer
from dbuffer.engine.contract import UNKNOWN_VERSION, WeightLabel
from dbuffer.format.lineage import Lineage, VersionId
from dbuffer.integrations.vllm import requests, responses
from dbuffer.integrations.vllm.config import CALL
from dbuffer.integrations.vllm.core import label_cores, tell_labels
from dbuffer.integrations.vllm.middleware import FollowStore
from dbuffer.integrations.vllm.requests import (
    HEADERS,
    Outlook,
    headers_of,
    requirement_in,
    unmet_by,
    values_by_name,
)
from dbuffer.integrations.vllm.responses import CURRENT, Exchange, observe, serve
from dbuffer.integrations.vllm.vllm_engine import VllmServer

RUN = "0123456789abcdef"
SERVED = WeightLabel("7", RUN, {"step": 70})
SPANS = [{"version": "7", "start": 0, "end": 3}]
START = {"type": "http.response.start", "status": 200}
JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")


IN_TIME_S = 30.0


class Core:
    def __init__(self, *labels: WeightLabel) -> None:
        self.labels = list(labels)
        self.num_questions = 0

    async def call_utility_async(self, method: str) -> str:
        assert method == "dbuffer_label"
        self.num_questions += 1
        await asyncio.sleep(0)
        label = self.labels[0] if len(self.labels) == 1 else self.labels.pop(0)
        return label.encode()


def outlook_on(core: Core) -> Outlook:
    parallel = SimpleNamespace(data_parallel_size=1, data_parallel_rank=0, is_moe_model=False)
    config = SimpleNamespace(parallel_config=parallel)
    return Outlook(SimpleNamespace(engine_core=core, vllm_config=config, errored=False))


Note = Callable[[Exchange], None]


def answering(
    headers: Iterable[tuple[bytes, bytes]], *parts: bytes, note: Note
) -> Callable[..., Coroutine[Any, Any, None]]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange = CURRENT.get()
        assert exchange is not None
        await send({**START, "headers": list(headers)})
        note(exchange)
        for number, part in enumerate(parts, 1):
            more = number < len(parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})

    return app


def has_generated(exchange: Exchange) -> None:
    exchange.admitted = SERVED
    exchange.calls = [(2, {0: SPANS})]


async def stay() -> Any:
    await asyncio.Event().wait()


def messages_of(
    app: Any,
    engine: Core | Outlook | None,
    path: str,
    receive: Any = stay,
    root_path: str = "",
    **headers: str,
) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    path, _, query = path.partition("?")
    pairs = [(name.replace("_", "-").lower(), value) for name, value in headers.items()]
    scope = {
        "type": "http",
        "path": path,
        "root_path": root_path,
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in pairs],
    }
    outlook = engine if isinstance(engine, Outlook) else outlook_on(engine or Core(SERVED))
    asyncio.run(asyncio.wait_for(serve(app, outlook, scope, receive, send), IN_TIME_S))
    return sent


def ask(
    app: Any,
    engine: Core | Outlook | None = None,
    path: str = "/v1/completions",
    root_path: str = "",
    **headers: str,
) -> tuple[int, dict[str, str], bytes]:
    start, *bodies = messages_of(app, engine, path, root_path=root_path, **headers)
    assert start["type"] == "http.response.start"
    assert all(one["type"] == "http.response.body" for one in bodies)
    told = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], told, b"".join(one["body"] for one in bodies)


@pytest.fixture(autouse=True)
def with_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let outputs tell their weights as vLLM's do from 0.32 on."""
    monkeypatch.setattr(responses, "has_spans", lambda: True)


@pytest.mark.parametrize(
    ("path", "headers", "words"),
    [
        ("/v1/messages", {"X_Weight_Versions": "true"}, b"/v1/messages"),
        ("/v1/completions", {"X_Weight_Versions": "yes"}, b"true or false"),
    ],
)
def test_request_that_cannot_be_answered_is_refused(path, headers, words):
    status, _, body = ask(None, None, path, **headers)
    assert (status, words in body) == (400, True)


def test_nobody_but_the_follower_sets_the_version():
    engine = SimpleNamespace(generate=None)
    observe(engine)
    with pytest.raises(dbuffer.OptionError, match="its follower sets the version"):
        asyncio.run(engine.update_weight_version("of a client"))


def test_releases_that_tell_no_spans_refuse_to(monkeypatch):
    monkeypatch.setattr(responses, "has_spans", lambda: False)
    status, _, body = ask(None, X_Weight_Versions="true")
    assert (status, b"vLLM 0.32" in body) == (400, True)


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_fields_are_added_to_json_that_comes_in_parts(step):
    whole = json.dumps({"choices": [{"index": 0, "text": "ü"}, {"index": 1}]}).encode()
    parts = [whole[start : start + step] for start in range(0, len(whole), step)]
    length = (b"content-length", str(len(whole)).encode())
    app = answering([JSON, length], *parts, note=has_generated)
    _, headers, body = ask(app, X_Weight_Versions="true")
    first, second = json.loads(body)["choices"]
    assert first == {"index": 0, "text": "ü", "weight_versions": SPANS}
    assert second == {"index": 1, "weight_versions": None}
    assert int(headers["content-length"]) == len(body)


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_fields_are_added_to_the_last_chunk_of_a_choice(step):
    chunks: list[Any] = [
        {"choices": [{"index": 0, "text": "a", "finish_reason": None}]},
        {"choices": [{"index": 0, "text": "b", "finish_reason": "stop"}]},
        {"choices": [], "usage": {}},
    ]
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    whole = "".join([*events, "data: [DONE]\n\n"]).encode()
    parts = [whole[start : start + step] for start in range(0, len(whole), step)]
    _, _, body = ask(answering([EVENTS], *parts, note=has_generated), X_Weight_Versions="true")
    *told, end = body.removesuffix(b"\n\n").split(b"\n\n")
    assert end == b"data: [DONE]"
    chunks[1]["choices"][0]["weight_versions"] = SPANS
    assert [json.loads(event.removeprefix(b"data: ")) for event in told] == chunks


def test_each_choice_in_a_batch_of_chats_has_its_own_spans():
    """vLLM gives all choices of one chat the same index."""
    exchange = Exchange(calls=[(2, {0: ["a"], 1: ["b"]}), (2, {0: ["c"], 1: ["d"]})])
    body = {"choices": [{"index": chat} for chat in (0, 0, 1, 1)]}
    choices = exchange.with_fields(body, is_chunk=False)["choices"]
    assert [choice["weight_versions"] for choice in choices] == [["a"], ["b"], ["c"], ["d"]]


@pytest.mark.parametrize("body", [b"null", b"[]", b'{"error": "x"}', b'{"choices": null}'])
def test_json_without_choices_stays_as_it_is(body):
    app = answering([JSON], body, note=has_generated)
    assert json.loads(ask(app, X_Weight_Versions="true")[2]) == json.loads(body)


# The version that a request needs

NEXT_RUN = "fedcba9876543210"
GETS_NEXT_RUN = WeightLabel("7", RUN, {"step": 70}, NEXT_RUN)


@pytest.mark.parametrize(
    ("label", "words"),
    [
        (SERVED, None),
        (WeightLabel("8", RUN), None),
        (WeightLabel("6", RUN), ("version 6", "7")),
        *((WeightLabel(text), (text, "7")) for text in (UNKNOWN_VERSION, "default", "7.5")),
        # Of another run, numbers say nothing: it may have been resumed from far below.
        (GETS_NEXT_RUN, (RUN, NEXT_RUN)),
        (WeightLabel("8", NEXT_RUN), None),
    ],
)
def test_labels_meet_a_least_version_or_not(label, words):
    reason = unmet_by(label, 7)
    assert reason is None if words is None else all(word in reason for word in words)


@pytest.mark.parametrize("text", ["", " 7", "+7", "7.0", "7.5", "1e3", "0", "-1", "٣", "1" * 30])
def test_version_that_is_no_whole_number_is_refused_by_name(text):
    with pytest.raises(dbuffer.OptionError, match="x-weight-min-version"):
        requirement_in({"x-weight-min-version": text})


@pytest.mark.parametrize("text", ["", "soon", "nan", "inf", "-0.1", "3601", "1_0"])
def test_wait_that_no_request_may_take_is_refused_by_name(text):
    with pytest.raises(dbuffer.OptionError, match="x-weight-wait-s"):
        requirement_in({"x-weight-min-version": "1", "x-weight-wait-s": text})


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ([("x-weight-minversion", "1")], "unknown x-weight-minversion"),
        ([("x-weight-min-version", value) for value in "19"], "given twice: 1, 9"),
    ],
)
def test_misspelt_or_repeated_header_is_not_ignored(headers, words):
    known = [("x-weight-min-version", "1"), ("x-weight-versions", "true")]
    others = [("x-request-id", "a"), ("x-request-id", "b")]
    assert values_by_name([*known, *others], HEADERS, "x-weight-") == dict(known)
    with pytest.raises(dbuffer.OptionError, match=words):
        values_by_name(headers, HEADERS, "x-weight-")


# What waits, and until when


def test_requests_that_came_one_by_one_wait_together():
    core = Core(WeightLabel("1"))
    outlook = outlook_on(core)
    interval_s = requests._LOOK_S

    async def wait_after(delay_s: float) -> Any:
        await asyncio.sleep(delay_s)
        return await outlook.refusal(2, 60)

    async def wait() -> list[Any]:
        asyncio.get_running_loop().call_later(15 * interval_s, core.labels.append, WeightLabel("2"))
        return await asyncio.gather(*(wait_after(n * interval_s / 10) for n in range(50)))

    assert {reason for reason, _ in asyncio.run(wait())} == {None}
    assert core.num_questions < 50 + 2 * 15 + 10


def test_label_that_is_looked_at_is_not_older_than_the_request():
    """A request that comes after an acknowledged switch is not refused for what was before it."""
    core = Core(WeightLabel("1"))
    outlook = outlook_on(core)

    async def look() -> tuple[Any, Any]:
        before = await outlook.refusal(2)
        core.labels = [WeightLabel("2")]
        return before, await outlook.refusal(2)

    (before, _), (after, _) = asyncio.run(look())
    assert before is not None
    assert after is None


async def answer(_: Any, __: Any, send: Any) -> None:
    await send({**START, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


@pytest.mark.parametrize("path", ["/ready?min_version=8&wait_s=3600", "/v1/completions"])
def test_client_that_leaves_no_longer_waits(path):
    async def leave() -> Any:
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    asked = {"X_Weight_Min_Version": "8", "X_Weight_Wait_S": "3600"}
    assert messages_of(answer, None, path, leave, **asked) == []


def body_in(*parts: bytes) -> tuple[Any, Any]:
    """Return a client that sends these parts of a body, and an application that requires them."""
    last = len(parts) - 1
    messages = [
        {"type": "http.request", "body": part, "more_body": number < last}
        for number, part in enumerate(parts)
    ]
    left = list(messages)

    async def receive() -> Any:
        return left.pop(0) if left else await stay()

    async def app(_: Any, receive: Any, send: Any) -> None:
        assert [await receive() for _ in messages] == messages
        await answer(_, receive, send)

    return receive, app


def test_body_that_comes_while_its_request_waits_is_passed_on():
    receive, app = body_in(b"a", b"b", b"c")
    core = Core(*[WeightLabel("6")] * 5, SERVED)
    asked = {"X_Weight_Min_Version": "7", "X_Weight_Wait_S": "60"}
    start, _ = messages_of(app, core, "/v1/completions", receive, **asked)
    assert start["status"] == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"model": "adapter"}', 409),
        (b'{"model": "base"}', 200),
        (b'{"model": ["adapter"]}', 200),
        (b'["adapter"]', 200),
        (b"no JSON", 200),
    ],
)
def test_least_version_is_that_of_the_adapter_which_the_json_names(body, status):
    """The application gets the whole body again."""
    receive, app = body_in(body[:4], body[4:])
    outlook = outlook_on(Core(SERVED))
    adapter: Any = SimpleNamespace(label=WeightLabel("3", RUN))
    outlook.adapters["adapter"] = Outlook(outlook._engine, adapter=adapter)
    start, _ = messages_of(app, outlook, "/v1/completions", receive, X_Weight_Min_Version="4")
    assert start["status"] == status


@pytest.mark.timing(alive_check_s=0.01)
@pytest.mark.parametrize("path", ["/ready?min_version=8&wait_s=3600", "/v1/completions"])
def test_engine_that_ends_ends_all_waits(path):
    """vLLM never answers a call that was in flight when its engine died."""

    class Dying(Core):
        async def call_utility_async(self, method: str) -> str:
            if self.num_questions == 3:
                outlook._engine.errored = True
                await asyncio.Event().wait()
            return await super().call_utility_async(method)

    outlook = outlook_on(Dying(SERVED))
    asked = {"X_Weight_Min_Version": "8", "X_Weight_Wait_S": "3600"}
    status, _, body = ask(answer, outlook, path, **asked)
    assert (status, b"the engine has ended" in body) == (503, True)


@pytest.mark.parametrize("root", ["", "/policy"])
@pytest.mark.parametrize(("query", "status"), [("", 200), ("?min_version=8", 503), ("?x=1", 400)])
def test_readiness_is_told_below_a_root_path(root, query, status):
    told, _, body = ask(None, path=f"{root}/ready{query}", root_path=root)
    assert told == status
    if status != 400:
        assert json.loads(body)["ready"] is (status == 200)


# Labels


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
    assert WeightLabel(text).encode() == text


def test_version_that_is_attested_while_it_is_served_stays_one_span():
    """vLLM begins a span when the label changes. The headers have the label at the start."""

    class RequestState:
        lora_request = lora_name = None

        def __init__(self) -> None:
            attested = replace(SERVED, attested_at=1e9)
            labels = ["default", SERVED.encode(), attested.encode(), GETS_NEXT_RUN.encode()]
            labels += [WeightLabel("8", RUN).encode()]
            self.weight_version_starts = [(label, number) for number, label in enumerate(labels)]

        def track_weight_version(self) -> None: ...

        def _new_completion_output(self) -> Any:
            starts = self.weight_version_starts
            spans = [SimpleNamespace(version=v, start=n, end=n + 1) for v, n in starts]
            return SimpleNamespace(weight_versions=spans)

    tell_labels(RequestState)
    spans = RequestState()._new_completion_output().weight_versions
    told = [(span.version, span.run, span.start, span.end) for span in spans]
    assert told == [("default", None, 0, 1), ("7", RUN, 1, 4), ("8", RUN, 4, 5)]


@pytest.mark.parametrize(
    ("label", "verified"),
    [
        (SERVED, "false"),
        (replace(SERVED, attested_at=1e9), "true"),
        (WeightLabel("default"), None),
        (WeightLabel(), None),
    ],
)
def test_headers_say_whether_the_weights_were_compared(label, verified):
    assert headers_of(WeightLabel.decode(label.encode())).get("x-weight-verified") == verified


def labeled_core() -> Any:
    class EngineCore:
        vllm_config = SimpleNamespace(weight_transfer_config=None)
        version = "default"
        attached: Any = None

        def set_weight_version(self, version: str) -> None:
            self.version = version

        def get_weight_version(self) -> str:
            return self.version

        def _attach_weight_version(self, outputs: dict[int, Any]) -> None:
            raise NotImplementedError

        def collective_rpc(self, method: str) -> None: ...

    label_cores(EngineCore)
    return EngineCore()


def test_run_that_the_engine_gets_ready_begins_no_span():
    """vLLM begins a span for each other label of its core; the core tells all of it if asked."""
    core = labeled_core()
    for label in (SERVED, GETS_NEXT_RUN):
        core.set_weight_version(label.encode())
        core._attach_weight_version({0: core})
        assert WeightLabel.decode(core.weight_version) == SERVED
        assert WeightLabel.decode(core.dbuffer_label()) == label
        assert core.version == "7"


def test_label_of_weights_that_a_server_lost_meanwhile_is_ignored():
    """Until the follower asks the workers, which tell it that their weights are unknown."""
    core = labeled_core()

    def answer(request: httpx.Request) -> httpx.Response:
        core.set_weight_version(json.loads(request.content)["new_version"])
        return httpx.Response(200, json={})

    server = VllmServer("http://server:8000")
    server.close()
    transport = httpx.MockTransport(answer)
    with httpx.Client(base_url=server.url, transport=transport) as server._client:
        for method, version in ((CALL, "7"), ("reload_weights", UNKNOWN_VERSION), (CALL, "7")):
            core.collective_rpc(method)
            server.set_weight_version(SERVED)
            assert core.get_weight_version() == version


def test_an_adapter_that_cannot_be_closed_does_not_keep_others_open(caplog):
    middleware, closed = FollowStore(lambda *_: None), []

    def adapter(name: str) -> Any:
        def close() -> None:
            closed.append(name)
            if name == "broken":
                raise dbuffer.StoreAccessError("its disk is gone")

        return SimpleNamespace(close=close)

    middleware._adapters = [adapter(name) for name in ("first", "broken", "last")]
    asyncio.run(middleware._end())
    assert sorted(closed) == ["broken", "first", "last"]
    assert "its disk is gone" in caplog.text
