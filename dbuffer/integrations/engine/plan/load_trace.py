"""`LoadTrace`: how a model's loaders use published tensors, learned without data.

A load into a copy of the model on the meta device is watched operation by operation. A copy of a
view of a published tensor into a view of a parameter becomes a `CopyOp`. A parameter that is
written in any other way has no copies, and its trace says why.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

Copy = tuple[torch.Tensor, torch.Tensor]
"""Target and source of a copy, of the same shape."""

Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, stride and dtype of a tensor."""

_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}


class View(NamedTuple):
    """Part of a tensor, in elements, counted from the tensor's first one."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, part: torch.Tensor, whole: torch.Tensor) -> View:
        """Return the view of ``whole`` that ``part``, which shares its storage, is."""
        offset = int(part.storage_offset() - whole.storage_offset())
        return cls(offset, tuple(part.shape), part.stride())

    def in_(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this part of a tensor that lies in memory as the recorded one did."""
        if self.shape == whole.shape and self.stride == whole.stride():
            return whole
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def end(self) -> int:
        """Position after the last element."""
        if not self.num_elements:
            return self.offset
        steps = zip(self.shape, self.stride, strict=True)
        return self.offset + sum((extent - 1) * stride for extent, stride in steps) + 1


@dataclass(frozen=True, slots=True)
class CopyOp:
    """One write into a parameter: a copy of a part of a published tensor, or of a constant."""

    to: View
    source: str | None
    """Published tensor's name; None: a constant."""
    part: View | None = None
    value: float = 0

    def bind(self, parameter: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> Copy:
        """Return the copy into a tensor of the parameter's form, from published tensors."""
        target = self.to.in_(parameter.detach())
        if self.source is None or self.part is None:
            return target, torch.tensor(self.value, dtype=target.dtype).expand(self.to.shape)
        return target, self.part.in_(tensors[self.source])


def form_of(tensor: torch.Tensor) -> Form:
    """Return a tensor's form."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """Parameter or buffer of the model that loaders write, and how."""

    form: Form
    """Form of the copy without data; the live tensor must have the same."""
    ops: tuple[CopyOp, ...]
    """Copies that write each element once."""
    refused: str | None
    """Reason why there are no such copies: how it is written instead."""
    num_loaded: int
    """Number of elements that loaders gave it, in whatever way."""

    @property
    def copied_bytes(self) -> int:
        """Bytes that copies of published tensors give it, in its own dtype."""
        num_copied = sum(op.to.num_elements for op in self.ops if op.source is not None)
        return num_copied * self.form[2].itemsize

    def bind(self, tensor: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> list[Copy]:
        """Return the copies into a tensor of this form, from published tensors."""
        return [op.bind(tensor, tensors) for op in self.ops]

    def filled(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
        """Return a new tensor of this form, filled from published tensors."""
        shape, stride, dtype = self.form
        made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        for target, source in self.bind(made, tensors):
            target.copy_(source)
        return made


@dataclass(frozen=True, slots=True)
class LoadTrace:
    """Record of what loaders do with the tensors of one layout."""

    tensors: Mapping[str, TracedTensor]
    """Parameters and buffers that are written, by name."""
    offered: frozenset[str]
    """Names of all tensors that were offered to the loaders."""
    unused: tuple[str, ...] = ()
    """Tensors that no loader has read, and that make a difference, with dtypes and shapes."""
    twins: Mapping[str, str] = field(default_factory=dict)
    """Tensor of the same dtype and shape in an embedding or a head, by the name of a tensor that
    no loader has read. If both are equal, the latter is redundant."""
    embedded: frozenset[str] = frozenset()
    """Names of tensors that go into embeddings or heads."""

    @property
    def refused(self) -> dict[str, str]:
        """Tensors that copies cannot fill, and why."""
        return {name: each.refused for name, each in self.tensors.items() if each.refused}

    def is_copied(self, name: str) -> bool:
        """Whether copies fill the parameter or buffer of this name."""
        return name in self.tensors and self.tensors[name].refused is None


Unwrapped = Callable[[str], str]
"""Returns the name that a live layer or parameter has where the model was not wrapped."""


def unwrapped_by(wrapper: str | None) -> Unwrapped:
    """Return what leaves ``wrapper``, the name of a wrapped layer in its wrapper, out of names."""
    return lambda name: ".".join(step for step in name.split(".") if step != wrapper)


class LoadRecorder:
    """Notes what operations do to the tensors of a model without data.

    Args:
        tensors: the model's parameters and buffers, by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        # A tied tensor has several names; any of them leads to it.
        self._tensors = {storage_of(tensor): (name, tensor) for name, tensor in tensors.items()}
        self._registered: list[int] = []
        self._lock = threading.Lock()  # some models load in threads
        self._sources: dict[int, tuple[str, torch.Tensor]] = {}
        self._ops: dict[str, list[CopyOp]] = defaultdict(list)
        self._refused: dict[str, str] = {}
        self._computed: dict[int, tuple[str, torch.Tensor]] = {}
        """Values computed from the model's own tensors, and from which; alive, to be recognized."""
        self.written_from: dict[str, str] = {}
        """Tensors of the model that are written with a value computed from another one of it."""

    def begin(self) -> None:
        """Discard all notes."""
        for storage in self._registered:
            del self._tensors[storage]
        self._registered.clear()
        self._sources.clear()
        self._ops.clear()
        self._refused.clear()
        self._computed.clear()
        self.written_from.clear()

    def note_source(self, name: str, tensor: torch.Tensor) -> None:
        """Note a published tensor, which must live until :meth:`end`."""
        self._sources[storage_of(tensor)] = (name, tensor)

    def note_result(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note the result of an operation on one of the model's tensors."""
        with self._lock:
            origins = (self._origin_of(each) for each in _tensors_in((args, kwargs)))
            origin = next(filter(None, origins), None)
            if origin is None:
                return
            for made in _tensors_in(result):
                if storage_of(made) not in self._tensors:
                    self._computed.setdefault(storage_of(made), (origin, made))

    def is_source(self, tensor: torch.Tensor) -> bool:
        """Whether this is a published tensor that was noted, or a view of one."""
        return storage_of(tensor) in self._sources

    def note_registered(self, name: str, parameter: torch.Tensor) -> None:
        """Note a parameter that a loader has just made of a published tensor."""
        storage = storage_of(parameter)
        if storage not in self._tensors:
            self._registered.append(storage)
        self._tensors[storage] = name, parameter
        self._refused[name] = "is registered by its loader"

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note an operation that is about to run."""
        if not func._schema.is_mutable:  # noqa: SLF001 - the only place that says so
            return
        with self._lock:
            if func is torch.ops.aten.copy_.default:
                self._note_copy(args[0], args[1])
                return
            for target in _written(func, args, kwargs):
                name, whole = self._tensors.get(storage_of(target), (None, target))
                if name is None:
                    continue
                if func in _FILLS and target.dtype == whole.dtype:
                    value = args[1] if len(args) > 1 else 0
                    self._ops[name].append(CopyOp(View.of(target, whole), None, value=value))
                else:
                    self._refused[name] = f"is written by {func}"

    def is_written(self, tensor: torch.Tensor) -> bool:
        """Whether published data went into this parameter or buffer.

        False for a tensor that is newer than this recorder: engines replace the position embeddings
        that all their models share now and then.
        """
        name, _ = self._tensors.get(storage_of(tensor), ("", tensor))
        ops = self._ops.get(name, ())
        return name in self._refused or any(op.source is not None for op in ops)

    def end(self, loaded: Iterable[tuple[torch.Tensor, int]]) -> LoadTrace:
        """Return the trace since :meth:`begin`; ``loaded`` counts the elements by tensor."""
        num_loaded: Counter[str] = Counter()
        for tensor, count in loaded:
            name, _ = self._tensors.get(storage_of(tensor), ("", tensor))
            num_loaded[name] += count
        traced = {}
        for name, whole in self._tensors.values():
            ops = tuple({op.to: op for op in self._ops.get(name, ())}.values())
            refused = self._refused.get(name) or _not_once(ops, whole.numel())
            if ops or name in self._refused or num_loaded[name]:
                kept = () if refused else ops
                traced[name] = TracedTensor(form_of(whole), kept, refused, num_loaded[name])
        return LoadTrace(traced, frozenset(name for name, _ in self._sources.values()))

    def _origin_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the model's tensor that this is part of, or was computed from."""
        storage = storage_of(tensor)
        name, _ = self._tensors.get(storage) or self._computed.get(storage) or (None, None)
        return name

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        name, whole = self._tensors.get(storage_of(target), (None, target))
        if name is None:
            return  # the loader's own memory; a later copy out of it shows
        origin = self._origin_of(source)
        if origin is not None and origin != name:
            self.written_from[name] = origin
        source_name, published = self._sources.get(storage_of(source), (None, source))
        if source_name is None:
            self._refused[name] = "is computed by its loader"
        elif target.dtype != whole.dtype or source.dtype != published.dtype:
            self._refused[name] = "gets bits of another dtype"
        elif target.is_complex() or _changes_values(source) or _changes_values(target):
            self._refused[name] = "gets complex numbers"
        else:
            part = View.of(source.expand(target.shape), published)
            self._ops[name].append(CopyOp(View.of(target, whole), source_name, part))


def storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of the storage that a tensor and its views share."""
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return address


def tables_of(layer: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a module's own tables of parameters and buffers; registering again keeps no order."""
    return layer.__dict__["_parameters"], layer.__dict__["_buffers"]


def _tensors_in(values: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _changes_values(view: torch.Tensor) -> bool:
    return view.is_conj() or view.is_neg()


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[torch.Tensor]:
    """Yield the tensors that an operation writes into."""
    for index, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        yield from _tensors_in(value)


def _not_once(ops: tuple[CopyOp, ...], num_elements: int) -> str | None:
    """Return why copies do not write each element of a parameter exactly once; None: they do."""
    end = 0
    for view in sorted((op.to for op in ops), key=lambda view: view.offset):
        if not view.num_elements:
            continue
        if view.offset < end or view.end - view.offset != view.num_elements:
            return "is loaded in parts that overlap, or lie in between each other"
        end = view.end
    if sum(op.to.num_elements for op in ops) != num_elements:
        return "is loaded in part only"
    return None
