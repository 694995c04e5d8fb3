"""Two double buffers of TorchRL weights, ours and TorchRL's own: read while being written to.

Writers and readers are processes of their own. A writer gives every element of every tensor the
same number, a new one each time, so that a read of two versions shows.
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
"""How long a reader waits for news. TorchRL's ignores it and reads the same again."""

_WHOLE_WRITES = 3
"""Before the one that is killed: dbuffer's first two make its buffers, the third is timed."""


class Way(ABC):
    """A transport as TorchRL knows it, with its defaults: one thread on either side."""

    name: ClassVar[str]

    def __init__(self, path: Path) -> None:
        """Nothing is written or read yet."""
        self._transport = self._open(str(path))

    @abstractmethod
    def _open(self, path: str) -> Any:
        """The transport; imported there: it takes seconds, and not every benchmark needs it."""

    def send(self, tree: Any) -> None:
        """Publish a nested TensorDict, as extracted from a module."""
        self._transport.send_weights("model", tree)

    def receive(self) -> Any:
        """What the transport gives: a flat TensorDict, or None if there is nothing new."""
        return self._transport.receive_weights(timeout=_TIMEOUT_S)

    def receive_copy(self) -> Any:
        """The same in memory of this process's own, so that all bytes have been read."""
        return self.receive()

    @abstractmethod
    def load_into(self, destination: Weights) -> None:
        """Receive into tensors that are there, as a model's are."""


class Ours(Way):
    """dbuffer's; what it gives is a copy."""

    name = "dbuffer"

    def _open(self, path: str) -> Any:
        from dbuffer.integrations.torchrl import VLLMDoubleBufferTransport

        return VLLMDoubleBufferTransport(path)

    def load_into(self, destination: Weights) -> None:
        """Copy out of the buffer, held still, to where it belongs."""
        self._transport.receive_weights(timeout=_TIMEOUT_S, weights=destination)


class Theirs(Way):
    """TorchRL's VLLMDoubleBufferTransport; what it gives are the files, mapped."""

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
"""What the fork server imports, so that no child has to."""


@dataclass(frozen=True, slots=True)
class Read:
    """What one read found: the same number everywhere, several, or an error."""

    lowest: int = 0
    highest: int = 0
    error: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether it is one version."""
        return not self.error and self.lowest == self.highest

    @property
    def is_torn(self) -> bool:
        """Whether it is several, and looks as good as one."""
        return not self.error and self.lowest != self.highest

    def __str__(self) -> str:
        if self.error:
            return self.error
        return f"{self.lowest}" if self.is_whole else f"{self.lowest} to {self.highest}"


@dataclass(frozen=True, slots=True)
class Race:
    """A writer and a reader, both at full speed."""

    duration_s: float
    num_written: int
    reads: list[Read]

    def count_back(self) -> int:
        """Whole reads of a version below one that was read whole before."""
        versions = [read.lowest for read in self.reads if read.is_whole]
        newest = itertools.accumulate(versions, max)
        return sum(version < most for version, most in zip(versions, newest, strict=True))

    def errors(self) -> Counter[str]:
        """The reads that failed, by the name of the exception."""
        return Counter(read.error for read in self.reads if read.error)


@dataclass(frozen=True, slots=True)
class Kill:
    """A writer killed in the middle of a write, and what it left."""

    write_s: float
    """What the write before took."""
    killed_after_s: float
    """From the beginning of the next one."""
    left: Read
    """By a reader that is started afterwards."""
    next_write_error: str
    """Of a new writer; empty if it had none."""
    after_next_write: Read

    @property
    def kind(self) -> str:
        """What could be read before anybody wrote again."""
        if self.left.error:
            return "unreadable"
        if self.left.is_torn:
            return "a mix"
        return {_WHOLE_WRITES: "the version before", _WHOLE_WRITES + 1: "the new version"}.get(
            self.left.lowest, "an older version"
        )

    @property
    def next_write_works(self) -> bool:
        """Whether it was written, and is what is read."""
        expected = _WHOLE_WRITES + 2
        return not self.next_write_error and self.after_next_write == Read(expected, expected)


def race(way: type[Way], directory: Path, shapes: Shapes, *, duration_s: float) -> Race:
    """Let a process write and another one read, each as fast as it can."""
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

    None if it had finished before it was struck.
    """
    with scratch_folder(directory) as folder:
        with child(write_when_told, (way,), folder, shapes) as writer:
            process_id = reply(writer)
            for number in range(1, _WHOLE_WRITES + 1):
                write_s = write(writer, way, number)
            writer.send((way.name, _WHOLE_WRITES + 1))
            reply(writer)  # it begins
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
    """Whether a killed writer had said that it was done."""
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
    """A writer could not write; its exception's name."""


def write(writer: Connection, way: type[Way], number: int) -> float:
    """Have a process that runs `write_when_told` write, and return the seconds that it took.

    Raises:
        WriteError: it failed.
    """
    writer.send((way.name, number))
    reply(writer)  # it begins
    answer = reply(writer)
    if isinstance(answer, str):
        raise WriteError(answer)
    return float(answer)


# ---------------------------------------------------------------------------------------------
# What runs in the children


class Source:
    """A model that holds one number, as a nested TensorDict."""

    def __init__(self, shapes: Shapes) -> None:
        from tensordict import TensorDict

        weights = models.warm_destination(shapes)
        self._elements = _elements(weights)
        self.tree = TensorDict(weights).unflatten_keys(".")

    def fill(self, number: int) -> None:
        """Let every element be ``number``; an error above 32,767."""
        for elements in self._elements:
            elements.fill_(number)


def _elements(weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """As integers, of which a 16-bit float cannot tell one from the next above 256."""
    return [tensor.view(torch.int16) for tensor in weights.values()]


def look(weights: Weights, shapes: Shapes) -> Read:
    """Which numbers are in there."""
    if {name: tuple(tensor.shape) for name, tensor in weights.items()} != shapes:
        return Read(error="other names or shapes")
    ranges = [torch.aminmax(elements) for elements in _elements(weights)]
    lowest, highest = (torch.stack(ends) for ends in zip(*ranges, strict=True))
    return Read(int(lowest.min()), int(highest.max()))


def write_when_told(
    connection: Connection, ways: Sequence[type[Way]], folder: Path, shapes: Shapes
) -> None:
    """Write the number that is asked for the way that is asked for; answer how long it took."""
    source = Source(shapes)
    opened = {way.name: way(folder / way.name) for way in ways}
    connection.send(os.getpid())
    while True:
        name, number = connection.recv()
        source.fill(number)
        connection.send("begins")
        try:
            answer: float | str = timed(lambda: opened[name].send(source.tree))  # noqa: B023 - called at once
        except Exception as error:  # noqa: BLE001 - which ones there are is a result
            answer = type(error).__name__
        connection.send(answer)


def _write_on(connection: Connection, way: type[Way], path: Path, shapes: Shapes) -> None:
    torch.set_num_threads(1)  # two processes, maybe on two cores: threads would wait for cores
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
    """Read and look; None if there is nothing new."""
    try:
        received = transport.receive_copy()
    except Exception as error:  # noqa: BLE001 - which ones there are is a result
        return Read(error=type(error).__name__)
    return None if received is None else look(dict(received.items()), shapes)
