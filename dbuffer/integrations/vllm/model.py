"""One rank's model: whether weights fit it, loading them, and refusing to serve when that failed.

:class:`ShapeCheck` loads weights without data into a copy of the model without data, through the
model's own loaders; the model that serves is not touched. :class:`EngineModel` swaps weights in,
through vLLM's layerwise reload, which serves packed, quantised and plain layers alike.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.utils.torch_utils import set_default_torch_dtype

from dbuffer.errors import EngineBrokenError, EngineUnsupportedError, WeightsMismatchError
from dbuffer.layout import TensorSpec
from dbuffer.tensors import DTYPES


class EngineModel:
    """The model of one rank, as it serves.

    All methods are for the worker's main thread, between two steps of the engine.
    """

    def __init__(self, vllm_config: Any, model: Any, device: Any) -> None:
        self._vllm_config = vllm_config
        self._device = device
        self._model = model
        self._hook: Any = None
        self._places = self._find_places()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Swap in the weights of one version. A failure leaves a mix, to be repaired at once."""
        self._load(weights)

    def load_checkpoint(self) -> None:
        """Swap in the weights that the engine was started with, from where it read them.

        Raises:
            EngineUnsupportedError: it was started in a way that cannot be read again.
        """
        config = self._vllm_config
        loader = get_model_loader(config.load_config)
        if not hasattr(loader, "get_all_weights"):
            raise EngineUnsupportedError(
                f"weights in load format {config.load_config.load_format!r} cannot be read again"
            )
        self._load(loader.get_all_weights(config.model_config, self._model))

    def _find_places(self) -> dict[str, int]:
        """Where each parameter lies in memory: captured graphs read there and nowhere else."""
        return {name: tensor.data_ptr() for name, tensor in self._model.named_parameters()}

    def refuse_to_serve(self, reason: str) -> None:
        """Let every step of this model fail, and say why, until :meth:`serve_again`."""
        self.serve_again()

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise EngineBrokenError(reason)

        self._hook = self._model.register_forward_pre_hook(refuse)
        # A captured graph is replayed without a call of the model; this comes after it.
        if hasattr(self._model, "compute_logits"):
            self._model.compute_logits = refuse

    def serve_again(self) -> None:
        """Take :meth:`refuse_to_serve` back, after whole weights were loaded."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self._model.__dict__.pop("compute_logits", None)

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        config = self._vllm_config
        with set_current_vllm_config(config):
            before = [(module, _own_tensors(module)) for module in self._model.modules()]
            try:
                initialize_layerwise_reload(self._model)
                # Tensors are handed over where they lie, in main memory; a layer's are kept as
                # views until it is whole, so their order costs no memory.
                self._model.load_weights(iter(weights))
                loaded = [module for module in self._model.modules() if _has_loaded(module)]
                finalize_layerwise_reload(self._model, config.model_config)
            except BaseException:
                _put_back(before)
                raise
            _repack_tied_heads(self._model)
            _repack_cpu_experts(loaded)
        # The next step reads what was copied, and staging may write anew where it was copied from.
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        if self._find_places() != self._places:
            raise EngineBrokenError("parameters were left at other places in memory")


def _own_tensors(module: Any) -> list[dict[str, Any]]:
    return [dict(table) for table in _tables(module)]


def _tables(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Where a module keeps its parameters and buffers; to register them again keeps no order."""
    return module._parameters, module._buffers  # noqa: SLF001


def _put_back(before: list[tuple[torch.nn.Module, list[dict[str, Any]]]]) -> None:
    """Give each layer its own tensors again, after a load that failed; what is in them is a mix.

    Half a layer that is left waiting for its other half would be completed by the next load, with
    tensors of another version; and one that failed would stay on the meta device.
    """
    for module, tensors in before:
        get_layerwise_info(module).reset()
        for table, own in zip(_tables(module), tensors, strict=True):
            table.clear()
            table.update(own)


