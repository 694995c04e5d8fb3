"""Copies of vLLM's layers; dbuffer uses them to check a version or to prepare a switch.

`draft_of` finds the draft model that a worker of vLLM has.

`VllmMetaModel`, a copy of a model without data, checks whether published weights fit the model.

After vLLM has loaded a layer, it calls ``process_weights_after_loading`` of the layer's
quantization method, which packs or quantizes the weights. `packs`, `pack` and `computed` implement
`Packing` for vLLM. `pack` calls that method for a shadow: a copy of the layer that serves no
requests. A switch then copies the shadow into the serving layer (`engine/plan/copy_plan.py`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import _custom_ops
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, SKIP_TENSORS
from vllm.model_executor.model_loader.reload.utils import get_layer_size, get_layer_tensors
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.utils.torch_utils import set_default_torch_dtype

from dbuffer.engine.meta_model import DraftAlone, DraftedModel, MetaModel, built_without_data
from dbuffer.engine.plan.copy_plan import NotAloneError
from dbuffer.engine.plan.load_trace import storage_of, tables_of
from dbuffer.engine.shape_check import ShapeCheck, is_multi_token_prediction
from dbuffer.errors import UnsupportedError, WeightsMismatchError
from dbuffer.integrations.vllm.config import LOADING_WORKER

_HOOK = "process_weights_after_loading"


@dataclass(frozen=True)
class Draft:
    """Draft model of speculative decoding (EAGLE, Medusa, MTP, or a small model).

    vLLM made ``model`` with the settings in the other fields.
    """

    model: torch.nn.Module
    make_config: Callable[[], Any]
    """Function that returns the draft model's ``VllmConfig``."""
    model_config: Any
    prefix: str
    """Prefix of the names of the draft model's attention layers."""
    target_config: Any
    """Config of the target model if the draft is in its checkpoint (MTP); otherwise None."""

    def is_in_target(self, name: str) -> bool:
        """Whether a tensor in the target model's checkpoint belongs to the draft model."""
        config = self.target_config
        return config is not None and is_multi_token_prediction(name, config)


def draft_of(worker: Any = None) -> Draft | None:
    """Return a worker's draft model. Default: the worker that is loading its models now.

    Return None if the worker has no draft model, or if the draft model cannot follow a store. A
    draft model cannot follow with pipeline parallelism, in vLLM's second model runner, or in a
    release of vLLM that makes draft models differently. It then keeps its weights.
    """
    worker = worker or LOADING_WORKER.get()
    drafter = getattr(getattr(worker, "model_runner", None), "drafter", None)
    model: Any = getattr(drafter, "model", None)
    if hasattr(model, "unwrap"):  # a wrapper for CUDA graphs
        model = model.unwrap()
    if not isinstance(model, torch.nn.Module):
        return None
    config = worker.vllm_config
    speculative = config.speculative_config
    if config.parallel_config.pipeline_parallel_size > 1 or speculative.draft_model_config is None:
        return None
    make_config = getattr(drafter, "_create_draft_vllm_config", None)
    if make_config is None and speculative.method != "medusa":
        return None
    return Draft(
        model,
        make_config or (lambda: config),
        speculative.draft_model_config,
        "draft_model" if speculative.method == "draft_model" else "",
        config.model_config.hf_text_config if "mtp" in str(speculative.method) else None,
    )


