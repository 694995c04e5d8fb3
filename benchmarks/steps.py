"""Times of the steps of an engine's switch."""

from __future__ import annotations

import functools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

PAUSING = "pause, reset caches"
AGREEING = "agree between ranks"
INITIALISING = "initialise reload"
LOADING = "load_weights: copy, pack"
FINALISING = "finalise reload"
COPYING = "copy by plan"
REPACKING = "repack tied heads"
STAMPING = "stamp the version"
ACKNOWLEDGING = "acknowledge"
RESUMING = "resume"
OTHER = "all else"

STEPS = (
    PAUSING,
    AGREEING,
    INITIALISING,
    LOADING,
    FINALISING,
    REPACKING,
    COPYING,
    STAMPING,
    ACKNOWLEDGING,
    RESUMING,
    OTHER,
)


class Stopwatch:
    """Measures the time in watched functions, by step. An outer step excludes its inner steps.

    Only one thread may call the watched functions.
    """

    def __init__(self) -> None:
        self._steps_s: dict[str, float] = defaultdict(float)
        self._inner_s: list[float] = []

    def read(self) -> dict[str, float]:
        """Return the seconds of each step since the last call of this method."""
        steps_s, self._steps_s = dict(self._steps_s), defaultdict(float)
        return steps_s

    def watch(self, owner: Any, function: Callable[..., Any], step: str) -> None:
        """Count later calls of a method of ``owner`` as ``step``.

        Pass the function, not its name, so that a type check reports a function that was removed.
        """
        setattr(owner, function.__name__, self._timed(function, step))

    def watch_everywhere(
        self, packages: tuple[str, ...], function: Callable[..., Any], step: str
    ) -> None:
        """Count later calls of a function, from all modules of ``packages``, as ``step``."""
        timed = self._timed(function, step)
        for name, module in list(sys.modules.items()):
            is_watched = name.partition(".")[0] in packages
            if is_watched and vars(module).get(function.__name__) is function:
                setattr(module, function.__name__, timed)

    def _timed(self, function: Callable[..., Any], step: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **more: Any) -> Any:
            with self._step(step):
                return function(*arguments, **more)

        return timed

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        self._inner_s.append(0.0)
        try:
            yield
        finally:
            synchronize()
            elapsed_s = time.perf_counter() - start_s
            self._steps_s[name] += elapsed_s - self._inner_s.pop()
            if self._inner_s:
                self._inner_s[-1] += elapsed_s


class Marks:
    """Beginning and end of the last call of each watched function, by `time.monotonic`.

    On Linux, all processes share this clock.
    """

    def __init__(self) -> None:
        self.last: dict[str, tuple[float, float]] = {}

    def watch(self, owner: type, function: Callable[..., Any]) -> None:
        """Note later calls of a method of ``owner``, under the method's name.

        Pass the function, not its name, so that a type check reports a function that was removed.
        """
        name = function.__name__

        @functools.wraps(function)
        def noted(*arguments: Any, **more: Any) -> Any:
            began = time.monotonic()
            try:
                return function(*arguments, **more)
            finally:
                self.last[name] = began, time.monotonic()

        setattr(owner, name, noted)


def synchronize() -> None:
    """Wait until the GPU, if there is one, has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def watch_steps(llm: Any) -> Stopwatch:
    """Return a stopwatch for all steps of a switch, in vLLM's code and in dbuffer's."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    from dbuffer.engine.rank_channel import RankChannel
    from dbuffer.engine.rank_model import RankModel
    from dbuffer.engine.rank_receiver import RankReceiver
    from dbuffer.integrations.vllm.rank import repack_tied
    from dbuffer.integrations.vllm.vllm_engine import OfflineVllm

    stopwatch = Stopwatch()
    [model] = llm.apply_model(lambda model: model)
    stopwatch.watch(model, model.load_weights, LOADING)
    methods: tuple[tuple[type, Callable[..., Any], str], ...] = (
        (OfflineVllm, OfflineVllm.pause, PAUSING),
        (RankReceiver, RankReceiver._take_on_all_ranks, AGREEING),  # noqa: SLF001
        (RankChannel, RankChannel.gather, AGREEING),
        (RankModel, RankModel.load, COPYING),
        (RankReceiver, RankReceiver._write_record, ACKNOWLEDGING),  # noqa: SLF001
        (OfflineVllm, OfflineVllm.weight_version, STAMPING),
        (OfflineVllm, OfflineVllm.set_weight_version, STAMPING),
        (OfflineVllm, OfflineVllm.resume, RESUMING),
    )
    for owner, function, step in methods:
        stopwatch.watch(owner, function, step)
    for function, step in (
        (initialize_layerwise_reload, INITIALISING),
        (finalize_layerwise_reload, FINALISING),
        (repack_tied, REPACKING),
    ):
        stopwatch.watch_everywhere(("vllm", "dbuffer"), function, step)
    return stopwatch
