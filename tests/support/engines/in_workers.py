"""What tests let a vLLM worker do: calls that fail, wait, or take long; sent to it as functions."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from dbuffer.engine.endpoint import RankEndpoint
from dbuffer.store import filesystem
from dbuffer.testing.waiting import until

SLOW_STEP_S = 0.1

Pairs = Iterable[tuple[str, torch.Tensor]]


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


def process_id(_: Any) -> int:
    return os.getpid()


def echo(worker: Any, question: int) -> list[int]:
    """Return an answer by which a reply is known to be this rank's, and to be this call's."""
    return [worker.rank, question]


# Damage that one rank of an engine meets, and no other.

_open_regular = filesystem.open_regular


def damage_files(worker: Any, rank: int, kind: str) -> None:
    """Let a rank find every weights file ``truncated``, or with a bit ``flipped``."""

    def open_damaged(path: Path, flags: int, **options: Any) -> filesystem.Descriptor:
        if not path.name.startswith("weights-"):
            return _open_regular(path, flags, **options)
        with tempfile.NamedTemporaryFile() as copy:
            shutil.copyfile(path, copy.name)
            _damage(Path(copy.name), kind)
            return _open_regular(Path(copy.name), flags, **options)

    if rank == worker.rank:
        filesystem.open_regular = open_damaged


def mend_files(_: Any) -> None:
    """Undo :func:`damage_files`."""
    filesystem.open_regular = _open_regular


def _damage(path: Path, kind: str) -> None:
    """Cut a file short, or flip a bit of the first tensor in it."""
    if kind == "truncated":
        os.truncate(path, path.stat().st_size // 2)
        return
    with path.open("r+b") as file:
        [byte] = file.read(1)
        file.seek(0)
        file.write(bytes([byte ^ 1]))


def fail_loads(worker: Any, rank: int, times: int, after_tensors: int, why: str) -> None:
    """Let the model's next loads fail on a rank, when that many tensors have gone in."""
    fail_loads_of(worker.get_model(), times if rank == worker.rank else 0, after_tensors, why)


def fail_loads_of(model: Any, times: int, after_tensors: int, why: str) -> None:
    """Let the next loads of a model fail, when that many tensors have gone in."""
    left = times

    def fail(handed_over: int) -> None:
        nonlocal left
        if left and handed_over == after_tensors:
            left -= 1
            raise RuntimeError(why)

    watch_loads(model, fail)


def halt_load(worker: Any, rank: int, after_tensors: int, directory: str) -> None:
    """Let a rank's next load make a file ``halted`` there, and wait for one ``go on``."""
    halted, go_on = Path(directory, "halted"), Path(directory, "go on")

    def halt(handed_over: int) -> None:
        if rank == worker.rank and handed_over == after_tensors and not halted.exists():
            halted.touch()
            until("this rank may go on", go_on.exists, 60.0)

    watch_loads(worker.get_model(), halt)


def watch_loads(model: Any, watch: Callable[[int], None]) -> None:
    """Let ``watch`` be called before each tensor, with how many the model has been given so far."""
    load_weights = type(model).load_weights

    def watched(weights: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
        for count, pair in enumerate(weights):
            if pair[1].is_contiguous():  # or it stands in for a version's, and a failure passes
                watch(count)
            yield pair

    model.load_weights = lambda weights: load_weights(model, watched(weights))
