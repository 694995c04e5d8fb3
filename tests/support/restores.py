"""Stores that are copied and put back, as an administrator or a job script does it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.support.stores import remove_store


def back_up(store: Path, backup: Path) -> None:
    """Copy a store with all of its files."""
    subprocess.run(["cp", "-a", store, backup], check=True)


def copy_over(store: Path, backup: Path, *options: str) -> None:
    """Put a store back by copying its backup over it: files that came later stay."""
    subprocess.run(["cp", "-a", *options, f"{backup}/.", store], check=True)


def replace(store: Path, backup: Path) -> None:
    """Put a store back by removing it and copying its backup to its place."""
    remove_store(store)
    back_up(backup, store)


def rename(store: Path, backup: Path) -> None:
    """Put a store back by renaming a copy of its backup; open files lead to the lost store."""
    copy, lost = store.with_name("copy-of-backup"), store.with_name("lost")
    back_up(backup, copy)
    store.rename(lost)
    copy.rename(store)
    shutil.rmtree(lost)


WAYS = [copy_over, replace, rename]
"""Functions that put a whole store back."""
