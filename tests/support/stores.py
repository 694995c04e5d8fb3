"""Files of a store, stores that are put back, and disks with little room."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dbuffer.format.lineage import Run, VersionId
from dbuffer.format.manifest import Manifest
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.watcher import Watcher
from dbuffer.testing.waiting import until

SHARED_MEMORY = Path("/dev/shm")


def receiver_records(store: Path) -> dict[str, dict[str, Any]]:
    """Read the records of a store's receivers as JSON, by id.

    Of several with one id: the last update of one that lives, or else of one that has ended.
    """
    paths = (store / "receivers").glob("*.json")
    records = [json.loads(path.read_bytes()) for path in paths if path.name[0] != "."]
    records.sort(key=lambda record: (not record["has_ended"], record["updated_at"]))
    return {record["receiver"]: record for record in records}


def number_in(record: dict[str, Any], field: str) -> int | None:
    """Return the number of the version that a field of a record, as JSON, names; None: none."""
    return None if record.get(field) is None else VersionId(*record[field]).number


RUN = "0123456789abcdef"
"""Run of versions that no sender published."""


def applied(number: int) -> dict[str, Any]:
    """Return the fields of a record that tell that a version of :data:`RUN` is applied."""
    return {"applied": VersionId(RUN, number), "runs": [Run(RUN, None, "host", 1, 1.0, None)]}


def remove_store(store: Path) -> None:
    """Remove a store, to which those who follow it may write their records meanwhile."""

    def is_gone() -> bool:
        shutil.rmtree(store, ignore_errors=True)
        return not store.exists()

    until("it is removed", is_gone)


@contextlib.contextmanager
def mounted(path: Path, *options: str) -> Iterator[Path]:
    """Mount something at a new directory; skip the test if that is not permitted."""
    path.mkdir(mode=0o700)
    done = subprocess.run(["mount", *options, str(path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        # Unmount lazily, because the traceback of a caught error can keep a file open.
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def small_disk(path: Path, num_bytes: int) -> contextlib.AbstractContextManager[Path]:
    """Make a filesystem of this size."""
    return mounted(path, "-t", "tmpfs", "-o", f"size={num_bytes}", "dbuffer-test")


def fill(disk: Path, leave_bytes: int = 0) -> Path:
    """Leave that much room and no more; the file to remove to make room again."""
    path = disk / "filler"
    stats = os.statvfs(disk)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, stats.f_bavail * stats.f_frsize - leave_bytes)
    return path


def newest_version(store: Path) -> int:
    """Return the number of the newest version, or 0 before the first."""
    pointer = DoubleBuffer(store).pointer()
    return 0 if pointer is None else pointer.version


def weights_files(store: Path) -> dict[str, list[str]]:
    """The weights files in each buffer."""
    return {
        buffer: sorted(path.name for path in (store / buffer).glob("weights-*"))
        for buffer in ("A", "B")
    }


def version_files(store: Path) -> set[Path]:
    """All weights files, and all deltas."""
    return {*store.glob("[AB]/weights-*"), *store.glob("deltas/*")}


def named_files(store: Path) -> set[Path]:
    """Those that the manifests name."""
    double = DoubleBuffer(store)
    named = set()
    for buffer in ("A", "B"):
        if (manifest := double.undamaged_manifest(buffer)) is not None:
            named.add(store / (manifest.anchor_buffer or buffer) / manifest.file)
            named |= _deltas_of(store, manifest)
    for manifest in double.kept().values():
        named |= _deltas_of(store, manifest)
    return named


def _deltas_of(store: Path, manifest: Manifest) -> set[Path]:
    return {store / "deltas" / f"{version}.delta" for version in manifest.chain[1:]}


def open_files(*parts: str | Path) -> list[str]:
    """List the open files of this process whose names contain one of these."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(path.readlink()))
    return sorted(name for name in found if any(str(part) in name for part in parts))


def removed_but_mapped(store: Path) -> set[str]:
    """Removed files of a store whose room this process keeps, because it maps them."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {
        line.split(maxsplit=5)[5] for line in lines if str(store) in line and "(deleted)" in line
    }


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def contents(directory: Path, *besides: str) -> dict[str, bytes | None]:
    """Contents of all files below a directory (None for directories), but for some names."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
        if not {path.name, path.parent.name} & set(besides)
    }


def assert_tidy(store: Path) -> None:
    """Nothing lies in the store but what it needs."""
    assert version_files(store) <= named_files(store), "left over"
    assert not list(store.rglob("*.tmp"))


def make_temporaries_old(store: Path) -> None:
    """Let what a dead process left look as if it had died a while ago."""
    for path in store.rglob("*.tmp"):
        os.utime(path, (time.time() - 3600,) * 2)


def without_flock() -> None:
    """Let this process's locks succeed always and hold nobody back."""
    filesystem.try_lock = lambda descriptor, *, exclusive: True
    filesystem.lock_within = lambda descriptor, timeout_s: True
    filesystem.unlock = lambda descriptor: None


def begin_watching(directory: Path) -> None:
    """Let the thread and the descriptors of all watches be there, before a test counts its own.

    watchdog keeps them for good once a process has watched something.
    """
    with contextlib.closing(Watcher(directory, "nothing")) as watcher:
        watcher.wait(0.0)


# Stores that are copied and put back, as an administrator or a job script does it


def back_up(store: Path, backup: Path) -> None:
    """Copy a store with all of its files."""
    subprocess.run(["cp", "-a", store, backup], check=True)


def copy_over(store: Path, backup: Path, *options: str) -> None:
    """Put a store back by copying its backup over it: files that came later stay."""
    subprocess.run(["cp", "-a", *options, f"{backup}/.", store], check=True)


def replace(store: Path, backup: Path) -> None:
    """Put a store back by removing it and copying its backup to its place."""
    remove_store(store)
    try:
        back_up(backup, store)
    except subprocess.CalledProcessError:  # cp replaces no record that a receiver writes meanwhile
        copy_over(store, backup)


def rename(store: Path, backup: Path) -> None:
    """Put a store back by renaming a copy of its backup; open files lead to the lost store."""
    copy, lost = store.with_name("copy-of-backup"), store.with_name("lost")
    back_up(backup, copy)
    store.rename(lost)
    copy.rename(store)
    shutil.rmtree(lost)


WAYS = [copy_over, replace, rename]
"""Functions that put a whole store back."""
