"""A vLLM server that follows a store: by itself, by `dbuffer follow-server`, by vLLM's own trainer.

Two programs (this file, run with a role) each start a server, kill it, start it again, and leave
what they saw; a third starts servers that must not come up. The tests judge that. The model reveals
its version: an answer's tokens say from which weights each of them came, and an answer with weights
of two versions is token 0.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from tests.support.children import Child, Command, free_port, preload
from tests.support.engines.patch_trainers import all_of
from tests.support.engines.tiny_models import (
    make_model,
    revealing_weights,
    save_revealing,
    token_of,
)
from tests.support.engines.vllm_engines import (
    EXTENSION,
    NEEDS_VLLM,
    TIMEOUT_S,
    environment,
    observe,
)
from tests.support.engines.vllm_servers import (
    ANSWER_TOKENS,
    API_KEY,
    BACKEND_FLAGS,
    RECOVERY_S,
    START_EVERY_S,
    WAIT_S,
    Server,
    question,
    wait_for,
)
from tests.support.soak import in_soaks_alone, is_soak

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(2 * TIMEOUT_S + 60)]

EXIT_FAILED = 1
EXIT_TIMEOUT = 3
ENGINE_TIMEOUT_S = 10
FULL_SPEED = (150, 300) if is_soak() else (100, 200)
"""Versions that two trainers come to, one after the other."""


@pytest.fixture(scope="module")
def programs(directory: Path) -> dict[str, Any]:
    """What the programs saw, two of them side by side; the last one in soaks alone.

    In memory: what is written at full speed to a disk holds up all who write there, logs too.
    """

    def run(role: str) -> Any:
        place = directory / role
        place.mkdir()
        return observe(__file__, place, role, env=environment(processes=True))

    with ThreadPoolExecutor(2) as pool:
        roles = ("inside", "outside", "refused")[: None if is_soak() else 2]
        runs = {role: pool.submit(run, role) for role in roles}
        return {role: future.result() for role, future in runs.items()}


@pytest.fixture(scope="module")
def inside(programs: dict[str, Any]) -> dict[str, Any]:
    return programs["inside"]


@pytest.fixture(scope="module")
def refused(programs: dict[str, Any]) -> dict[str, Any]:
    return programs["refused"]


@pytest.fixture(scope="module")
def outside(programs: dict[str, Any]) -> dict[str, Any]:
    return programs["outside"]


def tokens_of(version: int) -> list[int]:
    return [token_of(version)] * ANSWER_TOKENS


def serving(version: int) -> dict[str, Any]:
    """The state of a server on this version."""
    return {"paused": False, "version": str(version), "tokens": tokens_of(version)}


# The server that follows by itself. Its own weights are a dummy's: what it serves is the store's.


def test_server_with_a_dummys_weights_is_not_ready_before_there_is_a_version(
    inside: dict[str, Any],
) -> None:
    assert inside["ready with an empty store"] is False
    [line] = [line for line in inside["log"] if "waiting" in line and "for a version" in line]
    assert f"waiting {ENGINE_TIMEOUT_S} s (timeout_s)" in line


def test_log_has_vllms_format_and_tells_each_switch(inside: dict[str, Any]) -> None:
    files = r"\[(follower|reporting)\.py:"
    ours = [line for line in inside["log"] if re.search(files, line)]
    format_of_vllm = re.compile(rf"INFO \d\d-\d\d \d\d:\d\d:\d\d {files}\d+\] ")
    assert all(format_of_vllm.search(line) for line in ours)
    began, *switches = ours
    assert "and serves weights that are no version" in began
    told = [
        re.search(r"serves version (\d+): .*staged in [\d.]+ ms.*paused for", s) for s in switches
    ]
    assert [match and match[1] for match in told] == ["1", "2", "3", "4", "5"]


def test_server_follows_with_no_route_of_development_mode(inside: dict[str, Any]) -> None:
    assert set(inside["routes"].values()) == {404}


def test_follower_names_what_such_a_server_lacks(inside: dict[str, Any]) -> None:
    code, errors = inside["driven from outside"]
    assert code == EXIT_FAILED
    assert "VLLM_SERVER_DEV_MODE=1" in errors
    assert "--middleware dbuffer.integrations.vllm.FollowStore" in errors


def test_server_follows_each_publish(inside: dict[str, Any]) -> None:
    assert inside["answers"] == {str(version): tokens_of(version) for version in range(1, 6)}


def test_metrics_are_on_the_server_and_right(inside: dict[str, Any]) -> None:
    metrics = inside["metrics"]
    num_bytes = sum(weight.nbytes for weight in revealing_weights(0).values())
    expected = {
        "following": 1,
        "version_applied": 5,
        "version_available": 5,
        "lag_versions": 0,
        "lag_seconds": 0,
        "bytes_total": 5 * num_bytes,
        "stage_seconds_count": 5,
        "pause_seconds_count": 5,
        "retries_total": 0,
        "evictions_total": 0,
        "failures_total": 0,
    }
    assert {name: metrics.pop(f"dbuffer_{name}") for name in expected} == expected
    assert set(metrics) == {"dbuffer_stage_seconds_sum", "dbuffer_pause_seconds_sum"}
    assert all(0 < seconds < 5 * WAIT_S for seconds in metrics.values())


def test_misfit_is_counted_and_the_server_answers_on(inside: dict[str, Any]) -> None:
    assert inside["answer with a misfit"] == tokens_of(5)
    metrics = inside["metrics with a misfit"]
    assert metrics["dbuffer_failures_total"] == 1
    assert metrics["dbuffer_following"] == 0
    assert metrics["dbuffer_version_applied"] == 5
    assert metrics["dbuffer_version_available"] == 6
    assert metrics["dbuffer_lag_versions"] == 1
    assert metrics["dbuffer_lag_seconds"] > 0
    assert metrics["dbuffer_pause_seconds_count"] == 5


def test_version_after_a_misfit_is_followed(inside: dict[str, Any]) -> None:
    assert inside["answer after a misfit"] == tokens_of(7)
    metrics = inside["metrics after a misfit"]
    assert metrics["dbuffer_version_applied"] == metrics["dbuffer_version_available"] == 7
    assert metrics["dbuffer_lag_seconds"] == 0
    assert metrics["dbuffer_failures_total"] == metrics["dbuffer_following"] == 1


def test_restarted_server_answers_first_from_the_newest_version(inside: dict[str, Any]) -> None:
    assert inside["first answer of the second start"] == tokens_of(8)
    assert inside["second start follows"] == tokens_of(9)


def test_server_ends_cleanly_while_versions_come(inside: dict[str, Any]) -> None:
    assert inside["exit code"] == 0
    assert inside["left over"] == []
    assert not any("appears unsupported" in line for line in inside["last log"])


def test_server_ends_soon_while_versions_come(inside: dict[str, Any]) -> None:
    assert inside["end took s"] < ENGINE_TIMEOUT_S


# Servers that cannot follow.


@in_soaks_alone
def test_server_that_cannot_follow_does_not_start_and_says_why(refused: dict[str, Any]) -> None:
    seen = refused["misfit"]
    assert seen["exit code"] > 0
    assert not seen["was ready"]
    assert seen["left over"] == []
    [line, *same] = [line for line in seen["log"] if "this server does not start" in line]
    assert re.search("no place for|lm_head.weight", line)
    assert not same
    assert not [line for line in seen["log"] if "Application startup complete" in line]


# The server that is driven from outside.


def test_answers_at_full_speed_are_of_one_version_and_never_go_back(
    outside: dict[str, Any],
) -> None:
    versions = {token_of(version): version for version in range(outside["published"] + 1)}
    assert len(versions) == outside["published"] + 1
    assert outside["published"] >= FULL_SPEED[-1]
    for answers in outside["answers"]:
        assert all(len(set(tokens)) == 1 for tokens in answers)
        seen = [versions[tokens[0]] for tokens in answers]
        assert seen == sorted(seen)
        # Else there were no switches to go wrong at.
        assert len(set(seen)) >= 3


def test_follower_prints_each_switch(outside: dict[str, Any]) -> None:
    lines = outside["lines"]
    versions = [line["version"] for line in lines]
    assert versions == sorted(set(versions))
    assert versions[-1] == outside["published"]
    for line in lines:
        assert line["num_bytes"] > 0
        assert 0 < line["load_s"] < line["pause_s"]


def test_server_is_on_the_newest_version_after_full_speed(outside: dict[str, Any]) -> None:
    assert outside["before"] == tokens_of(0)
    assert outside["full speed"] == serving(outside["published"])


def test_restarted_server_is_followed_again(outside: dict[str, Any]) -> None:
    assert_serves_newest(outside["restarted"])


# While ranks load, before they are asked to, and when they have loaded.
@pytest.mark.parametrize("call", ["extension: update", "backend: no update", "backend: no resume"])
def test_pause_of_a_killed_follower_is_ended_by_the_next(
    outside: dict[str, Any], call: str
) -> None:
    assert_recovered(outside["killed"][call])


def test_session_that_a_killed_trainer_left_open_hinders_no_follower(
    outside: dict[str, Any],
) -> None:
    assert outside["session"] == {"begun": 200, "ended": 200}
    assert_recovered(outside["killed"]["in a session: update"])


def assert_recovered(seen: dict[str, Any]) -> None:
    assert seen["was paused"] is True
    assert_serves_newest(seen["after"])


def assert_serves_newest(seen: dict[str, Any]) -> None:
    assert seen["state"] == serving(seen["newest"])


def test_follower_that_is_told_to_end_ends_its_switch_first(outside: dict[str, Any]) -> None:
    assert outside["ended"]["exit code"] == -signal.SIGTERM
    assert_serves_newest(outside["ended"])


def test_pause_is_ended_although_the_first_attempt_failed(outside: dict[str, Any]) -> None:
    assert_serves_newest(outside["begun in a pause, with an error"])


def test_server_that_would_not_resume_is_told_again(outside: dict[str, Any]) -> None:
    assert_serves_newest(outside["an error for resume"])


def test_nobody_there_is_a_timeout(outside: dict[str, Any]) -> None:
    code, errors = outside["no server"]
    assert code == EXIT_TIMEOUT
    assert "does not answer" in errors


def test_follower_names_what_an_engine_must_be_started_with(outside: dict[str, Any]) -> None:
    _, errors = outside["no flags"]
    assert "not started for dbuffer" in errors
    assert "weight_transfer_config" in errors
    assert f"worker_extension_cls='{EXTENSION}'" in errors


def test_trainer_written_for_vllm_publishes_and_switches(outside: dict[str, Any]) -> None:
    """Twice all weights, then patches."""
    assert outside["trained"]["sent"] == [
        {"tokens": tokens_of(101), "version": "1"},
        {"tokens": tokens_of(102), "version": "2"},
        {"tokens": tokens_of(103), "version": "3"},
    ]


def test_trainer_needs_nothing_but_the_init_info(outside: dict[str, Any]) -> None:
    assert outside["trained"]["backend is known"]


def test_driven_server_ends_cleanly(outside: dict[str, Any]) -> None:
    assert outside["exit code"] == 0
    assert outside["left over"] == []


# What both programs are made of.


class FollowCommand(Command):
    """``dbuffer follow-server STORE URL --json``."""

    def __init__(self, store: Path, url: str, directory: Path, *options: str) -> None:
        super().__init__(directory, "follow-server", store, url, "--json", *options)

    def lines(self) -> list[dict[str, Any]]:
        """What it has printed so far."""
        whole = self.output().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def errors(self) -> str:
        """What it has complained of so far, on one line however it was broken."""
        return " ".join(super().errors().split())

    def wait_line(self, version: int) -> None:
        """Wait until it has printed this version or a later one."""
        wait_for(
            f"the follower prints version {version}",
            lambda: any(line["version"] >= version for line in self.lines()),
        )

    def end(self) -> int:
        """SIGTERM; the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(WAIT_S)


