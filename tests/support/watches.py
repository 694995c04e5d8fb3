"""`begin_watching`: what watchdog keeps for good once a process has watched something."""

from __future__ import annotations

import contextlib
from pathlib import Path

from dbuffer.store.watcher import Watcher


def begin_watching(directory: Path) -> None:
    """Let the thread and the descriptors of all watches be there, before a test counts its own."""
    with contextlib.closing(Watcher(directory / "nothing")) as watcher:
        watcher.wait(0.0)
