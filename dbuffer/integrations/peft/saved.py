"""`save_adapter`: saves a published adapter as a directory that engines and peft can load.

vLLM's ``LoRARequest(lora_path=...)``, SGLang's ``lora_paths`` and peft's ``from_pretrained`` load
such a directory. Each version is saved in its own directory, which appears atomically and never
changes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbuffer.errors import StoreAccessError, WeightsMismatchError
from dbuffer.format.layout import digest
from dbuffer.receive.reader import Snapshot
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime import options
from dbuffer.runtime.extras import needed_for
from dbuffer.runtime.trouble import log_once
from dbuffer.store import filesystem
from dbuffer.weights.targets import ADAPTER_KEY

logger = logging.getLogger(__name__)

_CONFIG = "adapter_config.json"
_NAME = re.compile(r"v[0-9]{1,19}-[0-9a-f]{16}")
_SCRATCH = ".saving-"
_ABANDONED_NS = 3600 * 10**9
"""Age after which an unfinished directory counts as left behind by a killed process."""

_holds: weakref.WeakValueDictionary[Path, filesystem.Descriptor] = weakref.WeakValueDictionary()
"""Open, locked configuration files of the saved versions that :func:`hold` keeps, by directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAdapter:
    """A version of an adapter that was saved in a directory."""

    version: int
    path: Path
    run: str
    metadata: Mapping[str, Any]
    """Metadata of the version, without the configuration of the adapter."""

    @property
    def number(self) -> int:
        """Number (1 to 2**62) that identifies this version among all adapters of an engine."""
        return (int(digest(self.path.name.encode()), 16) >> 2) + 1


def save_adapter(
    receiver: WeightReceiver,
    directory: str | os.PathLike[str],
    *,
    newer_than: int | None = None,
    timeout_s: float = 60.0,
    acknowledge: bool = True,
) -> SavedAdapter:
    """Save the newest version of an adapter in a new subdirectory of ``directory``.

    A version that is already saved is not written again. The newest two saved versions are kept.
    Older versions are removed, unless a request from `adapter_request` still uses them.

    Args:
        receiver: receiver of a store with adapters from `send_adapter`.
        directory: parent of the versions' directories, created if it does not exist. Use
            another directory for each store.
        newer_than: wait for a version above this number. Default: wait only if the store has no
            version.
        timeout_s: how long to wait for a version.
        acknowledge: whether to acknowledge the version. If False, call ``receiver.acknowledge``
            once the version is in use.

    Raises:
        WeightsMismatchError: the store holds a model, not an adapter.
        WaitTimeoutError: no version above ``newer_than`` was published in time.
        SnapshotEvictedError: the sender overwrote the version during the call; nothing was saved.
    """
    directory = options.directory("directory", directory)
    filesystem.make_directory(directory, parents=True)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=directory) as scratch:
        made = Path(scratch, "adapter")
        with (
            receiver.open(newer_than, timeout_s, acknowledge=False) as snapshot,
            receiver.reporting(snapshot.id),
        ):
            config = snapshot.metadata.get(ADAPTER_KEY)
            if not isinstance(config, dict):
                raise WeightsMismatchError(
                    "the store holds a model, not an adapter: publish an adapter with send_adapter "
                    "of dbuffer.integrations.peft, or load the model with load_into"
                )
            path = directory / f"v{snapshot.version}-{snapshot.id.run}"
            if not path.is_dir():
                _write(snapshot, config, made)
        # Rename only after the `with` block: the end of this block raises an error if the sender
        # overwrote the version during the copy.
        if made.is_dir():
            filesystem.rename_directory(made, path)
    metadata = {key: value for key, value in snapshot.metadata.items() if key != ADAPTER_KEY}
    run, version = snapshot.id
    _remove_old(path)
    if acknowledge:
        receiver.acknowledge(version)
    return SavedAdapter(version=version, path=path, run=run, metadata=metadata)


def _write(snapshot: Snapshot, config: dict[str, Any], path: Path) -> None:
    with needed_for("saving an adapter"):
        from safetensors.torch import save_file
    with filesystem.os_errors("save an adapter", path):
        path.mkdir()
        tensors = dict(snapshot.tensors)
        tensors |= {alias: tensors[name].clone() for alias, name in snapshot.aliases.items()}
        save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
        text = json.dumps(config, indent=2, sort_keys=True)
        (path / _CONFIG).write_text(text, encoding="utf-8")
        filesystem.sync_contents(path)


def hold(path: Path) -> filesystem.Descriptor | None:
    """Return a file descriptor that protects a saved version from removal until it is closed.

    Return None if another process is removing the version, or has removed it.
    """
    file = _holds.get(path)
    if file is None or not file.is_open:
        try:
            file = filesystem.open_regular(path / _CONFIG, os.O_RDONLY, owner_only=False)
        except FileNotFoundError:
            return None
        if not _lock(file, exclusive=False):  # another process is removing the version
            return None
        _holds[path] = file
    return file


def _lock(file: filesystem.Descriptor, *, exclusive: bool) -> bool:
    try:
        return filesystem.try_lock(file.number, exclusive=exclusive)
    except StoreAccessError as error:
        if error.errno not in filesystem.NO_LOCKS:
            raise
        log_once(logger, "locks do not work, so only the newest two adapters are kept: %s", error)
        return True


def _remove_old(newest: Path) -> None:
    """Remove saved versions that are not in use, except the newest two.

    Also remove incomplete directories that killed processes left behind.
    """
    saved = [path for path in newest.parent.iterdir() if _NAME.fullmatch(path.name)]
    older = sorted((path for path in saved if path != newest), key=_made_at)
    for path in older[:-1]:
        _remove_if_free(path)
    begun_before = time.time_ns() - _ABANDONED_NS
    for path in newest.parent.glob(f"{_SCRATCH}*"):
        if _made_at(path) < begun_before:
            shutil.rmtree(path, ignore_errors=True)


def _remove_if_free(path: Path) -> None:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FileNotFoundError):  # another process removed parts
            # Open for writing too: NFS locks a file exclusively only if it is open for writing.
            file = filesystem.open_regular(path / _CONFIG, os.O_RDWR, owner_only=False)
            if not _lock(stack.enter_context(file), exclusive=True):
                return
        shutil.rmtree(path, ignore_errors=True)


def _made_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # another process removed it
        return 0
