"""Checkpoints as HuggingFace has them, written from a version's tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from dbuffer.errors import InvalidWeightsError
from dbuffer.runtime.extras import needed_for
from dbuffer.store import filesystem
from dbuffer.weights.checkpoint import INDEX

DEFAULT_SHARD_BYTES = 5_000_000_000
"""Size of a file above which the next one begins; a single tensor may be larger."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Suffixes of files with weights, which `write_checkpoint` does not copy from ``beside``."""


def write_checkpoint(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    beside: Path | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_bytes: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Write tensors into a new directory, and flush it.

    Args:
        path: the directory; it is made.
        tensors: contiguous ones, by name.
        beside: checkpoint whose other files (configuration, tokenizer) are copied beside them.
        shard_bytes: size of a file.
        on_bytes: called with the bytes written so far, and in all.

    Raises:
        InvalidWeightsError: ``beside`` is no directory.
        StoreFullError, StoreAccessError: the filesystem refused.
    """
    with needed_for("writing a checkpoint"):
        from safetensors.torch import save_file
    if beside is not None and not beside.is_dir():
        raise InvalidWeightsError(f"{beside} is no directory of a model")
    shards = list(_shards(tensors, shard_bytes))
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    files: dict[str, str] = {}
    written_bytes = 0
    with filesystem.os_errors("write a checkpoint", path):
        path.mkdir()
        for file in () if beside is None else sorted(beside.iterdir()):
            if file.is_file() and not file.name.endswith(_WEIGHTS):
                shutil.copyfile(file, path / file.name)
        for number, names in enumerate(shards, 1):
            part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            name = f"model{part}.safetensors"
            save_file({each: tensors[each] for each in names}, path / name, {"format": "pt"})
            files |= dict.fromkeys(names, name)
            written_bytes += sum(tensors[each].nbytes for each in names)
            on_bytes(written_bytes, total_bytes)
        if len(shards) > 1:
            index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
            (path / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        filesystem.sync_contents(path)


def _shards(tensors: Mapping[str, torch.Tensor], shard_bytes: int) -> Iterator[list[str]]:
    """Yield the names of the tensors of each file."""
    names: list[str] = []
    num_bytes = 0
    for name, tensor in tensors.items():
        if names and num_bytes + tensor.nbytes > shard_bytes:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += tensor.nbytes
    yield names
