"""The engine's process: its main loop, and the trainer's handle on it.

Requests and replies go through a pipe, one at a time; weights go through the store and nowhere
else. Neither side can hang the other: the trainer waits with a time-out and kills, and an engine
whose trainer is gone reads the end of the pipe and ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from dbuffer.demo.engines import Engine, Refreshed
from dbuffer.demo.records import DemoError, EngineFailed, EngineReady, SampleReply, SampleRequest

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


class EngineProcess:
    """A process with one engine in it. Leave its ``with`` block, and it is gone."""

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
        message = self._receive(timeout_s)
        assert isinstance(message, EngineReady)  # noqa: S101
        return message.description

    def request(self, request: SampleRequest) -> None:
        """Ask for completions, and do not wait for them."""
        try:
            self._connection.send(request)
        except OSError as error:
            raise self._ended() from error

    def reply(self, timeout_s: float) -> SampleReply:
        """Wait for the completions asked for."""
        message = self._receive(timeout_s)
        assert isinstance(message, SampleReply)  # noqa: S101
        return message

    def _receive(self, timeout_s: float) -> Any:
        try:
            if not self._connection.poll(timeout_s):
                raise DemoError(f"the engine gave no answer in {timeout_s:g} s; see {self._log}")
            message = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if isinstance(message, EngineFailed):
            raise DemoError(f"the engine failed: {message.reason}; see {self._log}")
        return message

    def _ended(self) -> DemoError:
        self._process.join(_END_TIMEOUT_S)
        return DemoError(
            f"the engine's process ended with exit code {self._process.exitcode}; see {self._log}"
        )

    def close(self, timeout_s: float = _END_TIMEOUT_S) -> None:
        """Let the process finish its request and end; kill it if that takes too long."""
        self._connection.close()
        self._process.join(timeout_s)
        self._process.kill()
        self._process.join()
        self._process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(_END_TIMEOUT_S if error is None else _ABORT_TIMEOUT_S)


def _run(spec: EngineSpec, connection: Connection) -> None:
    """Main function of the engine's process."""
    # Ctrl-C reaches both processes; the trainer decides, and closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A checkpoint on disk is all that is needed.
    os.environ["HF_HUB_OFFLINE"] = "1"
    with _output_to(spec.log):
        try:
            engine = spec.engine(spec.checkpoint, spec.seed)
            connection.send(EngineReady(description=engine.description))
            if spec.store is not None:
                engine.follow(spec.store)
            _serve(connection, engine, follows=spec.store is not None)
            engine.close()
        except Exception as error:
            # The trainer may be the one that is gone; then there is nobody to tell.
            with contextlib.suppress(OSError):
                reason = f"{type(error).__name__}: {error}"
                connection.send(EngineFailed(reason=reason))
            raise


@contextlib.contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Engines print a lot, from native code too; none of it belongs into the trainer's table."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    yield


def _serve(connection: Connection, engine: Engine, *, follows: bool) -> None:
    """Refresh the engine and answer requests, until the trainer closes the pipe."""
    current = Refreshed(0, 0.0, 0.0)
    request: SampleRequest | None = None
    while True:
        if follows:
            current = engine.refresh() or current
        if connection.poll(_REQUEST_POLL_S if request is None else 0.0):
            try:
                request = connection.recv()
            except EOFError:
                return
        if request is not None and (request.at_version or 0) <= current.version:
            connection.send(_sample(engine, request, current))
            request = None


def _sample(engine: Engine, request: SampleRequest, current: Refreshed) -> SampleReply:
    return SampleReply(
        completions=engine.sample(request.prompts, request.num_tokens, greedy=request.greedy),
        version=current.version,
        stage_ms=current.stage_ms,
        pause_ms=current.pause_ms,
    )