def vllm_shape_check(
    vllm_config: Any, serving: torch.nn.Module, draft: Draft | None = None
) -> ShapeCheck:
    """Return a check of whether published weights fit the serving model.

    The check loads tensors without data, of the same names and shapes, into a copy of the model.
    If ``draft`` is given, ``serving`` is a :class:`DraftedModel` or a :class:`DraftAlone`.
    Call this function on the worker's main thread.

    Raises:
        UnsupportedError: vLLM moves the model's experts between ranks, or vLLM's reload of weights
            would fail or leave old weights in a part of the model.
    """
    if vllm_config.parallel_config.enable_eplb:
        raise UnsupportedError(
            "vLLM moves the experts of this engine between ranks, and would load new weights to "
            "the ranks where experts were at the start: start the engine without enable_eplb"
        )
    _require_latent_weights(serving)
    if not isinstance(serving, DraftAlone):
        model = built_without_data(
            lambda: _make_model(vllm_config, vllm_config.model_config),
            type(getattr(serving, "target", serving) if draft is not None else serving).__name__,
            keep=SKIP_TENSORS,
        )
    if draft is not None:
        of_draft = built_without_data(
            lambda: _make_model(draft.make_config(), draft.model_config, draft.prefix),
            f"draft {type(draft.model).__name__}",
            keep=SKIP_TENSORS,
        )
        if isinstance(serving, DraftAlone):
            model = serving.without_shared(of_draft)
        else:
            model = DraftedModel(model, of_draft, draft.is_in_target)
    _require_views(model, serving)
    for tensor in (*model.parameters(), *model.buffers()):
        # Before `MetaModel` wraps the loader, which would hide vLLM's wrapper.
        if hasattr(tensor, "weight_loader"):
            tensor.weight_loader = original_loader(tensor.weight_loader)
    meta = VllmMetaModel(model, serving, vllm_config.parallel_config.tensor_parallel_size)
    text_config = vllm_config.model_config.hf_text_config
    # vLLM discards some tensors of quantized checkpoints, for example GPTQ's ``g_idx``. Releases of
    # vLLM without this method discard no tensors.
    make_mapper = getattr(vllm_config.quant_config, "get_checkpoint_weight_mapper", None)

    def is_spare(name: str) -> bool:
        is_discarded = make_mapper is not None and not make_mapper().apply_list([name])
        return is_discarded or is_multi_token_prediction(name, text_config)

    return ShapeCheck(meta, is_spare=is_spare)


