"""Copies between main memory and a GPU, at the full speed of the link between them.

A GPU copies at full speed only to and from page-locked memory, in large pieces. On an H200,
page-locked memory gives 55 GB/s. Other memory gives 7 GB/s into the GPU, and 17 GB/s out of it. So
tensors that are long, contiguous and page-locked are copied directly. All other tensors are packed
into page-locked pieces: while threads pack one piece, the link transfers the previous piece.

All copies are queued on the current CUDA stream, after the work that the caller has queued there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from dbuffer.errors import StoreAccessError
from dbuffer.format.layout import align
from dbuffer.runtime.closing import Closing, ProcessBound

Pair = tuple[torch.Tensor, torch.Tensor]
"""Tensor in main memory, and a tensor of the same shape on a device."""

CopyInMemory = Callable[[list[torch.Tensor], list[torch.Tensor]], None]
"""Function that copies a list of tensors, its second argument, into the tensors of its first
argument. All tensors are in main memory."""

_PIECE_BYTES = (64 << 20, 8 << 20, 1 << 20)

_NUM_SLOTS = 2
"""Number of pieces in flight: threads work on one piece while the link transfers the other
piece."""

_LONG_BYTES = 1 << 20
"""Least size in bytes of a tensor that is copied directly. Its copy reaches 0.9 of the link's
speed."""

_REGISTER_READ_ONLY = 8


def any_on_gpu(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a tensor is on a GPU; a cheap check in a process that has not used a GPU."""
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_used and any(tensor.is_cuda for tensor in tensors)


def gpu_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the GPU that all tensors are on, or None if they are not all on one GPU."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    devices = {tensor.device for tensor in tensors}
    return devices.pop() if len(devices) == 1 and all(d.type == "cuda" for d in devices) else None


def fork_streams(tensors: Sequence[torch.Tensor]) -> Callable[[], contextlib.ExitStack]:
    """Return a function that makes new CUDA streams current, for a ``with`` block.

    Call the function in another thread. Work in the block begins after all work that the caller of
    `fork_streams` has queued so far. The streams have CUDA's lowest priority, torch's default.
    """
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    events = {device: torch.cuda.current_stream(device).record_event() for device in devices}

    def on_own_streams() -> contextlib.ExitStack:
        with contextlib.ExitStack() as stack:
            for device, event in events.items():
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream.wait_event(event)
                stack.enter_context(torch.cuda.stream(stream))
            return stack.pop_all()

    return on_own_streams


def free_on(device: torch.device) -> int:
    """Return the free bytes in a device's memory. For a CPU, this is the main memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def to_device(pairs: Sequence[Pair], copy_in_memory: CopyInMemory) -> None:
    """Copy from main memory into tensors on one device, casting; wait until the copies end."""
    with _Transfer(pairs) as transfer:
        for piece in transfer.pieces():
            piece.upload(copy_in_memory)
            torch._foreach_copy_([target for _, target in piece.pairs], piece.device_views())
            piece.slot.record()
        for host, target in transfer.direct:
            target.copy_(host, non_blocking=True)


def from_device(pairs: Sequence[Pair], copy_in_memory: CopyInMemory) -> None:
    """Copy tensors on one device into main memory, casting; wait until the copies end."""
    with _Transfer(pairs) as transfer:
        for host, source in transfer.direct:
            host.copy_(source, non_blocking=True)
        under_way: list[_Piece] = []
        for piece in transfer.pieces():
            if len(under_way) == _NUM_SLOTS:
                under_way.pop(0).take(copy_in_memory)
            torch._foreach_copy_(piece.device_views(), [source for _, source in piece.pairs])
            piece.download()
            under_way.append(piece)
        for piece in under_way:
            piece.take(copy_in_memory)


class Download:
    """Copy of a device's tensor into page-locked main memory, made in the background."""

    def __init__(self, source: torch.Tensor) -> None:
        self._host = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
        self._host.copy_(source, non_blocking=True)
        stream = torch.cuda.current_stream(source.device) if source.is_cuda else None
        self._event = None if stream is None else stream.record_event()

    def wait(self) -> torch.Tensor:
        """Wait until the copy is complete, and return it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class _Slot:
    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._has_queue = device.type == "cuda"
        self.device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._has_queue)
        self._event = torch.cuda.Event() if self._has_queue else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Mark the work that is queued so far: :meth:`wait` waits until this work is done."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self.device.device))

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class _Piece:
    def __init__(self, slot: _Slot, pairs: list[Pair]) -> None:
        self.slot = slot
        self.pairs = pairs
        ends = [0]
        for host, _ in pairs:
            ends.append(align(ends[-1] + host.nbytes))
        self._starts, self._num_bytes = ends[:-1], ends[-1]

    def upload(self, copy_in_memory: CopyInMemory) -> None:
        """Queue the piece's copy to the device; first pack tensors that are not page-locked."""
        self.slot.wait()
        hosts = [host for host, _ in self.pairs]
        if all(host.is_contiguous() and host.is_pinned() for host in hosts):
            torch._foreach_copy_(self.device_views(), hosts, non_blocking=True)
        else:
            copy_in_memory(self._views(self.slot.host), hosts)
            used = slice(0, self._num_bytes)
            self.slot.device[used].copy_(self.slot.host[used], non_blocking=True)
        self.slot.record()

    def download(self) -> None:
        used = slice(0, self._num_bytes)
        self.slot.host[used].copy_(self.slot.device[used], non_blocking=True)
        self.slot.record()

    def take(self, copy_in_memory: CopyInMemory) -> None:
        self.slot.wait()
        copy_in_memory([host for host, _ in self.pairs], self._views(self.slot.host))

    def device_views(self) -> list[torch.Tensor]:
        return self._views(self.slot.device)

    def _views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        return [
            memory[start : start + host.nbytes].view(host.dtype).view(host.shape)
            for start, (host, _) in zip(self._starts, self.pairs, strict=True)
        ]


