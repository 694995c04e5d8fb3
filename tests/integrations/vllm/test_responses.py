"""The middleware's part in a response, with an application in the place of vLLM's.

How vLLM's routes, outputs and cores behave is what `test_versions.py` shows with the real ones.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

import dbuffer
from dbuffer.engine.weight_label import WeightLabel
from dbuffer.integrations.vllm import exchanges
from dbuffer.integrations.vllm.admission import Admission
from dbuffer.integrations.vllm.core_labels import ADMITTED, STOP_REASON
from dbuffer.integrations.vllm.exchanges import CURRENT, Call, Exchange, Outlook, observe
from dbuffer.integrations.vllm.responses import WITHOUT_CHOICES, serve

RUN = "0123456789abcdef"
SERVED = WeightLabel("7", RUN, {"step": 70})
SPANS = [{"version": "7", "start": 0, "end": 3}]
START = {"type": "http.response.start", "status": 200}
JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")


IN_TIME_S = 30.0
"""Bound of what would otherwise wait for an hour."""

POST = {"type": "http", "path": "/v1/completions"}


class Core:
    """vLLM's client of an engine's core, which knows nothing but labels."""

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
    """An application that generates, and answers in parts."""

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
    exchange.admitted, exchange.num_tokens = SERVED, 3
    exchange.calls = [Call(2, {0: {"weight_versions": SPANS}})]


def has_been_ended(exchange: Exchange) -> None:
    exchange.is_ended = True
    exchange.calls = [Call(1)]


async def stay() -> Any:
    """Receive nothing more of a client that stays."""
    await asyncio.Event().wait()


def ask(
    app: Any, core: Core | None = None, scope: dict[str, Any] = POST, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of an answer."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = scope | {
        "headers": [
            (name.replace("_", "-").lower().encode(), value.encode())
            for name, value in headers.items()
        ],
    }
    asyncio.run(serve(app, outlook_on(core or Core(SERVED)), scope, stay, send))
    start, *bodies = sent
    assert start["type"] == "http.response.start"
    assert all(one["type"] == "http.response.body" for one in bodies)
    told = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], told, b"".join(one["body"] for one in bodies)


def test_headers_tell_the_weights_of_the_first_token():
    _, headers, body = ask(answering([JSON], b"{}", note=has_generated))
    assert headers["x-weight-version"] == "7"
    assert headers["x-weight-run"] == RUN
    assert json.loads(headers["x-weight-metadata"]) == {"step": 70}
    assert body == b"{}"


def test_nobody_but_the_follower_sets_the_version():
    versions: list[str] = []

    async def take(version: str) -> None:
        versions.append(version)

    engine = SimpleNamespace(generate=None, encode=None, update_weight_version=take)
    observe(engine, outlook_on(Core(SERVED)))

    async def app(*_: object) -> None:
        await engine.update_weight_version("of a client")

    status, _, body = ask(app, scope=POST | {"path": "/update_weight_version"})
    assert (status, b"its follower sets the version" in body) == (400, True)
    asyncio.run(engine.update_weight_version("of the follower"))
    assert versions == ["of the follower"]


def test_response_without_an_output_is_passed_on_as_it_is():
    _, headers, body = ask(answering([JSON], b"a", b"b", note=lambda _: None))
    assert headers == {"content-type": "application/json"}
    assert body == b"ab"


def test_metadata_that_no_header_holds_is_left_out():
    def note(exchange: Exchange) -> None:
        exchange.admitted = WeightLabel("7", RUN, {"note": "x" * 5000})

    _, headers, _ = ask(answering([JSON], b"{}", note=note))
    assert headers["x-weight-version"] == "7"
    assert "x-weight-metadata" not in headers


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


@pytest.mark.parametrize("body", [b"null", b"[]", b'{"error": "x"}', b'{"choices": null}'])
def test_json_without_choices_stays_as_it_is(body):
    app = answering([JSON], body, note=has_generated)
    assert json.loads(ask(app, X_Weight_Versions="true")[2]) == json.loads(body)


def test_beams_of_one_token_tell_no_spans():
    """A beam search of two prompts calls the engine once for each, and answers with two beams."""

    def has_searched(exchange: Exchange) -> None:
        exchange.admitted, exchange.num_tokens = SERVED, 2
        exchange.calls = [Call(1, {0: {"weight_versions": SPANS}}) for _ in range(2)]

    beams = {"choices": [{"index": index, "finish_reason": "length"} for index in range(4)]}
    app = answering([JSON], json.dumps(beams).encode(), note=has_searched)
    told = json.loads(ask(app, X_Weight_Versions="true")[2])["choices"]
    assert [choice["weight_versions"] for choice in told] == [None] * 4


def test_request_that_the_engine_ended_before_a_token_is_refused():
    """A switch came between the look at the engine and the request's way there."""
    core = Core(WeightLabel("8"))
    app = answering([EVENTS], b"data: {}\n\n", b"data: [DONE]\n\n", note=has_been_ended)
    status, headers, body = ask(app, core, X_Weight_Exact_Version="7")
    assert (status, headers["x-weight-version"]) == (409, "8")
    assert "retry-after" not in headers
    assert json.loads(body)["weights"]["version"] == "8"


