"""Megatron-Core's GPT and mbridge's export on a CPU; imported where mbridge is.

Both are the packages' own. mbridge asks for layers of Transformer Engine, which needs CUDA;
Megatron-Core's own layers take their place below, under the names of Transformer Engine's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from mbridge.core.bridge import _MODEL_REGISTRY
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from transformers import AutoConfig

ON_CPU = {
    "use_cpu_initialization": True,
    "sequence_parallel": False,
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "allgather",  # the other one makes a CUDA stream
    "variable_seq_lengths": False,
}


def start_megatron(tensor: int, pipeline: int, expert: int) -> None:
    """Split the ranks of the process group for Megatron; again, if they were split before."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda tensor, *_: tensor  # type: ignore[method-assign]
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=1,
    )


def load_model(checkpoint: Path) -> tuple[Any, torch.nn.Module]:
    """Return mbridge's bridge for a checkpoint, and this rank's part of the model."""
    config = AutoConfig.from_pretrained(checkpoint)
    config.rope_theta = config.rope_parameters["rope_theta"]  # where transformers 4 has it
    bridge = _on_cpu(_MODEL_REGISTRY[config.model_type])(config, dtype=torch.float32)
    bridge.set_extra_args(**ON_CPU)
    model = bridge._model_provider([])(
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    with torch.no_grad():
        bridge.load_weights([model], str(checkpoint))
    return bridge, model


class Export:
    """Weights of a Megatron model under HuggingFace's names: a pass gathers them on all ranks."""

    def __init__(self, bridge: Any, models: list[torch.nn.Module]) -> None:
        self._bridge, self._models = bridge, models
        self._metadata: list[SimpleNamespace] = []

    def metadata(self) -> list[SimpleNamespace]:
        if not self._metadata:  # a pass tells the shapes
            for name, tensor in self:
                meta = SimpleNamespace(name=name, dtype=tensor.dtype, shape=tensor.shape)
                self._metadata.append(meta)
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        names = set()
        for name, tensor in self._bridge.export_weights(self._models):
            if name not in names:  # a tied embedding comes once from each end of the pipeline
                names.add(name)
                yield name, tensor


def _on_cpu(kind: Any) -> Any:
    class BridgeOnCpu(kind):  # type: ignore[misc]
        def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
            self.has_vp_stage = True
            return get_gpt_decoder_block_spec(
                self.config, use_transformer_engine=False, vp_stage=vp_stage
            )

        def _weight_name_mapping_mcore_local_to_global(
            self, model: torch.nn.Module, consider_ep: bool = True
        ) -> dict[str, str]:
            num_experts = self.config.num_moe_experts or 0
            first = num_experts // self.mpu.ep_size * self.mpu.ep_rank if consider_ep else 0
            names = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep=False)
            return {local: _as_te(name, num_experts, first) for local, name in names.items()}

    return BridgeOnCpu


def _as_te(name: str, num_experts: int, first: int) -> str:
    """Return the name that a parameter would have in layers of Transformer Engine."""
    name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    if not num_experts:
        name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
    return re.sub(
        r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight",
        lambda found: f".{found[2]}.weight{first + int(found[1])}",
        name,
    )
