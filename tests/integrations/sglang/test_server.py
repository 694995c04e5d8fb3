"""An SGLang server that follows a store, driven in the background.

The follower runs in this process, which has no SGLang. The model reveals its version: an answer's
tokens say from which weights each of them came, and a token of two versions' weights is 0.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.integrations.sglang import follow, versions_of
from dbuffer.testing.waiting import until
from tests.support import ROOT
from tests.support.engines.sglang_engines import NEEDS_SGLANG, WAIT_S, Server
from tests.support.engines.tiny_models import revealing_weights, save_revealing, token_of
from tests.support.ports import free_port
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = [*NEEDS_SGLANG, IN_SOAKS_ALONE, pytest.mark.timeout(3 * WAIT_S)]

LOADER_FLAG = ["--custom-weight-loader", "dbuffer.integrations.sglang.load_from_store"]
LONG = list(range(1, 60))
START = 100


class World:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.next_version = 1
        self.store = path / "store"
        self.checkpoint = save_revealing(START, path)
        self.port = free_port()
        self.sender = dbuffer.WeightSender(self.store, dtype=torch.bfloat16)
        self.server = self.start()

    def start(self, *flags: str) -> Server:
        log = self.path / "server.log"
        server = Server(self.checkpoint, log, *(flags or LOADER_FLAG), port=self.port)
        try:
            server.wait_ready()
        except BaseException:
            server.kill()
            raise
        return server

    def publish(self) -> int:
        version = self.next_version
        self.next_version += 1
        return self.sender.send(revealing_weights(version), version=version).version


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("server"))
    yield world
    world.server.kill()
    world.sender.close()


def test_server_answers_from_each_version_and_says_so(world):
    assert world.server.generate(LONG)["output_ids"] == [token_of(START)] * 12
    with follow(world.server.url, world.store, engine_id="engine") as follower:
        for _ in range(3):
            version = world.publish()
            follower.wait_applied(version)
            world.sender.wait_applied(version, receivers=["engine"], timeout_s=WAIT_S)
            # Twice: the first answer fills the cache again, and the second is out of it.
            for _ in range(2):
                answer = world.server.generate(LONG)
                assert answer["output_ids"] == [token_of(version)] * 12
                assert answer["meta_info"]["weight_version"] == str(version)
            assert answer["meta_info"]["cached_tokens"] > 50


def test_tokens_of_requests_in_flight_are_of_the_version_that_is_said(world):
    answers: list[dict[str, Any]] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            answers.append(world.server.generate(LONG, tokens=100))

    with (
        follow(world.server.url, world.store, engine_id="engine") as follower,
        ThreadPoolExecutor(3) as pool,
    ):
        asking = [pool.submit(ask) for _ in range(3)]
        for _ in range(12):
            follower.wait_applied(world.publish())
        stop.set()
        for future in asking:
            future.result(WAIT_S)
    spans = [span for answer in answers for span in versions_of(answer)]
    assert len({span.version for span in spans}) > 5
    assert any(len(versions_of(answer)) > 1 for answer in answers)
    for answer in answers:
        for span in versions_of(answer):
            assert set(answer["output_ids"][span.start : span.end]) == {token_of(span.version)}


def test_aborted_requests_have_tokens_of_one_version(world):
    with (
        follow(world.server.url, world.store, pause="abort", engine_id="engine") as follower,
        ThreadPoolExecutor(1) as pool,
    ):
        before = follower.wait_applied(world.next_version - 1)
        asked = pool.submit(world.server.generate, LONG, 190)
        until("it is generating", lambda: is_generating(world.server), WAIT_S)
        follower.wait_applied(world.publish())
        answer = asked.result(WAIT_S)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert set(answer["output_ids"]) <= {token_of(before)}


def test_pause_and_session_of_a_killed_follower_are_ended_by_the_next(world):
    client = world.server.client
    assert client.post("/pause_generation", json={"mode": "retract"}).status_code == 200
    assert client.post("/begin_weight_update", json={"selector": "draft"}).status_code == 200
    with follow(world.server.url, world.store, engine_id="engine") as follower:
        version = world.publish()
        follower.wait_applied(version)
        assert world.server.generate(LONG)["output_ids"] == [token_of(version)] * 12


def test_example_samples_with_the_newest_weights_each_time(world, tmp_path):
    example = ROOT / "examples" / "sglang_server.py"
    command = [sys.executable, str(example), str(world.checkpoint), world.server.url]
    command.append(str(tmp_path / "store"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "".join(
        f"step {step}: rollouts of version {step + 1}\n" for step in range(3)
    )


def is_generating(server: Server) -> bool:
    loads = server.client.get("/server_info").json()["internal_states"][0]
    return float(loads.get("last_gen_throughput") or 0) > 0
