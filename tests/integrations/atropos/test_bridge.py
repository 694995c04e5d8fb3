"""The bridge without an engine: its settings, its store, whom it notifies and whom it waits for.

What follows here in an engine's place are real receivers in processes and threads of their own;
with a real vLLM: `test_atropos`, and the example.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import dbuffer
from dbuffer.integrations.atropos import (
    BridgeConfig,
    VLLMWeightBridge,
    create_bridge_from_training_config,
    mapping,
    permute_for_rotary,
)
from dbuffer.integrations.atropos.mapping import (
    MAPPING_FILE,
    PATH_VARIABLE,
    ParameterMapping,
    mapping_path,
)
from dbuffer.testing.waiting import TIMEOUT_S, until
from tests.support.children import Child
from tests.support.patterns import received as stored
from tests.support.waiting import meanwhile

SOON_S = 0.5


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGDIR", PATH_VARIABLE, "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_PROBE_S", TIMEOUT_S)


class Follower:
    """Applies each version of a store, in a thread, and acknowledges it as an engine does."""

    def __init__(self, store: Path, name: str = "vllm-here") -> None:
        self._stop = threading.Event()
        self.versions: list[int] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self._receiver = dbuffer.WeightReceiver(store, receiver_id=name, poll_interval_s=0.05)
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        for snapshot in self._receiver.follow(stop_event=self._stop):
            self.tensors = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
            self.versions.append(snapshot.version)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT_S)
        self._receiver.close()


WITH_ROUTES = {"POST /bridge/notify_update": 200}


@contextlib.contextmanager
def running(store: Path, routes: Mapping[str, Any], *, follows: bool = True) -> Iterator[Any]:
    """A server that answers each route with a code or a body, and follows the store or does not."""
    calls: list[tuple[str, str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            path = self.path.partition("?")[0]
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            calls.append((self.command, path, json.loads(body) if body else None))
            found = routes.get(f"{self.command} {path}", 404)
            answer = json.dumps(found if isinstance(found, dict) else {}).encode()
            self.send_response(200 if isinstance(found, dict) else found)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = _answer  # noqa: N815 - the library's names

        def log_message(self, *_: object) -> None:
            pass

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        stack.callback(thread.join, TIMEOUT_S)
        stack.callback(server.shutdown)
        follower = stack.enter_context(contextlib.closing(Follower(store))) if follows else None
        url = f"http://127.0.0.1:{server.server_port}"
        yield SimpleNamespace(url=url, calls=calls, follower=follower)


def config_for(url: str = "http://127.0.0.1:9", **more: Any) -> BridgeConfig:
    return BridgeConfig(
        **{"vllm_api_url": url, "device": "cpu", "timeout_seconds": TIMEOUT_S, **more}
    )


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def attached(bridge: VLLMWeightBridge, model: nn.Module | None = None) -> nn.Module:
    model = model or small()
    bridge.attach_to_vllm_weights(dict(model.named_parameters()))
    return model


@contextlib.contextmanager
def opened(store: Path, url: str = "http://127.0.0.1:9", **more: Any) -> Iterator[VLLMWeightBridge]:
    with VLLMWeightBridge(config_for(url, **more), store=store) as bridge:
        attached(bridge)
        yield bridge


def write_mapping(directory: Path, entries: dict[str, Any]) -> Path:
    path = directory / MAPPING_FILE
    path.write_text(json.dumps({"model": "m", "tp_degree": 1, "param_mappings": entries}))
    return path


def to(name: str, **more: Any) -> dict[str, Any]:
    return {"vllm_name": name, "shape": [1], "dtype": "torch.float32", **more}


RENAMED = {"0.weight": to("first.w")}


def assert_published(store: Path, model: nn.Module) -> None:
    found = stored(store)
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter), name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers.utils import logging as transformers_logging

    from tests.support.engines.tiny_models import save_model

    transformers_logging.disable_progress_bar()
    return save_model("tied-qwen2", 3, tmp_path_factory.mktemp("model"))


# Settings


def test_settings_come_from_a_training_config(monkeypatch):
    shared = {
        "model_name": "m",
        "device": "cpu",
        "trainer_rank": 1,
        "world_size": 2,
        "init_method": "tcp://a:1",
        "num_inference_nodes": 3,
    }
    given = SimpleNamespace(**shared, vllm_port=9007, lr=1e-5)
    monkeypatch.setenv("LOGDIR", "/logs")
    config = BridgeConfig.from_training_config(given)
    assert config == BridgeConfig(**shared, log_dir="/logs", vllm_api_url="http://localhost:9007")
    assert not config.is_local_mode
    least = SimpleNamespace(model_name="m", device="cpu", single_copy=False)
    config = BridgeConfig.from_training_config(least)
    assert config == BridgeConfig(model_name="m", device="cpu", log_dir="/logs")
    assert config.is_local_mode


@pytest.mark.parametrize("name", ["single_copy", "use_cuda_ipc"])
def test_shared_gpu_memory_is_refused_with_what_to_do(name):
    given = SimpleNamespace(model_name="m", device="cpu", **{name: True})
    with pytest.raises(dbuffer.UnsupportedError, match="Turn use_cuda_ipc off"):
        BridgeConfig.from_training_config(given)


def test_rank_outside_of_the_world_is_refused():
    with pytest.raises(dbuffer.OptionError, match="trainer_rank"):
        BridgeConfig(trainer_rank=1)


def test_default_stores(monkeypatch):
    name = f"dbuffer-atropos-{os.getuid()}"
    several = config_for(num_inference_nodes=1, log_dir="/shared/logs")
    monkeypatch.setenv("LOGDIR", "/logs")
    for config, job, store in (
        (config_for("http://localhost:9001"), None, f"/dev/shm/{name}-9001"),
        (several, None, "/shared/logs/dbuffer-atropos"),
        (config_for(num_inference_nodes=1), None, "/logs/dbuffer-atropos"),
        (config_for("http://h"), "77", f"/dev/shm/{name}-job77-80"),
    ):
        if job is not None:
            monkeypatch.setenv("SLURM_JOB_ID", job)
        assert VLLMWeightBridge(config).store == Path(store)
    monkeypatch.delenv("LOGDIR")
    with pytest.raises(dbuffer.OptionError, match="log_dir"):
        VLLMWeightBridge(config_for(num_inference_nodes=1))


# What is published


@pytest.mark.parametrize("delta", [False, True])
def test_tensors_of_the_trainer_are_published_as_they_are_then(store, delta):
    trained = nn.ParameterDict({"a": torch.zeros(10_000)})
    with VLLMWeightBridge(config_for(), store=store, delta=delta) as bridge:
        attached(bridge, trained)
        bridge.broadcast_weights_to_inference()
        with torch.no_grad():
            trained["a"][7] = 5
        assert not torch.equal(stored(store)["a"], trained["a"])
        bridge.broadcast_weights_to_inference()
        assert_published(store, trained)
        assert len(list(store.glob("deltas/*"))) == delta


def test_model_that_is_made_is_published(store, checkpoint):
    config = config_for(model_name=str(checkpoint))
    with VLLMWeightBridge(config, store=store) as bridge:
        model = bridge.get_trainable_model()
        assert bridge.get_trainable_model() is model
        assert model.training
        assert model.lm_head.weight is model.model.embed_tokens.weight
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for _ in range(3):
            model(torch.arange(4)[None]).logits.sum().backward()
            optimizer.step()
            bridge.broadcast_weights_to_inference()
            assert_published(store, model)
        with pytest.raises(dbuffer.OptionError, match="get_trainable_model"):
            attached(bridge)
    assert_published(store, model)


@pytest.mark.parametrize("under", ["names of parameters", "all names"])
def test_model_of_a_trainer_that_goes_on_is_what_it_attached(store, checkpoint, under):
    """In the order of Atropos' documents: attach, then the model."""
    from tests.support.engines.tiny_models import make_model

    resumed = make_model("tied-qwen2", seed=7).bfloat16()
    given: Any = dict(resumed.named_parameters())
    if under == "all names":
        given = resumed.state_dict()
    assert ("lm_head.weight" in given) == (under == "all names")
    config = config_for(model_name=str(checkpoint))
    with VLLMWeightBridge(config, store=store) as bridge:
        bridge.attach_to_vllm_weights(given)
        assert bridge.shared_state_dict is given
        model = bridge.get_trainable_model()
        assert model.training
        assert model.lm_head.weight is model.model.embed_tokens.weight
        expected = dict(resumed.named_parameters())
        assert dict(model.named_parameters()).keys() == expected.keys()
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad
            assert parameter.dtype == torch.bfloat16
            assert parameter.data_ptr() == expected[name].data_ptr(), "no copy: they are one"
        model(torch.arange(4)[None]).logits.sum().backward()
        torch.optim.SGD(model.parameters(), 0.5).step()
        bridge.broadcast_weights_to_inference()
    assert_published(store, resumed)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda x: x.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda x: x.update(other=torch.ones(1)), "other is not one of the model's tensors"),
        (
            lambda x: x.update({"model.norm.weight": torch.ones(3)}),
            "size mismatch for model.norm.weight",
        ),
        (
            lambda x: x.update({"lm_head.weight": x["lm_head.weight"] + 1}),
            "lm_head.weight is tied to another tensor of the model, but has other values",
        ),
    ],
)
def test_what_is_attached_must_be_the_model(store, checkpoint, change, problem):
    from tests.support.engines.tiny_models import make_model

    given = dict(make_model("tied-qwen2", seed=7).state_dict())
    change(given)
    with VLLMWeightBridge(config_for(model_name=str(checkpoint)), store=store) as bridge:
        bridge.attach_to_vllm_weights(given)
        with pytest.raises(dbuffer.OptionError, match=problem):
            bridge.get_trainable_model()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_default_device_without_a_gpu_says_so(store):
    assert BridgeConfig().device == "cuda"
    with VLLMWeightBridge(config_for(device="cuda", model_name="none"), store=store) as bridge:
        with pytest.raises(dbuffer.OptionError, match=r'no GPU.*device="cpu"'):
            bridge.get_trainable_model()


