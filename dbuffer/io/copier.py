"""`Copier`: copies and hashes tensors with a fixed number of threads."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import logging
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import xxhash

from dbuffer.errors import ClosedError
from dbuffer.format.layout import Block
from dbuffer.io import devices
from dbuffer.io.tensors import FileTensors, is_plain, join_blocks, split_evenly
from dbuffer.runtime import options
from dbuffer.runtime.closing import ProcessBound
from dbuffer.runtime.cores import leave_core, num_cores
from dbuffer.runtime.trouble import log_once

logger = logging.getLogger(__name__)

MAX_DEFAULT_THREADS = 8
"""Largest default number of threads. More threads do not help: a few cores use up the memory
bandwidth that limits copies."""

_PIECE_BYTES = 1 << 18
"""Bytes that are copied, and then hashed, in one step. A core's cache holds two copies of them."""


_SHARES_A_THREAD = 8


class _Batch:
    """Slices of work, which several threads take one by one.

    The calling thread takes slices too, so the work gets done even if no other thread can be
    started. When :meth:`settle` returns, no thread works on the slices any more, even after a
    Control-C.
    """

    def __init__(self, work: Callable[[int, int], Any], slices: Sequence[tuple[int, int]]) -> None:
        # Keep ``work`` only in the slices, because it refers to tensors of mapped files. A thread
        # that starts late keeps this batch alive, but not the slices. So it keeps no file mapped,
        # and the space of a removed file is freed.
        self._left = collections.deque(functools.partial(work, *bounds) for bounds in slices)
        self._streams = _callers_streams()
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()
        self._num_helping = 0
        self._has_stopped: queue.SimpleQueue[None] = queue.SimpleQueue()

    def help(self) -> None:
        with self._lock:
            self._num_helping += 1
        try:
            with contextlib.ExitStack() as stack:
                for stream in self._streams:
                    stack.enter_context(torch.cuda.stream(stream))
                self.work_off()
        except BaseException as error:  # noqa: BLE001 - it is raised where the work was asked for
            self._errors.append(error)
            self._left.clear()
        with self._lock:
            self._num_helping -= 1
        self._has_stopped.put(None)

    def work_off(self) -> None:
        # Outside of inference mode, which each thread must enter, torch refuses to copy into
        # parameters and inference tensors.
        with torch.inference_mode():
            while True:
                try:
                    work = self._left.popleft()
                except IndexError:
                    return
                work()

    def settle(self) -> None:
        """Drop all slices that no thread has begun, and wait for the slices that were begun."""
        interrupt: BaseException | None = None
        while True:
            try:
                # Don't wait for threads that have not begun to help: they will find no slice.
                self._left.clear()
                while self._num_helping:
                    self._has_stopped.get()
                break
            except BaseException as error:  # noqa: BLE001 - a second Control-C; raised below
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def raise_error(self) -> None:
        if self._errors:
            raise self._errors.pop(0)  # the error's traceback refers to this batch: break the cycle


