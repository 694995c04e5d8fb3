"""An adapter out of a store, saved as a directory that engines and peft read.

vLLM's ``LoRARequest(lora_path=...)``, SGLang's ``lora_paths`` and peft's ``from_pretrained`` take a
directory with ``adapter_config.json`` and ``adapter_model.safetensors``. Each version gets one of
its own, which appears whole or not at all, and is never written again.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbuffer.errors import StoreAccessError, WeightsMismatchError
from dbuffer.format.layout import digest
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.receive.snapshot import Snapshot
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
"""Age at which an unfinished directory counts as a killed process's."""

_holds: weakref.WeakValueDictionary[Path, filesystem.Descriptor] = weakref.WeakValueDictionary()
"""Open configurations of the versions that :func:`hold` keeps, by their directories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAdapter:
    """A version of an adapter in a directory."""

    version: int
    path: Path
    """Directory of the version. Its name is unique, also across stores."""

    @property
    def number(self) -> int:
        """A number unique to this version, from 1 to 2**62, for engines that number adapters."""
        return (int(digest(self.path.name.encode()), 16) >> 2) + 1


def save_adapter(
    receiver: WeightReceiver,
    directory: str | os.PathLike[str],
    *,
    newer_than: int | None = None,
    timeout_s: float = 60.0,
) -> SavedAdapter:
    """Save the newest version of an adapter below ``directory``, and acknowledge it.

    A version that was saved before is not written again. The newest two versions are kept, and an
    older one while a request that `adapter_request` made names it.

    Args:
        receiver: of a store that `send_adapter` publishes into.
        directory: made, if it is not there. For this store alone.
        newer_than: wait for a version above this one. Default: save any version.
        timeout_s: how long to wait for it.

    Raises:
        WeightsMismatchError: the store holds no adapter.
        WaitTimeoutError: no such version came in time.
        SnapshotEvictedError: saving took longer than the sender waits; nothing was saved.
        StoreFullError, StoreAccessError: the filesystem refused.
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
                    "the store holds a model, not an adapter: publish one with send_adapter of "
                    "dbuffer.integrations.peft, or load the model with load_into"
                )
            path = directory / f"v{snapshot.version}-{snapshot.id.run}"
            if not path.is_dir():
                _write(snapshot, config, made)
        # After the snapshot was left: only then is it known that no writer took its buffer.
        if made.is_dir():
            filesystem.rename_directory(made, path)
    saved = SavedAdapter(version=snapshot.version, path=path)
    _remove_old(path)
    receiver.acknowledge(saved.version)
    return saved


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
    """Keep a saved version's files while the result is in use; return None if they are gone."""
    file = _holds.get(path)
    if file is None or not file.is_open:
        try:
            file = filesystem.open_regular(path / _CONFIG, os.O_RDONLY, owner_only=False)
        except FileNotFoundError:
            return None
        if not _lock(file, exclusive=False):  # just being removed
            return None
        _holds[path] = file
    return file


def _lock(file: filesystem.Descriptor, *, exclusive: bool) -> bool:
    try:
        return filesystem.try_lock(file.number, exclusive=exclusive)
    except StoreAccessError as error:
        if error.errno not in filesystem.NO_LOCKS:
            raise
        log_once(logger, "only the newest two adapters are kept: %s", error)
        return True


def _remove_old(newest: Path) -> None:
    """Remove versions but the newest two and those in use, and files of killed processes."""
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
        with contextlib.suppress(FileNotFoundError):  # partly removed
            # NFS locks a file exclusively only if it was opened for writing.
            file = filesystem.open_regular(path / _CONFIG, os.O_RDWR, owner_only=False)
            if not _lock(stack.enter_context(file), exclusive=True):
                return
        shutil.rmtree(path, ignore_errors=True)


def _made_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # another process was faster
        return 0
