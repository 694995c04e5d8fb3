"""Fixtures of tests of followers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import dbuffer
from tests.support.light_engines import Scene


@pytest.fixture
def scene(
    store: Path, sender: dbuffer.WeightSender, engine_id: str, caplog: pytest.LogCaptureFixture
) -> Iterator[Scene]:
    """An engine, and a store with a sender."""
    scene = Scene(store, engine_id, caplog, sender=sender)
    yield scene
    scene.engine.endpoint.end()  # of tests whose engine outlives its followers