Answer = tuple[int, bytes] | None


class Gate:
    """Between a follower and its server, so that a call can be met at its very moment."""

    def __init__(self, url: str) -> None:
        import httpx

        gate = self
        self._errors = httpx.HTTPError
        self._client = httpx.Client(base_url=url, timeout=WAIT_S)
        self._waiting: dict[str, Callable[[], Answer]] = {}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._pass_on()

            def do_POST(self) -> None:
                self._pass_on()

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = gate.answer(self.command, self.path, body)
                if answer is None:
                    self.close_connection = True  # as a server does that is not there any more
                    return
                with contextlib.suppress(OSError):  # who asked may be dead
                    self.send_response(answer[0])
                    self.send_header("Content-Length", str(len(answer[1])))
                    self.end_headers()
                    self.wfile.write(answer[1])

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def meet(self, call: str, action: Callable[[], Answer]) -> None:
        """Once, do this before a call (what ranks are asked, or a path) is passed on.

        What the action returns is the answer in place of the server's; None passes the call on.
        """
        self._waiting[call] = action

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        call = path.partition("?")[0].strip("/")
        if call == "collective_rpc":
            arguments = json.loads(body)["kwargs"]
            call = arguments["request"]["call"]
        instead = self._waiting.pop(call, lambda: None)()
        if instead is not None:
            return instead
        headers = {"Content-Type": "application/json"} if body else {}
        try:
            response = self._client.request(method, path, content=body, headers=headers)
        except self._errors:
            return None
        return response.status_code, response.content

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Clients:
    """Threads that each ask a server one thing after the other, until the block ends."""

    def __init__(self, server: Server, count: int) -> None:
        self._server = server
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(count)
        self._asking = [self._pool.submit(self._ask, 5 + 40 * n) for n in range(count)]

    def _ask(self, length: int) -> list[list[int]]:
        answers = []
        while not self._stop.is_set():
            answers.append(self._server.answer(length))
        return answers

    def stop(self) -> list[list[list[int]]]:
        """Each client's answers, in the order of its questions."""
        self._stop.set()
        with self._pool:
            return [asking.result() for asking in self._asking]