def test_bridge_with_nothing_to_publish_says_so(store):
    with VLLMWeightBridge(config_for(), store=store) as bridge:
        with pytest.raises(dbuffer.NotReadyError, match="get_trainable_model"):
            bridge.notify_update()
        bridge.barrier()


def test_bridge_can_be_opened_again_and_versions_go_on(store):
    bridge = VLLMWeightBridge(config_for(), store=store)
    for version in (1, 2):
        bridge.initialize()
        bridge.initialize()
        with pytest.raises(dbuffer.StoreBusyError):
            VLLMWeightBridge(config_for(), store=store).initialize()
        attached(bridge)
        bridge.broadcast_weights_to_inference()
        bridge.cleanup()
        bridge.cleanup()
        with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
            assert (snapshot.version, snapshot.metadata) == (version, {"update_count": version})


def test_bridge_is_made_and_opened_from_a_training_config(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    write_mapping(tmp_path, {})
    given = SimpleNamespace(model_name="m", device="cpu", num_inference_nodes=2)
    bridge = create_bridge_from_training_config(given)
    try:
        assert bridge.store == tmp_path / "dbuffer-atropos"
        attached(bridge)
        bridge.broadcast_weights_to_inference()
        assert len(stored(bridge.store)) == 4
    finally:
        bridge.cleanup()


# Local mode


@pytest.mark.parametrize("code", [200, 404, 405])
def test_server_that_follows_is_notified_and_waited_for(store, code):
    """Also a stock one, which has no route for that."""
    routes = {"POST /bridge/notify_update": code}
    with running(store, routes) as server, opened(store, server.url) as bridge:
        for count in range(1, 5):
            began = time.time()
            if count % 2:  # also the first one, before any notify_update()
                bridge.broadcast_weights_to_inference()
                bridge.barrier()
            else:
                bridge.notify_update()
            assert server.follower.versions[-1] == count
            bridge.barrier()  # which finds that it is served already
            posted = [(path, body) for method, path, body in server.calls if method == "POST"]
            path, body = posted[-1]
            assert (len(posted), path) == (count, "/bridge/notify_update")
            assert began - 1 < body.pop("timestamp") < time.time() + 1
            assert body == {"update_count": count, "trainer_rank": 0}


@pytest.mark.parametrize("routes", [WITH_ROUTES, {}], ids=["with routes", "without"])
def test_server_that_follows_nothing_is_not_waited_for_ever(store, routes):
    with running(store, routes, follows=False) as server:
        with opened(store, server.url, timeout_seconds=SOON_S) as bridge:
            with pytest.raises(TimeoutError, match="FollowStore") as caught:
                bridge.notify_update()
            assert str(store) in str(caught.value)
            assert server.url in str(caught.value)
            with pytest.raises(dbuffer.WaitTimeoutError, match=server.url):
                bridge.barrier()
        assert len(stored(store)) == 4, "it is published all the same"


def test_error_of_the_server_is_raised(store):
    routes = {"POST /bridge/notify_update": 500}
    with running(store, routes) as server, opened(store, server.url) as bridge:
        with pytest.raises(dbuffer.EngineUpdateError, match="/bridge/notify_update: 500"):
            bridge.notify_update()


def test_server_that_is_not_available_yet_is_waited_for(store):
    routes = {"POST /bridge/notify_update": 503}
    with running(store, routes) as server:
        with opened(store, server.url, timeout_seconds=SOON_S) as bridge:
            with pytest.raises(dbuffer.EngineUnreachableError, match="with 503"):
                bridge.notify_update()
        with opened(store, server.url) as bridge, meanwhile(routes.clear, after_s=SOON_S):
            bridge.notify_update()


# Several nodes


def test_engines_of_all_inference_nodes_are_waited_for(tmp_path, network):
    write_mapping(tmp_path, {})
    config = config_for(num_inference_nodes=2, log_dir=str(tmp_path))
    with VLLMWeightBridge(config) as bridge, contextlib.ExitStack() as stack:
        attached(bridge)
        first, second = (
            stack.enter_context(contextlib.closing(Follower(bridge.store, f"vllm-{name}")))
            for name in ("gpu08", "gpu09")
        )
        for version in (1, 2, 3):
            if version == 2:
                bridge.broadcast_weights_to_inference()
                bridge.barrier()
            else:
                bridge.notify_update()
            assert first.versions[-1] == second.versions[-1] == version
        # One of them ends: the other does not stand for both.
        second.close()
        config.timeout_seconds = SOON_S
        with pytest.raises(dbuffer.WaitTimeoutError, match="vllm-gpu09 has ended at version 3"):
            bridge.notify_update()


# A trainer of several processes


def rank(
    connection: Connection,
    number: int,
    meeting: Path,
    store: Path,
    url: str,
    timeout_s: float,
    delta: bool = False,
) -> None:
    config = BridgeConfig(
        trainer_rank=number,
        world_size=2,
        init_method=f"file://{meeting}",
        device="cpu",
        vllm_api_url=url,
        timeout_seconds=TIMEOUT_S,
    )
    with VLLMWeightBridge(config, store=store, delta=delta) as bridge:
        model = attached(bridge, nn.Sequential(nn.Linear(100, 100)))
        config.timeout_seconds = timeout_s
        for value in (1, 2):
            with torch.no_grad():
                model[0].weight[0].fill_(value)
            try:
                bridge.notify_update()
            except dbuffer.DBufferError as error:
                connection.send(type(error).__name__)
            else:
                connection.send(value)
    connection.send(torch.distributed.is_initialized())


@pytest.mark.parametrize(("follows", "delta"), [(True, True), (False, False)])
def test_all_ranks_publish_and_hear_of_it_together(store, tmp_path, follows, delta):
    with running(store, WITH_ROUTES, follows=follows) as server, contextlib.ExitStack() as stack:
        timeout_s = TIMEOUT_S if follows else SOON_S
        told = tmp_path / "meeting", store, server.url, timeout_s, delta
        ranks = [stack.enter_context(Child(rank, number, *told)) for number in (0, 1)]
        for value in (1, 2):
            expected = value if follows else "WaitTimeoutError"
            assert [child.receive() for child in ranks] == [expected] * 2
        assert [child.receive() for child in ranks] == [False, False]
        assert [child.wait() for child in ranks] == [0, 0]
        assert [body["update_count"] for _, _, body in server.calls] == [1, 2]
    assert len(list(store.glob("deltas/*"))) == delta


def make_bridge(connection: Connection, place: str, store: Path) -> None:
    config = BridgeConfig(
        trainer_rank=1, world_size=2, init_method=place, device="cpu", timeout_seconds=SOON_S
    )
    with pytest.raises(dbuffer.DBufferError) as caught:
        VLLMWeightBridge(config, store=store, rank_timeout_s=SOON_S).initialize()
    error, is_initialized = caught.value, torch.distributed.is_initialized()
    connection.send([type(error).__name__, str(error), is_initialized, store.exists()])


@pytest.mark.parametrize(
    ("place", "error"), [("file://{}/meeting", "RankFailedError"), ("env://", "OptionError")]
)
def test_bridge_that_one_rank_makes_alone(store, tmp_path, place, error):
    place = place.format(tmp_path)
    with Child(make_bridge, place, store) as child:
        kind, message, *left = child.receive()
    assert kind == error
    assert place in message
    assert left == [False, False]


class AnsweredLate(dict[str, int]):
    def __init__(self) -> None:
        super().__init__(WITH_ROUTES)
        self.is_over = threading.Event()

    def get(self, route: str, default: Any = None) -> Any:
        self.is_over.wait(TIMEOUT_S)
        return super().get(route, default)


def test_rank_that_is_lost_while_it_tells_the_server(store, tmp_path):
    routes = AnsweredLate()
    with running(store, routes, follows=False) as server, contextlib.ExitStack() as stack:
        stack.callback(routes.is_over.set)
        told = tmp_path / "meeting", store, server.url, TIMEOUT_S
        first, second = (stack.enter_context(Child(rank, number, *told)) for number in (0, 1))
        until("the server is notified", lambda: server.calls, TIMEOUT_S)
        first.signal(signal.SIGKILL)
        assert [second.receive(), second.receive()] == ["RankFailedError", "RankFailedError"]


# The parameter mapping


@pytest.mark.parametrize(
    ("entries", "names"),
    [
        ({"0.weight": to("first.w"), "1.bias": to("1.bias")}, "0.bias 1.bias 1.weight first.w"),
        # Atropos' patched server writes its own names, fused ones among them, each to itself.
        ({"qkv_proj.weight": to("qkv_proj.weight")}, "0.bias 0.weight 1.bias 1.weight"),
        # Parts of a fused projection keep their names.
        (
            {"0.weight": to("qkv.weight"), "1.weight": to("qkv.weight"), "0.bias": to("b")},
            "0.weight 1.bias 1.weight b",
        ),
    ],
)
def test_names_are_those_of_the_mapping(store, tmp_path, entries, names):
    write_mapping(tmp_path, entries)
    with opened(store, log_dir=str(tmp_path)) as bridge:
        bridge.broadcast_weights_to_inference()
    assert sorted(stored(store)) == names.split()


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({"2.weight": to("w")}, r"2\.weight"),
        ({"2.weight": to("2.weight", needs_permute=True)}, r"2\.weight"),
        ({"0.weight": to("1.weight")}, r"1\.weight"),
        ({"0.weight": {"name": "w"}}, "vllm_name"),
        # An engine's loader would not know the parts by the names that they keep.
        (
            {"0.weight": to("attn.qkv.weight"), "1.weight": to("attn.qkv.weight")},
            r"fused.*0\.weight.*1\.weight",
        ),
    ],
)
@pytest.mark.timing(settle_s=0.1)
def test_mapping_for_another_model_is_refused_before_anything_is_written(
    tmp_path, store, entries, problem
):
    write_mapping(tmp_path, entries)
    with pytest.raises(dbuffer.OptionError, match=problem) as caught:
        with opened(store, log_dir=str(tmp_path)):
            pass
    assert MAPPING_FILE in str(caught.value)
    with dbuffer.WeightReceiver(store) as receiver:
        assert receiver.wait_for_version(timeout_s=0) is None


