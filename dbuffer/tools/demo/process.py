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
from typing import Any, Self

from dbuffer.errors import DBufferError
from dbuffer.tools.demo.engines import AnyEngine, Refreshed
from dbuffer.tools.demo.policy import Tokens

START_TIMEOUT_S = 240.0
"""How long an engine may take to start. The first one of a machine takes longest."""
REPLY_TIMEOUT_S = 60.0
"""How long it may take to answer once it runs."""
_END_TIMEOUT_S = 10.0
_ABORT_TIMEOUT_S = 2.0
"""After an error. Not zero: a process that is killed cannot remove its temporary files."""


class DemoError(DBufferError, RuntimeError):
    """The demo could not run to its end."""


class EngineProcess:
    """A process with one engine in it, which ends with its ``with`` block.

    All that it prints goes to ``log``. Each request is answered with the newest version in
    ``store``; None: with the checkpoint's weights.
    """

    def __init__(
        self, engine: type[AnyEngine], checkpoint: Path, seed: int, log: Path, store: Path | None
    ) -> None:
        self._log = log
        # Forking a process that has used torch's threads can deadlock.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_run, args=(theirs, engine, checkpoint, seed, log, store), daemon=True
        )
        self._process.start()
        # Else the end of the pipe would not show when the process dies.
        theirs.close()

    def wait_ready(self) -> str:
        """Wait until the engine has started; its description."""
        return str(self._receive(START_TIMEOUT_S))

    def sample(self, prompts: Tokens, *, greedy: bool = False) -> Tokens:
        self.request(prompts, greedy=greedy)
        return self.reply()[0]

    def request(self, prompts: Tokens, *, greedy: bool = False) -> None:
        """Ask for completions, and do not wait for them."""
        try:
            self._connection.send((prompts, greedy))
        except OSError as error:
            raise self._ended() from error

    def reply(self) -> tuple[Tokens, Refreshed]:
        """Wait for the completions asked for; with the weights that they were sampled with."""
        completions, weights = self._receive(REPLY_TIMEOUT_S)
        return completions, weights

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


def _run(
    connection: Connection,
    kind: type[AnyEngine],
    checkpoint: Path,
    seed: int,
    log: Path,
    store: Path | None,
) -> None:
    # Ctrl-C reaches both processes; the trainer decides, and closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Engines print a lot, from native code too, which would tear the trainer's table.
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        engine = kind(checkpoint, seed)
        connection.send(engine.description)
        with contextlib.nullcontext() if store is None else engine.follow(store):
            _serve(connection, engine, follows=store is not None)
    except Exception as error:
        # The trainer may have ended; then there is nobody to tell.
        with contextlib.suppress(OSError):
            connection.send(DemoError(f"{type(error).__name__}: {error}"))
        raise


def _serve(connection: Connection, engine: AnyEngine, *, follows: bool) -> None:
    """Answer requests, each with the newest weights, until the trainer closes the pipe."""
    weights = Refreshed(0, 0.0, 0.0)
    with contextlib.suppress(EOFError):
        while True:
            prompts, greedy = connection.recv()
            if follows:
                weights = engine.refresh() or weights
            connection.send((engine.sample(prompts, greedy=greedy), weights))
