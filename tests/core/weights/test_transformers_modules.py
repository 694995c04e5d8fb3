"""A transformers module is published as its checkpoint, and its experts are views."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import dbuffer
from dbuffer import WeightReceiver, WeightSender
from dbuffer.weights.sources import Describer
from tests.support.engines.families import CONFIGURATIONS, make_family
from tests.support.engines.tiny_models import SHAPE
from tests.support.patterns import assert_same, received
from tests.support.ways import NEEDS_CONVERSIONS

pytestmark = NEEDS_CONVERSIONS

EXPERT = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
"""A part of the third expert's rows in ``gate_up_proj``."""


def make_computed(seed: int = 0) -> Any:
    """A model whose checkpoint has in one tensor what the module has in several."""
    torch.manual_seed(seed)
    from transformers import HrmTextConfig, HrmTextForCausalLM

    return HrmTextForCausalLM(HrmTextConfig(**SHAPE, num_attention_heads=2))


@pytest.fixture
def mixtral() -> Any:
    return make_family("mixtral", 0)


def saved(model: Any, directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that transformers itself writes of a model."""
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize("family", sorted(CONFIGURATIONS))
def test_every_family_is_its_checkpoint_and_nothing_is_copied(family, tmp_path, store, sender):
    model = make_family(family, 0, embeds=family == "bert")
    sender.send(model)
    assert_same(received(store), saved(model, tmp_path))
    source = Describer().describe(model)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.state_dict().values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in source.eager} <= own
    assert source.eager


def test_a_change_of_one_expert_publishes_that_expert_alone(mixtral, store):
    with WeightSender(store, delta=True) as sender:
        first = sender.send(mixtral)
        before = received(store)
        fused = mixtral.model.layers[1].mlp.experts.gate_up_proj
        with torch.no_grad():
            fused[2, fused.shape[1] // 2 :] += 1
        assert sender.send(mixtral).delta_bytes is not None
    with WeightReceiver(store) as receiver, receiver.open() as snapshot:
        changed = snapshot.changed_since(first.id)
    assert {name: len(places) for name, places in changed.items()} == {
        EXPERT: fused[2].numel() // 2
    }
    after = received(store)
    assert [name for name in after if not torch.equal(before[name], after[name])] == [EXPERT]


def test_a_module_whose_tensors_change_is_converted_anew(mixtral, tmp_path, store, sender):
    sender.send(mixtral)
    experts = mixtral.model.layers[1].mlp.experts
    for name, fused in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(torch.cat([fused, fused[:1]])))
    sender.send(mixtral)
    assert_same(received(store), saved(mixtral, tmp_path / "one expert more"))
    del mixtral.model.layers[0]
    sender.send(mixtral)
    assert_same(received(store), saved(mixtral, tmp_path / "a layer less"))


def in_a_larger_storage(tensor: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(tensor.numel() + 10)
    return whole[7 : 7 + tensor.numel()].view(tensor.shape).copy_(tensor)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, 2).contiguous().transpose(0, 2)


@pytest.mark.parametrize("moved", [in_a_larger_storage, transposed])
def test_experts_are_views_wherever_their_tensor_lies(mixtral, tmp_path, store, sender, moved):
    expected = saved(mixtral, tmp_path)
    sender.send(mixtral)
    for parameter in mixtral.model.layers[1].mlp.experts.parameters():
        parameter.data = moved(parameter.data)
    sender.send(mixtral)
    assert_same(received(store), expected)


def test_a_change_meanwhile_is_detected_in_a_view(mixtral, sender):
    pending = sender.send(mixtral, wait=False)
    pending.wait()
    source = Describer().describe(mixtral)
    check = dbuffer.publish.sender.watch_writes([s.name for s in source.specs], source.eager)
    with torch.no_grad():
        mixtral.model.layers[0].mlp.experts.down_proj.add_(1)
    with pytest.raises(dbuffer.InvalidWeightsError, match=r"experts\.0\.w2\.weight"):
        check()


class Actor(nn.Module):
    """A trainer's module that has a model in it, and a value head beside it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.value = nn.Linear(3, 1)


def in_two_wrappers(model: nn.Module) -> nn.Module:
    outer = nn.Module()
    outer.module = nn.Module()
    outer.module._orig_mod = model
    return outer


def in_a_wrapped_layer(model: nn.Module) -> nn.Module:
    layer = nn.Module()
    layer._orig_mod = model.model.layers[1]
    model.model.layers[1] = layer
    return model


def in_a_compiled_layer(model: nn.Module) -> nn.Module:
    """Wrap layers as for FSDP2: transformers then sees stand-ins of the modules."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    layers = model.model.layers
    layers[1] = checkpoint_wrapper(torch.compile(layers[1], backend="eager"))
    return model


@pytest.mark.parametrize(
    ("wrap", "prefix"),
    [
        (in_two_wrappers, ""),
        (nn.DataParallel, ""),
        (in_a_wrapped_layer, ""),
        (in_a_compiled_layer, ""),
        (Actor, "model."),
    ],
)
def test_a_model_in_another_module_is_converted_too(mixtral, tmp_path, store, sender, wrap, prefix):
    expected = {prefix + name: tensor for name, tensor in saved(mixtral, tmp_path).items()}
    wrapped = wrap(mixtral)
    if isinstance(wrapped, Actor):
        expected |= {f"value.{name}": tensor for name, tensor in wrapped.value.state_dict().items()}
    sender.send(wrapped)
    assert_same(received(store), expected)


def test_what_transformers_cannot_save_is_refused(mixtral, store):
    from transformers.core_model_loading import Chunk, WeightConverter

    broken = WeightConverter("gate.weight", "gate.weight", [Chunk(0)])
    broken.quantization_operation = Chunk(0)  # which cannot be undone
    mixtral._weight_conversions = [broken]
    with WeightSender(store) as sender:
        with pytest.raises(dbuffer.UnsupportedError, match=r"cannot say how .*as_checkpoint=False"):
            sender.send(mixtral)
    with WeightSender(store, as_checkpoint=False) as sender:
        sender.send(mixtral)
    assert_same(received(store), mixtral.state_dict())


class TestComputed:
    """Tensors that transformers computes when it saves."""

    @pytest.mark.parametrize("delta", [False, True])
    def test_they_are_made_one_by_one(self, store, tmp_path, delta):
        model = make_computed()
        lazy = [t for t in Describer().describe(model).tensors if not isinstance(t, torch.Tensor)]
        assert lazy
        with WeightSender(store, delta=delta) as sender:
            for step in range(2):
                sender.send(model)
                assert_same(received(store), saved(model, tmp_path / str(step)))
                with torch.no_grad():
                    next(model.parameters()).add_(1)

    def test_they_are_not_loaded_into_a_module(self, store, sender):
        sender.send(make_computed())
        target = make_computed(1)
        before = copy.deepcopy(target.state_dict())
        with WeightReceiver(store) as receiver:
            with pytest.raises(dbuffer.WeightsMismatchError, match="as_checkpoint=False"):
                receiver.load_into(target)
        assert_same(target.state_dict(), before)


class TestTarget:
    """A transformers module is filled from its checkpoint's tensors."""

    @pytest.mark.parametrize("as_checkpoint", [True, False])
    def test_it_is_filled_from_either(self, mixtral, store, as_checkpoint):
        target = make_family("mixtral", 1)
        with (
            WeightSender(store, as_checkpoint=as_checkpoint) as sender,
            WeightReceiver(store) as receiver,
        ):
            for _ in range(3):
                sender.send(mixtral)
                receiver.load_into(target)
                assert_same(target.state_dict(), mixtral.state_dict())
                with torch.no_grad():
                    for parameter in mixtral.parameters():
                        parameter.mul_(2)

    def test_what_differs_is_told_by_the_names_of_the_store(self, mixtral, store, tmp_path):
        weights = saved(mixtral, tmp_path)
        more = {"more": torch.ones(1)}
        less = {name: tensor for name, tensor in weights.items() if name != EXPERT}
        for published, problem in (
            (mixtral.state_dict() | more, r"the target: the target has no more float32\[1\]$"),
            (weights | more, r"the target: the target has no more float32\[1\]$"),
            (less, f"the store has no '{EXPERT}'"),
        ):
            with WeightSender(store) as sender, WeightReceiver(store) as receiver:
                sender.send(published)
                with pytest.raises(dbuffer.WeightsMismatchError, match=problem):
                    receiver.load_into(mixtral)

    def test_one_expert_is_a_part(self, mixtral, store):
        fused = mixtral.model.layers[1].mlp.experts.gate_up_proj
        before = fused.detach().clone()
        with WeightSender(store) as sender, WeightReceiver(store) as receiver:
            sender.send({EXPERT: torch.ones(fused.shape[1] // 2, fused.shape[2])})
            receiver.load_into(mixtral, partial=True)
        before[2, fused.shape[1] // 2 :] = 1
        assert torch.equal(fused, before)
