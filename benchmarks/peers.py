"""Transports of tensors between processes through files: dbuffer and its peers.

Each peer is used in the fastest way, by our measurements, that its documented interface allows.
Each receive ends with the data in warm destination tensors, as a receiver needs it.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import dbuffer
from benchmarks.copying import HalvesCopy
from benchmarks.models import Weights


class Peer(ABC):
    """Publishes ``weights`` into files at ``path``, and receives into ``copy.destination``."""

    name: ClassVar[str]

    rewrites_files: ClassVar[bool] = True
    """Whether a publish rewrites the files of the publish before. If False, the benchmark deletes
    the files between publishes, outside of the measured time."""

    def __init__(self, weights: Weights, copy: HalvesCopy, path: Path) -> None:
        self.weights = weights
        self.copy = copy
        self.destination = copy.destination
        self.path = path

    @abstractmethod
    def publish(self) -> None:
        """Write the weights."""

    @abstractmethod
    def receive(self) -> None:
        """Read the weights into the destination."""

    def discard(self) -> None:
        """Delete the files."""
        if self.path.is_dir():
            shutil.rmtree(self.path)
        else:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Close files and mappings."""


class Dbuffer(Peer):
    """dbuffer without checksums."""

    name = "dbuffer"
    checksums = False

    def __init__(self, weights: Weights, copy: HalvesCopy, path: Path) -> None:
        super().__init__(weights, copy, path)
        self.sender = dbuffer.WeightSender(path, checksum=self.checksums)
        self.receiver = dbuffer.WeightReceiver(path, verify=self.checksums)

    def publish(self) -> None:
        """Send the dict of tensors."""
        self.sender.send(self.weights)

    def receive(self) -> None:
        """Load into the dict of tensors."""
        if self.receiver.load_into(self.destination) is None:
            raise RuntimeError("the receiver did not find the published version")

    def close(self) -> None:
        """Close both ends."""
        self.receiver.close()
        self.sender.close()


class DbufferChecksums(Dbuffer):
    """dbuffer with a checksum for each tensor, which the receiver verifies."""

    name = "dbuffer, checksums"
    checksums = True


class TorchRL(Peer):
    """TorchRL's VLLMDoubleBufferTransport, with its scheme's default extraction: a TensorDict."""

    name = "TorchRL"

    def __init__(self, weights: Weights, copy: HalvesCopy, path: Path) -> None:
        # Import TorchRL here: the import takes seconds, and child processes do not need it.
        from torchrl._utils import logger
        from torchrl.weight_update.llm.vllm_double_buffer import VLLMDoubleBufferTransport

        logger.setLevel(logging.WARNING)
        super().__init__(weights, copy, path)
        self._tree = TensorDict(weights).unflatten_keys(".")
        self._transport = VLLMDoubleBufferTransport(str(path))

    def publish(self) -> None:
        """Send the nested TensorDict, as extracted from a module."""
        self._transport.send_weights("model", self._tree)

    def receive(self) -> None:
        """Map the files and copy out."""
        self.copy(dict(self._transport.receive_weights().items()))


class TensorDictMemmap(Peer):
    """tensordict's directory of memory-mapped files, one per tensor."""

    name = "tensordict memmap"

    def publish(self) -> None:
        """Write a flat TensorDict."""
        TensorDict(self.weights).memmap(self.path)

    def receive(self) -> None:
        """Map the files and copy out."""
        self.copy(dict(TensorDict.load_memmap(self.path).items()))


class Safetensors(Peer):
    """One safetensors file."""

    name = "safetensors"
    rewrites_files = False

    def publish(self) -> None:
        """Save the file."""
        save_file(self.weights, self.path)

    def receive(self) -> None:
        """Load the file and copy out."""
        self.copy(load_file(self.path))


class TorchSave(Peer):
    """torch.save, and torch.load with the file mapped, which is the faster way to load."""

    name = "torch.save"
    rewrites_files = False

    def publish(self) -> None:
        """Save the file."""
        torch.save(self.weights, self.path)

    def receive(self) -> None:
        """Map the file and copy out."""
        self.copy(torch.load(self.path, mmap=True, weights_only=True))


class DistributedCheckpoint(Peer):
    """torch.distributed.checkpoint in a single process, without the fsync that is its default."""

    name = "torch DCP"
    rewrites_files = False

    def publish(self) -> None:
        """Save with one thread per core."""
        writer = FileSystemWriter(self.path, sync_files=False, thread_count=torch.get_num_threads())
        with warnings.catch_warnings(action="ignore"):  # it warns of having a single process
            save_distributed(self.weights, storage_writer=writer, no_dist=True)

    def receive(self) -> None:
        """Load in place."""
        with warnings.catch_warnings(action="ignore"):
            load_distributed(
                self.destination, storage_reader=FileSystemReader(self.path), no_dist=True
            )
