"""The engine's process: its main loop, and the trainer's handle on it.

Requests and replies go through a pipe, one at a time; weights go through the store and nowhere
else. Neither side can hang the other: the trainer waits with a timeout and kills, and an engine
whose trainer is gone reads the end of the pipe and ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Self

from dbuffer.tools.demo.engines import Engine, Refreshed
from dbuffer.tools.demo.records import DemoError, Tokens

_REQUEST_POLL_S = 0.01
"""How long the idle engine waits for a request before it looks for a version."""
_END_TIMEOUT_S = 10.0
_ABORT_TIMEOUT_S = 2.0
"""After an error. Not zero: a process that is killed cannot remove its temporary files."""


class EngineSpec(NamedTuple):
    """What an engine's process is started from."""

    engine: type[Engine]
    checkpoint: Path
    store: Path | None
    """The store to follow. None: stay on the checkpoint's weights."""
    seed: int
    log: Path
    """File for everything the process prints."""


class Request(NamedTuple):
    """Ask the engine for completions."""

    prompts: Tokens
    num_tokens: int
    """Tokens in each completion."""
    greedy: bool = False
    at_version: int = 0
    """Wait for this version or a later one first."""


class Reply(NamedTuple):
    """Completions, and the weights that they were sampled with."""

    completions: Tokens
    weights: Refreshed


class EngineProcess:
    """A process with one engine in it, which ends with its ``with`` block."""

    def __init__(self, spec: EngineSpec) -> None:
        self._log = spec.log
        # Forking a process that has used torch's threads can deadlock.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_run, args=(spec, theirs), name="dbuffer-demo-engine", daemon=True
        )
        self._process.start()
        # Else the end of the pipe would not show when the process dies.
        theirs.close()

    def wait_ready(self, timeout_s: float) -> str:
        """Wait until the engine has started; its description."""
        return str(self._receive(timeout_s))

    def request(self, request: Request) -> None:
        """Ask for completions, and do not wait for them."""
        try:
            self._connection.send(request)
        except OSError as error:
            raise self._ended() from error

    def reply(self, timeout_s: float) -> Reply:
        """Wait for the completions asked for."""
        return Reply(*self._receive(timeout_s))

    def _receive(self, timeout_s: float) -> Any:
        try:
            if not self._connection.poll(timeout_s):
                raise DemoError(f"the engine gave no answer in {timeout_s:g} s; see {self._log}")
            message = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if isinstance(message, DemoError):
            raise DemoError(f"the engine failed: {message}; see {self._log}")
        return message

    def _ended(self) -> DemoError:
        self._process.join(_END_TIMEOUT_S)
        return DemoError(
            f"the engine's process ended with exit code {self._process.exitcode}; see {self._log}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Let the process finish its request and end; kill it if that takes too long."""
        self._connection.close()
        self._process.join(_END_TIMEOUT_S if kind is None else _ABORT_TIMEOUT_S)
        self._process.kill()
        self._process.join()
        self._process.close()


def _run(spec: EngineSpec, connection: Connection) -> None:
    """Main function of the engine's process."""
    # Ctrl-C reaches both processes; the trainer decides, and closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Engines print a lot, from native code too, which would tear the trainer's table.
    with spec.log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        engine = spec.engine(spec.checkpoint, spec.seed)
        connection.send(engine.description)
        if spec.store is not None:
            engine.follow(spec.store)
        _serve(connection, engine, follows=spec.store is not None)
        engine.close()
    except Exception as error:
        # The trainer may have ended; then there is nobody to tell.
        with contextlib.suppress(OSError):
            connection.send(DemoError(f"{type(error).__name__}: {error}"))
        raise


def _serve(connection: Connection, engine: Engine, *, follows: bool) -> None:
    """Refresh the engine and answer requests, until the trainer closes the pipe."""
    weights = Refreshed(0, 0.0, 0.0)
    request: Request | None = None
    while True:
        if follows:
            weights = engine.refresh() or weights
        if connection.poll(_REQUEST_POLL_S if request is None else 0.0):
            try:
                request = connection.recv()
            except EOFError:
                return
        if request is not None and request.at_version <= weights.version:
            completions = engine.sample(request.prompts, request.num_tokens, greedy=request.greedy)
            connection.send(Reply(completions, weights))
            request = None
