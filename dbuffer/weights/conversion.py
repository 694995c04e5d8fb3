"""`Conversion`: tensors made from other tensors by cutting, joining and renaming.

The function that converts the tensors is traced once, on tensors without data. If an output is a
view of a single tensor, the view is published, without a copy. All other outputs are computed when
they are published.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from dbuffer.errors import UnsupportedError
from dbuffer.runtime.messages import listed
from dbuffer.weights.lazy_tensor import LazyTensor, Tensors, View

Shapes: TypeAlias = dict[str, tuple[torch.dtype, tuple[int, ...]]]

Convert: TypeAlias = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
"""Function that converts tensors. To compute a single output, it is called with only the tensors
that the output is made from."""


def shapes_of(tensors: Mapping[str, Any]) -> Shapes:
    """Return the dtype and shape of each tensor, by name."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True)
class Output:
    """How a conversion makes a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    """Names of the tensors that the output is made from."""
    view: View | None
    """Place of the output in the tensor that it is a view of, or None for a computed output."""
    stride: tuple[int, ...]
    offset: int
    """Storage offset of the view in a contiguous source that begins at storage offset 0."""


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
            outputs[name] = Output(
                tensor.dtype,
                tuple(tensor.shape),
                tuple(sources),
                view,
                tuple(tensor.stride()),
                int(tensor.storage_offset()),
            )

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
        cut: dict[str, Callable[[Output, View], torch.Tensor | LazyTensor]] = {}
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
                converted[name] = cut[source](output, output.view)
        return converted


def _views_of(
    tensor: torch.Tensor | LazyTensor,
) -> Callable[[Output, View], torch.Tensor | LazyTensor]:
    if isinstance(tensor, LazyTensor):
        return _SharedFetch(tensor).part
    source = tensor.detach()
    if not source.is_contiguous():
        return lambda _, view: view.of(source)
    start = source.storage_offset()
    # as_strided takes a third of the time of indexing. A version can have 18,000 experts.
    return lambda output, _: source.as_strided(output.shape, output.stride, start + output.offset)


class _SharedFetch:
    """Lazy tensor that is fetched once per publish for all its views, and then dropped."""

    def __init__(self, tensor: LazyTensor) -> None:
        self._tensor = tensor
        self._made: torch.Tensor | None = None
        self._num_views = 0
        self._fetched: set[int] = set()

    def part(self, _: Output, view: View) -> LazyTensor:
        tensor, number = self._tensor, self._num_views
        self._num_views += 1
        fetch = functools.partial(self._fetch, number, view)
        # If `tensor` is itself a view, the place of `view` in the sharded tensor is unknown.
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
