"""TorchRL's vLLM classes over a store, with real engines: an `LLM`, an `AsyncLLM`, and Ray actors.

The first part needs no engine. The second asks of ours what TorchRL's own tests ask of its classes,
and what these do wrong, in a program that has the engines.
"""

from __future__ import annotations

import inspect
import pickle
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.integrations import torchrl as ours
from tests.programs import torchrl_engines
from tests.support.engines.tiny_models import make_model, make_tokenizer
from tests.support.engines.vllm_engines import (
    ANSWERS_TELL_VERSIONS,
    NEEDS_VLLM,
    environment,
    observe,
)
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = NEEDS_VLLM

# torchrl's own remark on one of its two strategies.
EXPERIMENTAL = pytest.mark.filterwarnings("ignore:state_dict strategy is experimental")

CLASSES = [
    "VLLMDoubleBufferSyncScheme",
    "VLLMDoubleBufferTransport",
    "VLLMDoubleBufferWeightSender",
    "VLLMDoubleBufferWeightReceiver",
    "VLLMWeightSyncScheme",
    "VLLMWeightSender",
    "VLLMWeightReceiver",
]
COLLECTORS = "DoubleBufferSyncScheme"


@pytest.fixture(scope="module", autouse=True)
def of_torchrl() -> Any:
    """Import TorchRL's classes, and with them vLLM, but not as each process collects tests."""
    with warnings.catch_warnings():
        # torchrl warns of its own legacy classes, and of torch's, as it is imported.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torchrl.weight_update import llm

        getattr(ours, COLLECTORS)
    return llm


# Without an engine.


def pair(name: str) -> tuple[Any, Any]:
    """Return our class of this name, and the installed TorchRL's whose place it takes."""
    from torchrl.weight_update import llm
    from torchrl.weight_update.weight_sync_schemes import WeightSyncScheme

    return getattr(ours, name), WeightSyncScheme if name == COLLECTORS else getattr(llm, name)


def methods(name: str) -> set[str]:
    _, theirs = pair(name)
    found = {method for method, _ in inspect.getmembers(theirs, callable) if method[0] != "_"}
    return found if name == COLLECTORS else {*found, "__init__"}  # that one asks for a directory


def test_methods_of_torchrl_were_found():
    expected = {"__init__", "init_all_workers_group", "apply_weights", "poll_and_apply"}
    assert methods("VLLMWeightReceiver") == expected
    assert "connect" in methods(COLLECTORS)


@pytest.mark.parametrize("name", [*CLASSES, COLLECTORS])
def test_signatures_are_those_of_torchrl(name):
    for method in methods(name):
        assert_same_signature(*pair(name), method)


def assert_same_signature(mine: Any, theirs: Any, method: str) -> None:
    wanted = inspect.signature(getattr(theirs, method)).parameters.values()
    there = list(inspect.signature(getattr(mine, method)).parameters.values())
    more = there[len(wanted) :]
    for parameter, counterpart in zip(wanted, there, strict=False):
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            # Ours may name some of the keywords, and take more.
            more = there[len(wanted) - 1 :]
            assert any(other.kind is inspect.Parameter.VAR_KEYWORD for other in more)
            continue
        assert (counterpart.name, counterpart.kind) == (parameter.name, parameter.kind)
        if parameter.default is not inspect.Parameter.empty:
            assert counterpart.default == parameter.default
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for other in more:
        assert other.kind in variable or other.default is not inspect.Parameter.empty


@pytest.mark.parametrize("name", [*CLASSES, COLLECTORS])
def test_properties_are_those_of_torchrl(name):
    mine, theirs = pair(name)
    public = {name for name in dir(theirs) if not name.startswith("_")}
    assert public <= set(dir(mine))


@pytest.mark.parametrize("given", [{}, {"master_address": "here", "master_port": 12345}])
@pytest.mark.parametrize("copied", [False, True])
def test_attributes_are_those_of_torchrl(store, of_torchrl, given, copied):
    arguments = {"gpus_per_replica": 2, "num_replicas": 3, "device": "cuda:1", **given}
    theirs = vars(of_torchrl.VLLMWeightSyncScheme(**arguments))
    scheme = ours.VLLMWeightSyncScheme(remote_addr=str(store), **arguments)
    if copied:
        scheme = pickle.loads(pickle.dumps(scheme))
    assert {"master_address", "master_port", "strategy_name"} <= theirs.keys()
    for name, value in theirs.items():
        if name == "master_port" and not given:
            value = None  # theirs is a free port; here there is nothing to listen for
        assert getattr(scheme, name) == value
    theirs = vars(of_torchrl.VLLMDoubleBufferSyncScheme(str(store), None, 2))
    double = ours.VLLMDoubleBufferSyncScheme(str(store), None, 2)
    assert {name: getattr(double, name) for name in theirs} == theirs


@pytest.fixture
def scheme(store: Path) -> Iterator[ours.VLLMDoubleBufferSyncScheme]:
    made = ours.VLLMDoubleBufferSyncScheme(str(store))
    yield made
    made.shutdown()