def test_request_that_no_route_can_refuse_is_refused():
    """A pooled answer tells no weights, and a requirement in ``vllm_xargs`` is none of ours."""
    engine = SimpleNamespace(generate=None, encode=None, update_weight_version=None)
    observe(engine, outlook_on(Core(SERVED)))

    async def refuse(send: Any, call: Callable[[], Any]) -> None:
        with pytest.raises(dbuffer.OptionError):
            call()
        await send({**START, "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def embed(_: Any, __: Any, send: Any) -> None:
        await refuse(send, lambda: engine.encode("prompt", None, "id"))

    async def generate(_: Any, __: Any, send: Any) -> None:
        parameters = SimpleNamespace(n=1, extra_args={"dbuffer": "x"})
        await refuse(send, lambda: engine.generate("prompt", parameters, "id"))

    for app, headers, word in (
        (embed, {"X_Weight_Exact_Version": "7"}, "tokens"),
        (embed, {"X_Weight_Versions": "true"}, "tokens"),
        (generate, {}, "vllm_xargs"),
    ):
        status, _, body = ask(app, **headers)
        assert (status, word in json.loads(body)["error"]["message"]) == (400, True)


@pytest.mark.parametrize("root", ["", "/policy"])
def test_readiness_is_told_below_a_root_path(root):
    scope = {**POST, "path": f"{root}/ready", "root_path": root, "query_string": b""}
    status, _, body = ask(None, None, scope)
    assert (status, json.loads(body)["ready"]) == (200, True)


def test_choices_that_the_engine_ended_are_told_if_others_go_on():
    """Their chunks are held back until it is known that the request is not refused."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange = CURRENT.get()
        assert exchange is not None
        await send({**START, "headers": [EVENTS]})
        exchange.is_ended = True
        await send({"type": "http.response.body", "body": b"ended ", "more_body": True})
        exchange.num_tokens = 1
        await send({"type": "http.response.body", "body": b"generated", "more_body": False})

    status, _, body = ask(app, X_Weight_Exact_Version="7")
    assert (status, body) == (200, b"ended generated")


def test_requests_that_wait_ask_the_engine_together():
    core = Core(*[WeightLabel("1")] * 5, WeightLabel("2"))
    outlook = outlook_on(core)

    async def wait() -> list[Any]:
        admission = Admission(min_version=2, wait_s=60)
        return await asyncio.gather(*(outlook.refusal(admission) for _ in range(50)))

    assert asyncio.run(wait()) == [None] * 50
    assert core.num_questions < 20


def test_requests_that_came_one_by_one_wait_together():
    """Each first looks for itself; after that one looks for all."""
    core = Core(WeightLabel("1"))
    outlook = outlook_on(core)
    interval_s = exchanges._ADMISSION_LOOK_S

    async def wait_after(delay_s: float) -> Any:
        await asyncio.sleep(delay_s)
        return await outlook.refusal(Admission(min_version=2, wait_s=60))

    async def wait() -> list[Any]:
        asyncio.get_running_loop().call_later(15 * interval_s, core.labels.append, WeightLabel("2"))
        return await asyncio.gather(*(wait_after(n * interval_s / 10) for n in range(50)))

    assert asyncio.run(wait()) == [None] * 50
    assert core.num_questions < 50 + 2 * 15 + 10


def test_label_that_is_looked_at_is_not_older_than_the_request():
    """A request that comes after an acknowledged switch is not refused for what was before it."""
    core = Core(WeightLabel("1"))
    outlook = outlook_on(core)

    async def look() -> tuple[Any, Any]:
        before = await outlook.refusal(Admission(min_version=2))
        core.labels = [WeightLabel("2")]
        return before, await outlook.refusal(Admission(min_version=2))

    before, after = asyncio.run(look())
    assert before is not None
    assert after is None


# What waits, and until when


class Engine:
    """vLLM's front end over such a core: one token, or a request that the core has ended."""

    def __init__(self, core: Core, *finish_reasons: str | None) -> None:
        self.finish_reasons = finish_reasons or ("length",)
        self.outlook = outlook_on(core)
        self.encode = self.update_weight_version = None
        observe(self, self.outlook)

    async def generate(self, *_: Any) -> Any:
        for number, reason in enumerate(self.finish_reasons):
            is_ended = reason == "abort"
            choice = SimpleNamespace(
                index=0,
                token_ids=[] if is_ended else [number],
                finish_reason=reason,
                stop_reason=STOP_REASON if is_ended else None,
                weight_versions=None,
            )
            if number == 0 and not is_ended:
                setattr(choice, ADMITTED, SERVED.encode())
            yield SimpleNamespace(outputs=[choice])


class Parameters(SimpleNamespace):
    """Sampling parameters, as far as an engine that is observed needs them."""

    def __init__(self) -> None:
        super().__init__(n=1, extra_args=None)

    def clone(self) -> Parameters:
        return Parameters()


def served(engine: Engine, path: str, app: Any, receive: Any = stay, **headers: str) -> list[Any]:
    """Return the messages of an answer."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    path, _, query = path.partition("?")
    pairs = [(name.replace("_", "-").lower(), value) for name, value in headers.items()]
    scope = {
        **POST,
        "path": path,
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in pairs],
    }
    asyncio.run(asyncio.wait_for(serve(app, engine.outlook, scope, receive, send), IN_TIME_S))
    return sent


def streaming(engine: Engine, catches: Any = Exception) -> Callable[..., Coroutine[Any, Any, None]]:
    """A route that begins its stream before it asks the engine, as `/v1/responses` does."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def tell(event: bytes) -> None:
            body = b"data: %s\n\n" % event
            await send({"type": "http.response.body", "body": body, "more_body": True})

        await send({**START, "headers": [EVENTS]})
        await tell(b"created")
        async for _ in engine.generate("prompt", Parameters(), "id"):
            await tell(b"delta")
        await tell(b"completed")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


@pytest.fixture
def with_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let outputs tell their weights as vLLM's do from 0.32 on."""
    monkeypatch.setattr(exchanges, "_has_spans", lambda: True)


def test_request_waits_where_its_route_asks_the_engine(with_spans):
    core = Core(*[WeightLabel("6")] * 5, SERVED)
    engine = Engine(core)
    start, *_ = served(
        engine, "/v1/completions", streaming(engine), X_Weight_Min_Version="7", X_Weight_Wait_S="60"
    )
    assert (start["status"], core.labels) == (200, [SERVED])


def test_request_that_its_server_does_not_let_in_learns_nothing_and_waits_for_nothing():
    """vLLM compares API keys below this middleware."""

    async def unauthorized(_: Any, __: Any, send: Any) -> None:
        await send({**START, "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    core = Core(WeightLabel("1"))
    asked = {"X_Weight_Min_Version": "7", "X_Weight_Wait_S": "3600"}
    start, _ = served(Engine(core), "/v1/completions", unauthorized, **asked)
    assert (start["status"], start["headers"], core.num_questions) == (401, [], 0)


async def leave() -> Any:
    """Receive that the client has left, after a moment."""
    await asyncio.sleep(0.05)
    return {"type": "http.disconnect"}


def test_client_that_leaves_no_longer_waits_for_readiness():
    path = "/ready?min_version=8&wait_s=3600"
    assert served(Engine(Core(SERVED)), path, None, leave) == []


def test_client_that_leaves_no_longer_waits_for_weights(with_spans):
    """vLLM's routes listen for that, and cancel what they do."""
    engine = Engine(Core(SERVED))

    async def cancelling(scope: Any, receive: Any, send: Any) -> None:
        generating = asyncio.create_task(streaming(engine)(scope, receive, send))
        assert (await receive())["type"] == "http.disconnect"
        generating.cancel()
        await asyncio.wait([generating])
        assert generating.cancelled()

    asked = {"X_Weight_Min_Version": "8", "X_Weight_Wait_S": "3600"}
    assert served(engine, "/v1/responses", cancelling, leave, **asked) == []
    assert not engine.outlook._lock.locked()


@pytest.mark.timing(alive_check_s=0.01)
def test_engine_that_ends_ends_all_waits(with_spans):
    """vLLM never answers a call that was in flight when its engine died."""

    class Dying(Core):
        async def call_utility_async(self, method: str) -> str:
            if self.num_questions == 3:
                engine.outlook._engine.errored = True
                await asyncio.Event().wait()
            return await super().call_utility_async(method)

    engine = Engine(Dying(SERVED))
    start, body = served(engine, "/ready?min_version=8&wait_s=3600", None)
    assert start["status"] == 503
    assert "ended" in json.loads(body["body"])["reason"]
    engine = Engine(Dying(SERVED))
    asked = {"X_Weight_Min_Version": "8", "X_Weight_Wait_S": "3600"}
    start, *_ = served(engine, "/v1/completions", streaming(engine), **asked)
    assert start["status"] == 200, "vLLM's engine is asked, and says that it has ended"


# Routes without choices


@pytest.mark.parametrize("path", sorted(WITHOUT_CHOICES))
def test_stream_that_begins_before_the_engine_has_its_headers(with_spans, path):
    engine = Engine(Core(SERVED))
    start, *bodies = served(engine, path, streaming(engine))
    assert dict(start["headers"])[b"x-weight-version"] == b"7"
    told = b"".join(body["body"] for body in bodies)
    assert told == b"data: created\n\ndata: delta\n\ndata: completed\n\n"


def test_stream_that_begins_before_the_engine_is_refused_once(with_spans):
    engine = Engine(Core(WeightLabel("8")), "abort")
    start, *_ = served(engine, "/v1/responses", streaming(engine), X_Weight_Exact_Version="7")
    assert start["status"] == 409


def test_request_that_is_cut_is_not_told_as_complete(with_spans):
    engine = Engine(Core(WeightLabel("8")), None, "abort")
    asked = {"X_Weight_Exact_Version": "7"}
    *bodies, last = served(engine, "/v1/responses", streaming(engine), **asked)
    assert not any(b"completed" in body.get("body", b"") for body in [*bodies, last])
    event, data = last["body"].split(b"\n", 1)
    assert (event, last.get("more_body", False)) == (b"event: error", False)
    told = json.loads(data.removeprefix(b"data: "))
    assert "ended by a switch" in told["message"] == told["error"]["message"]

    async def whole(_: Any, __: Any, send: Any) -> None:
        async for _ in engine.generate("prompt", Parameters(), "id"):
            pass
        await send({**START, "headers": [JSON]})
        await send({"type": "http.response.body", "body": b'{"status": "completed"}'})

    start, *_ = served(engine, "/v1/responses", whole, **asked)
    assert start["status"] == 409


def test_spans_that_a_route_cannot_tell_are_refused():
    start, body = served(Engine(Core(SERVED)), "/v1/messages", None, X_Weight_Versions="true")
    assert start["status"] == 400
    assert "/v1/messages" in json.loads(body["body"])["error"]["message"]
