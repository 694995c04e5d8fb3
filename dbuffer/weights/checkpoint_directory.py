"""`send_saved`: publishes each checkpoint that a trainer saves into a directory.

A checkpoint is finished if all its files come from one save and have not changed for a while. Files
of two saves can have the same names and sizes, so only the files' times distinguish the saves. Each
save rewrites all files. If a checkpoint has several files, the trainer writes their index last.
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

from dbuffer.errors import DBufferError, InvalidWeightsError, StoreAccessError
from dbuffer.runtime.messages import listed
from dbuffer.runtime.timing import TIMING
from dbuffer.runtime.trouble import RetryLoop
from dbuffer.store.buffer import Contents, DoubleBuffer
from dbuffer.weights.checkpoint import INDEX, FileState, checkpoint_files, state_of

logger = logging.getLogger(__name__)

SAVED_AT = "saved_at"
"""Metadata key: time of the last write to a version's checkpoint, in seconds since the epoch."""

Order: TypeAlias = tuple[float, int]
"""Sort key of checkpoints: time of the last write to a checkpoint, and the checkpoint's step."""

_STEP = re.compile(r"(?:checkpoint|(?:global_)?step)[-_](\d{1,18})")
_PART = re.compile(r"-of-\d+\.safetensors")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Checkpoint, with the state of its files when the directory was scanned."""

    path: Path
    step: int | None
    """Training step in the name of the checkpoint's directory, or None if the name has no step."""
    files: Mapping[Path, FileState]
    """State of each weights file, and of the index file if it exists."""

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def metadata(self) -> dict[str, Any]:
        saved_at = max(state.modified_at for state in self.files.values())
        return {SAVED_AT: saved_at} | ({} if self.step is None else {"step": self.step})

    @property
    def order(self) -> Order:
        return order_of(self.metadata)

    @property
    def has_changed(self) -> bool:
        """Whether a file was added, written or removed since the directory was scanned."""
        try:
            return _files_in(self.path) != self.files
        except OSError:  # the checkpoint was just removed
            return True

    def require_one_save(self, last: Order) -> None:
        """Refuse a checkpoint that is not finished or that mixes the files of two saves.

        ``last``: sort key of the checkpoint that was published last.
        """
        names = list(checkpoint_files(self.path))
        if missing := [file.name for file in names if file not in self.files]:
            raise InvalidWeightsError(f"{INDEX} names files that do not exist: {listed(missing)}")
        index = self.files.get(self.path / INDEX)
        if index is None and (len(names) > 1 or _PART.search(names[0].name)):
            raise InvalidWeightsError(
                f"the checkpoint has several files, but no {INDEX}, so its save is not complete"
            )
        for file in names:
            modified_at = self.files[file].modified_at
            if index is not None and modified_at > index.modified_at:
                raise InvalidWeightsError(
                    f"{file.name} was written after {INDEX}, so it may be from another save: save "
                    "the checkpoint again or, if its files belong together, touch "
                    f"{self.path / INDEX}"
                )
            if self.step is None and modified_at <= last[0]:  # each save overwrites these files
                raise InvalidWeightsError(
                    f"{file.name} is older than the checkpoint that was published last, so it may "
                    "be from an earlier save than the other files: save the checkpoint again"
                )