def publish(_: Connection, store: Path, count: int) -> None:
    """A trainer: publish the next versions at full speed, then wait to be killed."""
    with dbuffer.WeightSender(store) as sender:
        first = newest(store) + 1
        for version in range(first, first + count):
            sender.send(revealing_weights(version), version=version)
        signal.pause()


def newest(store: Path) -> int:
    with dbuffer.WeightReceiver(store) as receiver:
        return receiver.wait_for_version(timeout_s=0) or 0


# A server that follows by itself.

DEVELOPMENT_ROUTES = {
    "POST": [
        "/pause",
        "/resume",
        "/collective_rpc",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
        "/reset_prefix_cache",
    ],
    "GET": ["/is_paused", "/weight_info", "/server_info"],
}


class Inside:
    """The program for a server with the middleware, no development mode and a dummy's weights."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = directory / "store"
        self.checkpoint = save_revealing(0, directory)
        self.seen: dict[str, Any] = {}

    def observe(self) -> dict[str, Any]:
        server = self.start()
        with dbuffer.WeightSender(self.store) as sender:
            wait_for(
                "it waits",
                lambda: "for a version" in server.log() or server.is_ready(),
                every_s=START_EVERY_S,
            )
            self.seen["ready with an empty store"] = server.is_ready()
            self.publish(sender, 1)
            server.wait_ready()
            self.observe_routes(server)
            self.observe_following(server, sender)
            self.seen["log"] = server.log().splitlines()
            self.observe_misfit(server, sender)
            server.kill()
            self.publish(sender, 8)
            server = self.start()
            server.wait_ready()
            self.seen["first answer of the second start"] = server.answer()
            self.seen["second start follows"] = self.follow_one(server, sender, 9)
            self.observe_end(server, sender)
        return self.seen

    def start(self) -> Server:
        """The same command each time, but for the port."""
        settings = {"dbuffer": {"store": str(self.store), "timeout_s": ENGINE_TIMEOUT_S}}
        number = len(list(self.directory.glob("server-*.log")))
        return Server(
            self.checkpoint,
            self.directory / f"server-{number}.log",
            *BACKEND_FLAGS,
            *("--additional-config", json.dumps(settings)),
            *("--middleware", "dbuffer.integrations.vllm.FollowStore"),
            *("--load-format", "dummy"),
            port=free_port(),
        )

    def publish(self, sender: dbuffer.WeightSender, version: int, *, without: str = "") -> None:
        weights = revealing_weights(version)
        weights.pop(without, None)
        sender.send(weights, version=version)

    def follow_one(self, server: Server, sender: dbuffer.WeightSender, version: int) -> list[int]:
        self.publish(sender, version)
        sender.wait_applied(version, timeout_s=WAIT_S)
        return server.answer()

    def observe_routes(self, server: Server) -> None:
        self.seen["routes"] = {
            f"{method} {path}": server.status_of(method, path)
            for method, paths in DEVELOPMENT_ROUTES.items()
            for path in paths
        }
        command = [sys.executable, "-m", "dbuffer", "follow-server", str(self.store)]
        command += [server.url, "--timeout-s", "0.1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
        self.seen["driven from outside"] = done.returncode, " ".join(done.stderr.split())

    def observe_following(self, server: Server, sender: dbuffer.WeightSender) -> None:
        self.seen["answers"] = {1: server.answer()}
        self.seen["answers"] |= {v: self.follow_one(server, sender, v) for v in range(2, 6)}
        # The store knows of a switch a moment before it is counted.
        wait_for("five pauses", lambda: server.metrics()["dbuffer_pause_seconds_count"] == 5)
        self.seen["metrics"] = server.metrics()

    def observe_misfit(self, server: Server, sender: dbuffer.WeightSender) -> None:
        self.publish(sender, 6, without="lm_head.weight")
        wait_for("a retry", lambda: server.metrics()["dbuffer_retries_total"] > 0)
        self.seen["metrics with a misfit"] = server.metrics()
        self.seen["answer with a misfit"] = server.answer()
        self.seen["answer after a misfit"] = self.follow_one(server, sender, 7)
        wait_for("no lag", lambda: server.metrics()["dbuffer_lag_versions"] == 0)
        self.seen["metrics after a misfit"] = server.metrics()

    def observe_end(self, server: Server, sender: dbuffer.WeightSender) -> None:
        """SIGTERM while versions come at full speed."""
        has_ended = threading.Event()

        def publish_on() -> None:
            version = 10
            while not has_ended.is_set():
                self.publish(sender, version)
                version += 1

        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(publish_on)
            sender.wait_applied(11, timeout_s=WAIT_S)
            started = time.monotonic()
            try:
                self.seen["exit code"], self.seen["left over"] = server.terminate()
            finally:
                has_ended.set()
            self.seen["end took s"] = time.monotonic() - started
            publishing.result()
        self.seen["last log"] = server.log().splitlines()


class Refused:
    """The program for servers that must not come up. None has a backend, so all follow late."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = directory / "store"
        self.checkpoint = save_revealing(0, directory)

    def observe(self) -> dict[str, Any]:
        weights = revealing_weights(1)
        weights.pop("lm_head.weight")
        with dbuffer.WeightSender(self.store) as sender:
            sender.send(weights)
            return {"misfit": self.start("misfit").wait_end()}

    def start(self, name: str) -> Server:
        settings = {"dbuffer": {"store": str(self.store)}}
        return Server(
            self.checkpoint,
            self.directory / f"{name}.log",
            *("--worker-extension-cls", EXTENSION),
            *("--additional-config", json.dumps(settings)),
            *("--middleware", "dbuffer.integrations.vllm.FollowStore"),
            port=free_port(),
        )


