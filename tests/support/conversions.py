"""Tests that need a transformers which saves modules under other names than they have."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.find_spec("transformers")
_folders = [] if _spec is None else _spec.submodule_search_locations or []

NEEDS_CONVERSIONS = pytest.mark.skipif(
    # The file, because importing transformers takes seconds.
    not any(Path(folder, "core_model_loading.py").exists() for folder in _folders),
    reason="this transformers saves modules as they are",
)