def _callers_streams() -> list[torch.cuda.Stream]:
    """Return the calling thread's current CUDA streams, for each GPU with a non-default stream.

    A copy on another stream would not wait for the work that the caller has queued.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    currents = map(torch.cuda.current_stream, range(torch.cuda.device_count()))
    return [stream for stream in currents if stream != torch.cuda.default_stream(stream.device)]


class Copier(ProcessBound):
    """Copies and hashes tensors with a fixed number of threads.

    The threads use the caller's CUDA streams. When a call returns or raises, no thread works for
    the call any more.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        if num_threads is None:
            num_threads = min(MAX_DEFAULT_THREADS, num_cores())
        self.num_threads = options.whole_number("num_threads", num_threads)
        self._begin()

    def _begin(self) -> None:
        super().__init__()  # it belongs to this process from now on
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._is_closed = False

    def close(self) -> None:
        if self._is_inherited:  # a fork has no threads that could end, or release the lock
            self._begin()
        with self._lock:
            self._is_closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def write(
        self, contents: FileTensors, sources: list[torch.Tensor], *, hashed: bool = False
    ) -> list[int] | None:
        """Copy each source into the file, casting; return the file's checksums if ``hashed``."""
        if hashed:
            return self._copy_and_hash(contents, sources, into_file=True)
        self.copy_tensors(contents.views, sources, contents.cut(self.num_threads))
        return None

    def read(
        self, contents: FileTensors, targets: list[torch.Tensor], *, hashed: bool = False
    ) -> list[int] | None:
        """Copy each tensor out of the file; return the file's checksums if ``hashed``.

        The threads copy each piece of the file first, and hash it second. A writer that overwrites
        the file never restores the old bytes. So if a checksum is correct, the file still had the
        right bytes when they were copied.
        """
        if hashed:
            return self._copy_and_hash(contents, targets, into_file=False)
        self.copy_tensors(targets, contents.views, contents.cut(self.num_threads))
        return None

    def checksums(self, contents: FileTensors, tensors: Collection[int] | None = None) -> list[int]:
        """Return the checksums, keyed by index, of all tensors in the file, or of ``tensors`` only.

        ``tensors`` are indexes.
        """
        blocks: Sequence[Block] = contents.layout.blocks
        if tensors is not None:
            chosen = set(tensors)
            blocks = [block for block in blocks if block.tensor in chosen]
        return join_blocks(blocks, self.digests(contents, blocks))

    def digests(self, contents: FileTensors, blocks: Sequence[Block]) -> list[int]:
        digests = [0] * len(blocks)

        def work(first: int, end: int) -> None:
            digests[first:end] = map(contents.hash_block, blocks[first:end])

        if blocks is contents.layout.blocks:
            slices = contents.cut(self.num_threads, into_blocks=True)
        else:
            slices = split_evenly([block.num_bytes for block in blocks], self.num_threads)
        self.in_parallel(work, slices)
        return digests

    def copy_tensors(
        self,
        destinations: list[torch.Tensor],
        sources: list[torch.Tensor],
        slices: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Copy each source into its destination, cast to the destination's dtype.

        ``slices`` divide the tensors into equal shares for the threads. They are computed if None,
        and not used if a tensor is copied to or from a GPU.
        """
        # Without CUDA, skip the loop below. It takes 8 ms for 18,867 tensors, which would prolong
        # an engine's pause.
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._copy_slices(destinations, sources, slices)
            return
        uploads: dict[torch.device, list[devices.Pair]] = {}
        downloads: dict[torch.device, list[devices.Pair]] = {}
        on_one_device: list[tuple[torch.Tensor, torch.Tensor]] = []
        for destination, source in zip(destinations, sources, strict=True):
            if destination.is_cuda and source.is_cpu:
                uploads.setdefault(destination.device, []).append((source, destination))
            elif source.is_cuda and destination.is_cpu:
                plain = source.detach().resolve_conj().resolve_neg()
                downloads.setdefault(source.device, []).append((destination, plain))
            else:
                on_one_device.append((destination, source))
        with torch.inference_mode():
            for pairs in uploads.values():
                devices.to_device(pairs, self._copy_slices)
            for pairs in downloads.values():
                devices.from_device(pairs, self._copy_slices)
        if uploads or downloads:
            if on_one_device:
                self._copy_slices(*map(list, zip(*on_one_device, strict=True)))
        else:
            self._copy_slices(destinations, sources, slices)

    def _copy_slices(
        self,
        destinations: list[torch.Tensor],
        sources: list[torch.Tensor],
        slices: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        if slices is None:
            slices = split_evenly([tensor.nbytes for tensor in destinations], self.num_threads)

        def work(first: int, end: int) -> None:
            # One call for many tensors releases the interpreter's lock once, not per tensor.
            torch._foreach_copy_(destinations[first:end], sources[first:end])

        self.in_parallel(work, slices)

    def _copy_and_hash(
        self, contents: FileTensors, tensors: list[torch.Tensor], *, into_file: bool
    ) -> list[int]:
        blocks, offsets = contents.layout.blocks, contents.layout.offsets
        addresses = self._plain_addresses(contents, tensors, into_file=into_file)
        digests = [0] * len(blocks)

        def work(first: int, end: int) -> None:
            for index in range(first, end):
                tensor, offset, num_bytes = blocks[index]
                start, address = offsets[tensor] + offset, addresses[tensor]
                hasher = xxhash.xxh3_64()
                for at in range(0, num_bytes, _PIECE_BYTES):
                    length = min(_PIECE_BYTES, num_bytes - at)
                    if address:
                        inside = contents.address + start + at
                        outside = address + offset + at
                        ends = (inside, outside) if into_file else (outside, inside)
                        ctypes.memmove(*ends, length)
                    hasher.update(contents.raw[start + at : start + at + length])
                digests[index] = hasher.intdigest()

        self.in_parallel(work, contents.cut(self.num_threads, into_blocks=True))
        return join_blocks(blocks, digests)

    def _plain_addresses(
        self, contents: FileTensors, tensors: Sequence[torch.Tensor], *, into_file: bool
    ) -> list[int]:
        """Return the address of each plain tensor. Copy all other tensors, and return 0 for them.

        A tensor is plain if it has the order, dtype and device of the file's bytes.
        """
        addresses = [0] * len(tensors)
        views, not_plain = [], []
        for index, (view, tensor) in enumerate(zip(contents.views, tensors, strict=True)):
            if is_plain(tensor, view.dtype):
                addresses[index] = tensor.data_ptr()
            else:
                views.append(view)
                not_plain.append(tensor)
        self.copy_tensors(*((views, not_plain) if into_file else (not_plain, views)))
        return addresses

    def cut_work(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        return split_evenly(sizes, self.num_threads * _SHARES_A_THREAD)

    def in_parallel(
        self, work: Callable[[int, int], Any], slices: Sequence[tuple[int, int]]
    ) -> None:
        """Call ``work(first, end)`` for all slices, which several threads take one by one."""
        batch = _Batch(work, slices)
        try:
            try:
                self._call_helpers(batch, min(len(slices), self.num_threads) - 1)
                batch.work_off()
            finally:
                batch.settle()
        finally:
            batch.settle()  # an interrupt may have come before the first call began
        batch.raise_error()

    def _call_helpers(self, batch: _Batch, num_helpers: int) -> None:
        if self._is_inherited:
            self._begin()
        with self._lock:
            if self._is_closed:
                raise ClosedError(
                    "the sender or receiver was closed: make a new sender or receiver"
                )
            if num_helpers > 0 and self._pool is None:
                self._pool = ThreadPoolExecutor(self.num_threads - 1, "dbuffer-copy", leave_core)
            try:
                for _ in range(num_helpers):
                    assert self._pool is not None  # noqa: S101 - made above
                    self._pool.submit(batch.help)
            except RuntimeError as error:  # the interpreter ends, or a limit on threads is reached
                message = "no more threads to copy with (%s): copying with fewer"
                log_once(logger, message, str(error))
