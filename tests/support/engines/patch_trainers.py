"""Trainers written for vLLM's sparse weight transfer, and the engine of an ``LLM`` that they drive.

For programs; see `vllm_engines`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import dbuffer
from tests.support.soak import is_soak
from tests.support.waiting import error_of

NUM_STEPS = 200 if is_soak() else 20
WRONG_AFTER = 10
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
VARIED = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.layers.0.self_attn.q_norm.weight",
    "model.embed_tokens.weight",
    "lm_head.weight",
)


class Client:
    """vLLM's protocol of the same four methods, for an ``LLM`` in this process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)
        self._llm.reset_prefix_cache()


class Trainer:
    """Parameters in float32, which change in places."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._parameters = dict(model.named_parameters())
        self._random = torch.Generator().manual_seed(0)

    def step(self) -> list[Any]:
        """Change some places of some parameters; the patches that say so."""
        patches = [self.some_of(name) for name in VARIED]
        with torch.no_grad():
            for patch in patches:
                self._parameters[patch.name].view(-1)[patch.indices.long()] = patch.values
        return patches

    def some_of(self, name: str) -> Any:
        count = self._parameters[name].numel()
        places = torch.randperm(count, generator=self._random)[:40]
        values = torch.randn(len(places), generator=self._random) / 5
        return patch_of(name, places, values, self._parameters[name].shape)

    def differences(self, llm: Any) -> list[str]:
        """The engine's parameters that are not what they are after a fresh start on these."""
        worker = llm.llm_engine.model_executor.driver_worker.worker
        wrong = []
        for name, parameter in worker.get_model().named_parameters():
            expected = self._expected(name).to(parameter.dtype)
            if not torch.equal(parameter[: len(expected)], expected):  # vLLM pads embeddings
                wrong.append(name)
        return wrong

    def _expected(self, name: str) -> torch.Tensor:
        for fused, parts in FUSED.items():
            if fused in name:
                names = [name.replace(fused, part) for part in parts]
                return torch.cat([self._parameters[one].detach() for one in names])
        return self._parameters[name].detach()


def patch_of(name: str, places: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> Any:
    from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseWeightPatch

    return SparseWeightPatch(name, places.int(), values, tuple(shape))


def all_of(model: torch.nn.Module) -> Iterator[Any]:
    """Patches that leave nothing as it was."""
    for name, parameter in model.named_parameters():
        values = parameter.detach().reshape(-1)
        yield patch_of(name, torch.arange(len(values)), values, parameter.shape)


def trainer_engine(store: Path, client: Any, source: Any = None, rank: int = 0, **how: Any) -> Any:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from dbuffer.integrations.vllm import DBufferTrainerInitInfo

    return WeightTransferTrainerFactory.trainer_init(
        DBufferTrainerInitInfo(store=str(store), rank=rank, **how), client=client, source=source
    )


def observe_versions(store: Path, llm: Any, version_of: Callable[[Any], str]) -> dict[str, Any]:
    """A whole version of a source, then versions by patches: at once, in chunks, and a wrong one.

    Its last one is all of another model, which is seed 1.
    """
    from vllm.distributed.weight_transfer.base import ModuleSource

    from tests.support.engines.tiny_models import make_model

    trainer, client = Trainer(make_model("qwen3", 0)), Client(llm)
    how = {"sparse": True, "sender": {"dtype": torch.bfloat16}}
    engine = trainer_engine(store, client, ModuleSource(trainer.model), **how)
    seen: dict[str, Any] = {"too early": error_of(lambda: engine.send_weights(trainer.step()))}
    engine.send_weights()
    seen["differences"] = [trainer.differences(llm)]
    seen["versions"] = [version_of(llm)]
    for step in range(NUM_STEPS):
        patches = trainer.step()
        if step % 5:
            engine.send_weights(patches)
        else:
            client.start_weight_update()
            first = engine.send_weight_chunk(patches[:3])
            seen["after a chunk"] = trainer.differences(llm)
            last = engine.send_weight_chunk(patches[3:])
            assert (engine.send_weight_chunk([]), last) == (None, first + 1)
            client.finish_weight_update(str(last))
        seen["differences"].append(trainer.differences(llm))
        seen["versions"].append(version_of(llm))
        if step == WRONG_AFTER:
            right = trainer.some_of(VARIED[0])
            wrong = patch_of("lm_head", right.indices, right.values, right.full_shape)
            seen["wrong"] = error_of(lambda: engine.send_weights([right, wrong]))  # noqa: B023
            seen["after a wrong one"] = trainer.differences(llm), version_of(llm)
    engine.send_weights([])
    engine.send_weights(all_of(make_model("qwen3", 1)))
    engine.shutdown()
    return seen


def observe_trainers_without_source(
    store: Path, checkpoint: Path, llm: Any, answers: Callable[[Any], Any]
) -> dict[str, Any]:
    """As vLLM's own sparse trainers are; and what other releases call."""
    from tests.support.engines.tiny_models import make_model

    client, other = Client(llm), make_model("qwen3", 1)
    seen: dict[str, Any] = {"no base": error_of(lambda: trainer_engine(store, client))}
    engine = trainer_engine(store, client, checkpoint=str(checkpoint))
    follower = trainer_engine(store, None, checkpoint=str(checkpoint), rank=1)
    engine.send_weights()
    seen["nothing sent"] = answers(llm)
    for one in (engine, follower):
        one.send_weights(all_of(other))
        assert one.send_weight_chunk([]) is None
    assert follower.send_weight_chunk(all_of(other)) is None
    seen["sent"] = answers(llm)
    engine.shutdown()
    follower.shutdown()

    transfer = llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine
    applied: list[Any] = []
    with dbuffer.WeightSender(store, delta=True) as sender:
        sender.send(other)
        patches = list(all_of(make_model("qwen3", 0)))
        version = type(transfer).trainer_send_sparse_weights(patches, {"sender": sender})
        asked = transfer.parse_update_info(
            {
                "version": version,
                "update_kind": "sparse_flat",
                "num_updates_list": [len(patch.indices) for patch in patches],
            }
        )
        transfer.receive_sparse_weights(asked, applied.extend)
        llm.reset_prefix_cache()
    seen["other releases"] = answers(llm), len(applied)
    return seen
