"""`VllmMetaModel`: the layers of a vLLM model without data, as vLLM's reload counts them."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.utils.torch_utils import set_default_torch_dtype

from dbuffer.engine.meta_model import MetaModel, built_without_data
from dbuffer.engine.plan.load_trace import storage_of, tables_of
from dbuffer.engine.shape_check import ShapeCheck, is_multi_token_prediction
from dbuffer.errors import UnsupportedError, WeightsMismatchError
from dbuffer.integrations.vllm.reload_fixes import has_optional_scales

logger = logging.getLogger(__name__)

_DEFERRING = "online_process_loader"
"""Name of the loaders that vLLM wraps others in."""


def vllm_shape_check(vllm_config: Any, serving: torch.nn.Module) -> ShapeCheck:
    """Make a check with a copy of the model that serves, on the worker's main thread.

    Raises:
        UnsupportedError: its experts do not stay where they are loaded, or a reload would
            fail, or leave a part of it as it is.
    """
    if vllm_config.parallel_config.enable_eplb:
        raise UnsupportedError(
            "vLLM moves the experts of this engine between ranks (enable_eplb), and would load new "
            "ones to where they were at its start: start it without"
        )
    _require_latent_weights(serving)
    model = built_without_data(
        lambda: _make_model(vllm_config), type(serving).__name__, keep=SKIP_TENSORS
    )
    _require_views(model, serving)
    for tensor in (*model.parameters(), *model.buffers()):
        _unwrap_online_quantization(tensor)
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    meta = VllmMetaModel(model, serving, tp_size=tp_size)
    text_config = vllm_config.model_config.hf_text_config

    def is_spare(name: str) -> bool:
        is_of_draft = is_multi_token_prediction(name, text_config)
        if is_of_draft and "mtp" in str(getattr(vllm_config.speculative_config, "method", "")):
            _log_that_drafts_stay()
        return is_of_draft or _is_discarded(name, vllm_config.quant_config)

    return ShapeCheck(meta, is_spare=is_spare)


def _is_discarded(name: str, quantization: Any) -> bool:
    """Whether vLLM drops a tensor of this name from checkpoints of a quantized model.

    GPTQ's ``g_idx``, say: engines take only models whose groups are in order. Releases that lack
    the method drop nothing.
    """
    make_mapper = getattr(quantization, "get_checkpoint_weight_mapper", None)
    return make_mapper is not None and not make_mapper().apply_list([name])


@functools.cache
def _log_that_drafts_stay() -> None:
    logger.info("the draft keeps the layers (MTP) of the engine's start: versions do not bring any")


def _make_model(vllm_config: Any) -> Any:
    """Make a model as vLLM does, on the default device, without a trace in the engine."""
    config = copy.copy(vllm_config)
    # The Transformers backend asks for its parameters here, whatever the default device is.
    config.device_config = copy.copy(config.device_config)
    config.device_config.device = torch.device("meta")
    config.compilation_config = copy.copy(config.compilation_config)
    # Layers register in here by name, and refuse a name that is taken.
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    with (
        set_current_vllm_config(config),
        set_default_torch_dtype(config.model_config.dtype),
        _expert_maps_with_data(),
    ):
        return initialize_model(config, model_config=config.model_config)


def _require_latent_weights(serving: torch.nn.Module) -> None:
    """Refuse latent attention that drops a layer's weight once it has packed it.

    vLLM's reload would load that layer, and have no place for its weight (0.32, on a CPU with AMX).
    """
    for name, module in serving.named_modules():
        if getattr(module, "is_amx_bmm_enabled", False):
            raise UnsupportedError(
                f"{name} has packed the weights of its kv_b_proj for AMX, and vLLM's reload has no "
                "place for new ones: start the engine with attention_backend='CPU_MLA'"
            )


def _require_views(model: torch.nn.Module, serving: torch.nn.Module) -> None:
    """Refuse a model with a buffer that is no longer a view of its parameter.

    A layer that packs the parameter after loading leaves the buffer behind, with what was loaded
    first. vLLM's reload does the same, and would leave it as it is (Mamba 2's convolution in
    bfloat16, on a CPU).
    """
    parameters = {storage_of(tensor): name for name, tensor in model.named_parameters()}
    served = dict(serving.named_parameters()) | dict(serving.named_buffers())
    for name, buffer in model.named_buffers():
        origin = parameters.get(storage_of(buffer))
        if origin is None or name not in served:
            continue
        if origin not in served or storage_of(served[name]) != storage_of(served[origin]):
            raise UnsupportedError(
                f"{name} was a view of {origin} until that was packed, and vLLM's reload would "
                f"leave it as it is: a {type(model).__name__} cannot be followed in this dtype here"
            )


@contextlib.contextmanager
def _expert_maps_with_data() -> Iterator[None]:
    """Keep data in the maps of experts to ranks, which loaders read."""
    make = ExpertMapManager.__init__

    def make_with_data(*args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):
            make(*args, **kwargs)

    ExpertMapManager.__init__ = make_with_data
    try:
        yield
    finally:
        ExpertMapManager.__init__ = make


def _unwrap_online_quantization(tensor: Any) -> None:
    """Unwrap the loader of a tensor whose layer quantizes online.

    Such a layer's loaders are wrapped from the start, as reload wraps all: they keep tensors until
    all have come, quantize them, and take the wrapping off, which a watched loader would hide.
    """
    loader = getattr(tensor, "weight_loader", None)
    while getattr(loader, "__name__", None) == _DEFERRING:
        loader = loader.__wrapped__  # type: ignore[union-attr]
        tensor.weight_loader = loader


class VllmMetaModel(MetaModel):  # type: ignore[no-untyped-call]
    """Counts by layer too: a module's own parameters and buffers, which vLLM reloads as one."""

    def __init__(self, model: torch.nn.Module, serving: torch.nn.Module, *, tp_size: int) -> None:
        super().__init__(
            model,
            embedding=VocabParallelEmbedding,
            default_loader=default_weight_loader,
            tp_size=tp_size,
            serving=serving,
        )
        # Layer of each tensor, and the elements at which vLLM takes that for whole.
        self._layers: dict[int, tuple[str, int]] = {}
        self._loaded_of_layer: dict[str, int] = {}
        for prefix, module in model.named_modules():
            if not _is_reloaded_last(module):
                own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
                total = sum(map(_count_loadable, own))
                for tensor in own:
                    self._layers.setdefault(id(tensor), (prefix, total))
        self._num_shares = dict(_shares_of_experts(model))
        self._optional = {
            id(tensor) for module in model.modules() for tensor in _find_optional(module)
        }

    def num_shares(self, tensor: Any) -> int:
        return self._num_shares.get(id(tensor)) or super().num_shares(tensor)

    def reset(self) -> None:
        super().reset()
        self._loaded_of_layer.clear()

    def note_loaded(self, tensor: Any, count: int, *, is_part: bool) -> None:
        """Refuse a tensor that comes when vLLM takes its layer for whole: reload leaves it out.

        The parts of a fused layer that share a scale bring it each, and vLLM counts each. A tensor
        that has come before may be left out: a tied one under its other name, and integers that
        tell how the layer is packed, which every part repeats.
        """
        if not count or id(tensor) not in self._layers:
            return
        prefix, total = self._layers[id(tensor)]
        counted = self._loaded_of_layer.get(prefix, 0)
        is_new = self.count_of(tensor) < _count_loadable(tensor)
        if counted >= total and (is_new or (is_part and tensor.is_floating_point())):
            raise WeightsMismatchError(
                f"vLLM's reload takes {prefix} for whole before this tensor, since its parts bring "
                "more than it holds: only an engine's start can load such a layer"
            )
        self._loaded_of_layer[prefix] = counted + min(count, _count_loadable(tensor))

    def require_complete(self) -> None:
        """Raise :class:`WeightsMismatchError` if a tensor, or a part of one, is missing.

        vLLM's reload leaves the missing buffers of a layer that gets others uninitialized.
        """
        self.require_late_parameters()
        self._refuse_loads_past_loaders()
        for prefix, module in self.model.named_modules():
            parameters, buffers = tables_of(module)
            is_reloaded = any(map(self.count_of, [*parameters.values(), *buffers.values()]))
            for name, tensor in (parameters | buffers if is_reloaded else parameters).items():
                is_optional = id(tensor) in self._optional and not self.count_of(tensor)
                if tensor is not None and not is_optional:
                    self.require_whole(f"{prefix}.{name}", tensor, _count_loadable(tensor))

    def _refuse_loads_past_loaders(self) -> None:
        """Refuse loads past a tensor's loader: reload has other tensors there, and misses them."""
        for name, origin in self.recorder.written_from.items():
            raise WeightsMismatchError(
                f"{type(self.model).__name__} computes {name} from {origin}, which has no data in "
                "the midst of vLLM's reload: only an engine's start can load this model"
            )
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        # Some buffers are views of parameters.
        loaded = {storage_of(tensor) for _, tensor in tensors if self.count_of(tensor)}
        for name, tensor in tensors:
            if _has_no_rows(self._padded.get(id(tensor))):
                continue  # its loader writes zeros, and nothing else
            if storage_of(tensor) not in loaded and self.recorder.is_written(tensor):
                raise WeightsMismatchError(
                    f"{type(self.model).__name__} writes {name} past its loader, where vLLM's "
                    "reload leaves the weights as they were: only an engine's start can load it"
                )