def test_what_is_in_torchrls_wrapper_is_sent_by_the_names_that_an_engine_knows(scheme):
    from torchrl.modules.llm import TransformersWrapper

    model = make_model("qwen3", 0)
    wrapper = TransformersWrapper(
        model, tokenizer=make_tokenizer(), input_mode="tokens", generate=False
    )
    sender, transport = scheme.create_sender(), scheme.create_transport()
    sender.register_model(wrapper)
    sender.update_weights()
    received = transport.receive_weights()
    of_wrapper = ours.get_model_metadata(wrapper)
    assert received.keys() == ours.get_model_metadata(model).keys() == of_wrapper.keys()
    assert "model.embed_tokens.weight" in of_wrapper
    sender.shutdown()
    transport.close()


class Counting:
    def __init__(self, store: Path, *, is_broken: bool = False) -> None:
        self._store, self._is_broken = store, is_broken
        self.published: list[int] = []

    def increment_version(self) -> None:
        if self._is_broken:
            raise RuntimeError("this collector has ended")
        with dbuffer.WeightReceiver(self._store) as receiver:
            self.published.append(receiver.wait_for_version(None, 0.0) or 0)


@pytest.mark.parametrize("kind", ["VLLMDoubleBufferSyncScheme", "VLLMWeightSyncScheme"])
def test_senders_from_registration_to_shutdown(kind, store, caplog):
    """Collectors advance after the write; one that cannot is logged. The store is given up."""
    scheme = getattr(ours, kind)(remote_addr=str(store))
    sender, successor = scheme.create_sender(), scheme.create_sender()
    model = torch.nn.Linear(1, 1)
    sender.register_model(model)
    collectors = [Counting(store, is_broken=number == 1) for number in range(3)]
    for collector in collectors:
        sender.register_collector(collector)
    sender.update_weights()
    sender.update_weights(model.state_dict())
    assert [collector.published for collector in collectors] == [[1, 2], [], [1, 2]]
    assert "this collector has ended" in caplog.text
    with pytest.raises(dbuffer.StoreBusyError):
        successor.update_weights(model)
    sender.shutdown()
    sender.shutdown()
    successor.update_weights(model)
    successor.shutdown()
    scheme.shutdown()
    scheme.shutdown()
    with dbuffer.WeightReceiver(store) as receiver:
        assert receiver.wait_for_version(None, 0.0) == 3


class Adapted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(2, 2, bias=False)
        self.adapter = torch.nn.Parameter(torch.full((2, 2), 0.5))

    def merge_and_unload(self) -> torch.nn.Module:
        with torch.no_grad():
            self.base.weight += self.adapter
        return torch.nn.Sequential(self.base)


@EXPERIMENTAL
def test_adapters_are_merged(store):
    model = Adapted()
    before = model.base.weight.detach().clone()
    scheme = ours.VLLMDoubleBufferSyncScheme(str(store), strategy="state_dict")
    sender = scheme.create_sender()
    sender.update_weights(model)
    sender.shutdown()
    received = scheme.create_transport().receive_weights()
    assert list(received.keys()) == ["0.weight"]
    assert torch.equal(received["0.weight"], before + 0.5)
    assert torch.equal(model.base.weight, before)
    assert ours.get_model_metadata(model) == {"0.weight": (torch.float32, torch.Size([2, 2]))}


def test_metadata_is_that_of_torchrl():
    from torchrl.weight_update.llm import vllm_nccl

    model = make_model("qwen3", 1)
    assert ours.get_model_metadata(model) == vllm_nccl.get_model_metadata(model)


def test_collective_scheme_must_be_given_a_store():
    with pytest.raises(dbuffer.OptionError, match="remote_addr"):
        ours.VLLMWeightSyncScheme(master_address="localhost", master_port=1, num_replicas=2)


@pytest.mark.parametrize("has_local", [False, True])
def test_nothing_at_any_address_is_said_once(tmp_path, has_local, caplog):
    local = tmp_path / "local" / "store" if has_local else None
    scheme = ours.VLLMDoubleBufferSyncScheme(tmp_path / "remote" / "store", local)
    receiver = scheme.create_receiver("http://127.0.0.1:1")  # which need not answer yet
    assert [receiver.poll_and_apply(timeout) for timeout in (0.2, 0, 0)] == [False] * 3
    [line] = [message for message in caplog.messages if "no weights so far in" in message]
    assert "remote_addr" in line
    assert scheme.remote_addr in line
    assert scheme.local_addr in line
    receiver.shutdown()


# With engines.


@ANSWERS_TELL_VERSIONS
def test_engines_of_one_process_are_updated(tmp_path):
    observe(torchrl_engines.__file__, tmp_path)


@IN_SOAKS_ALONE
def test_engines_in_ray_actors_are_updated(tmp_path):
    # Ray's workers would give way to every other process, and tests run side by side.
    env = environment(processes=False, RAY_worker_niceness="0")
    # Ray's sockets lie below it, and may have no long names.
    with tempfile.TemporaryDirectory(prefix="dbuffer-ray-", ignore_cleanup_errors=True) as session:
        observe(torchrl_engines.__file__, tmp_path, session, env=env)
