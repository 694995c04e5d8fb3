"""Program of `test_server.py`, which says what it shows."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import dbuffer
from dbuffer.store.buffer import DoubleBuffer
from tests.support.children import free_port
from tests.support.engines import preforked
from tests.support.engines.patch_trainers import all_of
from tests.support.engines.tiny_models import make_model, revealing_weights, save_revealing
from tests.support.engines.vllm_engines import EXTENSION
from tests.support.engines.vllm_servers import (
    API_KEY,
    BACKEND_FLAGS,
    RECOVERY_S,
    WAIT_S,
    Server,
    following,
    question,
)
from tests.support.soak import is_soak
from tests.support.waiting import until

ENGINE_TIMEOUT_S = 10
LONG_TIMEOUT_S = 120
"""Of a server that ends: had it waited so long for anything, that would show on any machine."""
FULL_SPEED = (150, 300) if is_soak() else (25, 50)
"""Versions that two trainers come to, one after the other."""


# What both programs are made of.


class FollowCommand:
    """``dbuffer follow-server STORE URL``, as a fork."""

    def __init__(self, store: Path, url: str, directory: Path, *options: str) -> None:
        number = len(list(directory.glob("follower-*.out")))
        self._output, self._errors = (
            directory / f"follower-{number}.{kind}" for kind in ("out", "err")
        )
        command = ["-m", "dbuffer", "follow-server", str(store), url, *options]
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            env = dict(os.environ)
            self.process = preforked.start(command, env=env, output=output, errors=errors)

    def lines(self) -> list[dict[str, Any]]:
        """What it has printed so far."""
        whole = self._output.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def errors(self) -> str:
        """What it has complained of so far, on one line however it was broken."""
        return " ".join(self._errors.read_text().split())

    def wait_line(self, version: int) -> None:
        """Wait until it has printed this version or a later one."""
        until(
            f"the follower prints version {version}",
            lambda: any(line["version"] >= version for line in self.lines()),
            WAIT_S,
            0.02,
        )

    def end(self) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(WAIT_S)


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


def publish(store: Path, count: int) -> None:
    """A trainer: publish the next versions at full speed, then wait to be killed."""
    with dbuffer.WeightSender(store) as sender:
        first = newest(store) + 1
        for version in range(first, first + count):
            sender.send(revealing_weights(version), version=version)
        signal.pause()


def newest(store: Path) -> int:
    pointer = DoubleBuffer(store).pointer()
    return 0 if pointer is None else pointer.version


def start_program(directory: Path, *arguments: str) -> preforked.Process:
    """Run this program in another role, as a fork."""
    with (directory / f"{arguments[0]}.log").open("ab") as log:
        command = [__file__, str(directory), *arguments]
        return preforked.start(command, env=dict(os.environ), output=log)


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
            self.seen["ready with an empty store"] = server.is_ready_without_version()
            self.publish(sender, 1)
            server.wait_ready()
            self.observe_routes(server)
            self.observe_following(server, sender)
            self.seen["log"] = server.log().splitlines()
            self.observe_misfit(server, sender)
            server.kill()
            self.publish(sender, 8)
            server = self.start(LONG_TIMEOUT_S)
            server.wait_ready()
            self.seen["first answer of the second start"] = server.answer()
            self.seen["second start follows"] = self.follow_one(server, sender, 9)
            self.observe_end(server, sender)
        return self.seen

    def start(self, timeout_s: int = ENGINE_TIMEOUT_S) -> Server:
        """The same command each time, but for the port and the time-out."""
        number = len(list(self.directory.glob("server-*.log")))
        return Server(
            self.checkpoint,
            self.directory / f"server-{number}.log",
            *BACKEND_FLAGS,
            *following(self.store, timeout_s=timeout_s),
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
        command = FollowCommand(self.store, server.url, self.directory, "--timeout-s", "0.1")
        self.seen["driven from outside"] = command.process.wait(WAIT_S), command.errors()

    def observe_following(self, server: Server, sender: dbuffer.WeightSender) -> None:
        self.seen["answers"] = {1: server.answer()}
        self.seen["answers"] |= {v: self.follow_one(server, sender, v) for v in range(2, 6)}
        # The store knows of a switch a moment before it is counted.
        until(
            "five pauses",
            lambda: server.metrics()["dbuffer_pause_seconds_count"] == 5,
            WAIT_S,
            0.05,
        )
        self.seen["metrics"] = server.metrics()

    def observe_misfit(self, server: Server, sender: dbuffer.WeightSender) -> None:
        self.publish(sender, 6, without="lm_head.weight")
        until("a retry", lambda: server.metrics()["dbuffer_retries_total"] > 0, WAIT_S, 0.05)
        self.seen["metrics with a misfit"] = server.metrics()
        self.seen["answer with a misfit"] = server.answer()
        self.seen["answer after a misfit"] = self.follow_one(server, sender, 7)
        until("no lag", lambda: server.metrics()["dbuffer_lag_versions"] == 0, WAIT_S, 0.05)
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


def observe_refused(directory: Path) -> dict[str, Any]:
    """A server that must not come up. It has no backend, so that it follows late."""
    store, checkpoint = directory / "store", save_revealing(0, directory)
    weights = revealing_weights(1)
    weights.pop("lm_head.weight")
    flags = ["--worker-extension-cls", EXTENSION, *following(store)]
    with dbuffer.WeightSender(store) as sender:
        sender.send(weights)
        server = Server(checkpoint, directory / "misfit.log", *flags, port=free_port())
        return server.wait_end()


# A server that is driven from outside.


class Outside:
    """The program for a server in development mode, a follower of it, and vLLM's own trainer."""

    def __init__(self, directory: Path) -> None:
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
        self.observe_only_version()
        self.seen["trained"] = self.train()
        self.seen["exit code"], self.seen["left over"] = self.server.terminate()

    def start(self, name: str, *flags: str, tp: int = 1) -> Server:
        log = self.directory / f"{name}.log"
        flags = (*flags, "--api-key", API_KEY)
        return Server(self.checkpoint, log, *flags, port=self.port, tp=tp, development=True)

    def follow(self, *options: str) -> FollowCommand:
        return self.command(self.gate.url, *options, "--api-key", API_KEY)

    def command(self, url: str, *options: str) -> FollowCommand:
        follower = FollowCommand(self.store, url, self.directory, "--json", *options)
        self.started.callback(follower.process.kill)
        return follower

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
                trainer = start_program(self.directory, "publish", str(self.store), "240")
                self.started.callback(trainer.kill)
                until(f"version {goal}", lambda goal=goal: newest(self.store) >= goal, WAIT_S)
                trainer.kill()
                trainer.wait(WAIT_S)
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
            self.follower.process.kill()
            self.follower.process.wait(WAIT_S)
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
            until("recovery", has_recovered, RECOVERY_S, 0.02)
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
        until("a word", without.errors, WAIT_S)
        self.seen["no server"] = nobody.process.wait(WAIT_S), nobody.errors()
        self.seen["no flags"] = without.end(), without.errors()
        plain.close()

    def observe_ended_follower(self) -> None:
        """SIGTERM in the middle of a switch."""
        self.gate.meet("update", self.follower.process.terminate)
        version = self.publish()
        code = self.follower.process.wait(WAIT_S)
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

    def observe_only_version(self) -> None:
        """Keep the server on a version while newer ones come."""
        version = self.publish()
        self.publish()
        self.follower = self.follow("--version", str(version))
        self.follower.wait_line(version)
        self.publish()
        gone = self.follow("--version", "1")
        self.seen["gone"] = gone.process.wait(WAIT_S), gone.errors()
        lines = [line["version"] for line in self.follower.lines()]
        self.follower.end()
        self.seen["only version"] = {"lines": lines, "stayed": self.recover(version)}

    def train(self) -> Any:
        """vLLM's trainer interface, in a process of its own."""
        assert start_program(self.directory, "train", self.server.url).wait(WAIT_S) == 0
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
    elif role == "publish":
        publish(Path(sys.argv[3]), int(sys.argv[4]))
    else:
        observe = {
            "inside": lambda: Inside(target).observe(),
            "outside": lambda: Outside(target).observe(),
            "refused": lambda: observe_refused(target),
        }
        (target / "observed.json").write_text(json.dumps(observe[role]()))
