"""HuggingFace checkpoints as a source: safetensors files, read one tensor at a time."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from dbuffer.errors import InvalidWeightsError
from dbuffer.io.tensors import DTYPES
from dbuffer.runtime.extras import needed_for
from dbuffer.runtime.messages import listed

_INDEX = "model.safetensors.index.json"
SAFETENSORS_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F4": "float4_e2m1fn_x2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}


@dataclass(frozen=True, slots=True)
class View:
    """Place of a tensor in a larger one: a box of it, with dimensions reordered or left out."""

    index: tuple[int | slice, ...]
    """Index of the box in the whole; of a dimension that is left out, a number."""
    order: tuple[int, ...]
    """Dimensions of the box in the order in which the view has them."""
    shape: tuple[int, ...]
    """Shape of the view, which may have more dimensions of size 1."""
    is_whole: bool = False
    """Whether the view is the whole tensor, unchanged."""

    @classmethod
    def of_all(cls, shape: tuple[int, ...]) -> Self:
        index = tuple(slice(0, extent) for extent in shape)
        return cls(index, tuple(range(len(shape))), shape, is_whole=True)

    @classmethod
    def find(cls, part: torch.Tensor, whole: torch.Tensor) -> Self | None:
        """Return the place of ``part`` in a contiguous tensor of which it is a view.

        None: it is no box of it, for instance because dimensions were joined.
        """
        shape, rest = tuple(part.shape), int(part.storage_offset())
        if shape == whole.shape and part.stride() == whole.stride():
            return cls.of_all(shape)
        index: list[int | slice] = []
        dimension_at = {}
        for dimension, (stride, size) in enumerate(zip(whole.stride(), whole.shape, strict=True)):
            start, rest = divmod(rest, stride) if size > 1 else (0, rest)
            index.append(start)
            if size > 1:
                dimension_at[stride] = dimension
        dimensions = []
        for stride, size in zip(part.stride(), shape, strict=True):
            if size == 1:
                continue
            dimension = dimension_at.pop(stride, -1)
            first = index[dimension]
            if dimension < 0 or isinstance(first, slice) or first + size > whole.shape[dimension]:
                return None
            index[dimension] = slice(first, first + size)
            dimensions.append(dimension)
        ascending = sorted(dimensions)
        return cls(tuple(index), tuple(map(ascending.index, dimensions)), shape)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the view of a tensor; nothing is copied."""
        part = whole[self.index]
        if self.order != tuple(range(part.ndim)):
            part = part.permute(self.order)
        return part if part.shape == self.shape else part.view(self.shape)


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is fetched when its turn comes to be published, and dropped after.

    A mapping, or a list of pairs, may hold some: weights that are made as they are written.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], torch.Tensor]
    """Makes it, of just this dtype and shape. Called once a publish, maybe in another thread."""
    identity: int = 0
    """A negative number shared by all names of one tensor; 0 if unknown."""
    sharded: Any = None
    """The tensor itself, where each rank of a trainer holds a part of it and `fetch` gathers it, or
    this rank's rows of it."""
    view: View | None = None
    """Place of the tensor in ``sharded``; None: it is all of it."""


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Rows of a tensor that this rank holds, where the ranks' shares are not those of a DTensor."""

    local: torch.Tensor
    first: int
    """Number of the first row in the tensor."""
    ranks: tuple[int, ...]
    """Ranks of the job that hold rows of the tensor; together, all of them."""

    def to_local(self) -> torch.Tensor:
        return self.local


class Checkpoint(NamedTuple):
    """Names and tensors of a checkpoint, and whether its files are still what was opened."""

    names: list[str]
    tensors: list[torch.Tensor | LazyTensor]
    require_unchanged: Callable[[], None]
    """Raises an `InvalidWeightsError` if a file was written or replaced since it was opened."""


