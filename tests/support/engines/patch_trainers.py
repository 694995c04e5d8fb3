"""Trainers written for vLLM's sparse weight transfer, and the engine of an ``LLM`` that they drive.

For programs; see `vllm_engines`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from tests.support.soak import is_soak

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


def require_patched(store: Path, llm: Any, version_of: Callable[[Any], str]) -> None:
    """Send a whole version, then versions by patches: at once, in chunks, and a wrong one.

    Each is the trainer's state, in the engine's own parameters, fused ones included. The last one
    is all of another model, which is seed 1.
    """
    from vllm.distributed.weight_transfer.base import ModuleSource

    from dbuffer.testing.conformance import Client
    from tests.support.engines.tiny_models import make_model

    trainer, client = Trainer(make_model("qwen3", 0)), Client(llm)
    how = {"sparse": True, "sender": {"dtype": torch.bfloat16}}
    engine = trainer_engine(store, client, ModuleSource(trainer.model), **how)
    with pytest.raises(dbuffer.VersionError, match="send all weights once"):
        engine.send_weights(trainer.step())
    engine.send_weights()
    version = 1

    def require_served() -> None:
        assert trainer.differences(llm) == []
        assert version_of(llm) == str(version)

    require_served()
    for step in range(NUM_STEPS):
        patches = trainer.step()
        if step % 5:
            engine.send_weights(patches)
            version += 1
        else:  # in two chunks, which are a version each
            client.start_weight_update()
            assert engine.send_weight_chunk(patches[:3]) == version + 1
            assert set(trainer.differences(llm)) == set(VARIED[3:]), "a chunk is there at once"
            version += 2
            assert engine.send_weight_chunk(patches[3:]) == version
            assert engine.send_weight_chunk([]) is None
            client.finish_weight_update(str(version))
        require_served()
        if step == WRONG_AFTER:
            right = trainer.some_of(VARIED[0])
            wrong = patch_of("lm_head", right.indices, right.values, right.full_shape)
            problem = "^there is a patch of 'lm_head', but no tensor"
            with pytest.raises(dbuffer.WeightsMismatchError, match=problem):
                engine.send_weights([right, wrong])
            require_served()
    engine.send_weights([])
    engine.send_weights(all_of(make_model("qwen3", 1)))
    engine.shutdown()