@pytest.mark.parametrize("where", ["LOGDIR", "log_dir", "working directory", "named"])
def test_mapping_is_found_where_atropos_puts_it(store, tmp_path, monkeypatch, where):
    assert not mapping_path(None).exists()
    assert not mapping_path(str(tmp_path)).exists()
    path = write_mapping(tmp_path, RENAMED)
    more = {}
    if where == "LOGDIR":
        monkeypatch.setenv("LOGDIR", str(tmp_path))
        assert config_for().log_dir is None
        assert config_for(log_dir="/other").directory == "/other"
    elif where == "log_dir":
        more = {"log_dir": str(tmp_path)}
    elif where == "working directory":
        monkeypatch.chdir(tmp_path)
    else:
        monkeypatch.setenv(PATH_VARIABLE, str(path))
    with opened(store, **more) as bridge:
        bridge.broadcast_weights_to_inference()
    assert "first.w" in stored(store)


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("nodes", [0, 1])
@pytest.mark.timing(settle_s=TIMEOUT_S)
def test_mapping_that_comes_late_is_waited_for(store, tmp_path, nodes, is_begun):
    if is_begun:
        (tmp_path / MAPPING_FILE).write_text('{"model": "m", "tp_')
    with meanwhile(write_mapping, tmp_path, RENAMED, after_s=SOON_S):
        with opened(store, log_dir=str(tmp_path), num_inference_nodes=nodes) as bridge:
            assert bridge.param_mappings.keys() == {"0.weight"}
            assert bridge.name_conversions == {"first.w": ["0.weight"]}
            bridge.broadcast_weights_to_inference()
    assert "first.w" in stored(store)


