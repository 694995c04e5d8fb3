"""A server under load: many streams on kept-alive connections, while versions come or none do.

Whoever asks must see no error, no token of a version that does not go up, and no server that grows.
Ten minutes, in a soak.
"""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from tests.programs.vllm_load import BUSY_S, NUM_SAMPLES, PUBLISH_EVERY_S
from tests.support.engines.vllm_engines import NEEDS_VLLM, environment, observe
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = NEEDS_VLLM
SHARES = (0.5, 0.9, 0.99, 0.999)
MAX_GROWTH = 1.05
"""Of the memory and descriptors of all processes, in the second half of the time: at first the
engine meets pages of its cache that it has not used before."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = observe(
        "vllm_load.py", tmp_path_factory.mktemp("load"), env=environment(processes=True)
    )
    return found


@IN_SOAKS_ALONE
def test_nobody_sees_an_error(seen, record_property):
    assert seen["quiet"]["errors"] == seen["busy"]["errors"] == []
    for when in ("quiet", "busy"):
        gaps = sorted(seen[when]["gaps_ms"])
        told = [f"{share:.1%}: {gaps[int(share * len(gaps))]} ms" for share in SHARES]
        print(f"{when}, between two tokens of an answer: {', '.join(told)}, most: {gaps[-1]} ms")
    record_property("answers that a server under load streamed", seen["busy"]["answers"])


@IN_SOAKS_ALONE
def test_each_stream_sees_versions_in_order(seen, record_property):
    assert seen["busy"]["backwards"] == []
    assert seen["busy"]["cut short"] == 0
    assert seen["switches"] > BUSY_S / PUBLISH_EVERY_S / 20
    record_property("versions that a server under load switched to", int(seen["switches"]))


@IN_SOAKS_ALONE
def test_the_server_does_not_grow(seen):
    for samples in zip(*seen["samples"], strict=True):
        assert len(samples) >= NUM_SAMPLES - 2
        middle, last = statistics.median(samples[8:12]), statistics.median(samples[-4:])
        assert last < MAX_GROWTH * middle, samples
