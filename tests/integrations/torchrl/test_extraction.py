"""Models as tensors and metadata: names, extra state of every kind, and back again."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

from dbuffer import (
    InvalidWeightsError,
    StoreCorruptError,
    WeightReceiver,
    WeightSender,
    WeightsMismatchError,
)
from dbuffer.integrations.torchrl.extraction import (
    extract,
    extract_for_vllm,
    unpacked,
)
from dbuffer.integrations.torchrl.forward_guard import ForwardGuard
from dbuffer.integrations.torchrl.loading import StagedVersion
from dbuffer.weights.targets import Matcher
from tests.support.engines.families import make_family
from tests.support.patterns import Tied

pytestmark = pytest.mark.filterwarnings("ignore:state_dict strategy is experimental")

STRATEGIES = ["tensordict", "state_dict"]


class Counting(nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def extracted(weights: Any, strategy: str = "tensordict") -> Any:
    return extract(weights, WeightStrategy(extract_as=strategy).extract_weights)


def back(found: Any) -> dict[str, Any]:
    return unpacked(found["__extra_state__"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_policy_is_its_parameters_and_buffers_by_dotted_name(strategy):
    policy = TensorDictModule(
        nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), in_keys=["a"], out_keys=["b"]
    )
    found = extracted(policy, strategy)
    assert found.keys() == policy.state_dict().keys()
    for name, tensor in policy.state_dict(keep_vars=True).items():
        assert found[name].data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_transformers_model_is_extracted_for_an_engine_as_its_checkpoint(strategy, tmp_path):
    model = make_family("mixtral", 0)
    model.save_pretrained(tmp_path)
    found = extract_for_vllm(model, WeightStrategy(extract_as=strategy).extract_weights)
    expected = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # A collector's workers have the module, and get its own.
    assert extracted(model, strategy).keys() >= model.state_dict().keys()


STATES = [
    torch.arange(3.0),
    {"mean": torch.ones(2), "count": torch.tensor(7)},
    {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
    [1, 2.5, "text", None, True, [torch.ones(2), [torch.zeros(1)]]],
    {"none yet": torch.empty(0), "rows": torch.empty(0, 3, dtype=torch.int64)},
    {"empty": [], "nothing": None, "": torch.ones(1), 1: "one"},
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("state", STATES, ids=repr)
def test_extra_state_comes_out_as_it_went_in(state, strategy):
    model = nn.Sequential(nn.Linear(2, 2), Counting(state))
    found = extracted(model, strategy)
    states = back(found)
    assert states.keys() == {"1"}
    assert same(states["1"], state), states
    assert found.keys() == {"0.weight", "0.bias", "__extra_state__"}


def test_every_module_that_has_extra_state_is_found_and_compilation_changes_no_path():
    model = nn.ModuleDict({"a": Counting({"n": 1}), "b": nn.Sequential(Counting({"n": 2}))})
    assert back(extracted(model)) == {"a": {"n": 1}, "b.0": {"n": 2}}
    compiled = torch.compile(model, backend="eager")
    assert back(extracted(compiled)) == {"a": {"n": 1}, "b.0": {"n": 2}}


def test_extra_state_of_the_model_itself_and_none_at_all():
    assert back(extracted(Counting({"n": 3}))) == {"": {"n": 3}}
    for nothing in (None, {}):
        assert not extracted(Counting(nothing))


def test_what_torchrl_has_extracted_already():
    model = Counting({"inner": {"mean": torch.ones(2)}, "count": torch.tensor(3)})
    model.linear = nn.Linear(1, 1)
    weights = WeightStrategy().extract_weights(model)
    found = extracted(weights)
    # Flat, as TorchRL's receivers hand it to set_extra_state.
    assert same(back(found), {"": {"inner.mean": torch.ones(2), "count": torch.tensor(3)}})
    assert {"linear.weight", "linear.bias"} <= found.keys()


@pytest.mark.parametrize(
    "state", [..., {"a": Path()}, (1, 2), b"bytes"], ids=["ellipsis", "path", "tuple", "bytes"]
)
def test_extra_state_that_cannot_travel_is_refused_and_its_module_named(state):
    with pytest.raises(InvalidWeightsError, match=r"extra state of 1 "):
        extracted(nn.Sequential(nn.Linear(1, 1), Counting(state)), "state_dict")


@pytest.mark.parametrize("value", [(1, 2), torch.ones(2)], ids=["no tensor", "no buffer"])
def test_state_that_torchrl_would_drop_is_refused_and_named(value):
    policy = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    policy[1].register_state_dict_post_hook(
        lambda _, state, prefix, __: state.update({f"{prefix}scales": value})
    )
    with pytest.raises(InvalidWeightsError, match=r"1\.scales"):
        extracted(policy)


class Harmful:
    def __reduce__(self) -> Any:
        return pytest.fail, ("code from the store was executed",)


def test_bytes_that_are_no_such_state_are_refused():
    harmful = torch.frombuffer(bytearray(pickle.dumps(Harmful())), dtype=torch.uint8)
    short = torch.frombuffer(bytearray(b'{"tensor": ["float32", [3], ""]}'), dtype=torch.uint8)
    for packed in (harmful, short, torch.zeros(8, dtype=torch.uint8)):
        with pytest.raises(StoreCorruptError, match="invalid extra state"):
            unpacked(packed)


def test_tied_parameters_take_no_tensors_that_differ(store):
    with WeightSender(store) as sender, WeightReceiver(store) as receiver:
        sender.send(Tied(tied=False))
        with receiver.open() as snapshot:
            staged = StagedVersion.of(snapshot)
            with pytest.raises(WeightsMismatchError):
                staged.load(Tied(), ForwardGuard(), Matcher())
