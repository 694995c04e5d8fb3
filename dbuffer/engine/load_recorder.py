"""`LoadRecorder`: learns without data how a model's loaders use published tensors.

A load into a copy of the model on the meta device is watched operation by operation.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dbuffer.engine.plan.load_trace import (
    CopyOp,
    LoadTrace,
    TracedTensor,
    View,
    form_of,
)

_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}


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
        self._rewritten: dict[str, float | None] = {}
        """Published tensors that were written into, and the number that fills one; None: others."""
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
        self._rewritten.clear()
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
            value = (args[1] if len(args) > 1 else 0) if func in _FILLS else None
            for target in _written(func, args, kwargs):
                self._note_rewritten(target, value)
                name, whole = self._tensors.get(storage_of(target), (None, target))
                if name is None:
                    continue
                if value is not None and target.dtype == whole.dtype:
                    self._ops[name].append(CopyOp(View.of(target, whole), None, value=value))
                else:
                    self._refused[name] = f"is written by {func}"

    def _note_rewritten(self, target: torch.Tensor, value: float | None = None) -> None:
        """Note a write into a published tensor, if this is one: this value, or anything else."""
        name, published = self._sources.get(storage_of(target), (None, target))
        if name is not None:
            is_filled = (target.numel(), target.dtype) == (published.numel(), published.dtype)
            self._rewritten[name] = value if is_filled else None

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
        offered = frozenset(name for name, _ in self._sources.values())
        return LoadTrace(traced, offered, frozenset(self._rewritten))

    def _origin_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the model's tensor that this is part of, or was computed from."""
        storage = storage_of(tensor)
        name, _ = self._tensors.get(storage) or self._computed.get(storage) or (None, None)
        return name

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._note_rewritten(target)
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
        elif source_name not in self._rewritten:
            part = View.of(source.expand(target.shape), published)
            self._ops[name].append(CopyOp(View.of(target, whole), source_name, part))
        elif (value := self._rewritten[source_name]) is not None:
            self._ops[name].append(CopyOp(View.of(target, whole), None, value=value))
        else:
            self._refused[name] = f"is loaded from {source_name}, which its loader has changed"


def storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of the storage that a tensor and its views share."""
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return address


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
    # Parts that are columns of a matrix alternate in memory.
    is_written = torch.zeros(max(ends), dtype=torch.bool, device="cpu")
    for view in views:
        is_written.as_strided(view.shape, view.stride, view.offset).fill_(True)
    is_once = num_loaded == num_elements == int(is_written.sum())
    return None if is_once else "is loaded in parts that overlap"
