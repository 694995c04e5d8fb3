"""What an engine is told, checked field by field; and that asking for it needs no vLLM."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import itertools
import logging
import math
import subprocess
import sys
import threading
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import pytest

from dbuffer.engine.engine_options import EngineOptions, UpdateRequest
from dbuffer.errors import OptionError, UnsupportedError
from dbuffer.format.lineage import MAX_NUMBER
from dbuffer.format.manifest import is_receiver_id
from dbuffer.integrations.vllm import plugin
from dbuffer.integrations.vllm.config import (
    BACKEND,
    CALL,
    EXTENSION,
    adapters_of,
    default_engine_id,
    engine_settings,
    facts_here,
    facts_of,
    facts_of_server,
    has_backend,
    options_of,
    replicas_of,
)

STORE = "/dev/shm/policy"
PLUGIN = "dbuffer.integrations.vllm.plugin"
TOO_LONG_S = 2 * threading.TIMEOUT_MAX

WRONG_OPTIONS: dict[str, list[Any]] = {
    "store": ["", None, 1, True, b"/store", ["/store"], {}],
    "local_store": ["", 1, True, b"/store", ["/store"], {}],
    "draft_store": ["", 1, True, b"/store", ["/store"], {}, STORE],
    "version": [0, -1, 1.0, "1", True, [1], MAX_NUMBER + 1],
    "every": [0, -1, 1.0, "10", True, None, [1], MAX_NUMBER + 1],
    "when": [{}, [], "step", 1, {"step": 0}, {"step": "1"}, {"step": True}, {"step": 1.0}, {1: 2}],
    "until_done": [0, 1, None, "true", "", []],
    "engine_id": ["", "a/b", "../a", ".a", "-a", "a b", "a\n", "größe", "a" * 101, 1, True, ["a"]],
    "staging": ["", "MAP", "pinned", None, True, 1, ["map"], {}],
    "verify": ["", "yes", "Auto", None, 0, 1, 2, 0.0, 0.5, 1.0, [True], {}],
    "poll_interval_s": [0, -1, 0.0, math.inf, math.nan, "1", None, True, [1], 1j, TOO_LONG_S],
    "timeout_s": [0, -0.5, math.inf, -math.inf, math.nan, "60", None, False, {}, TOO_LONG_S],
    "num_threads": [0, -1, 1.0, "4", True, False, math.nan, [4]],
    "allow_shared_store": [0, 1, 0.0, 1.0, None, "false", "", []],
    "allow_stale_kv": [0, 1, None, "true", []],
    "forked": ["", "Follow", "ask", None, True, 1, ["follow"]],
    "unused_tensors": ["", "Refuse", "ignore", None, True, 1, ["warn"]],
    "plan": [0, 1, None, "true", "", []],
    "images": [0, 1, None, "true", "", []],
    "attest": ["", "yes", "Auto", None, 0, 1, 2, [True], {}],
    "canary": [
        *(0, 1, False, "true", [], {}),
        {"prompts": ["a"]},
        {"min_mean_logprob": -1},
        *({"prompts": p, "min_mean_logprob": -1} for p in ("a", [], [""], ["a", [1, 2]], [[1]])),
        {"prompts": [[1, -2]], "min_mean_logprob": -1},
        *({"prompts": ["a"], "min_mean_logprob": m} for m in (None, "-1", True, math.nan)),
        {"prompts": ["a"], "min_mean_logprob": -1, "max_mean_logprob": 0},
    ],
    "instance_id": ["", 1, True, ["a"], {}],
}

WRONG_REQUESTS: dict[str, list[Any]] = {
    "version": [0, -1, 1.0, "1", True, False, [1], {}, MAX_NUMBER + 1, math.nan],
    "at_least": [0, -1, 1.0, "1", True, False, [1], {}, MAX_NUMBER + 1],
    "run": ["", "a", "A" * 16, 1, True, ["0" * 16]],
    "update_kind": ["", "Dense", "sparse", None, True, 1, ["dense"], {}],
    "attempt": ["", "a", "A" * 16, "0" * 15, "0" * 17, "0" * 16 + "\n", 1, True, ["0" * 16]],
}


# Options of an engine.


@pytest.mark.parametrize(
    ("kind", "needed", "name", "values"),
    [
        *((EngineOptions, {"store": STORE}, *wrong) for wrong in WRONG_OPTIONS.items()),
        *((UpdateRequest, {}, *wrong) for wrong in WRONG_REQUESTS.items()),
    ],
)
def test_a_wrong_value_is_an_error_that_names_its_field(kind, needed, name, values):
    for value in values:
        with pytest.raises(OptionError) as caught:
            kind.parse({**needed, name: value})
        assert str(caught.value).startswith(f"invalid {name} {value!r}"[:200])


def test_every_field_is_tested_here():
    names = {field.name for field in dataclasses.fields(EngineOptions)}
    assert names == set(WRONG_OPTIONS)
    assert {field.name for field in dataclasses.fields(UpdateRequest)} == set(WRONG_REQUESTS)


NO_OBJECTS = (None, STORE, 1, [("store", STORE)], {"store"}, [])


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        *itertools.product((EngineOptions, UpdateRequest), NO_OBJECTS),
        (EngineOptions, {}),
        (EngineOptions, {"engine_id": "a"}),
        (EngineOptions, {"store": STORE, "Store": STORE}),
        (EngineOptions, {"store": STORE, None: 1}),
        (UpdateRequest, {"versions": 1}),
        (UpdateRequest, {"version": 1, "x": 2}),
        (UpdateRequest, {1: 1}),
    ],
    ids=repr,
)
def test_a_missing_store_and_unknown_keys_are_refused(kind, values):
    with pytest.raises(OptionError) as caught:
        kind.parse(values)
    assert repr(values) in str(caught.value)
    known = WRONG_OPTIONS if kind is EngineOptions else WRONG_REQUESTS
    assert all(name in str(caught.value) for name in known), "it says what there is"


# Options from the engine's own configuration.


@pytest.mark.parametrize(
    "additional",
    [None, {}, {"other": 1}, {BACKEND: {}}, SimpleNamespace(dbuffer=1), [BACKEND], "dbuffer", 1],
    ids=repr,
)
def test_an_engine_without_options_has_none(additional):
    assert engine_settings(additional) == {}
    assert options_of(additional) is None


def test_an_engines_options_are_those_in_its_configuration():
    settings = {"store": STORE, "timeout_s": 5, "pause": "wait"}
    additional = MappingProxyType({BACKEND: settings, "other": 1})
    assert options_of(additional) == EngineOptions(store=STORE, timeout_s=5)
    assert engine_settings(additional) == settings, "the pause is for who follows"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        *((no_object, "dbuffer") for no_object in (None, STORE, [STORE], 1, True)),
        ({"pause": "keep"}, "store"),
        ({"store": 1}, "store"),
        ({"store": STORE, "verify": "yes"}, "verify"),
        ({"store": STORE, "pauses": "keep"}, "pauses"),
    ],
    ids=str,
)
def test_wrong_options_of_an_engine_are_named(settings, named):
    with pytest.raises(OptionError, match=named):
        options_of({BACKEND: settings})


def test_adapters_have_stores_and_share_some_options():
    stores = {"one": "/dev/shm/one", "two": "/dev/shm/two"}
    additional = {BACKEND: {"adapters": stores, "verify": True}}
    assert adapters_of(additional) == {
        name: EngineOptions(store=store, verify=True) for name, store in stores.items()
    }
    assert options_of(additional) is None, "the workers do not follow adapters"
    assert adapters_of({BACKEND: {"store": STORE}}) == adapters_of(None) == {}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        *(({"adapters": wrong}, "invalid adapters") for wrong in (None, {}, [STORE], {"": STORE})),
        ({"adapters": {"one": 1}}, "store"),
        ({"adapters": {"one": STORE}, "verify": "yes"}, "verify"),
        ({"adapters": {"one": STORE}, "store": STORE, "every": 2}, "every, store cannot be set"),
    ],
    ids=str,
)
def test_wrong_options_of_adapters_are_named(settings, named):
    with pytest.raises(OptionError, match=named):
        adapters_of({BACKEND: settings})


def test_the_default_engine_id_can_name_a_record(monkeypatch):
    for host in ("node-1", "größe/..", "h" * 300, ""):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        assert is_receiver_id(f"{default_engine_id('abc123')}.rank-0000")
        assert default_engine_id("abc123").endswith("abc123")


# Requests.


def test_exactly_and_at_least_exclude_each_other():
    with pytest.raises(OptionError, match="version or at_least"):
        UpdateRequest.parse({"version": 1, "at_least": 1})


# Facts about an engine.


def config_of(**changes: Any) -> dict[str, Any]:
    parallel = {"world_size": 2, "worker_extension_cls": "", "is_moe_model": False}
    parallel |= {f"data_parallel_{name}": False for name in ("hybrid_lb", "external_lb")}
    parallel |= {"data_parallel_size": 1, "data_parallel_size_local": 1}
    parallel |= {"data_parallel_rank": 0, "data_parallel_rank_local": None}
    config = {
        "instance_id": "abc",
        "parallel_config": parallel,
        "weight_transfer_config": {"backend": BACKEND},
        "additional_config": {},
    }
    for name, value in changes.items():
        (parallel if name in parallel else config)[name] = value
    return config


def as_object(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return SimpleNamespace(**{name: as_object(inner) for name, inner in value.items()})


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({}, True),
        ({"worker_extension_cls": EXTENSION}, True),
        ({"worker_extension_cls": EXTENSION, "weight_transfer_config": None}, False),
        (
            {"worker_extension_cls": EXTENSION, "weight_transfer_config": {"backend": "nccl"}},
            False,
        ),
        ({"worker_extension_cls": None}, True),
    ],
    ids=str,
)
def test_how_an_engine_takes_weights(changes, backend):
    config = config_of(**changes)
    for facts in (facts_of_server(config), facts_of(as_object(config))):
        assert (facts.instance_id, facts.num_ranks) == ("abc", 2)
    assert has_backend(config) == has_backend(as_object(config)) == backend


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"weight_transfer_config": None}, "weight-transfer-config"),
        ({"weight_transfer_config": {"backend": "nccl"}}, "weight-transfer-config"),
        ({"data_parallel_size": 2}, "2 replicas.*FollowStore"),
        (
            {"is_moe_model": True, "data_parallel_size": 2, "data_parallel_external_lb": True},
            "2 replicas",
        ),
        (
            {"is_moe_model": True, "data_parallel_size": 2, "data_parallel_rank_local": 1},
            "2 replicas",
        ),
    ],
    ids=str,
)
def test_an_engine_that_cannot_follow_is_told(changes, told):
    with pytest.raises(UnsupportedError, match=told):
        facts_of_server(config_of(**changes))


@pytest.mark.parametrize("has_plugin", [True, False])
def test_an_engine_without_the_plugin_is_refused(monkeypatch, has_plugin):
    plugins, base = ModuleType("vllm.plugins"), ModuleType("vllm.v1.worker.worker_base")
    wrapper = type("WorkerWrapperBase", (), {})

    def load() -> None:
        if has_plugin:
            setattr(wrapper, CALL, None)

    plugins.load_general_plugins = load  # type: ignore[attr-defined]
    base.WorkerWrapperBase = wrapper  # type: ignore[attr-defined]
    for module in (plugins, base):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    refused = pytest.raises(UnsupportedError, match="has not loaded dbuffer's plugin")
    with contextlib.nullcontext() if has_plugin else refused:
        facts_here(as_object(config_of()))


def test_an_engines_configuration_is_read_for_its_options():
    facts = facts_of(config_of(additional_config={BACKEND: {"store": STORE}}))
    assert facts.configured == EngineOptions(store=STORE)
    assert facts_of(config_of(additional_config=None)).configured is None


# The plugin, and what is imported when.

PROBE = """
import importlib, sys
for name in ("", ".config", ".plugin", ".vllm_engine", ".follow_vllm"):
    importlib.import_module(f"dbuffer.integrations.vllm{name}")
