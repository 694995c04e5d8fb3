"""Reads from double buffers for TorchRL, dbuffer's and TorchRL's own, during writes.

Writers and readers run in separate processes. A writer sets all elements of all tensors to one
number, which differs from version to version, so that a read shows whether it mixes versions.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks import models
from benchmarks.measure import timed
from benchmarks.models import Shapes, Weights
from benchmarks.processes import child, reply, scratch_folder

_TIMEOUT_S = 1.0
"""Time that a reader waits for a new version. TorchRL's reader ignores it, and reads the same
version again."""

_WHOLE_WRITES = 3
"""Complete writes before the killed write. The first two make dbuffer's buffers."""


class Way(ABC):
    """Transport for TorchRL with its defaults: one thread in the writer and one in the reader."""

    name: ClassVar[str]

    def __init__(self, path: Path) -> None:
        """Make the transport, without writing or reading anything."""
        self._transport = self._open(str(path))

    @abstractmethod
    def _open(self, path: str) -> Any:
        """Return the transport. Implementations import it here, because that takes seconds."""

    def send(self, tree: Any) -> None:
        """Publish a nested TensorDict, as extracted from a module."""
        self._transport.send_weights("model", tree)

    def receive(self) -> Any:
        """Return the transport's result: a flat TensorDict, or None if there is nothing new."""
        return self._transport.receive_weights(timeout=_TIMEOUT_S)

    def receive_copy(self) -> Any:
        """Return a copy in this process's own memory, so that all bytes have been read."""
        return self.receive()

    @abstractmethod
    def load_into(self, destination: Weights) -> None:
        """Receive into existing tensors, such as a model's."""


class Ours(Way):
    """dbuffer's VLLMDoubleBufferTransport, which returns copies."""

    name = "dbuffer"

    def _open(self, path: str) -> Any:
        from dbuffer.integrations.torchrl import VLLMDoubleBufferTransport

        return VLLMDoubleBufferTransport(path)

    def load_into(self, destination: Weights) -> None:
        """Copy from the buffer into the destination."""
        self._transport.receive_weights(timeout=_TIMEOUT_S, weights=destination)


class Theirs(Way):
    """TorchRL's VLLMDoubleBufferTransport, which returns mapped files."""

    name = "TorchRL"

    def _open(self, path: str) -> Any:
        from torchrl._utils import logger
        from torchrl.weight_update.llm.vllm_double_buffer import VLLMDoubleBufferTransport

        logger.setLevel(logging.WARNING)
        return VLLMDoubleBufferTransport(path)

    def receive_copy(self) -> Any:
        """Map the files and copy, as loading them into a model would."""
        return self.receive().clone()

    def load_into(self, destination: Weights) -> None:
        """Map the files and copy."""
        found = self.receive()
        torch._foreach_copy_(list(destination.values()), [found[key] for key in destination])


WAYS: Sequence[type[Way]] = (Ours, Theirs)

PRELOAD = ["dbuffer.integrations.torchrl", "torchrl.weight_update.llm.vllm_double_buffer"]
"""Modules that the fork server imports once for all children."""


@dataclass(frozen=True, slots=True)
class Read:
    """Result of a read: the lowest and the highest number, or an error."""

    lowest: int = 0
    highest: int = 0
    error: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether the read returned one version."""
        return not self.error and self.lowest == self.highest

    @property
    def is_torn(self) -> bool:
        """Whether the read returned a mix of versions, without an error."""
        return not self.error and self.lowest != self.highest

    def __str__(self) -> str:
        if self.error:
            return self.error
        return f"{self.lowest}" if self.is_whole else f"{self.lowest} to {self.highest}"


@dataclass(frozen=True, slots=True)
class Race:
    """Result of a writer and a reader at full speed."""

    duration_s: float
    num_written: int
    reads: list[Read]

    def count_back(self) -> int:
        """Return the number of whole reads of an earlier version than a whole read before."""
        versions = [read.lowest for read in self.reads if read.is_whole]
        newest = itertools.accumulate(versions, max)
        return sum(version < most for version, most in zip(versions, newest, strict=True))

    def errors(self) -> Counter[str]:
        """Return the number of failed reads, by the name of the exception."""
        return Counter(read.error for read in self.reads if read.error)


@dataclass(frozen=True, slots=True)
class Kill:
    """Result of killing a writer in the middle of a write."""

    write_s: float
    """Time of the write before."""
    killed_after_s: float
    """Time from the beginning of the killed write until the kill."""
    left: Read
    """Result of a reader that was started after the kill."""
    next_write_error: str
    """Error of the next writer, or empty."""
    after_next_write: Read

    @property
    def kind(self) -> str:
        """Kind of version that could be read before the next write."""
        if self.left.error:
            return "unreadable"
        if self.left.is_torn:
            return "a mix"
        return {_WHOLE_WRITES: "the version before", _WHOLE_WRITES + 1: "the new version"}.get(
            self.left.lowest, "an older version"
        )

    @property
    def next_write_works(self) -> bool:
        """Whether the next write succeeded, and its version could be read."""
        expected = _WHOLE_WRITES + 2
        return not self.next_write_error and self.after_next_write == Read(expected, expected)


def race(way: type[Way], directory: Path, shapes: Shapes, *, duration_s: float) -> Race:
    """Run a writer and a reader at full speed, each in a process."""
    with (
        scratch_folder(directory) as folder,
        child(_write_on, way, folder / "weights", shapes) as writer,
    ):
        reply(writer)  # the first version is there
        with child(_read_on, way, folder / "weights", shapes) as reader:
            reply(reader)
            for connection in (writer, reader):
                connection.send("go")
            time.sleep(duration_s)
            reader.send("stop")
            reads = reply(reader)
        writer.send("stop")
        return Race(duration_s, reply(writer), reads)


def kill_writer(way: type[Way], directory: Path, shapes: Shapes, share: float) -> Kill | None:
    """Kill a writer after a share (0 to 1) of the time that a write takes.

    Return None if the write had finished before the kill.
    """
    with scratch_folder(directory) as folder:
        with child(write_when_told, (way,), folder, shapes) as writer:
            process_id = reply(writer)
            for number in range(1, _WHOLE_WRITES + 1):
                write_s = write(writer, way, number)
            writer.send((way.name, _WHOLE_WRITES + 1))
            reply(writer)  # the write begins
            time.sleep(share * write_s)
            os.kill(process_id, signal.SIGKILL)
            if _has_answered(writer):
                return None
        left = _read_anew(way, folder, shapes)
        error = ""
        with child(write_when_told, (way,), folder, shapes) as writer:
            reply(writer)
            try:
                write(writer, way, _WHOLE_WRITES + 2)
            except WriteError as failed:
                error = str(failed)
        after = _read_anew(way, folder, shapes)
        return Kill(write_s, share * write_s, left, error, after)


def _has_answered(writer: Connection) -> bool:
    """Whether a killed writer had finished its write."""
    try:
        reply(writer)
    except (EOFError, ConnectionResetError):
        return False
    return True


def _read_anew(way: type[Way], folder: Path, shapes: Shapes) -> Read:
    with child(_read_once, way, folder / way.name, shapes) as reader:
        read: Read = reply(reader)
        return read


class WriteError(Exception):
    """Failed write. The message is the name of the writer's exception."""