@pytest.mark.parametrize("several", [True, False])
def test_mapping_that_is_needed_and_does_not_come_is_named(tmp_path, monkeypatch, several):
    log_dir = tmp_path / "logs"
    log_dir.mkdir()
    path, store = log_dir / MAPPING_FILE, None if several else log_dir / "store"
    if not several:
        path = log_dir / "names.json"
        monkeypatch.setenv(PATH_VARIABLE, str(path))
    config = config_for(
        log_dir=str(log_dir), num_inference_nodes=int(several), timeout_seconds=SOON_S
    )
    with pytest.raises(RuntimeError, match=re.escape(str(path))) as caught:
        VLLMWeightBridge(config, store=store).initialize()
    assert isinstance(caught.value, dbuffer.NotReadyError)
    assert list(log_dir.iterdir()) == []


def test_nobody_waits_for_the_mapping_of_a_stock_server(store, tmp_path, caplog):
    with running(store, {"GET /version": {"version": "0.32.0"}}) as server:
        began = time.monotonic()
        with opened(store, server.url, log_dir=str(tmp_path), timeout_seconds=TIMEOUT_S):
            assert time.monotonic() - began < TIMEOUT_S / 2
    assert f"no {tmp_path / MAPPING_FILE}: " in caplog.text


def test_mapping_is_checked_against_what_was_attached_before(store, tmp_path):
    write_mapping(tmp_path, {"2.weight": to("w")})
    bridge = VLLMWeightBridge(config_for(log_dir=str(tmp_path)), store=store)
    attached(bridge)
    with pytest.raises(dbuffer.OptionError, match=r"2\.weight"):
        bridge.initialize()
    assert not store.exists()


