"""Megatron-Core over a store: models split by tensors, stages and experts, named by mbridge."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import dbuffer
from tests.support.children import preload
from tests.support.ways import mounted
from tests.support.worlds import World

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("mbridge") is None, reason="needs mbridge: python3 dev.py megatron"
    ),
]

SIZES: dict[str, Any] = {
    "vocab_size": 125,  # padded to 128
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


class Report(NamedTuple):
    num_held: int
    """Number of weights that the rank holds."""
    num_collectives: int
    """Number of torch's collectives in the last publish of `MegatronWeights`."""


def model_of(family: str) -> Any:
    import transformers

    match family:
        case "llama":
            sizes = SIZES | {"num_hidden_layers": 4}
            config = transformers.LlamaConfig(**sizes, head_dim=16)
        case "llama, one key-value head":
            config = transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 1}, head_dim=16)
        case "llama, two key-value heads":
            config = transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 2}, head_dim=16)
        case "qwen2, tied":
            sizes = {"vocab_size": 128, "num_key_value_heads": 2, "tie_word_embeddings": True}
            config = transformers.Qwen2Config(**SIZES | sizes)
        case "qwen3-moe":
            config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16)
        case "mixtral":
            config = transformers.MixtralConfig(**SIZES, num_local_experts=4, head_dim=16)
        case "glm4-moe":
            experts = {"n_routed_experts": 4, "n_shared_experts": 1, "use_qk_norm": True}
            sizes = SIZES | EXPERTS | experts | {"attention_bias": True}
            config = transformers.Glm4MoeConfig(**sizes, head_dim=16, num_nextn_predict_layers=0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # zeros; in float32, as Megatron has it
            buffer.data = torch.rand(buffer.shape)
    return model


@pytest.fixture(scope="module")
def world(tmp_path_factory: Any) -> Iterator[World]:
    preload("tests.support.megatron_parts")
    with World(tmp_path_factory.mktemp("world"), 4) as world:
        yield world


@pytest.mark.parametrize(
    ("family", "split", "mount"),
    [
        ("llama", {"tensor": 2, "pipeline": 2}, "local"),
        ("llama", {"tensor": 2, "pipeline": 2}, "network"),
        ("llama", {"tensor": 2, "pipeline": 2, "virtual": 2}, "local"),
        ("llama, one key-value head", {"tensor": 2, "pipeline": 2}, "local"),
        ("llama, two key-value heads", {"tensor": 4}, "network"),
        ("qwen2, tied", {"tensor": 2, "pipeline": 2}, "local"),
        ("qwen3-moe", {"pipeline": 2, "expert": 2}, "local"),
        ("mixtral", {"expert": 2}, "local"),
        ("mixtral", {"tensor": 2, "expert": 2}, "local"),
        ("mixtral", {"tensor": 2, "expert": 2, "expert_tensor": 2}, "local"),
        ("glm4-moe", {"tensor": 2, "expert": 2}, "local"),
    ],
)
def test_a_megatron_model_is_published_as_its_checkpoint(
    world, family, split, mount, tmp_path, shm_path
):
    torch.manual_seed(0)
    model, other = model_of(family), model_of(family)
    model.save_pretrained(tmp_path)
    checkpoint = load_file(tmp_path / "model.safetensors")
    reports = world.run(publish, tmp_path, shm_path, split, mount)
    num_weights = sum(tensor.numel() for tensor in checkpoint.values())
    assert max(report.num_held for report in reports) < num_weights
    # On a network mount, columns are gathered.
    assert any(report.num_collectives for report in reports) == (mount == "network")
    change(model)
    stores = sorted(shm_path.iterdir())
    assert [store.name for store in stores] == ["export", "export-delta", "parts", "parts-delta"]
    for store in stores:
        with mounted(mount), dbuffer.WeightReceiver(store) as receiver:
            with receiver.open() as snapshot:
                assert (snapshot.version, snapshot.metadata) == (2, {"step": 2})
                assert snapshot.tensors.keys() == checkpoint.keys()
                for name, tensor in snapshot.tensors.items():
                    assert torch.equal(tensor, changed(checkpoint[name])), name
            receiver.load_into(other)
        for name, tensor in other.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]), name


def changed(tensor: torch.Tensor) -> torch.Tensor:
    return torch.where(tensor > 0.05, tensor / 2, tensor)


@torch.no_grad()
def change(*models: torch.nn.Module) -> None:
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(changed(tensor))


