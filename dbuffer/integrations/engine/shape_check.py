"""Whether weights fit a model, told while it serves: loaded without data into a copy without data.

The copy's own loaders do that (:class:`ShapeCheck`), and what they write is counted
(:class:`WatchedLoads`): engines fuse parameters (q, k and v are one), so a set of loaded names
cannot tell that one of the parts is missing.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dbuffer.errors import WeightsMismatchError
from dbuffer.format.layout import TensorSpec
from dbuffer.integrations.engine.plan.recording import LoadRecorder, Recording, tables_of
from dbuffer.io.tensors import DTYPES
from dbuffer.weights.names import NameMap, renamed

Loader = Callable[..., Any]


class WatchedLoads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what a model's loaders write into each of its tensors.

    Args:
        model: the copy, made on the meta device. Layers that name a device of their own are
            moved there.
        embedding: the class of embeddings and heads, which are padded to a round number of rows;
            no checkpoint has the last ones, and the loaders check the rows they get.
        default_loader: of tensors without a ``weight_loader``.
        tp_size: over how many ranks a tensor may be spread, of which nothing else is known.
    """

    def __init__(
        self, model: Any, *, embedding: type[torch.nn.Module], default_loader: Loader, tp_size: int
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        _leave_data_out(model)
        self.model = model
        self._tp_size = tp_size
        self._thread: int | None = None
        self.recorder = LoadRecorder(dict(model.named_parameters()) | dict(model.named_buffers()))
        self._loaded: dict[int, int] = {}
        self._padded = {
            id(parameter)
            for module in model.modules()
            if isinstance(module, embedding)
            for parameter in module.parameters(recurse=False)
        }
        for tensor in (*model.parameters(), *model.buffers()):
            self._wrap_loader(tensor, getattr(tensor, "weight_loader", default_loader))

    def reset(self) -> None:
        self._loaded.clear()
        self._thread = threading.get_ident()
        self.recorder.begin()

    def require_complete(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise :class:`WeightsMismatchError` if something is missing, or was not used.

        ``tensors`` were handed over, each under what it is called in the message.
        """
        raise NotImplementedError

    def note_read(self, tensor: torch.Tensor) -> None:
        """A loader is about to read this."""

    def note_loaded(self, tensor: Any, count: int, *, is_part: bool) -> None:
        """A loader has written so many elements of this; of a part of it, or of it as a whole."""

    def num_shares(self, tensor: Any) -> int:  # noqa: ARG002
        """Over how many ranks a tensor may be spread."""
        return self._tp_size

    def count_of(self, tensor: Any) -> int:
        return self._loaded.get(id(tensor), 0)

    def end(self) -> Recording:
        """What was done since :meth:`reset`."""
        return self.recorder.end(
            (tensor, self.count_of(tensor))
            for tensor in (*self.model.parameters(), *self.model.buffers())
        )

    def require_whole(self, name: str, tensor: Any, num_elements: int) -> None:
        """Raise :class:`WeightsMismatchError` if fewer elements of this were written."""
        loaded = self.count_of(tensor)
        if loaded < (1 if id(tensor) in self._padded else num_elements):
            raise WeightsMismatchError(
                f"only {loaded} of {num_elements} elements of {name} were published"
            )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.recorder.note(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        self.recorder.note_result(args, kwargs or {}, result)
        return result

    def _wrap_loader(self, tensor: Any, loader: Loader) -> None:
        signature = inspect.signature(loader)

        def watched(*args: Any, **kwargs: Any) -> Any:
            # All take the parameter and what is loaded first, some by name.
            param, loaded, *which_part = signature.bind(*args, **kwargs).arguments.values()
            if not param.is_meta:  # with data, what was counted without is done once more
                return loader(*args, **kwargs)
            # A trainer's float32 into an engine's bfloat16 is the usual case; bits are not numbers.
            if loaded.is_floating_point() != param.is_floating_point():
                raise WeightsMismatchError(f"{loaded.dtype} does not convert to {param.dtype}")
            self.note_read(loaded)
            # Some models load in threads of their own, which have modes of their own too.
            is_here = threading.get_ident() == self._thread
            copied = _CopiedElements(None if is_here else self.recorder)
            with copied:
                result = loader(*args, **kwargs)
            # Each rank takes its share, or all of it, or nothing (another rank's expert).
            is_padded = id(param) in self._padded
            if not is_padded and 0 < copied.count * self.num_shares(param) < loaded.numel():
                raise WeightsMismatchError(f"only {copied.count} of {loaded.numel()} elements fit")
            self.note_loaded(param, copied.count, is_part=bool(which_part))
            self._loaded[id(param)] = self.count_of(param) + copied.count
            return result

        # Parameters of some quantisations have a property of that name, without a setter.
        found = getattr(type(tensor), "weight_loader", None)
        is_fixed = isinstance(found, property) and found.fset is None
        setattr(tensor, "_weight_loader" if is_fixed else "weight_loader", watched)


class _CopiedElements(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements that are copied while it is on, in this thread; tells the recorder."""

    def __init__(self, recorder: LoadRecorder | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.count += args[0].numel()
        if self._recorder is not None:
            self._recorder.note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class ShapeCheck:
    """Loads shapes into a copy of a model; the model that serves is not touched.

    Building the copy sets things for the whole process, so that is done on the worker's main
    thread. The check itself does not, and may run while the engine serves.
    """

    def __init__(self, watched: WatchedLoads, names: NameMap | None = None) -> None:
        self._watched = watched
        self._names = names
        self._specs: Sequence[TensorSpec] = ()

    def __call__(self, specs: Sequence[TensorSpec]) -> Recording:
        """Refuse tensors that do not fit the model; what its loaders do with those that do.

        Raises:
            WeightsMismatchError: a name or a shape is not the model's, or a tensor is missing.
        """
        self._specs = specs
        tensors = self._load(specs)
        self._watched.require_complete(tensors)
        return self._watched.end()

    def of_part(self, names: Collection[str]) -> Recording:
        """What the model's loaders do with some of the tensors of the last check alone.

        Raises:
            WeightsMismatchError: they do not take them alone.
        """
        self._load([spec for spec in self._specs if spec.name in names])
        return self._watched.end()

    def _load(self, specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
        """Let the loaders load tensors without data; these, under what messages call them."""
        current = "no tensor at all"
        tensors: dict[str, torch.Tensor] = {}

        def shapes() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal current
            for spec in specs:
                current = str(spec)
                tensor = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta")
                tensors[current] = tensor
                self._watched.recorder.note_source(spec.name, tensor)
                yield renamed(spec.name, self._names), tensor

        self._watched.reset()
        try:
            with self._watched, torch.device("meta"):
                self._watched.model.load_weights(shapes())
        # A model's loaders refuse in their own ways: assert, KeyError, ValueError, RuntimeError.
        except Exception as error:
            # Some list every parameter that there is.
            reason = f"{type(error).__name__} {error!s:.300}".strip()
            message = f"{current} does not fit the engine's model: {reason}"
            raise WeightsMismatchError(message) from error
        return tensors

    def loaded(self, name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What the model's loaders make of some tensors with data, in the parameter of this name.

        For the same thread as the check. What the loaders raise is raised.
        """
        model = self._watched.model
        with _with_data(model, name) as real:
            model.load_weights((renamed(n, self._names), tensor) for n, tensor in tensors.items())
        return real


@contextlib.contextmanager
def _with_data(model: torch.nn.Module, name: str) -> Iterator[torch.Tensor]:
    """Let a parameter or buffer of a copy without data have some meanwhile."""
    path, _, own = name.rpartition(".")
    tables = tables_of(model.get_submodule(path))
    without = next(table[own] for table in tables if own in table)
    made = _twin(without, "cpu")
    made.data.zero_()
    _put_in_place(model, without, made)
    try:
        yield made.data
    finally:
        _put_in_place(model, made, without)


def _leave_data_out(model: torch.nn.Module) -> None:
    """Parameters that were made on another device than all else go to the meta device, too.

    No buffers: engines keep rotary embeddings for all their models, so the copy has those of the
    model that serves.
    """
    for parameter in list(model.parameters()):
        if not parameter.is_meta:
            _put_in_place(model, parameter, _twin(parameter, "meta"))


def _twin(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor of the same kind, shape and attributes on another device."""
    data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    made = torch.Tensor._make_subclass(type(tensor), data, False)  # noqa: SLF001
    made.__dict__.update(tensor.__dict__)
    return made


def _put_in_place(model: torch.nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
    """Let all layers that have a parameter or buffer have another; a tied one is in several."""
    for layer in model.modules():
        for table in tables_of(layer):
            for key, tensor in table.items():
                if tensor is old:
                    table[key] = new
