"""Whether weights fit an SGLang model; see :mod:`dbuffer.integrations.engine.shape_check`.

SGLang's loaders pass over a name that they do not know, with a warning, so what is checked is also
whether anything was done with each tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsMoEScheme
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch.utils._pytree import tree_leaves

from dbuffer.errors import EngineUnsupportedError, WeightsMismatchError
from dbuffer.integrations.engine.plan.recording import storage_of
from dbuffer.integrations.engine.shape_check import ShapeCheck, WatchedLoads
from dbuffer.integrations.sglang.model import dtype_of
from dbuffer.weights.names import NameMap


def sglang_shape_check(model: Any, names: NameMap | None, *, tp_size: int) -> ShapeCheck:
    """A check with a copy of a model. To be called on the scheduler's own thread.

    Raises:
        EngineUnsupportedError: there can be no copy, or SGLang could not load the model again.
    """
    try:
        with set_default_torch_dtype(dtype_of(model)), torch.device("meta"):
            quantization = getattr(model, "quant_config", None)
            copy: Any = type(model)(config=model.config, quant_config=quantization)
    # Whatever a model's constructor may raise.
    except Exception as error:
        raise EngineUnsupportedError(
            f"a {type(model).__name__} cannot be built without data, so nothing could be "
            f"checked before it is loaded: {type(error).__name__} {error!s:.300}"
        ) from error
    require_as_loaded(copy, model)
    return ShapeCheck(_WatchedReads(copy, tp_size=tp_size), names)


def require_as_loaded(copy: torch.nn.Module, serving: torch.nn.Module) -> None:
    """Refuse a model that serves in another form than it is loaded in.

    SGLang quantises, transposes or packs layers once they are loaded, and undoes that for very few.
    Into all others it would load as they are: that fails halfway, or means something else there.
    """
    served = dict(serving.named_parameters())
    for path, layer in copy.named_modules():
        method = getattr(layer, "quant_method", None)
        if _is_undone(getattr(layer, "scheme", None) or method):
            continue
        for name, loaded in layer.named_parameters(path, recurse=False):
            if name not in served or _form(served[name]) != _form(loaded):
                raise EngineUnsupportedError(
                    f"{name} was loaded as {loaded.dtype} {tuple(loaded.shape)} and has been made "
                    f"something else of since ({type(method).__name__}), into which SGLang cannot "
                    "load another version: this engine, quantised or packed so, cannot be followed"
                )


def _form(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Without its loader, a parameter takes no part of what it is fused of."""
    return parameter.shape, parameter.dtype, hasattr(parameter, "weight_loader")


def _is_undone(method: Any) -> bool:
    """Whether SGLang undoes what was made of a layer's parameters before it loads new ones."""
    undo = getattr(type(method), "restore_weights_before_loading", None)
    nothing = (QuantizeMethodBase, CompressedTensorsMoEScheme)
    return undo not in (None, *(each.restore_weights_before_loading for each in nothing))


class _WatchedReads(WatchedLoads):  # type: ignore[no-untyped-call]
    """Sees what a model's loaders read, too."""

    def __init__(self, model: torch.nn.Module, *, tp_size: int) -> None:
        super().__init__(
            model,
            embedding=VocabParallelEmbedding,
            default_loader=default_weight_loader,
            tp_size=tp_size,
        )
        self._read: set[int] = set()

    def reset(self) -> None:
        super().reset()
        self._read.clear()

    def note_read(self, tensor: torch.Tensor) -> None:
        self._read.add(storage_of(tensor))

    def require_complete(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for what, tensor in tensors.items():
            if storage_of(tensor) not in self._read:
                raise WeightsMismatchError(f"the engine's model has no place for {what}")
        for name, parameter in self.model.named_parameters():
            self.require_whole(name, parameter, parameter.numel())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for value in tree_leaves(args):
            if isinstance(value, torch.Tensor):
                self.note_read(value)
        return super().__torch_dispatch__(func, types, args, kwargs)
