"""Reading and writing of HuggingFace checkpoints (safetensors files), tensor by tensor."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dbuffer.errors import InvalidWeightsError, UnsupportedError
from dbuffer.format.layout import TensorSpec
from dbuffer.io.tensors import DTYPES, as_bytes, new_memory
from dbuffer.runtime.extras import needed_for
from dbuffer.runtime.messages import listed
from dbuffer.store import filesystem
from dbuffer.store.filesystem import Descriptor
from dbuffer.weights.lazy_tensor import LazyTensor

INDEX = "model.safetensors.index.json"
_PARTS_OF_CONFIG = ("text_config", "vision_config", "audio_config")
_MODEL_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
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


def read_checkpoint(
    path: Path, saved: Mapping[Path, FileState] | None = None
) -> tuple[dict[str, LazyTensor], Callable[[], None]]:
    """Open a HuggingFace checkpoint directory, or a single safetensors file.

    Return the checkpoint's tensors, and a check. The check is a function that raises an
    `InvalidWeightsError` if a file of the checkpoint was written or replaced after this call or, if
    given, after the directory's files had the states ``saved``.
    """
    tensors: dict[str, LazyTensor] = {}
    file_of: dict[str, str] = {}
    twice: dict[tuple[str, str], list[str]] = {}
    state = state_of if saved is None else saved.get
    states = {**(saved or {}), path / INDEX: state(path / INDEX)}
    files = checkpoint_files(path)
    states |= {file: state(file) for file in files}  # before any file is opened
    for file, names_in_file in files.items():
        for name, tensor in _open_safetensors(file, names_in_file):
            if name in tensors:
                twice.setdefault((file_of[name], file.name), []).append(name)
            tensors[name], file_of[name] = tensor, file.name
    if twice:
        (first, second), names = next(iter(twice.items()))
        raise InvalidWeightsError(
            f"{path} has tensors twice: {first} and {second} both hold {listed(names)}. Pass one "
            f"file ({path / first}) instead of the directory, or a directory without the other file"
        )

    def require_unchanged() -> None:
        for file, state in states.items():
            if state_of(file) != state:
                raise _changed(file)

    return tensors, require_unchanged


def _changed(file: Path) -> InvalidWeightsError:
    change = "written" if file.exists() else "removed"
    return InvalidWeightsError(
        f"{file} was {change} while it was being published, so nothing was published: publish a "
        "checkpoint after it is completely saved"
    )


class FileState(NamedTuple):
    """Inode, size and time of a file. At least one changes if the file is written or replaced."""

    inode: int
    num_bytes: int
    modified_ns: int

    @property
    def modified_at(self) -> float:
        return self.modified_ns / 1e9


def state_of(file: Path) -> FileState | None:
    """Return the state of a file, or None if the file does not exist."""
    try:
        status = file.stat()
    except OSError:  # reading the file raises the same error
        return None
    return FileState(status.st_ino, status.st_size, status.st_mtime_ns)


def checkpoint_files(path: Path) -> Mapping[Path, list[str] | None]:
    """Return the files of a checkpoint, each with the names of the checkpoint's tensors in it.

    The names are None if every tensor in the file belongs to the checkpoint.

    Raises:
        InvalidWeightsError: ``path`` has no checkpoint, or contains two checkpoints.
    """
    if path.is_file():
        return {path: None}
    if not path.is_dir():
        raise InvalidWeightsError(
            f"there is no checkpoint at {path}: pass a local directory or .safetensors file"
        )
    index = path / INDEX
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
                raise InvalidWeightsError(
                    f"{index} names {file!r}, which is outside the directory of the index"
                )
            files_of.setdefault(path / file, []).append(name)
    except (KeyError, TypeError, AttributeError, OSError, ValueError, RecursionError) as error:
        raise InvalidWeightsError(f"{index} is not the index of a checkpoint ({error})") from error
    alone = path / "model.safetensors"
    if alone.is_file() and alone not in files_of:
        raise InvalidWeightsError(
            f"{path} holds two checkpoints: {alone.name}, which transformers would load, and the "
            f"shards of {index.name}. Pass {alone}, or a directory without this file"
        )
    return files_of


def _open_safetensors(
    path: Path, names_in_file: list[str] | None
) -> Iterator[tuple[str, LazyTensor]]:
    # Read the file, and don't map it as safetensors does: if another program truncated a mapped
    # file, access to the missing pages would kill this process with SIGBUS.
    try:
        file = Descriptor.open(path, os.O_RDONLY | os.O_NONBLOCK)
        entries, start = _read_header(file)
        for name in sorted(entries) if names_in_file is None else names_in_file:
            if name not in entries:
                raise ValueError(f"it has no tensor {name!r}")
            dtype, shape, first, num_bytes = _parse_entry(name, entries[name])
            read = functools.partial(_read, path, file, start + first, num_bytes, dtype, shape)
            yield name, LazyTensor(dtype, shape, read)
    except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        raise InvalidWeightsError(f"cannot read {path}: {error}") from error


def _read_header(file: Descriptor) -> tuple[dict[str, Any], int]:
    """Return the entries of a safetensors header by tensor name, and the data's file offset."""
    size = os.fstat(file.number).st_size
    start = 8 + int.from_bytes(filesystem.read_at(file.number, 0, 8), "little")
    if not 8 < start <= size:
        raise ValueError(f"it has {size} bytes, but its header would end at byte {start}")
    header = json.loads(filesystem.read_at(file.number, 8, start - 8))
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1]["data_offsets"]):
        first, after = entry["data_offsets"]
        if first != end:
            raise ValueError(
                f"{name!r} begins at byte {first}, but the tensor before it ends at byte {end}"
            )
        end = after
    if start + end != size:
        raise ValueError(f"it has {size} bytes, but its header describes {start + end}")
    return entries, start