# A server that is driven from outside.


class Outside:
    """The program for a server in development mode, a follower of it, and vLLM's own trainer."""

    def __init__(self, directory: Path) -> None:
        # What followers and trainers import, and this file, which they are functions of.
        for name in ("patch_trainers", "tiny_models", "vllm_servers"):
            preload(f"tests.support.engines.{name}")
        preload("dbuffer.integrations.vllm")
        self.directory = directory
        self.started = contextlib.ExitStack()
        self.store = directory / "store"
        self.checkpoint = save_revealing(0, directory)
        self.port = free_port()
        self.gate = Gate(f"http://127.0.0.1:{self.port}")
        self.seen: dict[str, Any] = {"killed": {}}
        self.server: Server
        self.follower: FollowCommand

    def observe(self) -> dict[str, Any]:
        with self.started:
            self.observe_all()
        return self.seen

    def observe_all(self) -> None:
        num_ranks = 2 if is_soak() else 1
        self.server = self.start("extension", "--worker-extension-cls", EXTENSION, tp=num_ranks)
        self.server.wait_ready()
        self.follower = self.follow("--pause", "wait")
        self.observe_full_speed()
        self.observe_killed_follower("extension: update")
        self.observe_restart()
        self.observe_killed_follower("backend: no update")
        self.observe_killed_follower("backend: no resume")
        self.observe_ended_follower()
        self.observe_bad_moments()
        self.seen["trained"] = self.train()
        self.seen["exit code"], self.seen["left over"] = self.server.terminate()

    def start(self, name: str, *flags: str, tp: int = 1) -> Server:
        log = self.directory / f"{name}.log"
        flags = (*flags, "--api-key", API_KEY)
        return Server(self.checkpoint, log, *flags, port=self.port, tp=tp, development=True)

    def follow(self, *options: str) -> FollowCommand:
        return self.command(self.gate.url, *options, "--api-key", API_KEY)

    def command(self, url: str, *options: str) -> FollowCommand:
        follower = FollowCommand(self.store, url, self.directory, *options)
        return self.started.enter_context(follower)

    def publish(self) -> int:
        """Publish one version."""
        with dbuffer.WeightSender(self.store) as sender:
            version = newest(self.store) + 1
            sender.send(revealing_weights(version), version=version)
        return version

    def observe_full_speed(self) -> None:
        """Two trainers, both killed while they publish, and clients that ask all the time."""
        self.seen["before"] = self.server.answer()
        self.follower.wait_line(self.publish())
        clients = Clients(self.server, 2)
        try:
            for goal in FULL_SPEED:
                with Child(publish, self.store, 240):
                    wait_for(f"version {goal}", lambda goal=goal: newest(self.store) >= goal)
                self.follower.wait_line(newest(self.store))
        finally:
            self.seen["answers"] = clients.stop()
        self.seen["published"] = newest(self.store)
        self.seen["full speed"] = self.server.state()
        self.seen["lines"] = self.follower.lines()

    def observe_killed_follower(self, name: str) -> None:
        """Kill the follower in a pause, at one of its calls; the next one must end the pause.

        Args:
            name: ends in the call, after ``no`` if the server never gets it.
        """
        met = threading.Event()
        *_, how, call = name.split()
        lost = how == "no"

        def kill() -> Answer:
            self.follower.signal(signal.SIGKILL)
            self.follower.wait(WAIT_S)
            met.set()
            return (503, b"") if lost else None

        self.gate.meet(call, kill)
        version = self.publish()
        assert met.wait(WAIT_S), f"no call of {call}"
        was_paused = self.server.is_paused()
        self.follower = self.follow()
        self.seen["killed"][name] = {"was paused": was_paused, "after": self.recover(version)}

    def recover(self, version: int) -> dict[str, Any]:
        """The state of the server when it serves a version, or else after a while."""

        def has_recovered() -> bool:
            return self.server.version() == str(version) and not self.server.is_paused()

        with contextlib.suppress(AssertionError):
            wait_for("recovery", has_recovered, RECOVERY_S)
        return {"newest": version, "state": self.server.state()}

    def observe_restart(self) -> None:
        """SIGKILL the server; start it again, in another way; its follower must find that out."""
        info = self.server.get("/server_info?config_format=json")
        self.server.kill()
        version = self.publish()
        self.server = self.start("backend", *BACKEND_FLAGS)
        self.observe_messages(info)
        self.server.wait_ready()
        self.follower.wait_line(version)
        self.seen["restarted"] = self.recover(version)

    def observe_messages(self, info: dict[str, Any]) -> None:
        """What a follower says of a server that is not there, and of one that cannot follow."""
        nobody = self.command(f"http://127.0.0.1:{free_port()}", "--timeout-s", "0.1")
        # What the server said of itself, but for the extension.
        info["vllm_config"]["parallel_config"]["worker_extension_cls"] = ""
        plain = Gate(self.server.url)
        plain.meet("server_info", lambda: (200, json.dumps(info).encode()))
        without = self.command(plain.url, "--count", "1")
        wait_for("a word", without.errors)
        self.seen["no server"] = nobody.wait(WAIT_S), nobody.errors()
        self.seen["no flags"] = without.end(), without.errors()
        plain.close()

    def observe_ended_follower(self) -> None:
        """SIGTERM in the middle of a switch."""
        self.gate.meet("update", lambda: self.follower.signal(signal.SIGTERM))
        version = self.publish()
        code = self.follower.wait(WAIT_S)
        state = self.server.state()
        self.seen["ended"] = {"exit code": code, "newest": version, "state": state}

    def observe_bad_moments(self) -> None:
        """What a follower meets only now and then; afterwards the server is mended by hand."""
        self.server.client.post("/pause", params={"mode": "keep"})
        self.gate.meet("begin", lambda: (500, b"not now"))
        self.follower = self.follow()
        self.seen["begun in a pause, with an error"] = self.recover(self.publish())
        self.server.client.post("/resume")
        self.gate.meet("resume", lambda: (503, b"not now"))
        self.seen["an error for resume"] = self.recover(self.publish())
        self.server.client.post("/resume")
        begun = self.server.client.post("/start_weight_update")
        self.observe_killed_follower("in a session: update")
        ended = self.server.client.post("/finish_weight_update", json={})
        self.seen["session"] = {"begun": begun.status_code, "ended": ended.status_code}
        self.follower.end()

    def train(self) -> Any:
        """vLLM's trainer interface, in a process of its own: it imports vLLM."""
        arguments = ["train", self.server.url]
        subprocess.run([sys.executable, __file__, str(self.directory), *arguments], check=True)
        return json.loads((self.directory / "trained.json").read_text())