def send_saved(
    directory: Path,
    store: DoubleBuffer,
    send: Callable[[Checkpoint, dict[str, Any]], None],
    stop: threading.Event,
    *,
    count: int | None = None,
) -> None:
    """Call ``send`` for each checkpoint that is saved into a directory, until ``stop`` is set.

    The directory is itself a checkpoint, which each save overwrites, or it contains a directory for
    each checkpoint, such as ``checkpoint-80`` or ``step_80``.

    Args:
        directory: the directory to watch, which may not exist yet.
        store: store whose versions show which checkpoint was published last.
        send: function that publishes a checkpoint with the given metadata. If ``send`` raises an
            `InvalidWeightsError`, the error is logged once. A checkpoint is tried again if a file
            cannot be read, or if the store has no room or refuses access.
        stop: event that makes `send_saved` return.
        count: number of published checkpoints after which `send_saved` returns.
    """
    changes: dict[Path, tuple[Checkpoint, float]] = {}
    num_sent = 0
    last = _newest_order(store)
    problems: dict[Path, str] = {}
    retries = RetryLoop(logger, failed=f"publishing checkpoints of {directory}: ", stop=stop)

    def due_after(checkpoint: Checkpoint, error: Exception) -> float:
        """Log an error, and return the time at which the checkpoint is to be tried again."""
        if isinstance(error, StoreAccessError) or isinstance(error.__cause__, OSError):
            with retries.attempt():  # which logs the error, and sets the backoff
                raise error
            return time.monotonic() + retries.retry_s
        if problems.get(checkpoint.path) != str(error):
            logger.warning("%s is not published: %s", checkpoint.path, str(error))
            problems[checkpoint.path] = str(error)
        return math.inf

    missing = "" if directory.exists() else ", which does not exist yet"
    logger.info("publishing each checkpoint that is saved into %s%s", directory, missing)
    while True:
        settled, changes = _settled(directory, changes, last)
        for checkpoint in settled:
            if checkpoint.has_changed:  # while an earlier checkpoint was sent
                continue
            try:
                checkpoint.require_one_save(last)
                send(checkpoint, checkpoint.metadata)
            except (InvalidWeightsError, StoreAccessError) as error:
                if not _is_published(checkpoint, store):
                    if not checkpoint.has_changed:  # else it was read in the middle of a save
                        changes[checkpoint.path] = checkpoint, due_after(checkpoint, error)
                    continue
                logger.warning("%s", str(error))  # a later step failed, such as a flush
            retries.succeeded(f"publishing checkpoints of {directory}")
            for other, due in changes.values():
                if last < other.order < checkpoint.order and due < math.inf:
                    message = "%s is not published: %s, a later checkpoint, was published first"
                    logger.warning(message, other.path, checkpoint.path)
            last, num_sent = checkpoint.order, num_sent + 1
            problems.pop(checkpoint.path, None)
            if stop.is_set() or num_sent == count:
                return
        if stop.wait(TIMING.settle_s / 2):
            return


def _newest_order(store: DoubleBuffer) -> Order:
    published = [manifest.metadata for _, manifest in Contents(store).published()]
    return max(map(order_of, published), default=order_of({}))


def _is_published(checkpoint: Checkpoint, store: DoubleBuffer) -> bool:
    with contextlib.suppress(DBufferError, OSError):
        return _newest_order(store) >= checkpoint.order
    return False


def order_of(metadata: Mapping[str, Any]) -> Order:
    """Return the sort key of a version that was published from a checkpoint: time saved, and step.

    Both are in the version's metadata. A version from another source gets the lowest key.
    """
    saved_at, step = metadata.get(SAVED_AT), metadata.get("step")
    if not isinstance(saved_at, float):
        return 0.0, -1
    return saved_at, step if type(step) is int else -1


def _settled(
    directory: Path, before: Mapping[Path, tuple[Checkpoint, float]], last: Order
) -> tuple[list[Checkpoint], dict[Path, tuple[Checkpoint, float]]]:
    """Return checkpoints after ``last`` that have stopped changing, in the order of their saves.

    The second result is a mapping for the next call's ``before``. It maps each checkpoint after
    ``last`` to the time at which it is due: `Timing.settle_s` after its last change, unless
    ``before`` has another time for it.
    """
    now = time.monotonic()
    settled, changes = [], {}
    for checkpoint in _checkpoints_in(directory):
        if checkpoint.order <= last:
            continue
        same, due = before.get(checkpoint.path, (None, 0.0))
        due = due if same == checkpoint else now + TIMING.settle_s
        if now >= due:
            settled.append(checkpoint)
        changes[checkpoint.path] = checkpoint, due
    return sorted(settled, key=lambda checkpoint: checkpoint.order), changes


def _checkpoints_in(directory: Path) -> Iterator[Checkpoint]:
    steps: dict[Path, int | None] = {directory: None}
    with contextlib.suppress(OSError):  # the directory does not exist yet
        for path in directory.iterdir():
            if match := _STEP.fullmatch(path.name):
                steps[path] = int(match[1])
    for path, step in steps.items():
        with contextlib.suppress(OSError):  # the checkpoint was just removed
            if files := _files_in(path):
                yield Checkpoint(path, step, files)


def _files_in(path: Path) -> dict[Path, FileState]:
    """Return the state of each weights file in a directory, and of the index file if it exists."""
    states = {file: state_of(file) for file in (*path.glob("*.safetensors"), path / INDEX)}
    return {file: state for file, state in states.items() if state is not None}
