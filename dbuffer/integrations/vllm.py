"""New weights for a running vLLM engine in this process, without restarting it.

Three steps, so that what can fail fails while the engine still serves:

* :func:`check_weights` loads the weights into a copy of the model that has shapes and no data,
  through the model's own loaders. Generation may go on meanwhile.
* :func:`apply_weights` swaps them in. Nothing may be generating.
* :func:`update_weights` does both.

The engine must run in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``) on one rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import LLM
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from dbuffer.errors import DBufferError, WeightsMismatchError

Weights = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class EngineBusyError(DBufferError, RuntimeError):
    """The engine has requests in flight. Its weights were not touched."""


class EngineUnsupportedError(DBufferError, NotImplementedError):
    """The engine runs in other processes, or on several ranks."""


def update_weights(llm: LLM, weights: Weights) -> None:
    """Check ``weights``, then swap them in.

    A target for a receiver: ``receiver.load_into(functools.partial(update_weights, llm))``.

    Args:
        llm: the engine. Nothing may be generating.
        weights: all tensors under their checkpoint's names; of tied embeddings, the input's.

    Raises:
        WeightsMismatchError: names or shapes are not the model's. The engine is untouched.
        EngineBusyError: requests are in flight. The engine is untouched.
        EngineUnsupportedError: see the module's description.
    """
    weights = dict(weights)
    check_weights(llm, weights)
    apply_weights(llm, weights)


def check_weights(llm: LLM, weights: Weights) -> None:
    """Refuse weights that do not fit the engine's model. The engine is not touched.

    Raises:
        WeightsMismatchError: a name or a shape is not the model's, or a tensor is missing.
        EngineUnsupportedError: see the module's description.
    """
    _on_worker(llm, _check, dict(weights))


def apply_weights(llm: LLM, weights: Weights) -> None:
    """Swap in weights that :func:`check_weights` has accepted, and forget the prefix cache.

    A failure halfway leaves the engine unusable until a later call succeeds.

    Raises:
        EngineBusyError: requests are in flight. The engine is untouched.
        EngineUnsupportedError: see the module's description.
    """
    # Keys and values of the old weights must not serve the new ones. Reset before, because this
    # can fail, and a failure must come before the weights change.
    if llm.llm_engine.has_unfinished_requests() or not llm.reset_prefix_cache():
        raise EngineBusyError("the engine is generating: wait for its requests, then apply")
    _on_worker(llm, _apply, dict(weights))


def _on_worker(llm: LLM, function: Callable[..., None], weights: Mapping[str, Any]) -> None:
    executor = getattr(llm.llm_engine, "model_executor", None)
    if not isinstance(executor, UniProcExecutor):
        raise EngineUnsupportedError(
            "tensors reach only an engine of one rank in this process: "
            "set VLLM_ENABLE_V1_MULTIPROCESSING=0 before it starts"
        )
    llm.collective_rpc(function, args=(weights,))


def _apply(worker: Any, weights: Mapping[str, torch.Tensor]) -> None:
    # Layerwise reload: on a CPU linear layers are packed, so there is nothing left to copy into.
    worker.reload_weights(weights_iterator=iter(weights.items()))
    with set_current_vllm_config(worker.vllm_config):
        _repack_tied_heads(worker.get_model())


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Reload skips a head whose weight is the embedding's, so its packed copy is the old one."""
    embeddings = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    }
    for module in model.modules():
        if (
            isinstance(module, ParallelLMHead)
            and isinstance(module.quant_method, UnquantizedEmbeddingMethod)
            and id(module.weight) in embeddings
        ):
            module.quant_method.process_weights_after_loading(module)


def _check(worker: Any, weights: Mapping[str, torch.Tensor]) -> None:
    model = _shapes_of_model(worker)
    counts = _CountLoadedElements(model)
    current = "no tensor at all"

    def shapes() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current
        for name, tensor in weights.items():
            current = f"{name} {list(tensor.shape)}"
            yield name, torch.empty_like(tensor, device="meta")

    try:
        with counts, torch.device("meta"):
            model.load_weights(shapes())
    # A model's loaders refuse in their own ways: assert, KeyError, ValueError, RuntimeError.
    except Exception as error:
        reason = f"{type(error).__name__} {error}".strip()
        message = f"{current} does not fit the engine's model: {reason}"
        raise WeightsMismatchError(message) from error
    counts.require_all()


def _shapes_of_model(worker: Any) -> Any:
    """The engine's model once more, with all tensors on the meta device."""
    config = copy.copy(worker.vllm_config)
    config.compilation_config = copy.copy(config.compilation_config)
    # Layers register in here by name, and refuse a name that is taken.
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    with (
        set_current_vllm_config(config),
        set_default_torch_dtype(config.model_config.dtype),
        torch.device("meta"),
    ):
        return initialize_model(config, model_config=config.model_config)


class _CountLoadedElements(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what a model's loaders write into each parameter while this mode is on.

    vLLM fuses parameters (q, k and v are one), so a set of loaded names cannot tell that one of
    the parts is missing.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._copied = 0
        self._loaded: dict[int, int] = {}
        for parameter in model.parameters():
            self._wrap_loader(parameter)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._copied += args[0].numel()
        return func(*args, **(kwargs or {}))

    def _wrap_loader(self, parameter: Any) -> None:
        loader = getattr(parameter, "weight_loader", default_weight_loader)

        def counting_loader(param: Any, loaded: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # A trainer's float32 into an engine's bfloat16 is the usual case; bits are not numbers.
            if loaded.is_floating_point() != param.is_floating_point():
                raise WeightsMismatchError(f"{loaded.dtype} does not convert to {param.dtype}")
            before = self._copied
            result = loader(param, loaded, *args, **kwargs)
            copied = self._copied - before
            if 0 < copied < loaded.numel():
                raise WeightsMismatchError(f"only {copied} of {loaded.numel()} elements fit")
            self._loaded[id(param)] = self._loaded.get(id(param), 0) + copied
            return result

        parameter.weight_loader = counting_loader

    def require_all(self) -> None:
        """Raise :class:`WeightsMismatchError` if a parameter was not loaded to its end."""
        for module_name, module in self._model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                loaded = self._loaded.get(id(parameter), 0)
                # Embeddings are padded to a round number of rows that no checkpoint has.
                padded = isinstance(module, VocabParallelEmbedding)
                total = getattr(parameter, "weight_loader_numel", parameter.numel())
                if loaded < (1 if padded else total):
                    raise WeightsMismatchError(
                        f"only {loaded} of {total} elements of {module_name}.{name} were published"
                    )
