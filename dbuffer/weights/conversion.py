"""`Conversion`: tensors made from other tensors by cutting, joining and renaming.

The function that converts the tensors is traced once, on tensors without data. If an output is a
view of a single tensor, the view is published, without a copy. All other outputs are computed when
they are published.

`as_checkpoint` makes the tensors of a transformers module's checkpoint from the module. When
transformers loads a checkpoint, it fuses experts and renames layers. `as_checkpoint` reverses these
changes by calling the same transformers function as ``save_pretrained``.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dbuffer.errors import UnsupportedError
from dbuffer.runtime.messages import described, listed
from dbuffer.weights.lazy_tensor import LazyTensor, Tensors, View
from dbuffer.weights.named_tensors import WRAPPER_PREFIX, without_wrappers

Shapes: TypeAlias = dict[str, tuple[torch.dtype, tuple[int, ...]]]

Convert: TypeAlias = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
"""Function that converts tensors. To compute a single output, it is called with only the tensors
that the output is made from."""


def shapes_of(tensors: Mapping[str, Any]) -> Shapes:
    """Return the dtype and shape of each tensor, by name."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True)
class Output:
    """Output of a conversion: a view of a tensor, or computed from one or more tensors."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    """Names of the tensors that the output is made from."""
    view: View | None
    """Place of the output in the tensor that it is a view of, or None for a computed output."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Traced conversion, which :meth:`apply` repeats on tensors with the same dtypes and shapes."""

    shapes: Shapes
    outputs: dict[str, Output]
    """Outputs of the conversion by name, in the order of the tensors that they are made from."""

    @classmethod
    def trace(cls, convert: Convert, shapes: Shapes) -> Self:
        """Run ``convert`` on tensors without data, and record how each output is made."""
        wholes = {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, (dtype, shape) in shapes.items()
        }
        with torch.no_grad(), _Tracer(wholes) as tracer:
            made = convert(dict(wholes))
        position = {name: number for number, name in enumerate(shapes)}
        outputs = {}
        for name, tensor in made.items():
            sources = sorted(tracer.sources_of(tensor), key=position.__getitem__)
            view = View.find(tensor, wholes[sources[0]]) if tracer.is_view(tensor) else None
            outputs[name] = Output(tensor.dtype, tuple(tensor.shape), tuple(sources), view)

        def place(item: tuple[str, Output]) -> tuple[int, list[int]]:
            index = () if item[1].view is None else item[1].view.index
            starts = [part.start if isinstance(part, slice) else part for part in index]
            return position[item[1].sources[0]], starts

        return cls(shapes, dict(sorted(outputs.items(), key=place)))

    @property
    def changes_anything(self) -> bool:
        return self.outputs.keys() != self.shapes.keys() or not all(
            output.sources == (name,) and output.view is not None and output.view.is_whole
            for name, output in self.outputs.items()
        )

    def apply(self, convert: Convert, tensors: Tensors) -> dict[str, torch.Tensor | LazyTensor]:
        cut: dict[str, Callable[[View], torch.Tensor | LazyTensor]] = {}
        converted: dict[str, torch.Tensor | LazyTensor] = {}
        for name, output in self.outputs.items():
            source = output.sources[0]
            if output.view is None:
                parts = {source: tensors[source] for source in output.sources}
                converted[name] = _computed(name, output, convert, parts)
            elif output.view.is_whole:
                converted[name] = tensors[source]
            else:
                if source not in cut:
                    cut[source] = _views_of(tensors[source])
                converted[name] = cut[source](output.view)
        return converted


def _views_of(
    tensor: torch.Tensor | LazyTensor,
) -> Callable[[View], torch.Tensor | LazyTensor]:
    if isinstance(tensor, LazyTensor):
        return _SharedFetch(tensor).part
    detached = tensor.detach()
    return lambda view: view.of(detached)


class _SharedFetch:
    """Lazy tensor that is fetched once per publish for all its views, and then dropped."""

    def __init__(self, tensor: LazyTensor) -> None:
        self._tensor = tensor
        self._made: torch.Tensor | None = None
        self._num_views = 0
        self._fetched: set[int] = set()

    def part(self, view: View) -> LazyTensor:
        tensor, number = self._tensor, self._num_views
        self._num_views += 1
        fetch = functools.partial(self._fetch, number, view)
        # Note the place in the sharded tensor. It is unknown if `tensor` is itself a view.
        is_part = tensor.sharded is not None and tensor.view is None
        return LazyTensor(
            tensor.dtype,
            view.shape,
            fetch,
            sharded=tensor.sharded if is_part else None,
            view=view if is_part else None,
        )

    def _fetch(self, number: int, view: View) -> torch.Tensor:
        if self._made is None or number in self._fetched:  # a new publish fetches all views again
            self._made, self._fetched = self._tensor.fetch(), set()
        made = self._made
        self._fetched.add(number)
        if len(self._fetched) == self._num_views:
            self._made = None
        return view.of(made)


def _computed(name: str, output: Output, convert: Convert, parts: Tensors) -> LazyTensor:
    """Return a lazy tensor, which ``convert`` computes from ``parts`` at each publish."""
    for source, tensor in parts.items():
        if isinstance(tensor, LazyTensor) and tensor.sharded is not None:
            raise UnsupportedError(
                f"{name!r} must be computed from {listed(list(parts))}, but each rank holds only a "
                f"part of {source!r}: publish the trainer's own names and tensors "
                "(as_checkpoint=False, or without this rename), or gather the weights and publish "
                "them with a WeightSender"
            )

    def fetch() -> torch.Tensor:
        made = {
            source: tensor.fetch() if isinstance(tensor, LazyTensor) else tensor.detach()
            for source, tensor in parts.items()
        }
        with torch.no_grad():
            return convert(made)[name]

    return LazyTensor(output.dtype, output.shape, fetch)