def train(directory: Path, url: str) -> None:
    """A trainer written for vLLM's own engines, but for the class of its init info."""
    import requests
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.plugins import load_general_plugins

    from dbuffer.integrations.vllm import DBufferTrainerInitInfo

    is_known = DBufferTrainerInitInfo.backend in WeightTransferTrainerFactory._registry
    load_general_plugins()
    model = make_model("qwen3", 0)
    engine = WeightTransferTrainerFactory.trainer_init(
        DBufferTrainerInitInfo(store=str(directory / "trained"), rank=0, sparse=True),
        client=HTTPVLLMWeightSyncClient(url),
        source=ModuleSource(model),
    )
    sent = []
    for content in (101, 102, 103):
        model.load_state_dict(revealing_weights(content), strict=False)
        engine.send_weights(all_of(model) if content == 103 else None)
        key = {"Authorization": f"Bearer {API_KEY}"}
        answer = requests.post(f"{url}/v1/completions", json=question(5), headers=key).json()
        version = requests.get(f"{url}/weight_info").json()["weight_version"]
        sent.append({"tokens": answer["choices"][0]["token_ids"], "version": version})
    engine.shutdown()
    trained = {"backend is known": is_known, "sent": sent}
    (directory / "trained.json").write_text(json.dumps(trained))


if __name__ == "__main__":
    target, role = Path(sys.argv[1]), sys.argv[2]
    if role == "train":
        train(target, sys.argv[3])
    else:
        program = {"inside": Inside, "outside": Outside, "refused": Refused}[role](target)
        (target / "observed.json").write_text(json.dumps(program.observe()))