def read_checkpoint(path: Path) -> Checkpoint:
    """Open a HuggingFace checkpoint directory, or one safetensors file."""
    tensors: dict[str, torch.Tensor | LazyTensor] = {}
    file_of: dict[str, str] = {}
    twice: dict[tuple[str, str], list[str]] = {}
    """Tensors that are in two files, by the files' names."""
    states = {path / _INDEX: _state_of(path / _INDEX)}
    files = _checkpoint_files(path)
    states |= {file: _state_of(file) for file in files}  # before any is opened
    for file, names_in_file in files.items():
        for name, tensor in _open_safetensors(file, names_in_file):
            if name in tensors:
                twice.setdefault((file_of[name], file.name), []).append(name)
            tensors[name], file_of[name] = tensor, file.name
    if twice:
        (first, second), names = next(iter(twice.items()))
        raise InvalidWeightsError(
            f"{path} has tensors twice: {first} and {second} both hold {listed(names)}. Give one "
            f"of them ({path / first}), or a directory without the other"
        )

    def require_unchanged() -> None:
        for file, state in states.items():
            if _state_of(file) != state:
                raise InvalidWeightsError(
                    f"{file} was written while it was being published, so nothing was: publish a "
                    "checkpoint when all of it is saved"
                )

    return Checkpoint(list(tensors), list(tensors.values()), require_unchanged)


def _state_of(file: Path) -> tuple[int, ...] | None:
    try:
        found = file.stat()
    except OSError:  # which those who read it raise
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _checkpoint_files(path: Path) -> Mapping[Path, list[str] | None]:
    """The files of a checkpoint, and which tensors to take from each (None: all)."""
    if path.is_file():
        return {path: None}
    if not path.is_dir():
        raise InvalidWeightsError(
            f"there is no checkpoint at {path}: give a local directory or .safetensors file"
        )
    index = path / _INDEX
    if not index.is_file():
        if files := sorted(path.glob("*.safetensors")):
            return dict.fromkeys(files)
        raise InvalidWeightsError(
            f"{path} has no *.safetensors file (pickled checkpoints are never read: save with "
            "model.save_pretrained(path, safe_serialization=True))"
        )
    try:
        shards = json.loads(index.read_bytes())["weight_map"]
        files_of: dict[Path, list[str]] = {}
        for name, file in shards.items():
            if Path(file).name != file:
                raise InvalidWeightsError(f"{index} names {file!r}, outside its directory")
            files_of.setdefault(path / file, []).append(name)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise InvalidWeightsError(f"{index} is not the index of a checkpoint ({error})") from None
    alone = path / "model.safetensors"
    if alone.is_file() and alone not in files_of:
        raise InvalidWeightsError(
            f"{path} holds two checkpoints: {alone.name}, which transformers would load, and the "
            f"shards of {index.name}. Give {alone}, or a directory without it"
        )
    return files_of


def _open_safetensors(
    file: Path, names_in_file: list[str] | None
) -> Iterator[tuple[str, torch.Tensor | LazyTensor]]:
    with needed_for(f"reading {file}"):
        from safetensors import SafetensorError, safe_open
    try:
        file.open("rb").close()  # of a file that may not be read safetensors says it is not there
        handle: Any = safe_open(file, framework="pt")
        for name in names_in_file if names_in_file is not None else handle.keys():
            part = handle.get_slice(name)
            dtype = SAFETENSORS_DTYPES[part.get_dtype()]
            shape = list(part.get_shape())
            if dtype == "float4_e2m1fn_x2":
                shape[-1] //= 2  # safetensors counts numbers, torch the bytes that hold two
            # Each reader keeps the file open; it is closed when the last of them is dropped.
            read = functools.partial(handle.get_tensor, name)
            yield name, LazyTensor(DTYPES[dtype], tuple(shape), read)
    except (SafetensorError, OSError) as error:
        raise InvalidWeightsError(f"cannot read {file}: {error}") from None
    except KeyError as error:
        raise InvalidWeightsError(f"{file} holds a tensor of unknown type {error}") from None