import dbuffer.integrations.vllm as package
assert package.follow and package.Follower and package.EngineOptions
assert not hasattr(package, "nonsense")
print(*sorted({"vllm", "httpx", "prometheus_client", "torchrl"} & set(sys.modules)))
"""


def test_importing_needs_no_vllm(tmp_path):
    command = [sys.executable, "-W", "error", "-c", PROBE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_vllm_finds_the_plugin():
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="dbuffer")
    [function] = {entry.load() for entry in found}
    assert function is plugin.register


FACTORY = "vllm.distributed.weight_transfer.factory"
WORKERS = "vllm.v1.worker.worker_base"
CORE = "vllm.v1.engine.core"
OUTPUTS = "vllm.v1.engine.output_processor"


class Factory:
    def __init__(self) -> None:
        self.engines: dict[str, tuple[str, str]] = {}

    def register_engine(self, name: str, module_path: str, class_name: str) -> None:
        if name in self.engines:
            raise ValueError(f"{name} is already registered")
        self.engines[name] = module_path, class_name


def pretend(monkeypatch: pytest.MonkeyPatch, **factories: Any) -> None:
    for path in (FACTORY, WORKERS, CORE, OUTPUTS):
        names = path.split(".")
        for end in range(1, len(names) + 1):
            monkeypatch.setitem(sys.modules, ".".join(names[:end]), ModuleType(names[end - 1]))
    names = "sleep collective_rpc set_weight_version add_request pause_scheduler resume_scheduler"
    methods = dict.fromkeys(names.split())
    core = type("EngineCore", (), methods)
    cores = {name: type(name, (core,), {}) for name in ("EngineCoreProc", "DPEngineCoreProc")}
    parts = {
        WORKERS: {"WorkerWrapperBase": type("Wrapper", (), {})},
        CORE: {"EngineCore": core, **cores},
        OUTPUTS: {"RequestState": type("RequestState", (), {})},
        FACTORY: factories,
    }
    for path, names in parts.items():
        sys.modules[path].__dict__.update(names)
    sys.modules["vllm"].__version__ = ".".join(map(str, plugin.NEWEST))


def serves_every_worker() -> bool:
    return CALL in vars(sys.modules[WORKERS].WorkerWrapperBase)


def test_register_makes_both_halves_known_and_may_be_called_again(monkeypatch, caplog):
    engines, trainers = Factory(), Factory()
    pretend(monkeypatch, WeightTransferEngineFactory=engines, WeightTransferTrainerFactory=trainers)
    assert not serves_every_worker()
    for _ in range(3):
        plugin.register()
    package = "dbuffer.integrations.vllm"
    assert engines.engines == {BACKEND: (f"{package}.backend", "DBufferWeightTransferEngine")}
    assert trainers.engines == {
        BACKEND: (f"{package}.trainer", "DBufferTrainerWeightTransferEngine")
    }
    assert not [entry for entry in caplog.records if entry.name == PLUGIN]
    sys.modules["vllm"].__version__ = "99.1.0rc1"
    plugin.register()
    [entry] = [entry for entry in caplog.records if entry.name == PLUGIN]
    assert "newer than 0.33" in entry.getMessage()
    # Every worker answers to our methods.
    assert serves_every_worker()


@pytest.mark.parametrize("missing", [FACTORY, "pause_scheduler"])
def test_a_vllm_that_lacks_what_dbuffer_uses_is_warned_and_starts_without_it(
    monkeypatch, caplog, missing
):
    factory = Factory()
    pretend(monkeypatch, WeightTransferEngineFactory=factory, WeightTransferTrainerFactory=factory)
    if missing == FACTORY:
        monkeypatch.setitem(sys.modules, missing, None)
    else:
        delattr(sys.modules[CORE].EngineCore, missing)
    plugin.register()
    [entry] = [entry for entry in caplog.records if entry.name == PLUGIN]
    assert entry.levelno == logging.WARNING
    assert missing in entry.getMessage()
    assert not factory.engines
    assert not serves_every_worker()


@pytest.mark.parametrize(
    ("changes", "replicas"),
    [
        ({}, [0]),
        ({"data_parallel_size": 3}, [0, 1, 2]),
        ({"data_parallel_size": 3, "is_moe_model": True}, [0]),
        (
            {
                "data_parallel_size": 4,
                "data_parallel_size_local": 2,
                "data_parallel_rank": 2,
                "data_parallel_hybrid_lb": True,
            },
            [2, 3],
        ),
        (
            {"data_parallel_size": 4, "data_parallel_rank": 3, "data_parallel_external_lb": True},
            [3],
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("made", [lambda config: config, as_object], ids=["JSON", "object"])
def test_replicas_of_a_front_end(changes, replicas, made):
    config = made(config_of(**changes))
    assert replicas_of(config) == replicas
    names = [facts_of(config, replica).replica for replica in replicas]
    assert names == [f".dp-{replica}" if replica else "" for replica in replicas]


def test_replicas_that_step_together_are_one_engine_of_all_their_ranks():
    facts = facts_of(config_of(data_parallel_size=3, is_moe_model=True))
    assert (facts.num_ranks, facts.begins_paused, facts.replica) == (6, True, "")
    alone = facts_of(config_of(is_moe_model=True))
    assert (alone.num_ranks, alone.begins_paused) == (2, False)
