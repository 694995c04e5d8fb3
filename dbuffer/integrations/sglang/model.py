"""`sglang_shape_check`: checks weights against a copy of an SGLang model without data."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsMoEScheme
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.model_loader.weight_utils import default_weight_loader

from dbuffer.engine.meta_model import MetaModel, built_without_data
from dbuffer.engine.shape_check import ShapeCheck, is_multi_token_prediction
from dbuffer.errors import UnsupportedError


def dtype_of(model: torch.nn.Module) -> torch.dtype:
    """Return the dtype that a model was built with."""
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def sglang_shape_check(model: Any, *, tp_size: int) -> ShapeCheck:
    """Make a check with a copy of a model, on the scheduler's own thread.

    Raises:
        UnsupportedError: there can be no copy, or SGLang could not load the model again.
    """

    def make() -> Any:
        with set_default_torch_dtype(dtype_of(model)):
            quantization = getattr(model, "quant_config", None)
            return type(model)(config=model.config, quant_config=quantization)

    copy = built_without_data(make, type(model).__name__)
    require_as_loaded(copy, model)
    meta = SglangMetaModel(
        copy,
        embedding=VocabParallelEmbedding,
        default_loader=default_weight_loader,
        tp_size=tp_size,
        serving=model,
    )
    return ShapeCheck(meta, is_spare=lambda name: is_multi_token_prediction(name, model.config))


def require_as_loaded(copy: torch.nn.Module, serving: torch.nn.Module) -> None:
    """Refuse a model that serves in another form than it is loaded in.

    SGLang quantizes, transposes or packs layers once they are loaded, and undoes that for very few.
    It would load into the others as they are: that fails halfway, or gives other weights.
    """
    served = dict(serving.named_parameters())
    for path, layer in copy.named_modules():
        method = getattr(layer, "quant_method", None)
        if _is_undone(getattr(layer, "scheme", None) or method):
            continue
        for name, loaded in layer.named_parameters(path, recurse=False):
            if name not in served or form_and_loader(served[name]) != form_and_loader(loaded):
                raise UnsupportedError(
                    f"{name} was loaded as {loaded.dtype} {tuple(loaded.shape)} and has been made "
                    f"something else of since ({type(method).__name__}), into which SGLang cannot "
                    "load another version: this engine, quantized or packed so, cannot be followed"
                )


def form_and_loader(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Return a parameter's form; without its loader, it takes no part of a fused tensor."""
    return parameter.shape, parameter.dtype, hasattr(parameter, "weight_loader")


def _is_undone(method: Any) -> bool:
    """Whether SGLang restores a layer's parameters before it loads new ones."""
    undo = getattr(type(method), "restore_weights_before_loading", None)
    without = (QuantizeMethodBase, CompressedTensorsMoEScheme)
    return undo not in (None, *(base.restore_weights_before_loading for base in without))


class SglangMetaModel(MetaModel):  # type: ignore[no-untyped-call]
    """Copy that must be loaded whole, each parameter of it."""

    def require_complete(self) -> None:
        self.require_late_parameters()
        for name, parameter in self.model.named_parameters():
            self.require_whole(name, parameter, parameter.numel())