def _has_loaded(module: torch.nn.Module) -> bool:
    """Whether a layer has got tensors, between loading and the end of a reload."""
    info = get_layerwise_info(module)
    return not info.can_load() or info.load_numel > 0  # whole and done, or under way


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Reload skips a head whose weight is the embedding's, so its packed copy is the old one.

    On a CPU vLLM packs such a weight twice, for the embedding too, which never multiplies by it.
    Reload has just made that packed copy anew; it is what the head needs.
    """
    embeddings = {
        id(module.weight): module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    }
    for module in model.modules():
        if (
            isinstance(module, ParallelLMHead)
            and isinstance(module.quant_method, UnquantizedEmbeddingMethod)
            and id(module.weight) in embeddings
        ):
            embedding = embeddings[id(module.weight)]
            if hasattr(embedding, "cpu_linear") and getattr(module, "bias", None) is None:
                module.cpu_linear = embedding.cpu_linear
            else:
                module.quant_method.process_weights_after_loading(module)


def _repack_cpu_experts(loaded: list[torch.nn.Module]) -> None:
    """On a CPU, reload leaves experts as they were loaded, where their kernel reads packed ones.

    vLLM (0.28 to 0.33) packs them when it first makes their kernel, and not again. Those that got
    nothing are packed still.
    """
    for module in loaded:
        method = getattr(module, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if (
            isinstance(method, UnquantizedFusedMoEMethod)
            and kernel is not None
            and module.w13_weight.device.type == "cpu"
        ):
            places = {name: getattr(module, name) for name in ("w13_weight", "w2_weight")}
            kernel.fused_experts.process_weights_after_loading(module)
            for name, place in places.items():
                place.data.copy_(getattr(module, name))
                module.register_parameter(name, place)


class ShapeCheck:
    """Loads shapes into a copy of the model that has no data.

    Make it on the worker's main thread: building a model sets things for the whole process. The
    check itself does not, and may run while the engine serves.

    Args:
        vllm_config: the engine's.
        partial: whole layers may be missing.
    """

    def __init__(self, vllm_config: Any, *, partial: bool = False) -> None:
        self._partial = partial
        config = copy.copy(vllm_config)
        config.compilation_config = copy.copy(config.compilation_config)
        # Layers register in here by name, and refuse a name that is taken.
        config.compilation_config.static_forward_context = {}
        config.compilation_config.static_all_moe_layers = []
        with (
            set_current_vllm_config(config),
            set_default_torch_dtype(config.model_config.dtype),
            torch.device("meta"),
        ):
            self._model = initialize_model(config, model_config=config.model_config)
        self._counts = _CountLoadedElements(
            self._model,
            tp_size=config.parallel_config.tensor_parallel_size,
            partial=partial,
        )

    def __call__(self, specs: Sequence[TensorSpec]) -> None:
        """Refuse tensors that do not fit the model.

        Raises:
            WeightsMismatchError: a name or a shape is not the model's, or a tensor is missing; with
                ``partial``, a part of a layer.
        """
        current = "no tensor at all"

        def shapes() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal current
            for spec in specs:
                current = str(spec)
                yield spec.name, torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta")

        self._counts.reset()
        try:
            with self._counts, torch.device("meta"):
                self._model.load_weights(shapes())
        # A model's loaders refuse in their own ways: assert, KeyError, ValueError, RuntimeError.
        except Exception as error:
            # Some list every parameter that there is.
            reason = f"{type(error).__name__} {error!s:.300}".strip()
            message = f"{current} does not fit the engine's model: {reason}"
            raise WeightsMismatchError(message) from error
        if self._partial:
            self._counts.require_whole_layers()
        else:
            self._counts.require_all()


class _CountLoadedElements(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what a model's loaders write into each parameter while this mode is on.

    vLLM fuses parameters (q, k and v are one), so a set of loaded names cannot tell that one of
    the parts is missing.
    """

    def __init__(self, model: torch.nn.Module, *, tp_size: int, partial: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._tp_size = tp_size
        self._copied = 0
        self._loaded: dict[int, int] = {}
        # Embeddings are padded to a round number of rows that no checkpoint has, and check the
        # rows they get themselves.
        self._padded = {
            id(module.weight)
            for module in model.modules()
            if isinstance(module, VocabParallelEmbedding)
        }
        for tensor in (*model.parameters(), *(model.buffers() if partial else ())):
            self._wrap_loader(tensor)

    def reset(self) -> None:
        """Begin to count anew."""
        self._loaded.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._copied += args[0].numel()
        return func(*args, **(kwargs or {}))

    def _wrap_loader(self, tensor: Any) -> None:
        loader = getattr(tensor, "weight_loader", default_weight_loader)
        signature = inspect.signature(loader)

        def counting_loader(*args: Any, **kwargs: Any) -> Any:
            # All take the parameter and what is loaded first, some by name.
            param, loaded, *_ = signature.bind(*args, **kwargs).arguments.values()
            # A trainer's float32 into an engine's bfloat16 is the usual case; bits are not numbers.
            if loaded.is_floating_point() != param.is_floating_point():
                raise WeightsMismatchError(f"{loaded.dtype} does not convert to {param.dtype}")
            before = self._copied
            result = loader(*args, **kwargs)
            copied = self._copied - before
            # Each rank takes its share, or all of it, or nothing (another rank's expert).
            if id(param) not in self._padded and 0 < copied * self._tp_size < loaded.numel():
                raise WeightsMismatchError(f"only {copied} of {loaded.numel()} elements fit")
            self._loaded[id(param)] = self._loaded.get(id(param), 0) + copied
            return result

        tensor.weight_loader = counting_loader

    def require_all(self) -> None:
        """Raise :class:`WeightsMismatchError` if a parameter was not loaded to its end."""
        for name, parameter in self._model.named_parameters():
            self._require_whole(name, parameter)

    def require_whole_layers(self) -> None:
        """Raise it if a layer was loaded in part: vLLM fills what is missing with anything.

        A layer here is what vLLM reloads as one: a module's own parameters and buffers.
        """
        num_loaded = 0
        for prefix, module in self._model.named_modules():
            own = {name: tensor for table in _tables(module) for name, tensor in table.items()}
            missing = [
                name
                for name, tensor in own.items()
                if tensor is not None and name not in module._non_persistent_buffers_set  # noqa: SLF001
                if not self._loaded.get(id(tensor))
            ]
            loaded = [name for name, tensor in own.items() if self._loaded.get(id(tensor))]
            num_loaded += len(loaded)
            for name in loaded:
                self._require_whole(f"{prefix}.{name}", own[name])
            if loaded and missing:
                raise WeightsMismatchError(
                    f"{', '.join(loaded)} of {prefix} came without its {', '.join(missing)}: "
                    "publish all of a layer, or nothing of it"
                )
        if not num_loaded:
            raise WeightsMismatchError("nothing of the engine's model was published")

    def _require_whole(self, name: str, tensor: Any) -> None:
        loaded = self._loaded.get(id(tensor), 0)
        total = getattr(tensor, "weight_loader_numel", tensor.numel())
        if loaded < (1 if id(tensor) in self._padded else total):
            raise WeightsMismatchError(
                f"only {loaded} of {total} elements of {name} were published"
            )
