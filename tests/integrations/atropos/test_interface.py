"""Names and parameters, next to those of Atropos' ``example_trainer/vllm_weight_bridge.py``.

The tables are what that file has, as of its revision 533f0bf2 (December 2025), the last with all of
the bridge's calls; what is about process groups is left out, since none is joined here.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.integrations import atropos
from dbuffer.integrations.atropos import BridgeConfig, VLLMWeightBridge

CONFIG_FIELDS = {
    "trainer_rank": 0,
    "world_size": 1,
    "init_method": "env://",
    "num_inference_nodes": 0,
    "model_name": "",
    "device": "cuda",
    "timeout_seconds": 300.0,
    "log_dir": None,
    "vllm_api_url": "http://localhost:9001",
    "use_cuda_ipc": False,
    "num_gpus_per_node": torch.cuda.device_count(),
}

BRIDGE_METHODS = {
    "__init__": ["self", "config"],
    "initialize": ["self"],
    "attach_to_vllm_weights": ["self", "vllm_state_dict"],
    "get_trainable_model": ["self"],
    "broadcast_weights_to_inference": ["self"],
    "notify_update": ["self"],
    "barrier": ["self"],
    "cleanup": ["self"],
}
BRIDGE_ATTRIBUTES = {
    "config": BridgeConfig,
    "device": torch.device,
    "nccl_group": type(None),
    "gloo_group": type(None),
    "param_mappings": dict,
    "name_conversions": dict,
    "shared_state_dict": dict,
}
FUNCTIONS = {
    "create_bridge_from_training_config": ["config"],
    "get_inference_urls": ["num_inference_nodes"],
    "get_local_hostname": [],
    "get_name_conversions": ["param_mappings"],
    "permute_for_rotary": ["w", "n_heads"],
    "permute_for_rotary_1d": ["w", "n_heads"],
}
RUNTIME_ERRORS: dict[str, Callable[[VLLMWeightBridge], object]] = {
    "publishing before initialize()": lambda b: b.broadcast_weights_to_inference(),
    "a model before initialize()": lambda b: b.get_trainable_model(),
    "waiting before initialize()": lambda b: b.barrier(),
}


def parameters_of(function: Callable[..., Any]) -> list[str]:
    found = inspect.signature(function).parameters.values()
    return [one.name for one in found if one.kind is one.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    assert name in atropos.__all__
    assert parameters_of(getattr(atropos, name)) == FUNCTIONS[name]


@pytest.mark.parametrize("name", BRIDGE_METHODS)
def test_method_of_the_bridge(name):
    assert parameters_of(getattr(VLLMWeightBridge, name)) == BRIDGE_METHODS[name]


@pytest.mark.parametrize("name", BRIDGE_ATTRIBUTES)
def test_attribute_of_the_bridge(tmp_path, name):
    bridge = VLLMWeightBridge(BridgeConfig(device="cpu"), store=tmp_path / "store")
    assert isinstance(getattr(bridge, name), BRIDGE_ATTRIBUTES[name])


def test_fields_of_the_configuration():
    assert [one.name for one in dataclasses.fields(BridgeConfig)] == list(CONFIG_FIELDS)
    assert dataclasses.asdict(BridgeConfig()) == CONFIG_FIELDS
    given = 0, 1, "tcp://a:1", 3, "m", "cpu", 5.0, "/logs", "http://a:1", False, 8
    assert dataclasses.astuple(BridgeConfig(*given)) == given


@pytest.mark.parametrize("name", RUNTIME_ERRORS)
def test_what_is_a_runtime_error_there(tmp_path, name):
    config = BridgeConfig(num_inference_nodes=1, device="cpu", log_dir=str(tmp_path))
    with pytest.raises(RuntimeError) as caught:
        RUNTIME_ERRORS[name](VLLMWeightBridge(config, store=tmp_path / "store"))
    assert isinstance(caught.value, dbuffer.DBufferError)


def test_names_that_a_mapping_converts():
    mappings = {"q": {"vllm_name": "qkv"}, "k": {"vllm_name": "qkv"}, "norm": {"shape": [1]}}
    assert atropos.get_name_conversions(mappings) == {"qkv": ["q", "k"], "norm": ["norm"]}


def test_biases_have_a_function_of_their_own():
    rows = torch.arange(8)
    expected = atropos.permute_for_rotary(rows, n_heads=2)
    assert torch.equal(atropos.permute_for_rotary_1d(rows, n_heads=2), expected)
