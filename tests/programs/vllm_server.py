"""Program of `test_server.py`, which says what it shows."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.integrations.vllm import follow
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing.waiting import until
from dbuffer.tools import cli
from tests.support.engines import preforked
from tests.support.engines.patch_trainers import all_of
from tests.support.engines.tiny_models import (
    make_model,
    revealing_weights,
    save_revealing,
    token_of,
)
from tests.support.engines.vllm_engines import EXTENSION, TOLD_CHARACTERS, judge
from tests.support.engines.vllm_servers import (
    API_KEY,
    BACKEND_FLAGS,
    RECOVERY_S,
    WAIT_S,
    Clients,
    PausedError,
    Server,
    question,
    tokens_of,
)
from tests.support.object_server import RunningServer
from tests.support.object_store import Exchange, Fault, FaultyProxy, status
from tests.support.patterns import assert_same
from tests.support.ports import free_port
from tests.support.soak import is_soak
from tests.support.stores import newest_version
from tests.support.waiting import error_of

ENGINE_TIMEOUT_S = 10
LONG_TIMEOUT_S = 120
EXIT_FAILED, EXIT_TIMEOUT = 1, 3
FULL_SPEED = (150, 300) if is_soak() else (25, 50)
"""Versions that two trainers come to, one after the other."""
BAD = 3
"""Version that the canary's probe refuses."""
DIVERGES_EVERY = 5
EXPORTED = 400
"""Version of another run, with which a server starts."""


class FollowProgram:
    def __init__(self, store: Path, url: str, directory: Path, **options: Any) -> None:
        number = len(list(directory.glob("follower-*.out")))
        self._output = directory / f"follower-{number}.out"
        arguments = ("follow", str(store), url, json.dumps(options))
        self.process = start_program(directory, *arguments, log=self._output)

    def versions(self) -> list[int]:
        whole = self._output.read_text().rpartition("\n")[0]
        return [int(line) for line in whole.splitlines() if line.isdecimal()]

    def output(self) -> str:
        return " ".join(self._output.read_text().split())

    def wait_version(self, version: int) -> None:
        until(
            f"the follower prints version {version}",
            lambda: any(served >= version for served in self.versions()),
            WAIT_S,
            0.02,
        )

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(WAIT_S)


