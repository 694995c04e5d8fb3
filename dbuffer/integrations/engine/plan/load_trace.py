"""`LoadTrace`: what a model's loaders do with published tensors, found out without their data.

A load into a copy of the model on the meta device is watched operation by operation. Copies of
views of published tensors into views of parameters say which part goes where; any other way of
writing into a parameter is work that no copy can do.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}


class View(NamedTuple):
    """A part of a tensor, in elements, counted from the tensor's own first one."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, part: torch.Tensor, whole: torch.Tensor) -> View:
        """Where ``part``, which shares the storage of ``whole``, is in it."""
        offset = int(part.storage_offset() - whole.storage_offset())
        return cls(offset, tuple(part.shape), part.stride())

    def in_(self, whole: torch.Tensor) -> torch.Tensor:
        """That part of a tensor which lies in memory as the recorded one did."""
        if self.shape == whole.shape and self.stride == whole.stride():
            return whole
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)

    @property
    def num_elements(self) -> int:
        """How many elements it has."""
        return torch.Size(self.shape).numel()

    @property
    def end(self) -> int:
        """One past its last element."""
        if not self.num_elements:
            return self.offset
        steps = zip(self.shape, self.stride, strict=True)
        return self.offset + sum((extent - 1) * stride for extent, stride in steps) + 1