class _Tracer(TorchFunctionMode):
    """Torch mode that records which tensors each new tensor is made from.

    In this mode ``contiguous()`` returns the tensor itself, so that a view stays a view.
    """

    def __init__(self, wholes: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._sources = {_storage_of(tensor): {name} for name, tensor in wholes.items()}
        self._wholes = frozenset(self._sources)
        self._kept: list[torch.Tensor] = []
        """New tensors, kept alive so that a later storage cannot get the same address."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        result = func(*args, **(kwargs or {}))
        for made in _tensors_in(result):
            if _storage_of(made) not in self._sources:
                self._kept.append(made)
                used = _tensors_in((args, tuple((kwargs or {}).values())))
                names = [self._sources.get(_storage_of(tensor), set()) for tensor in used]
                self._sources[_storage_of(made)] = set().union(*names)
        return result

    def sources_of(self, tensor: torch.Tensor) -> set[str]:
        return self._sources[_storage_of(tensor)]

    def is_view(self, tensor: torch.Tensor) -> bool:
        return _storage_of(tensor) in self._wholes


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _storage_of(tensor: torch.Tensor) -> int:
    # Use the storage object's address: a storage without data has no data address.
    with torch._C.DisableTorchFunction():  # noqa: SLF001 - don't trace this call
        return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


_conversions: weakref.WeakKeyDictionary[nn.Module, Conversion] = weakref.WeakKeyDictionary()
"""Traced conversion of each module, kept because tracing thousands of experts takes long."""


def has_model(module: nn.Module) -> bool:
    """Whether a module is or contains a transformers model."""
    return any(True for _ in _models_in(module))


def as_checkpoint(module: nn.Module, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tensors that ``save_pretrained`` would write, in the module's order.

    ``tensors`` are the module's tensors, by names without the parts that wrappers add. Most
    returned tensors are views of ``tensors``. If a tensor must be computed, it is returned as a
    lazy tensor.

    Raises:
        UnsupportedError: a tensor must be computed from sharded tensors, or transformers cannot
            convert the module.
    """
    models = {_prefix_in(tensors, path): model for path, model in _models_in(module)}

    def convert(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return _saved(models, parts)

    shapes = shapes_of(tensors)
    conversion = _conversions.get(module)
    if conversion is None or conversion.shapes != shapes:
        _conversions[module] = conversion = _trace(module, models, shapes)
    return conversion.apply(convert, tensors) if conversion.changes_anything else tensors


def _trace(module: nn.Module, models: Mapping[str, Any], shapes: Shapes) -> Conversion:
    try:
        return Conversion.trace(lambda parts: _saved(models, parts), shapes)
    # The operations of transformers raise errors of many classes.
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError) as error:
        raise UnsupportedError(
            f"transformers cannot say how it would save this {type(module).__name__}: "
            f"{described(error)}; publish the module's own names and tensors (as_checkpoint=False)"
        ) from error


def _saved(models: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors as transformers saves them. ``models`` maps name prefixes to models."""
    from transformers.core_model_loading import revert_weight_conversion

    saved: dict[str, torch.Tensor] = {}
    outside = dict(tensors)
    for prefix, model in models.items():
        ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        names = [name for name in outside if name.startswith(prefix)]
        of_model = {name.removeprefix(prefix): outside.pop(name) for name in names}
        of_model = {name: tensor for name, tensor in of_model.items() if name not in ignored}
        if of_model:
            reverted = revert_weight_conversion(_in_own_class(model), of_model)
            saved |= {f"{prefix}{name}": tensor for name, tensor in reverted.items()}
    return saved | outside


def _models_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each outermost transformers model in a module, with the model's path."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or not hasattr(library, "revert_weight_conversion"):  # before version 5
        return
    inside: list[str] = []
    for path, part in module.named_modules():
        if isinstance(part, library.PreTrainedModel) and not path.startswith(tuple(inside)):
            inside.append(f"{path}." if path else "")
            # Skip a model with adapters: transformers saves such a model without a conversion.
            if not getattr(part, "_hf_peft_config_loaded", False):
                yield path, part
        if inside == [""]:
            return


def _prefix_in(names: Mapping[str, Any], path: str) -> str:
    """Return the prefix that ``names`` have for the parameters of a model at ``path``.

    It is the path, but the parts of the path that wrappers add can be missing.
    """
    prefix = without_wrappers(f"{path}.") if path else ""
    while not any(name.startswith(prefix) for name in names):
        if not prefix.startswith(WRAPPER_PREFIX):
            break
        prefix = prefix.removeprefix(WRAPPER_PREFIX)
    return prefix


def _in_own_class(model: Any) -> Any:
    """Return the model, or a twin of it whose modules have their original classes.

    ``fully_shard`` replaces the class of each module, but transformers needs the name and the
    Python module of the original class. If no class was replaced, the model itself is returned.
    """
    if not any(_is_replaced(type(module)) for module in model.modules()):
        return model

    def twin_of(module: nn.Module) -> nn.Module:
        original = next(kind for kind in type(module).__mro__ if not _is_replaced(kind))
        twin: nn.Module = object.__new__(original)
        # Compare with None: bool() of a compiled layer calls the layer's len(), which fails.
        children = {
            name: None if child is None else twin_of(child)
            for name, child in module._modules.items()  # noqa: SLF001
        }
        vars(twin).update(vars(module), _modules=children)
        return twin

    return twin_of(model)


def _is_replaced(kind: type) -> bool:
    return kind.__module__.startswith("torch.distributed.")