def test_rotary_layouts_are_changed_where_the_mapping_says_so(store, tmp_path, checkpoint):
    layer = "model.layers.0.self_attn"
    permuted = {f"{layer}.q_proj.weight": 2, f"{layer}.k_proj.weight": 2, f"{layer}.q_proj.bias": 2}
    write_mapping(tmp_path, {name: to(name, needs_permute=True) for name in permuted})
    config = config_for(log_dir=str(tmp_path), model_name=str(checkpoint))
    with VLLMWeightBridge(config, store=store) as bridge:
        model = bridge.get_trainable_model()
        for parameter in model.parameters():
            nn.init.normal_(parameter)  # biases are all the same at first
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        bridge.broadcast_weights_to_inference()
        found = stored(store)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        heads = permuted.get(name)
        expected = permute_for_rotary(parameter.detach(), heads) if heads else parameter
        assert torch.equal(found[name], expected)
        assert torch.equal(found[name], parameter) == (heads is None)


def test_only_queries_and_keys_have_rotary_layouts():
    entries = {"v_proj.weight": to("v_proj.weight", needs_permute=True)}
    mapping = ParameterMapping(Path("m"), {"param_mappings": entries})
    with pytest.raises(dbuffer.OptionError, match="v_proj"):
        mapping.permute({}, 2, 2)