@dataclass(frozen=True, slots=True)
class CopyOp:
    """One write into a parameter: a copy of a part of a published tensor, or of a constant."""

    to: View
    source: str | None
    """The published tensor's name; None: a constant."""
    part: View | None = None
    value: float = 0

    def content(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the part of a version that is written, or the constant, in this dtype."""
        if self.source is None or self.part is None:
            return torch.tensor(self.value, dtype=dtype).expand(self.to.shape)
        return self.part.in_(tensors[self.source])


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A parameter or buffer, as its loaders found it; its live twin must look the same."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """That of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


@dataclass(frozen=True, slots=True)
class LoadTrace:
    """What the loaders do with the tensors of one layout."""

    steps: Mapping[str, tuple[CopyOp, ...]]
    """By the name of a parameter that is written by copies alone, each element once."""
    places: Mapping[str, TensorMeta]
    """Of each of them."""
    refused: Mapping[str, str]
    """Parameters that are written otherwise, and how."""
    num_loaded: Mapping[str, int]
    """How many elements loaders gave each parameter, in whatever way."""
    offered: frozenset[str]
    """Names of all tensors that were offered to the loaders."""
    unused: tuple[str, ...] = field(default=(), compare=False)
    """Tensors that no loader has read, and that make a difference, with dtypes and shapes."""
    twins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """By names of tensors that no loader has read: the tensor, of the same dtype and shape, in an
    embedding or a head. If both are equal, the former is redundant."""
    embedded: frozenset[str] = field(default=frozenset(), compare=False)
    """Names of tensors that go into embeddings or heads."""

    @property
    def loaded_bytes(self) -> int:
        """Of what published tensors give parameters, in the parameters' dtypes."""
        return sum(
            step.to.num_elements * self.places[name].dtype.itemsize
            for name, steps in self.steps.items()
            for step in steps
            if step.source is not None
        )


Unwrapped = Callable[[str], str]
"""What a live layer or parameter of some name is called where the model was not wrapped."""


def unwrapped_by(wrapper: str | None) -> Unwrapped:
    """Names of a model of which some layers are children, of this name, of what wraps them."""
    return lambda name: ".".join(step for step in name.split(".") if step != wrapper)


class LoadRecorder:
    """Notes what operations do to the tensors of a model without data.

    Args:
        places: the model's parameters and buffers, by name.
    """

    def __init__(self, places: Mapping[str, torch.Tensor]) -> None:
        # A tied tensor is there under several names; any of them leads to it.
        self._places = {storage_of(tensor): (name, tensor) for name, tensor in places.items()}
        self._registered: list[int] = []
        self._lock = threading.Lock()  # some models load in threads
        self._sources: dict[int, tuple[str, torch.Tensor]] = {}
        self._steps: dict[str, list[CopyOp]] = defaultdict(list)
        self._refused: dict[str, str] = {}
        self._read: dict[int, tuple[str, torch.Tensor]] = {}
        """Values computed from the model's own tensors, and from which; alive, to be recognized."""
        self.written_from: dict[str, str] = {}
        """Tensors of the model that are written with what was computed from another one of it."""

    def begin(self) -> None:
        """Forget what was noted."""
        for storage in self._registered:
            del self._places[storage]
        self._registered.clear()
        self._sources.clear()
        self._steps.clear()
        self._refused.clear()
        self._read.clear()
        self.written_from.clear()

    def note_source(self, name: str, tensor: torch.Tensor) -> None:
        """A published tensor, which must live until :meth:`end`."""
        self._sources[storage_of(tensor)] = (name, tensor)

    def note_result(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note what an operation computed, if that was from one of the model's tensors."""
        with self._lock:
            origins = (self._origin_of(each) for each in _tensors_in((args, kwargs)))
            origin = next(filter(None, origins), None)
            if origin is None:
                return
            for made in _tensors_in(result):
                if storage_of(made) not in self._places:
                    self._read.setdefault(storage_of(made), (origin, made))

    def is_source(self, tensor: torch.Tensor) -> bool:
        """Whether it is one of those that were noted, or a view of one."""
        return storage_of(tensor) in self._sources

    def note_registered(self, name: str, parameter: torch.Tensor) -> None:
        """A parameter that a loader has just made, of a published tensor."""
        storage = storage_of(parameter)
        if storage not in self._places:
            self._registered.append(storage)
        self._places[storage] = name, parameter
        self._refused[name] = "is registered by its loader"

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """An operation that is about to be done."""
        if not func._schema.is_mutable:  # noqa: SLF001 - the only place that says so
            return
        with self._lock:
            if func is torch.ops.aten.copy_.default:
                self._note_copy(args[0], args[1])
                return
            for target in _written(func, args, kwargs):
                name, place = self._places.get(storage_of(target), (None, target))
                if name is None:
                    continue
                if func in _FILLS and target.dtype == place.dtype:
                    value = args[1] if len(args) > 1 else 0
                    self._steps[name].append(CopyOp(View.of(target, place), None, value=value))
                else:
                    self._refused[name] = f"is written by {func}"

    def is_written(self, tensor: torch.Tensor) -> bool:
        """Whether something that was published has gone into a parameter or buffer.

        Not into one that the model has had for less long than this recorder: embeddings of
        positions that engines keep for all models are replaced now and then.
        """
        name, _ = self._places.get(storage_of(tensor), ("", tensor))
        steps = self._steps.get(name, ())
        return name in self._refused or any(step.source is not None for step in steps)

    def end(self, loaded: Iterable[tuple[torch.Tensor, int]]) -> LoadTrace:
        """All that was noted since :meth:`begin`, and how many elements tensors were ``loaded``."""
        by_name = dict(self._places.values())
        steps = {}
        for name, written in self._steps.items():
            if name in self._refused:
                continue
            last = tuple({step.to: step for step in written}.values())
            why = _not_once(last, by_name[name].numel())
            if why is None:
                steps[name] = last
            else:
                self._refused[name] = why
        places = {name: TensorMeta.of(by_name[name]) for name in steps}
        offered = frozenset(name for name, _ in self._sources.values())
        num_loaded: dict[str, int] = defaultdict(int)
        for tensor, count in loaded:
            place = self._places.get(storage_of(tensor))
            if count and place is not None:
                num_loaded[place[0]] += count
        return LoadTrace(steps, places, dict(self._refused), dict(num_loaded), offered)

    def _origin_of(self, tensor: torch.Tensor) -> str | None:
        """The model's tensor that this is a part of, or was computed from."""
        storage = storage_of(tensor)
        name, _ = self._places.get(storage) or self._read.get(storage) or (None, None)
        return name

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        name, place = self._places.get(storage_of(target), (None, target))
        if name is None:
            return  # into memory of the loader's own; what it does with that shows
        origin = self._origin_of(source)
        if origin is not None and origin != name:
            self.written_from[name] = origin
        source_name, whole = self._sources.get(storage_of(source), (None, source))
        if source_name is None:
            self._refused[name] = "is computed by its loader"
        elif target.dtype != place.dtype or source.dtype != whole.dtype:
            self._refused[name] = "gets bits of another dtype"
        elif target.is_complex() or _changes_values(source) or _changes_values(target):
            self._refused[name] = "gets complex numbers"
        else:
            part = View.of(source.expand(target.shape), whole)
            self._steps[name].append(CopyOp(View.of(target, place), source_name, part))


def storage_of(tensor: torch.Tensor) -> int:
    """By which a tensor and its views are known."""
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return address


def tables_of(layer: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Where a module keeps its parameters and buffers; to register them again keeps no order."""
    return layer.__dict__["_parameters"], layer.__dict__["_buffers"]


def _tensors_in(values: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _changes_values(view: torch.Tensor) -> bool:
    return view.is_conj() or view.is_neg()


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[torch.Tensor]:
    """What an operation writes into."""
    for index, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        yield from _tensors_in(value)


def _not_once(steps: tuple[CopyOp, ...], num_elements: int) -> str | None:
    """Why steps do not write each element of a parameter exactly once; None: they do."""
    end = 0
    for step in sorted(steps, key=lambda step: step.to.offset):
        view = step.to
        if not view.num_elements:
            continue
        if view.offset < end or view.end - view.offset != view.num_elements:
            return "is loaded in parts that overlap, or lie in between each other"
        end = view.end
    if sum(step.to.num_elements for step in steps) != num_elements:
        return "is loaded in part only"
    return None
