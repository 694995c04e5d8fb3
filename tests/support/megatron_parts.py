"""Megatron-Core's GPT and mbridge's export on a CPU; imported where mbridge is.

Both are the packages' own. mbridge asks for layers of Transformer Engine, which needs CUDA;
Megatron-Core's own layers take their place below, under the names of Transformer Engine's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from mbridge.core.bridge import _MODEL_REGISTRY
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn
from transformers import AutoConfig

ON_CPU = {
    "use_cpu_initialization": True,
    "sequence_parallel": False,
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "allgather",  # the other one makes a CUDA stream
    "moe_shared_expert_overlap": False,  # only with the other one
    "variable_seq_lengths": False,
}


def start_megatron(
    *,
    tensor: int = 1,
    pipeline: int = 1,
    virtual: int | None = None,
    expert: int = 1,
    expert_tensor: int = 1,
) -> None:
    """Split the ranks of the process group for Megatron; again, if they were split before."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda tensor, *_: tensor  # type: ignore[method-assign]
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )


def load_models(checkpoint: Path) -> tuple[Any, list[nn.Module]]:
    """Return mbridge's bridge for a checkpoint, and this rank's part of the model, by stage."""
    config = AutoConfig.from_pretrained(checkpoint)
    config.rope_theta = config.rope_parameters["rope_theta"]  # where transformers 4 has it
    kind = _on_cpu(_MODEL_REGISTRY[config.model_type])
    bridge = kind(config, dtype=torch.bfloat16, make_vocab_size_divisible_by=64)
    bridge.set_extra_args(**ON_CPU)
    models = [_build(bridge, stage) for stage in range(bridge.mpu.vpp_size or 1)]
    with torch.no_grad():
        bridge.load_weights(models, str(checkpoint))
    return bridge, models


def _build(bridge: Any, stage: int) -> nn.Module:
    """Return a model as mbridge's ``get_model`` builds it, which needs a GPU for that."""
    model = bridge._model_provider([])(
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        vp_stage=stage if bridge.mpu.vpp_size else None,
    )
    _rename_as_te(model)
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    wrapped: nn.Module = Float16Module(bridge.config, model)
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module._maintain_float32_expert_bias()
    return wrapped


class Export:
    """Weights of a Megatron model under HuggingFace's names: a pass gathers them on all ranks."""

    def __init__(self, bridge: Any, models: list[nn.Module]) -> None:
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

    return BridgeOnCpu


def _rename_as_te(model: Any) -> None:
    """Move parameters to where layers of Transformer Engine have them; the model cannot run then.

    Those have norms in the linear layers after them, and all experts of a rank in one layer.
    """
    for layer in model.decoder.layers:
        layer.self_attention.linear_qkv.layer_norm_weight = layer.input_layernorm.weight
        del layer.input_layernorm
        if not hasattr(layer.mlp, "experts"):
            layer.mlp.linear_fc1.layer_norm_weight = layer.pre_mlp_layernorm.weight
            del layer.pre_mlp_layernorm
            continue
        for name in ("linear_fc1", "linear_fc2"):
            grouped = nn.Module()
            for number, expert in enumerate(layer.mlp.experts.local_experts):
                setattr(grouped, f"weight{number}", getattr(expert, name).weight)
            setattr(layer.mlp.experts, name, grouped)
        del layer.mlp.experts.local_experts
