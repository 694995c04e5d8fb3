"""One rank's model: whether weights fit it, loading them, and refusing to serve when that failed.

As in vLLM's module of this name: :class:`ShapeCheck` loads weights without data into a copy of the
model without data, through the model's own loaders. SGLang's loaders pass over a name that they do
not know, with a warning, so the check also looks at whether anything was done with each tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.runtime_context import get_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dbuffer.checkpoint import read_checkpoint
from dbuffer.errors import EngineBrokenError, EngineUnsupportedError, WeightsMismatchError
from dbuffer.layout import TensorSpec
from dbuffer.names import NameMap, renamed
from dbuffer.sources import fetch
from dbuffer.tensors import DTYPES

Pairs = Iterable[tuple[str, torch.Tensor]]


class EngineModel:
    """The model of one rank, as it serves.

    All methods are for the scheduler's own thread, between two steps of the engine.

    Args:
        model: SGLang's.
        names: from the store's names to the model's.
    """

    def __init__(self, model: Any, names: NameMap | None) -> None:
        self._model = model
        self._names = names
        self._device = next(model.parameters()).device

    def load(self, tensors: Pairs) -> None:
        """Swap in the weights of one version. A failure leaves a mix, to be repaired at once."""
        self._load((renamed(name, self._names), tensor) for name, tensor in tensors)

    def load_checkpoint(self) -> None:
        """Swap in the weights that the engine was started with, from where it read them.

        Raises:
            EngineUnsupportedError: they are not in safetensors files of this host.
        """
        path = Path(get_model().model_path)
        if not path.is_dir():
            raise EngineUnsupportedError(f"the weights of {path} cannot be read again from here")
        self._load(
            (name, fetch(tensor)) for name, tensor in zip(*read_checkpoint(path), strict=True)
        )

    def refuse_to_serve(self, reason: str) -> None:
        """Let every step of this model fail, and say why, until :meth:`serve_again`."""

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise EngineBrokenError(reason)

        # A captured graph is replayed without it; but caches were flushed, so every request that
        # is left must compute its prompt first.
        self._model.forward = refuse

    def serve_again(self) -> None:
        """Take :meth:`refuse_to_serve` back, after whole weights were loaded."""
        self._model.__dict__.pop("forward", None)

    def _load(self, weights: Pairs) -> None:
        with set_default_torch_dtype(_dtype_of(self._model)):
            # As SGLang loads a checkpoint into an engine that runs; quantised layers need both.
            DefaultModelLoader.restore_weights_before_loading(self._model, self._device)
            DefaultModelLoader.load_weights_and_postprocess(self._model, weights, self._device)
        # The next step reads what was copied, and staging may write anew where it was copied from.
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _dtype_of(model: torch.nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


class ShapeCheck:
    """Loads shapes into a copy of the model that has no data.

    Make it on the scheduler's own thread: building a model sets things for the whole process. The
    check itself does not, and may run while the engine serves.

    Raises:
        EngineUnsupportedError: the model cannot be built a second time.
    """

    def __init__(self, model: Any, names: NameMap | None, *, tp_size: int) -> None:
        self._names = names
        try:
            with set_default_torch_dtype(_dtype_of(model)), torch.device("meta"):
                quantization = getattr(model, "quant_config", None)
                self._model: Any = type(model)(config=model.config, quant_config=quantization)
        # Whatever a model's constructor may raise.
        except Exception as error:
            raise EngineUnsupportedError(
                f"a {type(model).__name__} cannot be built without data, so nothing could be "
                f"checked before it is loaded: {type(error).__name__} {error!s:.300}"
            ) from error
        self._watched = _WatchedLoads(self._model, tp_size=tp_size)

    def __call__(self, specs: Sequence[TensorSpec]) -> None:
        """Refuse tensors that do not fit the model.

        Raises:
            WeightsMismatchError: a name or a shape is not the model's, or a tensor is missing.
        """
        current = "no tensor at all"
        tensors: dict[str, torch.Tensor] = {}

        def shapes() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal current
            for spec in specs:
                current = str(spec)
                name = renamed(spec.name, self._names)
                tensors[str(spec)] = torch.empty(
                    spec.shape, dtype=DTYPES[spec.dtype], device="meta"
                )
                yield name, tensors[str(spec)]

        self._watched.reset()
        try:
            with self._watched, torch.device("meta"):
                self._model.load_weights(shapes())
        # A model's loaders refuse in their own ways: assert, KeyError, ValueError, RuntimeError.
        except Exception as error:
            reason = f"{type(error).__name__} {error!s:.300}".strip()
            message = f"{current} does not fit the engine's model: {reason}"
            raise WeightsMismatchError(message) from error
        self._watched.require_all(tensors)


class _WatchedLoads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what a model's loaders read, and counts what they write into each parameter.

    SGLang fuses parameters (q, k and v are one), so a set of loaded names cannot tell that one of
    the parts is missing.
    """

    def __init__(self, model: torch.nn.Module, *, tp_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._tp_size = tp_size
        self._loaded: dict[int, int] = {}
        self._read: set[int] = set()
        # Embeddings are padded to a round number of rows that no checkpoint has, and check the
        # rows they get themselves.
        self._padded = {
            id(module.weight)
            for module in model.modules()
            if isinstance(module, VocabParallelEmbedding)
        }
        for parameter in model.parameters():
            self._wrap_loader(parameter)

    def reset(self) -> None:
        """Begin anew."""
        self._loaded.clear()
        self._read.clear()

    def require_all(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise :class:`WeightsMismatchError` if something was not loaded, or not used.

        Args:
            tensors: what was handed over, under what it is called in the message.
        """
        for what, tensor in tensors.items():
            if _storage(tensor) not in self._read:
                raise WeightsMismatchError(f"the engine's model has no place for {what}")
        for name, parameter in self._model.named_parameters():
            loaded = self._loaded.get(id(parameter), 0)
            if loaded < (1 if id(parameter) in self._padded else parameter.numel()):
                raise WeightsMismatchError(
                    f"only {loaded} of {parameter.numel()} elements of {name} were published"
                )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._note_read(args)
        return func(*args, **(kwargs or {}))

    def _note_read(self, values: Any) -> None:
        tensors = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
        self._read.update(_storage(tensor) for tensor in tensors)

    def _wrap_loader(self, parameter: Any) -> None:
        loader = getattr(parameter, "weight_loader", default_weight_loader)
        signature = inspect.signature(loader)

        def watching_loader(*args: Any, **kwargs: Any) -> Any:
            # All take the parameter and what is loaded first, some by name.
            param, loaded, *_ = signature.bind(*args, **kwargs).arguments.values()
            # A trainer's float32 into an engine's bfloat16 is the usual case; bits are not numbers.
            if loaded.is_floating_point() != param.is_floating_point():
                raise WeightsMismatchError(f"{loaded.dtype} does not convert to {param.dtype}")
            # Some models load in threads of their own, which have modes of their own too.
            self._note_read(loaded)
            copied = _CopiedElements()  # type: ignore[no-untyped-call]
            with copied:
                result = loader(*args, **kwargs)
            # Each rank takes its share, or all of it, or nothing (another rank's expert).
            if id(param) not in self._padded and 0 < copied.count * self._tp_size < loaded.numel():
                raise WeightsMismatchError(f"only {copied.count} of {loaded.numel()} elements fit")
            self._loaded[id(param)] = self._loaded.get(id(param), 0) + copied.count
            return result

        # Parameters of some quantisations have a property of that name, without a setter.
        is_property = isinstance(getattr(type(parameter), "weight_loader", None), property)
        setattr(parameter, "_weight_loader" if is_property else "weight_loader", watching_loader)


class _CopiedElements(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements that are copied while it is on, in this thread."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    """By which a tensor and its views are known."""
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return address