def write(writer: Connection, way: type[Way], number: int) -> float:
    """Let a process that runs `write_when_told` write; return the seconds that the write took.

    Raises:
        WriteError: the write failed.
    """
    writer.send((way.name, number))
    reply(writer)  # the write begins
    answer = reply(writer)
    if isinstance(answer, str):
        raise WriteError(answer)
    return float(answer)


# ---------------------------------------------------------------------------------------------
# What runs in the children


class Source:
    """Nested TensorDict of a model whose elements all have the same number."""

    def __init__(self, shapes: Shapes) -> None:
        from tensordict import TensorDict

        weights = models.warm_destination(shapes)
        self._elements = _elements(weights)
        self.tree = TensorDict(weights).unflatten_keys(".")

    def fill(self, number: int) -> None:
        """Set every element to ``number``, which must not be above 32,767."""
        for elements in self._elements:
            elements.fill_(number)


def _elements(weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return views of the tensors as integers: bfloat16 is not exact above 256."""
    return [tensor.view(torch.int16) for tensor in weights.values()]


def look(weights: Weights, shapes: Shapes) -> Read:
    """Return the lowest and the highest number in received weights."""
    if {name: tuple(tensor.shape) for name, tensor in weights.items()} != shapes:
        return Read(error="other names or shapes")
    ranges = [torch.aminmax(elements) for elements in _elements(weights)]
    lowest, highest = (torch.stack(ends) for ends in zip(*ranges, strict=True))
    return Read(int(lowest.min()), int(highest.max()))


def write_when_told(
    connection: Connection, ways: Sequence[type[Way]], folder: Path, shapes: Shapes
) -> None:
    """Run as a writer's process: write requested numbers in requested ways, and send the times."""
    source = Source(shapes)
    opened = {way.name: way(folder / way.name) for way in ways}
    connection.send(os.getpid())
    while True:
        name, number = connection.recv()
        source.fill(number)
        connection.send("begins")
        try:
            answer: float | str = timed(lambda: opened[name].send(source.tree))  # noqa: B023 - called at once
        except Exception as error:  # noqa: BLE001 - the kind of error is a result
            answer = type(error).__name__
        connection.send(answer)


def _write_on(connection: Connection, way: type[Way], path: Path, shapes: Shapes) -> None:
    torch.set_num_threads(1)  # the machine may have only one core for each of the two processes
    source = Source(shapes)
    transport = way(path)
    for number in itertools.count(1):
        source.fill(number)
        transport.send(source.tree)
        if number == 1:
            connection.send("written")
            connection.recv()
        elif connection.poll():
            connection.send(number)
            break


def _read_on(connection: Connection, way: type[Way], path: Path, shapes: Shapes) -> None:
    torch.set_num_threads(1)  # as in the writer
    transport = way(path)
    reads = []
    connection.send("ready")
    connection.recv()
    while not connection.poll():
        read = _read(transport, shapes)
        if read is not None:
            reads.append(read)
    connection.send(reads)


def _read_once(connection: Connection, way: type[Way], path: Path, shapes: Shapes) -> None:
    connection.send(_read(way(path), shapes) or Read(error="nothing there"))


def _read(transport: Way, shapes: Shapes) -> Read | None:
    """Read a version and return the result, or None if there is nothing new."""
    try:
        received = transport.receive_copy()
    except Exception as error:  # noqa: BLE001 - the kind of error is a result
        return Read(error=type(error).__name__)
    return None if received is None else look(dict(received.items()), shapes)