def follow_server(directory: Path, store: str, url: str, options: str) -> None:
    """Follow until killed. The canary's probe waits while the file ``hold`` exists."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    served, never, told = None, threading.Event(), json.loads(options)

    def probe(url: str) -> str | None:
        if (directory / "hold").exists():
            (directory / "begun").touch()
            until("it may go on", lambda: not (directory / "hold").exists(), WAIT_S)
        return "it talks nonsense" if answer_of(url) == tokens_of(BAD) else None

    told["canary"] = probe if told.get("engine_id") == "canary" else None
    with (
        contextlib.suppress(SystemExit),
        follow(url, store, api_key=API_KEY, **told) as follower,
    ):
        while not never.wait(0.005):
            if follower.applied != served:
                served = follower.applied
                print(served, flush=True)


def answer_of(url: str) -> Any:
    import requests

    key = {"Authorization": f"Bearer {API_KEY}"}
    response = requests.post(f"{url}/v1/completions", json=question(5), headers=key)
    return response.json()["choices"][0]["token_ids"]


def passing(action: Callable[[], object]) -> Fault:
    """Return a fault that does something before the call is passed on."""

    def fault(exchange: Exchange) -> None:
        action()
        exchange.answer(exchange.forward())

    return fault


def publish(store: Path, count: int) -> None:
    """A trainer: publish the next versions at full speed, then wait to be killed.

    Its model begins with the weights of the trainer before. It diverges now and then, which its
    sender refuses, and so do casts to a dtype with less range.
    """
    model, last = make_model("qwen3", 0), newest_version(store)
    if last:
        with dbuffer.WeightReceiver(store) as receiver:
            assert receiver.load_into(model) == last
        assert_same(dict(model.state_dict()), revealing_weights(last))
    with dbuffer.WeightSender(store, dtype=torch.float16) as sender:
        large = revealing_weights(last + 1)
        large["model.norm.weight"][0] = 1e5
        assert "model.norm.weight" in str(error_of(lambda: sender.send(large)))
    with dbuffer.WeightSender(store, require_finite=True) as sender:
        for version in range(last + 1, last + 1 + count):
            model.load_state_dict(revealing_weights(version))
            if version % DIVERGES_EVERY == 0:
                diverged = revealing_weights(version)
                diverged["model.norm.weight"][0] = float("nan")
                error = error_of(lambda: sender.send(diverged, version=version))  # noqa: B023
                assert "of 'model.norm.weight' are NaN or infinite" in str(error)
            sender.send(model, version=version, metadata={"evaluate": version})
        signal.pause()


def start_program(directory: Path, *arguments: str, log: Path | None = None) -> preforked.Process:
    command = [__file__, str(directory), *arguments]
    log = log or directory / f"{arguments[0]}.log"
    return preforked.start(command, env=dict(os.environ), output=log)


# A server that follows by itself.

DEVELOPMENT_ROUTES = [
    *("POST /pause", "POST /resume", "POST /collective_rpc", "POST /reset_prefix_cache"),
    *("POST /init_weight_transfer_engine", "POST /start_weight_update", "POST /update_weights"),
    *("POST /finish_weight_update", "POST /update_weight_version"),
    *("GET /is_paused", "GET /weight_info", "GET /server_info"),
]


class Inside:
    """The program for a server with the middleware, no development mode and a dummy's weights."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = directory / "store"
        self.checkpoint = save_revealing(0, directory)

    def run(self) -> None:
        evaluation = {"when": {"evaluate": 1}, "until_done": True}
        server = self.start(**evaluation, poll_interval_s=0.05)
        with dbuffer.WeightSender(self.store) as sender:
            self.wait_for_a_version(server, sender)
            self.have_no_route_of_development_mode(server)
            self.follow_each_publish(server, sender)
            self.log_each_switch(server)
            assert self.verify(server) == (EXIT_TIMEOUT, [False])  # which compares nothing
            self.keep_until_done(server, sender)
            self.skip_one(server, sender)
        last = 7
        server.kill()
        with dbuffer.WeightSender(self.store) as sender:
            self.publish(sender, last + 1)
            drafts = self.directory / "drafts"
            draft = {"method": "draft_model", "model": str(self.checkpoint)}
            speculates = json.dumps(draft | {"num_speculative_tokens": 2})
            flags = ["--no-enable-prefix-caching", "--speculative-config", speculates]
            how = {"pause": "in_place", "attest": True, "draft_store": str(drafts)}
            how |= {"timeout_s": LONG_TIMEOUT_S}
            server = self.start(*flags, development=True, **how)
            server.wait_ready()
            assert server.answer() == tokens_of(last + 1)
            self.have_no_second_follower(server)
            self.follow_one(server, sender, last + 2)
            self.follow_a_draft(server, drafts, last + 2)
            self.answer_for_its_weights(server, last + 1)
            last = self.go_on_in_place(server, sender, last + 2)
            self.end_while_versions_come(server, sender, last)

    def start(
        self,
        *flags: str,
        timeout_s: int = ENGINE_TIMEOUT_S,
        development: bool = False,
        **options: Any,
    ) -> Server:
        flags = (*BACKEND_FLAGS, "--load-format", "dummy", *flags)
        options |= {"store": self.store, "timeout_s": timeout_s}
        return Server(self.checkpoint, self.directory, *flags, development=development, **options)

    def publish(self, sender: dbuffer.WeightSender, version: int) -> None:
        sender.send(revealing_weights(version), version=version, metadata={"evaluate": version})

    def follow_one(self, server: Server, sender: dbuffer.WeightSender, version: int) -> None:
        self.publish(sender, version)
        sender.wait_applied(version, timeout_s=WAIT_S)
        assert server.answer() == tokens_of(version)

    def keep_until_done(self, server: Server, sender: dbuffer.WeightSender) -> None:
        """Serve version 5 until a client is done with it."""
        assert server.status_of("GET", "/weights/done") == 405
        self.publish(sender, 6)
        with contextlib.suppress(dbuffer.WaitTimeoutError):
            sender.wait_applied(6, timeout_s=1.0)
        assert server.answer() == tokens_of(5)
        assert server.client.post("/weights/done").json()["version"] == 5
        sender.wait_applied(6, timeout_s=WAIT_S)
        assert server.answer() == tokens_of(6)

    def skip_one(self, server: Server, sender: dbuffer.WeightSender) -> None:
        """Skip a version whose metadata lacks the key."""
        [engine] = sender.receiver_lags()
        assert server.client.post("/weights/done").json()["version"] == 6
        sender.send(revealing_weights(7), version=7)
        with contextlib.suppress(dbuffer.ReceiverFailedError):
            sender.wait_applied(7, receivers=[engine], timeout_s=WAIT_S)
            raise AssertionError("the sender was not told")
        time.sleep(1.0)
        assert server.answer() == tokens_of(6)
        assert sender.receiver_lags() == {}

    def wait_for_a_version(self, server: Server, sender: dbuffer.WeightSender) -> None:
        assert not server.is_ready_without_version()
        self.publish(sender, 1)
        server.wait_ready()
        log = server.log().splitlines()
        [line] = [line for line in log if "waiting" in line and "for a version" in line]
        assert f"waiting {ENGINE_TIMEOUT_S} s (timeout_s)" in line
        assert server.answer() == tokens_of(1)

    def have_no_route_of_development_mode(self, server: Server) -> None:
        for route in DEVELOPMENT_ROUTES:
            assert server.status_of(*route.split()) == 404
        program = FollowProgram(self.store, server.url, self.directory)
        assert program.process.wait(WAIT_S) == EXIT_FAILED
        assert "VLLM_SERVER_DEV_MODE=1" in program.output()
        assert "--middleware dbuffer.integrations.vllm.FollowStore" in program.output()

    def have_no_second_follower(self, server: Server) -> None:
        program = FollowProgram(self.store, server.url, self.directory)
        assert program.process.wait(WAIT_S) == EXIT_FAILED
        assert "follows a store by itself (FollowStore)" in program.output()

    def follow_each_publish(self, server: Server, sender: dbuffer.WeightSender) -> None:
        for version in range(2, 6):
            assert server.status_of("POST", "/weights/done") == 200
            self.follow_one(server, sender, version)
        # The store knows of a switch a moment before it is counted.
        until("five pauses", lambda: server.metrics()["pause_seconds_count"] == 5, WAIT_S, 0.05)
        metrics = server.metrics()
        num_bytes = sum(weight.nbytes for weight in revealing_weights(0).values())
        for name in ("stage_seconds_sum", "pause_seconds_sum"):
            assert 0 < metrics.pop(name) < 5 * WAIT_S
        assert metrics == {
            "following": 1,
            "version_applied": 5,
            "version_available": 5,
            "lag_versions": 0,
            "lag_seconds": 0,
            "run": 1,
            "bytes_total": 5 * num_bytes,
            "stage_seconds_count": 5,
            "pause_seconds_count": 5,
            "failures_total": 0,
        }

    def log_each_switch(self, server: Server) -> None:
        files = r"\[(follower|reporting)\.py:"
        ours = [line for line in server.log().splitlines() if re.search(files, line)]
        format_of_vllm = re.compile(rf"INFO \d\d-\d\d \d\d:\d\d:\d\d {files}\d+\] ")
        assert all(format_of_vllm.search(line) for line in ours)
        began, *switches = ours
        outside = (
            "and serves weights from outside the store (the engine's checkpoint, or another load)"
        )
        assert f"{outside} until a version is there and loaded" in began
        told = r"serves version (\d+): .*staged in [\d.]+ ms.*paused for"
        assert [re.findall(told, line) for line in switches] == [[str(v)] for v in range(1, 6)]

    def follow_a_draft(self, server: Server, store: Path, version: int) -> None:
        """Serve a draft from a store of its own, which proposes the tokens of ``version``."""
        assert server.answer() == tokens_of(version)
        assert vllm_metric(server, "spec_decode_num_accepted_tokens_total") == 0
        with dbuffer.WeightSender(store) as sender:
            sender.send(revealing_weights(version))
            sender.wait_applied(1, timeout_s=WAIT_S)
        assert server.answer() == tokens_of(version)
        assert vllm_metric(server, "spec_decode_num_accepted_tokens_total") > 0

    def answer_for_its_weights(self, server: Server, older: int) -> None:
        until("the weights are compared", lambda: self.verify(server) == (0, [True]), WAIT_S)
        response = server.client.post("/v1/completions", json=question(5))
        assert response.headers["x-weight-verified"] == "true"
        [replica] = server.client.get("/ready").json()["replicas"]
        records = DoubleBuffer(self.store).receivers()
        assert replica["attested_at"] in {record.attested_at for record in records}
        assert self.verify(server, "--version", str(older)) == (EXIT_TIMEOUT, [True])

    def verify(self, server: Server, *options: str) -> tuple[int, list[bool]]:
        """Ask the server by the command; the exit code, and whether each replica is attested."""
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code = cli.run(["verify", str(self.store), "--engine", server.url, "--json", *options])
        replicas = json.loads(output.getvalue())["replicas"]
        assert all(replica["is_of_store"] for replica in replicas)
        return code, [replica["is_attested"] for replica in replicas]

    def go_on_in_place(self, server: Server, sender: dbuffer.WeightSender, version: int) -> int:
        """Switch while an answer is on its way, of which nothing is computed again.

        Returns:
            The last version.
        """
        spans: list[dict[str, Any]] = []
        asked = question(5) | {"max_tokens": 240}
        headers = {"X-Weight-Versions": "true"}
        with ThreadPoolExecutor(1) as pool:
            while len(spans) < 2:
                answering = pool.submit(
                    server.client.post, "/v1/completions", json=asked, headers=headers
                )
                while not answering.done():
                    version += 1
                    self.follow_one(server, sender, version)
                [choice] = answering.result().json()["choices"]
                spans = choice["weight_versions"]
        told = [(token_of(int(span["version"])), span["end"] - span["start"]) for span in spans]
        assert choice["token_ids"] == [token for token, count in told for _ in range(count)]
        assert vllm_metric(server, "num_preemptions_total") == 0
        return version

    def end_while_versions_come(
        self, server: Server, sender: dbuffer.WeightSender, version: int
    ) -> None:
        """SIGTERM at full speed: the switch in flight ends, and no other begins."""
        first = version + 1
        has_ended = threading.Event()

        def publish_on() -> None:
            version = first
            while not has_ended.is_set():
                self.publish(sender, version)
                version += 1

        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(publish_on)
            sender.wait_applied(first + 1, timeout_s=WAIT_S)
            started = time.monotonic()
            try:
                assert server.terminate() == (0, [])
            finally:
                has_ended.set()
            assert time.monotonic() - started < LONG_TIMEOUT_S / 2
            publishing.result()
        before, after = server.log().split("Waiting for application shutdown")
        assert "appears unsupported" not in before + after
        assert "gets no more versions" not in before + after
        assert after.count("serves version") <= 1
        assert before.count("serves version") >= 1