def _shares_of_experts(model: torch.nn.Module) -> Iterator[tuple[int, int]]:
    """Yield experts' tensors with their number of ranks, in all replicas that step together."""
    for module in model.modules():
        parallel = getattr(getattr(module, "moe_config", None), "moe_parallel_config", None)
        if parallel is not None:
            for tensor in module.parameters(recurse=False):
                yield id(tensor), parallel.tp_size * parallel.ep_size


def _count_loadable(tensor: Any) -> int:
    """Return the number of a parameter's elements that come from a checkpoint, without padding."""
    return int(getattr(tensor, "weight_loader_numel", tensor.numel()))


def _is_reloaded_last(module: torch.nn.Module) -> bool:
    """Whether this is an attention layer, which reload leaves until all others are done."""
    return isinstance(module, AttentionLayerBase) and hasattr(
        module, "process_weights_after_loading"
    )


def _has_no_rows(module: Any) -> bool:
    """Whether this is a small vocabulary's embedding or head, of which a rank has padding alone."""
    return isinstance(module, VocabParallelEmbedding) and not module.shard_indices.num_org_elements


def _find_optional(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield a layer's own tensors that may be missing: reload fills them, or leaves them alone."""
    own = [tensor for table in tables_of(module) for tensor in table.values() if tensor is not None]
    yield from own if has_optional_scales(module) or _has_no_rows(module) else ()
    yield from (tensor for tensor in own if not _count_loadable(tensor))
    for name, buffer in module.named_buffers(recurse=False):
        if name in module._non_persistent_buffers_set or name in SKIP_TENSORS:  # noqa: SLF001
            yield buffer