def publish(rank: int, checkpoint: Path, stores: Path, split: dict[str, int], mount: str) -> Report:
    from torch.distributed.tensor.debug import CommDebugMode

    from dbuffer.integrations.megatron import MegatronWeights
    from tests.support.megatron_parts import Export, load_models, start_megatron

    start_megatron(**split)
    bridge, models = load_models(checkpoint)
    sources = {"export": Export(bridge, models), "parts": MegatronWeights(bridge, models)}
    with mounted(mount), contextlib.ExitStack() as stack, CommDebugMode() as mode:  # type: ignore[no-untyped-call]
        pairs = []
        for kind, delta in itertools.product(sources, (False, True)):
            store = stores / (f"{kind}-delta" if delta else kind)
            sender = dbuffer.ShardedWeightSender(store, delta=delta)
            pairs.append((sources[kind], stack.enter_context(sender)))
        for source, sender in pairs:
            sender.send(source, metadata={"step": 1})
        change(*models)
        num_collectives = 0
        for number, (source, sender) in enumerate(pairs):
            num_before = mode.get_total_counts()
            publication = sender.send(source, metadata={"step": 2})
            num_collectives = mode.get_total_counts() - num_before
            assert (publication.delta_bytes is not None) == (number % 2 == 1)
    return Report(
        sum(parameter.numel() for model in models for parameter in model.parameters()),
        num_collectives,
    )


ALTERATIONS: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
    ("model.norm.weight", lambda tensor: tensor * 2),
    ("model.norm.weight", lambda tensor: tensor + 1),
    ("model.norm.weight", lambda tensor: tensor.flip(0)),
    ("model.norm.weight", lambda tensor: tensor.float()),
    ("model.norm.weight", lambda tensor: tensor[0]),
    ("lm_head.weight", torch.ones_like),
    ("lm_head.weight", lambda tensor: torch.cat([tensor, tensor])),
]
"""Names of tensors, and functions by which a bridge alters them."""


def test_an_export_that_is_not_made_of_parts_is_refused(world, tmp_path, shm_path):
    model_of("llama").save_pretrained(tmp_path)
    expected = [
        f"cannot publish parts of {name}: mbridge computes the values, or joins several parts of a "
        "rank; publish the export itself, as a weight source"
        for name, _ in ALTERATIONS
        for _ in range(2)
    ]
    expected.append("MemoryError: no room")
    expected.append(
        "the model's parameters have other names, shapes or dtypes than when they were first "
        "published: make new MegatronWeights on all ranks"
    )
    for messages in world.run(send_refused, tmp_path, shm_path / "store"):
        assert [
            message.partition(" could not describe its weights: ")[2] for message in messages
        ] == expected
    with dbuffer.WeightReceiver(shm_path / "store") as receiver, receiver.open() as snapshot:
        assert snapshot.version == 1


def send_refused(rank: int, checkpoint: Path, store: Path) -> list[str]:
    from dbuffer.integrations.megatron import MegatronWeights
    from dbuffer.integrations.megatron.tracing import Cut
    from tests.support.megatron_parts import load_models, start_megatron

    start_megatron(tensor=2, pipeline=2)
    bridge, models = load_models(checkpoint)
    export = bridge.export_weights
    messages = []
    with dbuffer.ShardedWeightSender(store) as sender:
        for altered, function in ALTERATIONS:
            bridge.export_weights = lambda models, altered=altered, function=function: (
                (name, function(tensor) if name == altered else tensor)
                for name, tensor in export(models)
            )
            weights = MegatronWeights(bridge, models)
            for _ in range(2):  # the second time without an export
                with pytest.raises(dbuffer.UnsupportedError) as unsupported:
                    sender.send(weights)
                messages.append(str(unsupported.value))
        bridge.export_weights = export
        weights = MegatronWeights(bridge, models)
        with (
            mock.patch.object(Cut, "find", side_effect=MemoryError("no room"))
            if rank == 1
            else contextlib.nullcontext(),
            pytest.raises(dbuffer.RankFailedError) as failed,
        ):
            sender.send(weights)
        messages.append(str(failed.value))
        sender.send(weights)
        if rank == 3:
            norm: Any = models[0].get_submodule("module.decoder.final_layernorm")
            norm.weight = torch.nn.Parameter(norm.weight.float())
        with pytest.raises(dbuffer.InvalidWeightsError) as invalid:
            sender.send(weights)
        messages.append(str(invalid.value))
    return messages