def vllm_metric(server: Server, name: str) -> float:
    metrics = server.client.get("/metrics").text
    [value] = re.findall(rf"^vllm:{name}{{.*}} (\S+)$", metrics, re.MULTILINE)
    return float(value)


def require_refused(directory: Path) -> None:
    """Start a server that must not come up. It has no backend, so that it follows late."""
    store, checkpoint = directory / "store", save_revealing(0, directory)
    weights = revealing_weights(1)
    weights.pop("lm_head.weight")
    with dbuffer.WeightSender(store) as sender:
        sender.send(weights)
        server = Server(checkpoint, directory, "--worker-extension-cls", EXTENSION, store=store)
        assert server.wait_end() > 0
    log = server.log().splitlines()
    [line] = [line for line in log if "this server does not start" in line]
    assert re.search("no place for|lm_head.weight", line)
    assert not [line for line in log if "Application startup complete" in line]


# A server that is driven from outside.


class Outside:
    """The program for a server in development mode, a follower of it, and vLLM's own trainer."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started = contextlib.ExitStack()
        self.store = directory / "store"
        self.checkpoint = save_revealing(EXPORTED, directory)
        self.port = free_port()
        self.gate = self.started.enter_context(FaultyProxy(RunningServer(self.port)))
        self.server: Server
        self.follower: FollowProgram

    def run(self) -> None:
        self.server = self.start("--worker-extension-cls", EXTENSION)
        self.server.wait_ready()
        fresh = self.check_weights(action="checksum")["checksums"]
        self.follower = self.follow(self.gate.url, pause="wait")
        self.follow_at_full_speed()
        self.have_the_weights_of_a_fresh_engine(fresh)
        self.kill_follower_at("update")
        self.restart_server()
        self.kill_follower_at("update", is_lost=True)  # before ranks are asked to load
        self.kill_follower_at("resume", is_lost=True)  # when they have loaded
        self.end_follower_in_a_switch()
        self.meet_bad_moments()
        self.follow_a_canary()
        self.train()
        assert self.server.terminate() == (0, [])
        self.started.close()

    def start(self, *flags: str) -> Server:
        flags = (*flags, "--api-key", API_KEY)
        return Server(self.checkpoint, self.directory, *flags, port=self.port, development=True)

    def follow(self, url: str, store: Path | None = None, **options: Any) -> FollowProgram:
        follower = FollowProgram(store or self.store, url, self.directory, **options)
        self.started.callback(follower.process.kill)
        return follower

    def meet(self, call: str, fault: Fault) -> None:
        """Let a fault befall the next call of the follower: what ranks are asked, or a path."""

        def pass_others(exchange: Exchange) -> None:
            path = exchange.request.path
            if path == "/collective_rpc":
                path = f"/{json.loads(exchange.body())['kwargs']['request']['call']}"
            if path == f"/{call}":
                fault(exchange)
                return
            self.meet(call, fault)
            exchange.answer(exchange.forward())

        paths = ("/collective_rpc", f"/{call}")
        self.gate.inject(pass_others, when=lambda request: request.path in paths)

    def publish(self) -> int:
        with dbuffer.WeightSender(self.store) as sender:
            version = newest_version(self.store) + 1
            sender.send(revealing_weights(version), version=version)
        return version

    def require_served(self, version: int) -> None:
        assert not self.server.is_paused()
        assert self.server.version() == str(version)
        assert self.server.answer() == tokens_of(version)

    def recover(self, version: int) -> None:
        until(
            f"version {version} is served",
            lambda: self.server.version() == str(version) and not self.server.is_paused(),
            RECOVERY_S,
            0.05,
        )
        self.require_served(version)

    def follow_at_full_speed(self) -> None:
        """Two trainers, both killed while they publish, and clients that ask all the time."""
        assert self.server.answer() == tokens_of(EXPORTED)
        self.follower.wait_version(self.publish())
        clients = Clients(2, self.ask_unless_paused)
        try:
            for goal in FULL_SPEED:
                trainer = start_program(self.directory, "publish", str(self.store), "240")
                self.started.callback(trainer.kill)
                until(
                    f"version {goal}", lambda goal=goal: newest_version(self.store) >= goal, WAIT_S
                )
                trainer.kill()
                trainer.wait(WAIT_S)
                self.follower.wait_version(newest_version(self.store))
        finally:
            answers_of_clients = clients.stop()
        last = newest_version(self.store)
        self.require_served(last)
        versions = {token_of(version): version for version in range(last + 1)}
        assert len(versions) == last + 1
        for answers in answers_of_clients:
            assert all(len(set(tokens)) == 1 for tokens in answers), "an answer of two versions"
            seen = [versions[tokens[0]] for tokens in answers]
            assert seen == sorted(seen), "it went back"
            assert len(set(seen)) >= 3, "there were no switches to go wrong at"
        served = self.follower.versions()
        assert served == sorted(set(served))
        assert served[-1] == last

    def check_weights(self, **asked: Any) -> Any:
        return self.server.client.post("/weight_checker", json=asked).json()

    def have_the_weights_of_a_fresh_engine(self, fresh: dict[str, str]) -> None:
        """By vLLM's digests, after a switch to the weights of the server's checkpoint."""
        assert not self.check_weights(action="compare", baseline=fresh)["match"]
        with dbuffer.WeightSender(self.store) as sender:
            sender.send(revealing_weights(EXPORTED))
            sender.wait_applied(newest_version(self.store), timeout_s=WAIT_S)
        assert self.server.answer() == tokens_of(EXPORTED)
        found = self.check_weights(action="compare", baseline=fresh)
        assert found == {"match": True, "mismatches": []}

    def ask_unless_paused(self, number: int) -> list[int] | None:
        try:
            return self.server.answer(5 + 40 * number)
        except PausedError:  # in a pause="wait" of vLLM's, since 0.33
            return None

    def kill_follower_at(self, call: str, *, is_lost: bool = False) -> None:
        met = threading.Event()

        def kill() -> None:
            self.kill(self.follower)
            met.set()

        def kill_and_lose(exchange: Exchange) -> None:
            kill()
            status(503)(exchange)

        self.meet(call, kill_and_lose if is_lost else passing(kill))
        version = self.publish()
        assert met.wait(WAIT_S), f"no call of {call}"
        assert self.server.is_paused()
        self.follower = self.follow(self.gate.url)
        self.recover(version)

    def restart_server(self) -> None:
        """SIGKILL the server; start it again, in another way; its follower must find that out."""
        self.server.kill()
        version = self.publish()
        self.server = self.start(*BACKEND_FLAGS)
        self.server.wait_ready()
        self.follower.wait_version(version)
        self.recover(version)

    def end_follower_in_a_switch(self) -> None:
        self.meet("update", passing(self.follower.process.terminate))
        version = self.publish()
        assert self.follower.process.wait(WAIT_S) == 0
        self.require_served(version)

    def meet_bad_moments(self) -> None:
        self.server.client.post("/pause", params={"mode": "keep"})
        self.meet("begin", status(500))
        self.follower = self.follow(self.gate.url)
        self.recover(self.publish())
        self.meet("resume", status(503))
        self.recover(self.publish())
        # A session that a killed trainer left open.
        assert self.server.client.post("/start_weight_update").status_code == 200
        self.kill_follower_at("update")
        assert self.server.client.post("/finish_weight_update", json={}).status_code == 200
        self.follower.end()

    def follow_a_canary(self) -> None:
        """Kill the canary's follower in its probe. The next one goes back from the bad version."""
        store, hold = self.directory / "canary", self.directory / "hold"
        canary = self.follow(self.server.url, store, engine_id="canary")
        with dbuffer.WeightSender(store) as sender:
            for version in (1, 2):
                sender.send(revealing_weights(version))
                sender.wait_applied(version, receivers="canary", timeout_s=WAIT_S)
            hold.touch()
            sender.send(revealing_weights(BAD))
            until("the probe has begun", (self.directory / "begun").exists, WAIT_S)
            self.kill(canary)
            with pytest.raises(dbuffer.WaitTimeoutError):
                sender.wait_applied(BAD, receivers="canary", timeout_s=1.0)
            assert self.server.answer() == tokens_of(BAD)
            hold.unlink()
            canary = self.follow(self.server.url, store, engine_id="canary")
            with pytest.raises(dbuffer.ReceiverFailedError, match=r"by canary: .* nonsense"):
                sender.wait_applied(BAD, receivers="canary", timeout_s=WAIT_S)
            self.recover(2)
            self.kill(canary)
            other = self.follow(self.server.url, store, engine_id="other")
            time.sleep(2.0)
            self.require_served(2)  # it skips the bad version, too
            sender.send(revealing_weights(4))
            sender.wait_applied(4, receivers="other", timeout_s=WAIT_S)
            self.require_served(4)
            assert other.end() == 0

    def kill(self, follower: FollowProgram) -> None:
        follower.process.kill()
        follower.process.wait(WAIT_S)

    def train(self) -> None:
        """vLLM's trainer interface, in a process of its own; the one before was killed."""
        assert self.server.client.post("/start_weight_update").status_code == 200
        trainer = start_program(self.directory, "train", self.server.url)
        log = self.directory / "train.log"
        assert trainer.wait(WAIT_S) == 0, log.read_text(errors="replace")[-TOLD_CHARACTERS:]


