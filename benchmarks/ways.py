"""Ways to bring new weights into an engine, dbuffer among them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

import dbuffer
from benchmarks.engines import Checkpoint
from benchmarks.measure import timed
from benchmarks.models import Weights
from benchmarks.steps import synchronize
from dbuffer.store.buffer import DoubleBuffer

_READY_TIMEOUT_S = 60.0


class Way(ABC):
    """One way to bring new weights into an engine: publish them, then switch to them."""

    name: ClassVar[str]

    stage_s = 0.0
    """Seconds that the preparation of the last switch took, while the engine could serve."""

    def publish(self, weights: Weights) -> None:  # noqa: B027 - not all need to
        """Publish weights, as a trainer does."""

    def wait_ready(self) -> None:  # noqa: B027 - not all need to
        """Wait until all work that needs no pause is done."""

    @abstractmethod
    def switch(self, weights: Weights) -> float:
        """Switch the engine to the published weights; return the seconds of the pause."""


class Dbuffer(Way):
    """Switches by an engine that follows a store."""

    name = "dbuffer"

    def __init__(self, llm: Any, store: Path, *, delta: bool = False) -> None:
        from dbuffer.integrations.vllm import Follower, follow

        self._sender = dbuffer.WeightSender(store, delta=delta)
        follower = follow(llm, store)
        if not isinstance(follower, Follower):
            raise TypeError("follow() did not return a Follower for an offline engine")
        self._follower = follower
        self._ready = Ready(store, f"{follower.engine_id}.rank-0")

    def publish(self, weights: Weights) -> None:
        """Send the weights."""
        self._ready.version = self._sender.send(weights).version

    def wait_ready(self) -> None:
        """Wait until the engine has staged the version."""
        self._ready.wait()

    def switch(self, weights: Weights) -> float:  # noqa: ARG002 - read from the store
        """Sync the follower."""
        switch = self._follower.sync()
        if switch is None:
            raise RuntimeError("the follower did not switch to the published version")
        self.stage_s = switch.stage_s
        return switch.pause_s

    def close(self) -> None:
        """Close both ends."""
        self._follower.close()
        self._sender.close()


class Ready:
    """Waits, by the record of an engine's only rank, until a version is staged."""

    def __init__(self, store: Path, receiver_id: str) -> None:
        self.version = 0
        self._store = DoubleBuffer(store)
        self._receiver_id = receiver_id

    def wait(self) -> None:
        """Wait until ``version`` is staged."""
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < deadline:
            record = self._store.receiver(self._receiver_id)
            if (
                record is not None
                and record.staged is not None
                and record.staged.number == self.version
            ):
                return
            time.sleep(0.001)
        raise TimeoutError(f"version {self.version} was not staged")


class Memcpy(Way):
    """One copy of as many bytes within memory: a lower bound of a switch."""

    name = "memcpy of the same bytes"

    def __init__(self, weights: Weights) -> None:
        num_bytes = sum(tensor.nbytes for tensor in weights.values())
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._source = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=device == "cuda")
        self._target = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def switch(self, weights: Weights) -> float:  # noqa: ARG002 - any bytes do
        """Copy."""
        return _finished_s(lambda: self._target.copy_(self._source, non_blocking=True))


class Floor(Way):
    """vLLM's own layerwise reload, from tensors in memory."""

    name = "vLLM, from memory (the floor)"

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def switch(self, weights: Weights) -> float:
        """Reload from an iterator."""
        arguments = {"weights_iterator": iter(weights.items())}
        return _finished_s(lambda: self._llm.collective_rpc("reload_weights", kwargs=arguments))


class Reload(Way):
    """vLLM's own reload of a safetensors checkpoint."""

    name = "vLLM, from safetensors"

    def __init__(self, llm: Any, checkpoint: Checkpoint) -> None:
        self._llm = llm
        self._checkpoint = checkpoint

    def publish(self, weights: Weights) -> None:
        """Save the checkpoint."""
        self._checkpoint.save(weights)

    def switch(self, weights: Weights) -> float:  # noqa: ARG002 - read from the file
        """Reload from the path."""
        arguments = {"weights_path": str(self._checkpoint.directory)}
        return _finished_s(lambda: self._llm.collective_rpc("reload_weights", kwargs=arguments))


def _finished_s(action: Callable[[], object]) -> float:
    def finished() -> None:
        action()
        synchronize()

    return timed(finished)
