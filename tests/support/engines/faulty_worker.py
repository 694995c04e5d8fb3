"""A vLLM worker's extension through which one rank of an engine, and no other, meets real damage.

Given as ``worker_extension_cls="tests.support.engines.faulty_worker.Faults"``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from dbuffer.integrations.vllm import WorkerExtension
from dbuffer.store import filesystem
from dbuffer.testing.waiting import until

_WAIT_S = 60.0

Pairs = Iterable[tuple[str, torch.Tensor]]


class Faults(WorkerExtension):
    """What the tests need of a worker; the rest is dbuffer's own extension."""

    def test_pid(self: Any) -> int:
        return os.getpid()

    def test_echo(self: Any, question: int) -> list[int]:
        """An answer by which a reply is known to be this rank's, and to be this call's."""
        return [self.rank, question]

    def test_damage_file(self: Any, rank: int, kind: str) -> None:
        """Let this rank find every weights file ``truncated``, or with a bit ``flipped``."""
        if rank != self.rank:
            return
        really_open = filesystem.open_regular

        def open_damaged(path: Path, flags: int, **options: Any) -> filesystem.Descriptor:
            if not path.name.startswith("weights-"):
                return really_open(path, flags, **options)
            with tempfile.NamedTemporaryFile() as copy:
                shutil.copyfile(path, copy.name)
                damage(Path(copy.name), kind)
                return really_open(Path(copy.name), flags, **options)

        self._test_open_regular = really_open
        filesystem.open_regular = open_damaged

    def test_mend_file(self: Any) -> None:
        """Let this rank find what is really there."""
        filesystem.open_regular = getattr(self, "_test_open_regular", filesystem.open_regular)

    def test_fail_load(self: Any, rank: int, times: int, after_tensors: int, why: str) -> None:
        """Let the model's next loads fail on this rank, when that many tensors have gone in."""
        left = times if rank == self.rank else 0

        def fail(handed_over: int) -> None:
            nonlocal left
            if left and handed_over == after_tensors:
                left -= 1
                raise RuntimeError(why)

        watch_loads(self.get_model(), fail)

    def test_halt_load(self: Any, rank: int, after_tensors: int, directory: str) -> None:
        """Let the model's next load make a file ``halted`` there, and wait for one ``go on``."""
        halted, go_on = Path(directory, "halted"), Path(directory, "go on")

        def halt(handed_over: int) -> None:
            if rank != self.rank or handed_over != after_tensors or halted.exists():
                return
            halted.touch()
            until("this rank may go on", go_on.exists, _WAIT_S)

        watch_loads(self.get_model(), halt)


def damage(path: Path, kind: str) -> None:
    """Cut a file short, or flip a bit of the first tensor in it."""
    if kind == "truncated":
        os.truncate(path, path.stat().st_size // 2)
        return
    with path.open("r+b") as file:
        [byte] = file.read(1)
        file.seek(0)
        file.write(bytes([byte ^ 1]))


def watch_loads(model: Any, watch: Callable[[int], None]) -> None:
    """Let ``watch`` be called before each tensor, with how many the model has been given so far."""
    load_weights = type(model).load_weights

    def watched(weights: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
        for count, pair in enumerate(weights):
            if pair[1].is_contiguous():  # or it stands in for a version's, and a failure passes
                watch(count)
            yield pair

    model.load_weights = lambda weights: load_weights(model, watched(weights))