class _Transfer(Closing):
    """Copies of tensors to or from one device: some tensors directly, others packed into pieces.

    Closing waits until the device has finished all queued copies.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._device = pairs[0][1].device
        self.direct: list[Pair] = []
        self._in_pieces: list[Pair] = []
        for host, on_device in pairs:
            if host.nbytes >= _LONG_BYTES and _is_flat(host, on_device) and host.is_pinned():
                self.direct.append((host, on_device))
            elif host.nbytes:
                self._in_pieces.append((host, on_device))

    def close(self) -> None:
        if self._device.type == "cuda":
            # Wait until the device has finished, because the pieces' memory is freed afterwards.
            torch.cuda.current_stream(self._device).synchronize()

    def pieces(self) -> Iterator[_Piece]:
        if not self._in_pieces:
            return
        slots = _make_slots(self._device, sum(align(host.nbytes) for host, _ in self._in_pieces))
        limit = slots[0].host.numel()
        number, num_bytes = 0, 0
        pairs: list[Pair] = []
        for pair in itertools.chain.from_iterable(_cut(long, limit) for long in self._in_pieces):
            pair_bytes = align(pair[0].nbytes)
            if pairs and num_bytes + pair_bytes > limit:
                yield _Piece(slots[number % _NUM_SLOTS], pairs)
                number, pairs, num_bytes = number + 1, [], 0
            pairs.append(pair)
            num_bytes += pair_bytes
        yield _Piece(slots[number % _NUM_SLOTS], pairs)


def _make_slots(device: torch.device, num_bytes: int) -> list[_Slot]:
    for limit in _PIECE_BYTES[:-1]:
        with contextlib.suppress(torch.OutOfMemoryError):
            return [_Slot(device, min(limit, num_bytes)) for _ in range(_NUM_SLOTS)]
    return [_Slot(device, min(_PIECE_BYTES[-1], num_bytes)) for _ in range(_NUM_SLOTS)]


def _is_flat(host: torch.Tensor, on_device: torch.Tensor) -> bool:
    """Whether a copy between the two tensors is a plain copy of bytes in order, without a cast."""
    return (
        host.dtype == on_device.dtype
        and host.is_contiguous()
        and on_device.is_contiguous()
        and host.is_neg() == on_device.is_neg()
        and host.is_conj() == on_device.is_conj()
    )


def _cut(pair: Pair, limit: int) -> Iterator[Pair]:
    """Cut a pair of tensors into parts of at most ``limit`` bytes, but at least one element."""
    host, on_device = pair
    if host.nbytes <= limit or host.numel() == 1:
        yield pair
    elif _is_flat(host, on_device):
        step = max(1, limit // host.itemsize)
        flat = host.reshape(-1), on_device.reshape(-1)
        for first in range(0, host.numel(), step):
            part = slice(first, first + step)
            yield flat[0][part], flat[1][part]
    else:
        dimension = next(d for d, n in enumerate(host.shape) if n > 1)
        rows = max(1, limit // (host.nbytes // host.shape[dimension]))
        for first in range(0, host.shape[dimension], rows):
            place = dimension, first, min(rows, host.shape[dimension] - first)
            yield from _cut((host.narrow(*place), on_device.narrow(*place)), limit)


class PageLock(ProcessBound):
    """Lock of memory pages, which lets a GPU copy to and from them at full speed.

    If the memory is a mapped file, its mapping must be shared: locking a private mapping copies
    each page.

    Raises:
        StoreAccessError: CUDA refuses to lock the memory, or the memory is longer than `max_bytes`.
    """

    max_bytes: ClassVar[int] = (512 << 30) - 1
    """Largest number of bytes in one lock. NVIDIA's driver 580 refuses more in one call, and
    refuses a copy that crosses from one lock to another."""

    def __init__(self, address: int, num_bytes: int, *, read_only: bool = False) -> None:
        super().__init__()
        if num_bytes > self.max_bytes:
            raise StoreAccessError(
                f"{num_bytes} bytes of memory are not page-locked: CUDA locks at most "
                f"{self.max_bytes} at once"
            )
        self._address = address
        flags = _REGISTER_READ_ONLY if read_only else 0
        status = int(_cuda_runtime().cudaHostRegister(address, num_bytes, flags))
        if status:
            # CUDA reports the error again when the next kernel starts. Start one here, so that the
            # user's next kernel does not fail.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")
            raise StoreAccessError(
                f"{num_bytes} bytes of memory could not be page-locked: CUDA error {status}; is "
                "there a limit on locked memory (ulimit -l)?"
            )

    def release(self) -> None:
        """Unlock the memory, which must still be mapped. Further calls do nothing."""
        if self._address and not self._is_inherited:  # a fork does not inherit locks
            _cuda_runtime().cudaHostUnregister(self._address)
        self._address = 0


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