def train(directory: Path, url: str) -> None:
    """A trainer written for vLLM's own engines, but for the class of its init info.

    It sends all weights twice, then patches.
    """
    import requests
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.plugins import load_general_plugins

    from dbuffer.integrations.vllm import DBufferTrainerInitInfo

    assert DBufferTrainerInitInfo.backend in WeightTransferTrainerFactory._registry
    load_general_plugins()
    model = make_model("qwen3", 0)
    engine = WeightTransferTrainerFactory.trainer_init(
        DBufferTrainerInitInfo(store=str(directory / "trained"), rank=0, sparse=True),
        client=HTTPVLLMWeightSyncClient(url),
        source=ModuleSource(model),
    )
    for version, content in enumerate((101, 102, 103), 1):
        model.load_state_dict(revealing_weights(content), strict=False)
        engine.send_weights(all_of(model) if content == 103 else None)
        assert answer_of(url) == tokens_of(content)
        assert requests.get(f"{url}/weight_info").json()["weight_version"] == str(version)
    engine.shutdown()


def run(directory: Path, role: str, *arguments: str) -> None:
    match role:
        case "inside":
            Inside(directory).run()
        case "outside":
            Outside(directory).run()
        case "refused":
            require_refused(directory)
        case "train":
            train(directory, *arguments)
        case "follow":
            follow_server(directory, *arguments)
        case "publish":
            publish(Path(arguments[0]), int(arguments[1]))


if __name__ == "__main__":
    judge(run)
