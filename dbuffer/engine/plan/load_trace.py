"""`LoadTrace`: how a model's loaders use published tensors, as recorded by `LoadRecorder`.

The recorder watches each operation of a load into a copy of the model on the meta device. A copy
into a part of a parameter becomes a `CopyOp`. If a parameter is written in any other way, its trace
gives the reason why copies cannot replace the loader.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

Copy = tuple[torch.Tensor, torch.Tensor]
"""Target and source of a copy, two tensors of the same shape."""

Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, stride and dtype of a tensor."""


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by their size in bytes. Most are signed: torch supports few unsigned ones."""

_BLOCK_BYTES = 64 << 20
"""Number of bytes compared at a time. The number is small, as a device may have little free
memory."""


class View(NamedTuple):
    """Strided part of a tensor."""

    offset: int
    """Number of elements from the tensor's first element to the part's first element."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, part: torch.Tensor, tensor: torch.Tensor) -> View:
        """Return the view of a part of a tensor. Part and tensor must share their storage."""
        offset = int(part.storage_offset() - tensor.storage_offset())
        return cls(offset, tuple(part.shape), part.stride())

    def in_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this part of ``tensor``, which has the form of the tensor given to :meth:`of`."""
        if self.shape == tensor.shape and self.stride == tensor.stride():
            return tensor
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def end(self) -> int:
        """Position in the tensor's storage after the part's last element."""
        if not self.num_elements:
            return self.offset
        steps = zip(self.shape, self.stride, strict=True)
        return self.offset + sum((extent - 1) * stride for extent, stride in steps) + 1


@dataclass(frozen=True, slots=True)
class CopyOp:
    """One write into a parameter: a copy of a part of a published tensor, or a constant."""

    to: View
    source: str | None
    part: View | None = None
    """Part of the published tensor that is read, or None for a constant."""
    value: float = 0

    def bind(self, parameter: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> Copy:
        target = self.to.in_(parameter.detach())
        if self.source is None or self.part is None:
            return target, torch.tensor(self.value, dtype=target.dtype).expand(self.to.shape)
        return target, self.part.in_(tensors[self.source])


def form_of(tensor: torch.Tensor) -> Form:
    """Return a tensor's shape, strides and dtype."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """Record of how loaders write a parameter or buffer of the model."""

    form: Form
    ops: tuple[CopyOp, ...]
    """Copies that together write each element once. Empty if `refused`."""
    refused: str | None
    """Reason why copies cannot fill the parameter, or None if they can."""
    num_loaded: int

    @property
    def copied_bytes(self) -> int:
        """Number of bytes of the parameter that are copied from published tensors."""
        num_copied = sum(op.to.num_elements for op in self.ops if op.source is not None)
        return num_copied * self.form[2].itemsize

    def bind(self, tensor: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> list[Copy]:
        return [op.bind(tensor, tensors) for op in self.ops]

    def filled(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
        """Return a new tensor of the parameter's shape and dtype, filled from published tensors."""
        shape, stride, dtype = self.form
        made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        for target, source in self.bind(made, tensors):
            target.copy_(source)
        return made


@dataclass(frozen=True, slots=True)
class LoadTrace:
    """Record of how loaders load the tensors of one layout (names, dtypes and shapes)."""

    tensors: Mapping[str, TracedTensor]
    offered: frozenset[str]
    rewritten: frozenset[str] = frozenset()
    unused: tuple[str, ...] = ()
    """Descriptions of tensors that no loader has read, although the model may need them."""
    twins: Mapping[str, str] = field(default_factory=dict)
    """Possible duplicates: maps a published tensor that no loader has read to the embedding or head
    with the same dtype and shape."""

    @property
    def refused(self) -> dict[str, str]:
        """Reasons why copies alone cannot load some parameters and buffers, by their names."""
        return {name: t.refused for name, t in self.tensors.items() if t.refused}

    def is_copied(self, name: str) -> bool:
        return name in self.tensors and self.tensors[name].refused is None


_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}


class LoadRecorder:
    """Records how the operations of one load use a model's parameters and buffers."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        # A tied tensor has several names. The trace uses only the last of them.
        self._tensors = {storage_of(tensor): (name, tensor) for name, tensor in tensors.items()}
        self._lock = threading.Lock()  # some models load in threads
        self._sources: dict[int, tuple[str, torch.Tensor]] = {}
        self.read: set[str] = set()
        """Published tensors that loaders have read."""
        self.embedded: set[str] = set()
        """Published tensors that loaders have read for an embedding or a head."""
        self._rewritten: dict[str, float | None] = {}
        """Published tensors that loaders have written into, by name. The value is the number that
        fills the tensor, or None for any other content."""
        self._ops: dict[str, list[CopyOp]] = defaultdict(list)
        self._refused: dict[str, str] = {}
        self._computed: dict[int, tuple[str, torch.Tensor]] = {}
        """Results that were computed from a tensor of the model, with this tensor's name, keyed by
        the result's storage. The results are kept alive, so that no storage is reused."""
        self.written_from: dict[str, str] = {}
        """Maps the name of a computed tensor of the model to the name of the tensor that it was
        computed from."""

    def note_source(self, name: str, tensor: torch.Tensor) -> None:
        """Note a published tensor, and keep it alive, so that no other tensor gets its storage."""
        self._sources[storage_of(tensor)] = (name, tensor)

    def note_result(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note which tensor of the model an operation's result was computed from, if any."""
        with self._lock:
            origins = map(self._origin_of, _tensors_in((args, kwargs)))
            origin = next(filter(None, origins), None)
            if origin is None:
                return
            for made in _tensors_in(result):
                if storage_of(made) not in self._tensors:
                    self._computed.setdefault(storage_of(made), (origin, made))

    def note_read(self, tensor: torch.Tensor, *, is_embedded: bool = False) -> str | None:
        """Note that a loader is about to read a tensor; return its name if it was published.

        ``is_embedded``: whether the tensor is loaded into an embedding or a head.
        """
        name, _ = self._sources.get(storage_of(tensor), (None, None))
        if name is not None:
            self.read.add(name)
            if is_embedded:
                self.embedded.add(name)
        return name

    def note_registered(self, name: str, parameter: torch.Tensor) -> None:
        """Note a parameter that a loader has just made from a published tensor."""
        self._tensors[storage_of(parameter)] = name, parameter
        self._refused[name] = "is registered by its loader"

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record which tensors an operation that is about to run will write, and with what."""
        if not func._schema.is_mutable:  # noqa: SLF001 - there is no public way
            return
        with self._lock:
            if func is torch.ops.aten.copy_.default:
                self._note_copy(args[0], args[1])
                return
            value = (args[1] if len(args) > 1 else 0) if func in _FILLS else None
            for target in _written(func, args, kwargs):
                self._note_rewritten(target, value)
                name, tensor = self._tensors.get(storage_of(target), (None, target))
                if name is None:
                    continue
                if value is not None and target.dtype == tensor.dtype:
                    self._ops[name].append(CopyOp(View.of(target, tensor), None, value=value))
                else:
                    self._refused[name] = f"is written by {func}"

    def _note_rewritten(self, target: torch.Tensor, value: float | None = None) -> None:
        """Note a write into a published tensor. ``value``: the single number written, or None."""
        name, published = self._sources.get(storage_of(target), (None, target))
        if name is not None:
            is_filled = (target.numel(), target.dtype) == (published.numel(), published.dtype)
            self._rewritten[name] = value if is_filled else None

    def is_written(self, tensor: torch.Tensor) -> bool:
        """Whether published data was written into a parameter or buffer.

        Return False for a tensor that the recorder does not know because it came into the model
        later, such as position embeddings that all models of an engine share.
        """
        name, _ = self._tensors.get(storage_of(tensor), ("", tensor))
        ops = self._ops.get(name, ())
        return name in self._refused or any(op.source is not None for op in ops)

    def end(self, loaded: Iterable[tuple[torch.Tensor, int]]) -> LoadTrace:
        """Return the trace of the load.

        ``loaded``: the model's tensors, with the number of elements that loaders have written.
        """
        num_loaded: Counter[str] = Counter()
        for tensor, count in loaded:
            name, _ = self._tensors.get(storage_of(tensor), ("", tensor))
            num_loaded[name] += count
        traced = {}
        for name, tensor in self._tensors.values():
            ops = tuple({op.to: op for op in self._ops.get(name, ())}.values())
            refused = self._refused.get(name) or _not_once(ops, tensor.numel())
            if ops or name in self._refused or num_loaded[name]:
                kept = () if refused else ops
                traced[name] = TracedTensor(form_of(tensor), kept, refused, num_loaded[name])
        return LoadTrace(
            traced,
            offered=frozenset(name for name, _ in self._sources.values()),
            rewritten=frozenset(self._rewritten),
        )

    def _origin_of(self, tensor: torch.Tensor) -> str | None:
        storage = storage_of(tensor)
        name, _ = self._tensors.get(storage) or self._computed.get(storage) or (None, None)
        return name

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._note_rewritten(target)
        name, tensor = self._tensors.get(storage_of(target), (None, target))
        if name is None:
            return  # a write into the loader's own memory; a copy out of this memory is noted later
        origin = self._origin_of(source)
        if origin is not None and origin != name:
            self.written_from[name] = origin
        source_name, published = self._sources.get(storage_of(source), (None, source))
        if source_name is None:
            self._refused[name] = "is computed by its loader"
        elif target.dtype != tensor.dtype or source.dtype != published.dtype:
            self._refused[name] = "is loaded as a tensor of another dtype"
        elif target.is_complex() or _changes_values(source) or _changes_values(target):
            self._refused[name] = "gets complex numbers"
        elif source_name not in self._rewritten:
            part = View.of(source.expand(target.shape), published)
            self._ops[name].append(CopyOp(View.of(target, tensor), source_name, part))
        elif (value := self._rewritten[source_name]) is not None:
            self._ops[name].append(CopyOp(View.of(target, tensor), None, value=value))
        else:
            self._refused[name] = f"is loaded from {source_name} after its loader modified that"


def storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of the storage that a tensor and its views share."""
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return address


def _tensors_in(values: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _changes_values(view: torch.Tensor) -> bool:
    return view.is_conj() or view.is_neg()


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[torch.Tensor]:
    for index, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        yield from _tensors_in(value)


def _not_once(ops: tuple[CopyOp, ...], num_elements: int) -> str | None:
    """Return None if copies write each element of a parameter exactly once, else a description."""
    num_loaded = sum(op.to.num_elements for op in ops)
    if num_loaded < num_elements:
        return "is loaded in part only"
    views = sorted((op.to for op in ops if op.to.num_elements), key=lambda view: view.offset)
    ends = [0, *(view.end for view in views)]
    if all(
        view.offset >= end and view.end - view.offset == view.num_elements
        for view, end in zip(views, ends, strict=False)
    ):
        return None
    # The columns of a matrix alternate in memory. Their first and last elements do not show whether
    # they overlap, so mark each element that is written.
    is_written = torch.zeros(max(ends), dtype=torch.bool, device="cpu")
    for view in views:
        is_written.as_strided(view.shape, view.stride, view.offset).fill_(True)
    is_once = num_loaded == num_elements == int(is_written.sum())
    return None if is_once else "is loaded in parts that overlap"


_WRAPPED = frozenset({"base_layer", "_orig_mod"})
"""Attributes that hold a wrapped layer: of LoRA wrappers, in vLLM and SGLang alike, and of
``torch.compile``."""


def unwrapped(name: str) -> str:
    """Return the name of a layer or parameter, without the attribute names of wrappers."""
    return ".".join(step for step in name.split(".") if step not in _WRAPPED)


def wrapped_layer(layer: torch.nn.Module) -> torch.nn.Module:
    """Return the layer in a wrapper, or the layer itself if it is no wrapper."""
    parts = layer._modules  # noqa: SLF001
    inner = next((part for name in _WRAPPED if (part := parts.get(name)) is not None), None)
    return layer if inner is None else wrapped_layer(inner)


def tables_of(layer: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a module's dictionaries of parameters and of buffers, to replace tensors in them."""
    return layer.__dict__["_parameters"], layer.__dict__["_buffers"]


def as_integers(values: torch.Tensor) -> torch.Tensor:
    """View the elements' bits as integers of the same size."""
    return values.view(_INTEGERS[values.itemsize])


def same_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether copying the source into the target would leave the target's bytes unchanged."""
    target, source = (tensor.reshape(tensor.shape or (1,)) for tensor in (target, source))
    rows = max(1, len(target) * _BLOCK_BYTES // max(1, target.nbytes))
    blocks = zip(torch.split(target, rows), torch.split(source, rows), strict=True)
    return all(
        _same_bits(block, copied.to(device=block.device, dtype=block.dtype))
        for block, copied in blocks
    )


def _same_bits(*blocks: torch.Tensor) -> bool:
    pair = [as_integers(block) for block in blocks]
    # torch compares element by element, so elements of eight bytes take half the time of elements
    # of two bytes.
    if all(
        bits.is_contiguous() and not (bits.nbytes % 8 or bits.storage_offset() * bits.itemsize % 8)
        for bits in pair
    ):
        pair = [bits.view(-1).view(torch.int64) for bits in pair]
    return torch.equal(*pair)
