"""Directories that hold something other than a store: a checkpoint, or TorchRL's own weights.

A sender must not write a store into either of them. Files of a checkpoint would be mixed with a
store's. And receivers of TorchRL's own double buffer go on reading its files, whatever is published
beside them: a run of which only the trainer was moved to dbuffer would serve its last old weights.
"""

from __future__ import annotations

import logging
from pathlib import Path

from dbuffer.errors import OptionError
from dbuffer.store import filesystem
from dbuffer.store.filesystem import os_errors

logger = logging.getLogger(__name__)

ASIDE_DIRECTORY = "before-dbuffer"
"""Directory in a store, with a numbered one for each time that weights were moved aside."""

_TORCHRL_META = "meta.json"
"""File that ``TensorDict.memmap`` writes into a directory, and into each nested one."""

_TORCHRL_TENSORS = "*.memmap"
_TORCHRL_WEIGHTS = f"weights of TorchRL's own double buffer ({_TORCHRL_META}, {_TORCHRL_TENSORS})"

_CHECKPOINT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


def other_weights(root: Path) -> str | None:
    """Name the weights of another kind that a directory holds; None if it holds none."""
    with os_errors("look for other weights", root):
        files = [path.name for pattern in _CHECKPOINT_FILES for path in root.glob(pattern)]
        if files:
            return f"a checkpoint ({min(files)})"
        is_torchrl = (root / _TORCHRL_META).is_file() and any(root.rglob(_TORCHRL_TENSORS))
    return _TORCHRL_WEIGHTS if is_torchrl else None


def require_no_other_weights(root: Path, *, move_torchrl_aside: bool = False) -> None:
    """Refuse to write a store into a directory that holds weights of another kind.

    ``move_torchrl_aside``: move those of TorchRL into a directory below this one instead.

    Raises:
        OptionError: the directory holds a checkpoint, or TorchRL's weights.
        StoreAccessError: the directory cannot be listed, or the files cannot be moved.
    """
    other = other_weights(root)
    if other is None:
        return
    if other != _TORCHRL_WEIGHTS:
        raise OptionError(f"{root} holds {other}: give the store another directory")
    if not move_torchrl_aside:
        raise OptionError(
            f"{root} holds {other}, which receivers of TorchRL's own scheme would go on reading: "
            "change the receivers' import to dbuffer as well, then remove these files or pass "
            "move_torchrl_aside=True"
        )
    aside = filesystem.make_numbered_directory(root / ASIDE_DIRECTORY)
    # The first file moved is the one without which no receiver can load the others.
    filesystem.move_into(aside, root / _TORCHRL_META)
    with os_errors("look for TorchRL's weights", root):
        nested = (path.parent for path in root.glob(f"*/{_TORCHRL_META}"))
        moved = [*root.glob(_TORCHRL_TENSORS), *nested]
    filesystem.move_into(aside, *moved)
    logger.warning("%s held %s: moved into %s", root, other, aside)
