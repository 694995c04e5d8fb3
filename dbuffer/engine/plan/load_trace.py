"""`LoadTrace`: how a model's loaders use published tensors, as `load_recorder` learned it.

A copy of a view of a published tensor into a view of a parameter is a `CopyOp`. A parameter that is
written in any other way has no copies, and its trace says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

Copy = tuple[torch.Tensor, torch.Tensor]
"""Target and source of a copy, of the same shape."""

Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, stride and dtype of a tensor."""


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
    rewritten: frozenset[str] = frozenset()
    """Names of those that loaders write into, as if they were theirs."""
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


_WRAPPED = "base_layer"
"""Name of a layer in the one that wraps it for LoRA requests, in vLLM and SGLang alike."""


def unwrapped(name: str) -> str:
    """Return the name that a live layer or parameter has in a model that takes no LoRA requests."""
    return ".".join(step for step in name.split(".") if step != _WRAPPED)


def tables_of(layer: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a module's own tables of parameters and buffers; registering again keeps no order."""
    return layer.__dict__["_parameters"], layer.__dict__["_buffers"]
