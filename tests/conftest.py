"""Fixtures: a store in shared memory, where stores live, and one on a disk."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import SHARED_MEMORY


@pytest.fixture
def shm_path() -> Iterator[Path]:
    """A directory of the test's own on tmpfs, removed afterwards."""
    if not SHARED_MEMORY.is_dir():
        pytest.skip("this system has no /dev/shm")
    path = Path(tempfile.mkdtemp(prefix="dbuffer-test-", dir=SHARED_MEMORY))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def store(shm_path: Path) -> Path:
    """Where a store in shared memory will be; nothing is there yet."""
    return shm_path / "store"


@pytest.fixture(params=["tmpfs", "disk"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The same, in shared memory and in the system's directory for temporary files."""
    if request.param == "disk":
        return tmp_path / "store"
    path: Path = request.getfixturevalue("store")
    return path