def _parse_entry(
    name: str, entry: Mapping[str, Any]
) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Return a tensor's dtype, shape, offset after the header, and number of bytes."""
    if entry["dtype"] not in SAFETENSORS_DTYPES:
        raise ValueError(f"{name!r} has the unknown dtype {entry['dtype']!r}")
    dtype, shape = SAFETENSORS_DTYPES[entry["dtype"]], list(entry["shape"])
    if dtype == "float4_e2m1fn_x2":
        shape[-1] //= 2  # safetensors counts 4-bit numbers; torch counts pairs of them
    first, end = entry["data_offsets"]
    num_bytes = TensorSpec(name, dtype, tuple(shape)).num_bytes
    are_sizes = all(type(number) is int and number >= 0 for number in (first, end, *shape))
    if not are_sizes or end - first != num_bytes:
        raise ValueError(
            f"{name!r} has dtype {dtype} and shape {shape}, which do not fit bytes {first} to {end}"
        )
    return DTYPES[dtype], tuple(shape), first, num_bytes


def _read(
    path: Path,
    file: Descriptor,
    start: int,
    num_bytes: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> torch.Tensor:
    data = new_memory(num_bytes)
    try:
        num_read = filesystem.read_into(file.number, start, as_bytes(data))
    except OSError as error:
        raise InvalidWeightsError(f"cannot read {path}: {error}") from error
    if num_read < num_bytes:
        raise _changed(path)
    return data.view(dtype).view(shape)


DEFAULT_SHARD_BYTES = 5_000_000_000
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def write_checkpoint(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    beside: Path | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_bytes: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Write contiguous tensors into the new directory ``path``, and flush the directory to disk.

    Args:
        path: the directory to create.
        tensors: tensors by name.
        beside: directory of a checkpoint whose files without weights (configuration, tokenizer) are
            copied into ``path``. The copied configuration names the dtype of ``tensors``.
        shard_bytes: maximum size of a file with several tensors.
        on_bytes: called with the number of bytes written so far and the total number of bytes.
    """
    with needed_for("writing a checkpoint"):
        from safetensors.torch import save_file
    if beside is not None and not beside.is_dir():
        raise InvalidWeightsError(
            f"{beside} is not a directory: pass the directory of a HuggingFace checkpoint"
        )
    dtypes = {DTYPES.get(name) for name in SAFETENSORS_DTYPES.values()}
    if others := [name for name, tensor in tensors.items() if tensor.dtype not in dtypes]:
        raise UnsupportedError(
            f"safetensors has no dtype {tensors[others[0]].dtype}, so no checkpoint can hold "
            f"{listed(others)}: publish their real and imaginary parts (torch.view_as_real)"
        )
    shards = list(_shards(tensors, shard_bytes))
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    files: dict[str, str] = {}
    written_bytes = 0
    with filesystem.os_errors("write a checkpoint", path):
        path.mkdir()
        for file in () if beside is None else sorted(beside.iterdir()):
            if file.is_file() and not file.name.endswith(_WEIGHTS):
                shutil.copyfile(file, path / file.name)
        _set_dtype(path / "config.json", tensors)
        for number, names in enumerate(shards, 1):
            part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            name = f"model{part}.safetensors"
            save_file({key: tensors[key] for key in names}, path / name, {"format": "pt"})
            files |= dict.fromkeys(names, name)
            written_bytes += sum(tensors[key].nbytes for key in names)
            on_bytes(written_bytes, total_bytes)
        if len(shards) > 1:
            index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
            (path / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        filesystem.sync_contents(path)


def _set_dtype(config_file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Let a model's configuration name the dtype of its tensors, if they all have one dtype.

    Otherwise, transformers and vLLM would round float32 tensors to the configuration's bfloat16.
    """
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(dtypes) != 1 or not dtypes <= _MODEL_DTYPES or not config_file.exists():
        return
    [dtype] = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    try:
        config = json.loads(config_file.read_bytes())
        parts = [config, *(config.get(key) or {} for key in _PARTS_OF_CONFIG)]
        for part in parts:
            part |= {key: dtype for key in ("dtype", "torch_dtype") if part.get(key) is not None}
    except (ValueError, AttributeError, TypeError) as error:
        raise InvalidWeightsError(f"{config_file.name} of the model is invalid: {error}") from error
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _shards(tensors: Mapping[str, torch.Tensor], shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    num_bytes = 0
    for name, tensor in tensors.items():
        if names and num_bytes + tensor.nbytes > shard_bytes:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += tensor.nbytes
    yield names
