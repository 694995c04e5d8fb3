"""`send_saved`: publishes the checkpoints that a trainer saves into a directory, once finished.

A checkpoint is finished when its files have not changed for a while, and are of one save. Files of
two saves have the same names and sizes, so only their times tell them apart: trainers write the
index of several files last, and write all files again. That the files have the sizes in their
headers is checked when they are read.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from dbuffer.errors import InvalidWeightsError
from dbuffer.runtime.messages import listed
from dbuffer.runtime.timing import TIMING
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.contents import Contents
from dbuffer.store.watcher import Watcher
from dbuffer.weights.checkpoint import INDEX, FileState, checkpoint_files, state_of

logger = logging.getLogger(__name__)

SAVED_AT = "saved_at"
"""Metadata of a version: time of the last write to its checkpoint, in seconds since the epoch."""

Order: TypeAlias = tuple[float, int]
"""Time of the last write to a checkpoint, and its step."""

_STEP = re.compile(r"(?:checkpoint|(?:global_)?step)[-_](\d{1,18})")
"""Name of a checkpoint's directory among others."""
_PART = re.compile(r"-of-\d+\.safetensors")
"""End of the name of one file of several."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint, and the state of its files at one moment."""

    path: Path
    step: int | None
    """Step in the name of its directory."""
    files: Mapping[Path, FileState]
    """Its weights, and their index if there is one."""

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of its version."""
        saved_at = max(state.modified_at for state in self.files.values())
        return {SAVED_AT: saved_at} | ({} if self.step is None else {"step": self.step})

    @property
    def order(self) -> Order:
        return order_of(self.metadata)

    def require_one_save(self, last: Order) -> None:
        """Check that its files are there, and of one save.

        ``last``: place in the order of the checkpoint that was published last.

        Raises:
            InvalidWeightsError: the checkpoint is not finished, or is a mix of two.
        """
        names = list(checkpoint_files(self.path))
        if missing := [file.name for file in names if file not in self.files]:
            raise InvalidWeightsError(f"{INDEX} names files that are not there: {listed(missing)}")
        index = self.files.get(self.path / INDEX)
        if index is None and (len(names) > 1 or _PART.search(names[0].name)):
            raise InvalidWeightsError(f"it is in several files, and there is no {INDEX}")
        for file in names:
            modified_at = self.files[file].modified_at
            if index is not None and modified_at > index.modified_at:
                raise InvalidWeightsError(
                    f"{file.name} was written after {INDEX}, and may be of another save (if the "
                    f"files belong together: touch {self.path / INDEX})"
                )
            if self.step is None and modified_at <= last[0]:  # in a directory that is written over
                raise InvalidWeightsError(
                    f"{file.name} is older than the checkpoint that was published last, and may be "
                    "of another save"
                )


class CheckpointDirectory:
    """Checkpoints in a directory, saved after the checkpoint that was published last.

    The directory is a checkpoint that is written over, or has checkpoints in directories such as
    ``checkpoint-80`` and ``step_80``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._settling: dict[Path, tuple[Checkpoint, float]] = {}
        """Checkpoints, and since when each is as it is, by `time.monotonic`; infinite: settled."""

    def settled(self, last: Order) -> list[Checkpoint]:
        """Return checkpoints once they have settled, in order; after a change, again.

        ``last``: place in the order of the checkpoint that was published last.
        """
        before, self._settling = self._settling, {}
        settled, now = [], time.monotonic()
        for checkpoint in _checkpoints_in(self._path):
            if checkpoint.order <= last:
                continue
            same, since = before.get(checkpoint.path, (None, now))
            since = since if same == checkpoint else now
            if now - since >= TIMING.settle_s:
                settled.append(checkpoint)
                since = math.inf
            self._settling[checkpoint.path] = checkpoint, since
        return sorted(settled, key=lambda checkpoint: checkpoint.order)


def send_saved(
    directory: Path,
    store: DoubleBuffer,
    send: Callable[[Path, dict[str, Any]], None],
    stop: threading.Event,
    *,
    count: int | None = None,
) -> None:
    """Let a function publish each checkpoint that is saved into a directory.

    Args:
        directory: the directory, which may come later.
        store: the store, whose versions say which checkpoint was published last.
        send: publishes a checkpoint with this metadata. Its `InvalidWeightsError` is logged, once
            while it is the same.
        stop: ends it.
        count: number of checkpoints that end it.
    """
    checkpoints, num_sent = CheckpointDirectory(directory), 0
    published = [manifest.metadata for _, manifest in Contents(store).published()]
    last = max(map(order_of, published), default=order_of({}))
    problems: dict[Path, str] = {}
    logger.info("publishing each checkpoint that is saved into %s", directory)
    with contextlib.closing(Watcher(directory)) as watcher:
        while True:
            for checkpoint in checkpoints.settled(last):
                try:
                    checkpoint.require_one_save(last)
                    send(checkpoint.path, checkpoint.metadata)
                except InvalidWeightsError as error:
                    if problems.get(checkpoint.path) != str(error):
                        logger.warning("%s is not published: %s", checkpoint.path, str(error))
                    problems[checkpoint.path] = str(error)
                    continue
                last, num_sent = checkpoint.order, num_sent + 1
                problems.pop(checkpoint.path, None)
                if stop.is_set() or num_sent == count:
                    return
            if stop.is_set():
                return
            watcher.wait(TIMING.settle_s / 2)


def order_of(metadata: Mapping[str, Any]) -> Order:
    """Return the place of a version's checkpoint in the order of saves; the first, if it has none.

    Two small checkpoints may be saved at one time.
    """
    saved_at, step = metadata.get(SAVED_AT), metadata.get("step")
    if not isinstance(saved_at, float):
        return 0.0, -1
    return saved_at, step if type(step) is int else -1


def _checkpoints_in(directory: Path) -> Iterator[Checkpoint]:
    steps: dict[Path, int | None] = {directory: None}
    with contextlib.suppress(OSError):  # not there yet
        for path in directory.iterdir():
            if match := _STEP.fullmatch(path.name):
                steps[path] = int(match[1])
    for path, step in steps.items():
        with contextlib.suppress(OSError):  # removed since it was listed
            weights = list(path.glob("*.safetensors"))
            states = {file: state_of(file) for file in (*weights, path / INDEX)}
            if files := {file: state for file, state in states.items() if state is not None}:
                yield Checkpoint(path, step, files)