def _make_model(vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
    config = copy.copy(vllm_config)
    # vLLM's Transformers backend makes parameters on the config's device, not on torch's default
    # device.
    config.device_config = copy.copy(config.device_config)
    config.device_config.device = torch.device("meta")
    config.compilation_config = copy.copy(config.compilation_config)
    # Layers register here by name, and vLLM refuses duplicates. The layers of this copy have the
    # names of the serving layers, so they need registries of their own.
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    with (
        set_current_vllm_config(config),
        set_default_torch_dtype(model_config.dtype),
        _expert_maps_with_data(),
    ):
        return initialize_model(config, model_config=model_config, prefix=prefix)


def _require_latent_weights(serving: torch.nn.Module) -> None:
    """Refuse a model whose latent attention has replaced a parameter by a packed copy.

    vLLM's reload would find no parameter to load into (vLLM 0.32, on a CPU with AMX).
    """
    for name, module in serving.named_modules():
        if getattr(module, "is_amx_bmm_enabled", False):
            raise UnsupportedError(
                f"{name} has packed the weights of its kv_b_proj for AMX, and vLLM's reload cannot "
                "replace them: start the engine with attention_backend='CPU_MLA'"
            )


def _require_views(model: torch.nn.Module, serving: torch.nn.Module) -> None:
    """Refuse a model if a buffer was a view of a parameter before vLLM packed the parameter.

    Packing replaces the parameter, and the buffer keeps the first weights, because vLLM's reload
    does not update the buffer. An example is Mamba 2's convolution in bfloat16 on a CPU.
    """
    parameters = {storage_of(tensor): name for name, tensor in model.named_parameters()}
    served = dict(serving.named_parameters()) | dict(serving.named_buffers())
    for name, buffer in model.named_buffers():
        origin = parameters.get(storage_of(buffer))
        if origin is None or name not in served:
            continue
        if origin not in served or storage_of(served[name]) != storage_of(served[origin]):
            raise UnsupportedError(
                f"{name} was a view of {origin} until vLLM packed {origin}, and vLLM's reload "
                f"would not update {name}: {type(model).__name__} cannot follow in this dtype"
            )


@contextlib.contextmanager
def _expert_maps_with_data() -> Iterator[None]:
    """Let vLLM create maps of experts on the CPU, since loaders read which rank has an expert.

    All other tensors of the model are created on the meta device, without data.
    """
    make = ExpertMapManager.__init__

    def make_with_data(*args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):
            make(*args, **kwargs)

    ExpertMapManager.__init__ = make_with_data
    try:
        yield
    finally:
        ExpertMapManager.__init__ = make


def original_loader(loader: Any) -> Any:
    """Return a weight loader without vLLM's wrapper for reloads and online quantization."""
    while getattr(loader, "__name__", None) == "online_process_loader":
        loader = loader.__wrapped__
    return loader


class VllmMetaModel(MetaModel):  # type: ignore[no-untyped-call]
    """Meta model that counts the loaded elements of each layer, as vLLM's reload does.

    vLLM's reload processes a layer once its count is complete, and skips tensors that come later.
    """

    def __init__(self, model: torch.nn.Module, serving: torch.nn.Module, tp_size: int) -> None:
        super().__init__(
            model,
            embedding=VocabParallelEmbedding,
            default_loader=default_weight_loader,
            tp_size=tp_size,
            serving=serving,
        )
        self._layers: dict[int, tuple[str, int]] = {}
        """Key: id of a tensor. Value: name of the tensor's layer, and the number of loaded elements
        after which vLLM finishes the layer."""
        self._loaded_of_layer: dict[str, int] = {}
        self._num_shares: dict[int, int] = {}
        """Number of ranks, in all replicas together, that each load a part of a tensor of experts.
        The key is the tensor's id."""
        self._optional: set[int] = set()
        for prefix, module in model.named_modules():
            tensors = get_layer_tensors(module)
            self._optional.update(map(id, _find_optional(module)))
            if not is_deferred_attention_layer(module):
                total = get_layer_size(module)
                for name in tensors.keys() - SKIP_LOAD_TENSORS:
                    self._layers.setdefault(id(tensors[name]), (prefix, total))
            parallel = getattr(getattr(module, "moe_config", None), "moe_parallel_config", None)
            if parallel is not None:
                num_ranks = parallel.tp_size * parallel.ep_size
                self._num_shares |= dict.fromkeys(map(id, tensors.values()), num_ranks)

    def num_shares(self, tensor: Any) -> int:
        return self._num_shares.get(id(tensor)) or super().num_shares(tensor)

    def reset(self) -> None:
        super().reset()
        self._loaded_of_layer.clear()

    def note_loaded(self, tensor: Any, count: int, *, is_part: bool) -> None:
        """Refuse a tensor that vLLM's reload would skip, because its layer is already finished.

        vLLM finishes a layer when it has counted as many loaded elements as the layer has. If the
        parts of a fused layer share a scale, vLLM counts the scale once for each part, and finishes
        the layer too early. A skipped tensor is accepted if its values were loaded before: a tied
        tensor under its second name, or integers that describe a quantized layer's packing, which
        all parts of the layer have in common.
        """
        if not count or id(tensor) not in self._layers:
            return
        prefix, total = self._layers[id(tensor)]
        counted = self._loaded_of_layer.get(prefix, 0)
        is_new = self.count_of(tensor) < _count_loadable(tensor)
        if counted >= total and (is_new or (is_part and tensor.is_floating_point())):
            raise WeightsMismatchError(
                f"vLLM's reload would finish {prefix} before it loads this tensor: vLLM "
                "counts loaded elements, and an element that parts of the layer share is counted "
                "several times. Only an engine's start can load such a layer"
            )
        self._loaded_of_layer[prefix] = counted + min(count, _count_loadable(tensor))

    def require_complete(self) -> None:
        """Raise :class:`WeightsMismatchError` if a tensor was not loaded completely.

        A layer that gets a tensor needs all of its buffers too: vLLM's reload would leave the
        missing buffers uninitialized.
        """
        self.require_late_parameters()
        self._refuse_loads_past_loaders()
        for prefix, module in self.model.named_modules():
            if not self.is_needed(prefix):
                continue
            parameters, buffers = tables_of(module)
            is_reloaded = any(map(self.count_of, [*parameters.values(), *buffers.values()]))
            for name, tensor in (parameters | buffers if is_reloaded else parameters).items():
                is_optional = id(tensor) in self._optional and not self.count_of(tensor)
                if tensor is not None and not is_optional:
                    self.require_whole(f"{prefix}.{name}", tensor, _count_loadable(tensor))

    def _refuse_loads_past_loaders(self) -> None:
        """Refuse models that write into a tensor without the loader of the tensor.

        During vLLM's reload, a layer has temporary tensors, so writes without the loader would be
        lost.
        """
        for name, origin in self.recorder.written_from.items():
            raise WeightsMismatchError(
                f"{type(self.model).__name__} computes {name} from {origin}, which has no data "
                "during vLLM's reload: only an engine's start can load this model"
            )
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        # Compare storages: a buffer that is a view of a loaded parameter counts as loaded.
        loaded = {storage_of(tensor) for _, tensor in tensors if self.count_of(tensor)}
        for name, tensor in tensors:
            if _has_no_rows(self._padded.get(id(tensor))):
                continue  # the loader of an embedding without rows only writes zeros
            if storage_of(tensor) not in loaded and self.recorder.is_written(tensor):
                raise WeightsMismatchError(
                    f"{type(self.model).__name__} writes {name} without its loader, and vLLM's "
                    "reload would keep the old weights: only an engine's start can load this model"
                )


def _count_loadable(tensor: Any) -> int:
    return int(getattr(tensor, "weight_loader_numel", tensor.numel()))


def _has_no_rows(module: Any) -> bool:
    return isinstance(module, VocabParallelEmbedding) and not module.shard_indices.num_org_elements


def _find_optional(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    may_all = has_optional_scales(module) or _has_no_rows(module)
    for table in tables_of(module):
        for tensor in table.values():
            if tensor is not None and (may_all or not _count_loadable(tensor)):
                yield tensor
    for name, buffer in module.named_buffers(recurse=False):
        if name in module._non_persistent_buffers_set or name in SKIP_TENSORS:  # noqa: SLF001
            yield buffer


def packs(layer: torch.nn.Module, *, is_as_loaded: bool) -> bool:
    """Whether vLLM processes a layer's weights after loading, so that plain copies don't suffice.

    ``is_as_loaded``: whether the layer's parameters still have the form that loaders fill.
    """
    method = getattr(layer, "quant_method", None)
    # Scales of KV caches do not count: vLLM processes them later, with the attention layers.
    if isinstance(method, (UnquantizedFusedMoEMethod, BaseKVCacheMethod)):
        return has_cpu_experts(layer)
    if not isinstance(method, QuantizeMethodBase):
        return False
    has_hook = getattr(type(method), _HOOK) is not getattr(QuantizeMethodBase, _HOOK)
    return has_hook and (not is_as_loaded or has_cpu_kernel(layer))


def pack(shadow: Any, layer: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Pack or quantize the weights of a shadow (a copy of a layer), as vLLM does after loading.

    Return pairs: an object of the layer that takes part in packing, such as a kernel, and its copy.
    """
    _restore_form(shadow, layer)
    copies: dict[int, tuple[Any, Any]] = {}
    _copy_hooks(shadow, copies)
    vars(shadow).pop("_already_called_process_weights_after_loading", None)
    method = shadow.quant_method
    alone = _WithoutOtherRanks()  # type: ignore[no-untyped-call]
    with alone, onednn_kernels_keep_scales(_dtype_of(shadow)):
        if isinstance(method, UnquantizedFusedMoEMethod):
            # vLLM packs experts when it makes their kernel, at the engine's start. Here, a copy of
            # the kernel packs the shadow. This works, because packing leaves no state in a kernel.
            copy.copy(method.moe_kernel.fused_experts).process_weights_after_loading(shadow)
        else:
            method.process_weights_after_loading(shadow)
    return list(copies.values())


def computed(layer: Any) -> torch.Tensor | None:
    """Return a layer's output for a fixed input, to compare the layer before and after packing.

    Return None if the width of the layer's input is unknown.
    """
    widths = ("embedding_dim", "input_size_per_partition", "input_size")
    width = next((getattr(layer, name) for name in widths if hasattr(layer, name)), None)
    if width is None:
        return None
    tensors = (tensor for table in tables_of(layer) for tensor in table.values())
    device = next(tensor.device for tensor in tensors if tensor is not None)
    numbers = torch.arange(4 * width, dtype=torch.float32).mul_(12.9898).sin_()
    rows = numbers.view(4, width).to(device, _dtype_of(layer))
    result: torch.Tensor = layer.quant_method.apply(layer, rows)
    return result


def has_cpu_kernel(layer: torch.nn.Module) -> bool:
    """Whether a layer computes from a packed copy of its weight, on a CPU.

    Other layers on a CPU compute from the weight itself.
    """
    return bool(getattr(getattr(layer, "cpu_linear", None), "__closure__", None))


def has_cpu_experts(layer: Any) -> bool:
    """Whether a layer has unquantized experts in main memory, which vLLM packs for the CPU."""
    method = getattr(layer, "quant_method", None)
    return (
        isinstance(method, UnquantizedFusedMoEMethod)
        and method.moe_kernel is not None
        and layer.w13_weight.device.type == "cpu"
    )


def has_optional_scales(module: torch.nn.Module) -> bool:
    """Whether a layer has scales of a KV cache, which are optional in a checkpoint."""
    return isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod)


@contextlib.contextmanager
def onednn_kernels_keep_scales(dtype: torch.dtype) -> Iterator[None]:
    """Make vLLM create int8 CPU kernels that keep their scales alive and compute in ``dtype``.

    oneDNN keeps only the address of the scales. vLLM's reload (0.28 to 0.33) copies the scales and
    frees the original, so the kernel would then read memory that has been reused. vLLM's own
    kernels compute in torch's default dtype. This thread must not change that default, because it
    holds for the engine's thread, too.
    """
    make = _custom_ops.create_onednn_scaled_mm

    def make_and_keep(weight: Any, scales: Any, _default_dtype: Any, *args: Any) -> Any:
        kernel = make(weight, scales, dtype, *args)
        kernel.scales = scales
        return kernel

    _custom_ops.create_onednn_scaled_mm = make_and_keep
    try:
        yield
    finally:
        _custom_ops.create_onednn_scaled_mm = make


class _WithoutOtherRanks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that refuses collectives in this thread, because other ranks may not join them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise NotAloneError("vLLM processes this layer on all ranks together")
        return func(*args, **(kwargs or {}))


def _dtype_of(layer: Any) -> torch.dtype:
    dtype: torch.dtype = getattr(layer, "params_dtype", None) or layer.weight.dtype
    return dtype


def _restore_form(shadow: Any, layer: Any) -> None:
    """Give the tensors of a shadow the form that vLLM's loaders expect.

    Tensors that packing added are removed, and the original classes of parameters are restored.
    """
    made_of = get_layerwise_info(layer).restore_metadata
    for table, live, made in zip(tables_of(shadow), tables_of(layer), made_of, strict=True):
        for name, tensor in live.items():
            if table[name] is tensor and tensor is not None and name not in SKIP_TENSORS:
                del table[name]
        for name, form in made.items():
            tensor = table.get(name)
            if tensor is None:
                raise UnsupportedError(f"{name} is not loaded")
            tensor.__class__ = form.__class__
            tensor.__dict__.update(form.__dict__)


def _copy_hooks(owner: Any, copies: dict[int, tuple[Any, Any]]) -> None:
    for name, value in list(vars(owner).items()):
        if not hasattr(type(value), _HOOK) or isinstance(value, torch.nn.Module):
            continue
        if id(value) not in copies:
            copies[id(value)] = value, copy.copy(value)
            _copy_hooks(copies[id(value)][1], copies)
        vars(owner)[name] = copies[id(value)][1]
