"""What tests let a vLLM worker do: calls that fail, wait, or take long; sent to it as functions."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from dbuffer.engine.endpoint import RankEndpoint
from dbuffer.testing.waiting import until

SLOW_STEP_S = 0.1


def _places(worker: Any) -> dict[str, tuple[Any, str]]:
    receiver: Any = RankEndpoint.of(worker.get_model()).receiver
    return {
        "load": (receiver._model, "load"),
        "prepare": (receiver._stager, "take"),
    }


def let_fail(worker: Any, what: str) -> None:
    """Let every load fail, or every preparation of an update."""
    owner, name = _places(worker)[what]
    whole = getattr(owner, name)
    tries = []

    def fail(*arguments: Any, **options: Any) -> Any:
        tries.append(what)
        if what == "load" and len(tries) % 2 == 0:  # the way back to the version before
            return whole(*arguments, **options)
        raise RuntimeError(f"this {what} fails")

    setattr(owner, name, fail)


def let_work(worker: Any, what: str) -> None:
    """Undo :func:`let_fail`: the method itself is there again."""
    delattr(*_places(worker)[what])


def let_wait(worker: Any, what: str, directory: str) -> None:
    """Let the next call make a file ``entered`` there, and wait for one ``go on``."""
    owner, name = _places(worker)[what]
    whole = getattr(owner, name)

    def wait(*arguments: Any, **options: Any) -> Any:
        delattr(owner, name)
        Path(directory, "entered").touch()
        until("it is told to go on", Path(directory, "go on").exists, 60.0)
        return whole(*arguments, **options)

    setattr(owner, name, wait)


def step_slowly(worker: Any, marker: str) -> None:
    """Let each step take long while there is a file, however fast the machine."""
    step = worker.execute_model

    def step_when_waited(*arguments: Any, **options: Any) -> Any:
        if Path(marker).exists():
            time.sleep(SLOW_STEP_S)
        return step(*arguments, **options)

    worker.execute_model = step_when_waited


def step_as_ever(worker: Any) -> None:
    """Undo :func:`step_slowly`."""
    del worker.execute_model
