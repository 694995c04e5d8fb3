"""Weights files that are not mapped: read, written and copied in spans, byte for byte the same."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dbuffer
from dbuffer.format.layout import BLOCK_BYTES, SPAN_BYTES, Layout, TensorSpec
from dbuffer.io import transfer
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import DTYPE_NAMES, FileTensors, MappedTensors, join_blocks, join_digests
from dbuffer.store import filesystem
from dbuffer.store.filesystem import Descriptor
from dbuffer.testing.waiting import TIMEOUT_S
from tests.support.patterns import assert_same, bits, checksum_of, odd_tensors, random_bits
from tests.support.stores import open_files

EDGES = [0, 1, 63, 64, 65, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1]
LONG = [SPAN_BYTES - 64, SPAN_BYTES, SPAN_BYTES + 1, 2 * SPAN_BYTES + 17]
SIZES = st.one_of(
    st.integers(0, 300), st.sampled_from(EDGES), st.sampled_from(EDGES), st.sampled_from(LONG)
)
NUM_THREADS = st.sampled_from([1, 2, 3, 8])


def layout_of(sizes: Sequence[int]) -> Layout:
    return Layout.of(TensorSpec(f"t{i}", "uint8", (size,)) for i, size in enumerate(sizes))


class Files:
    """Files of a layout's size, in one place."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._opened: list[int] = []

    def new(self, layout: Layout, name: str, *, size: int | None = None) -> tuple[int, Path]:
        path = self._directory / name
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        self._opened.append(descriptor)
        os.truncate(path, layout.layout_offset if size is None else size)
        return descriptor, path

    def close(self) -> None:
        while self._opened:
            os.close(self._opened.pop())

    def assert_no_other_is_open(self) -> None:
        assert len(open_files(f"{self._directory}/")) == len(self._opened)


def handed(number: int) -> Descriptor:
    """As a writer hands an open file on."""
    return Descriptor(os.dup(number))


@pytest.fixture
def files(shm_path: Path) -> Iterator[Files]:
    files = Files(shm_path)
    yield files
    files.close()


def mapped_file(
    files: Files, layout: Layout, sources: list[torch.Tensor]
) -> tuple[bytes, list[int] | None]:
    """What the writer that maps its file makes of it."""
    file, path = files.new(layout, "mapped")
    mapped = MappedTensors(file, max(layout.layout_offset, 1), layout, access=mmap.ACCESS_WRITE)
    checksums = Copier(1).write(mapped, sources, hashed=True)
    return path.read_bytes(), checksums


def written_file(
    files: Files,
    layout: Layout,
    sources: Sequence[torch.Tensor],
    num_threads: int,
    *,
    hashed: bool = True,
) -> tuple[bytes, list[int]]:
    file, path = files.new(layout, "written")
    copier = Copier(num_threads)
    digests = transfer.write_tensors(handed(file), path, layout, sources, copier, hashed=hashed)
    copier.close()
    checksums = join_blocks(layout.blocks, digests) if hashed else []
    os.truncate(path, max(layout.layout_offset, path.stat().st_size))
    return path.read_bytes(), checksums


@pytest.mark.parametrize("size", [1000, 2 * SPAN_BYTES + 17])
def test_what_is_written_is_hashed_though_the_tensor_changes(files, monkeypatch, size):
    tensor, layout = torch.zeros(size, dtype=torch.uint8), layout_of([size])
    file, path = files.new(layout, "written")
    write = filesystem.write_at

    def write_and_change(*arguments: Any) -> None:
        write(*arguments)
        tensor.add_(1)

    monkeypatch.setattr(filesystem, "write_at", write_and_change)
    digests = transfer.write_tensors(handed(file), path, layout, [tensor], Copier(1), hashed=True)
    assert join_digests(digests) == checksum_of(path.read_bytes()[:size])


# Spans cover the file


@given(st.lists(SIZES, min_size=1, max_size=12))
@example([0])
@example([0, 0, SPAN_BYTES, 0])
@example([1] * 200)
@example([3 * SPAN_BYTES, 100, 5 * BLOCK_BYTES])
def test_spans_cover_all_bytes_once_in_whole_blocks(sizes):
    """None but the last is short."""
    layout = layout_of(sizes)
    end = block = 0
    for span in layout.spans:
        assert (span.start, span.first_block) == (end, block)
        assert span.end_block > span.first_block
        assert span.end - span.start < SPAN_BYTES + BLOCK_BYTES + 64
        assert span.end - span.start >= SPAN_BYTES or span is layout.spans[-1]
        end, block = span.end, span.end_block
    assert end == layout.checksums_offset
    assert block == len(layout.blocks)


# Written


@given(sizes=st.lists(SIZES, min_size=1, max_size=8), num_threads=NUM_THREADS)
@settings(max_examples=15)
def test_the_same_bytes_and_checksums_as_through_a_mapping(files, sizes, num_threads):
    layout = layout_of(sizes)
    sources = [random_bits(torch.uint8, size) for size in sizes]
    expected = mapped_file(files, layout, sources)
    assert written_file(files, layout, sources, num_threads) == expected
    assert written_file(files, layout, sources, num_threads, hashed=False) == (expected[0], [])
    files.close()


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("numel", [1, 1000, 3 * SPAN_BYTES // 8])
def test_tensors_that_lie_otherwise(files, num_threads, numel):
    """Not contiguous, of another dtype, conjugate: also where they go over many spans."""
    tensors = odd_tensors(numel)
    layout = Layout.of(
        TensorSpec(name, DTYPE_NAMES[dtype], tuple(tensor.shape))
        for name, (tensor, dtype) in tensors.items()
    )
    sources = [tensor for tensor, _ in tensors.values()]
    data, checksums = written_file(files, layout, sources, num_threads)
    assert (data, checksums) == mapped_file(files, layout, sources)
    found = FileTensors(torch.frombuffer(bytearray(data), dtype=torch.uint8), layout)
    right = [tensor.detach().resolve_conj().resolve_neg().to(d) for tensor, d in tensors.values()]
    assert_same(dict(enumerate(found.views)), dict(enumerate(right)))
    assert checksums == [checksum_of(bits(tensor)) for tensor in right]


@pytest.mark.parametrize(
    "columns", [[4096], [16, 4096, 16], [1000] * 3 + [8192], [3000] * 6, [16, 2000] * 4]
)
def test_threads_share_one_flat_copy_of_a_tensor(files, monkeypatch, columns):
    """However the spans are cut, never more copies are in memory than there are threads."""
    made: list[int] = []
    living: list[weakref.ref[torch.Tensor]] = []
    peaks: list[int] = []
    reshape = torch.Tensor.reshape
    num_threads = 4

    def counted(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
        flat = reshape(tensor, *shape)
        if not tensor.is_contiguous():
            made.append(tensor.numel())
            living.append(weakref.ref(flat))
            peaks.append(sum(ref() is not None for ref in living))
        return flat

    sources = [random_bits(torch.float32, 1024 * count).view(1024, count).T for count in columns]
    layout = Layout.of(
        TensorSpec(f"t{i}", "float32", tuple(source.shape)) for i, source in enumerate(sources)
    )
    expected = mapped_file(files, layout, sources)
    monkeypatch.setattr(torch.Tensor, "reshape", counted)
    assert written_file(files, layout, sources, num_threads) == expected
    for count in (4096, 8192):  # columns of a tensor that is all there is for some thread
        assert made.count(1024 * count) == columns.count(count)
    assert max(peaks) <= num_threads


def test_gaps_are_written_as_zeros(files):
    """Over memory that held the tensors before: what lies between two tensors is not theirs."""
    layout = layout_of([SPAN_BYTES, *[1] * 20])
    sources = [torch.full((size,), 255, dtype=torch.uint8) for size in layout.sizes]
    data, _ = written_file(files, layout, sources, 1)
    gaps = [data[start + 1 : start + 64] for start in layout.offsets[1:]]
    assert set(b"".join(gaps)) == {0}


def test_memory_a_thread_is_bounded(files, monkeypatch):
    """The model is not gathered on its way to the file."""
    layout = layout_of([8 * SPAN_BYTES])
    made: list[int] = []
    empty = torch.empty

    def noted(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*arguments, **options)
        made.append(tensor.nbytes)
        return tensor

    sources = [random_bits(torch.uint8, 8 * SPAN_BYTES)]
    monkeypatch.setattr(torch, "empty", noted)
    written_file(files, layout, sources, 2)
    assert sum(made) <= 2 * 2 * SPAN_BYTES


# Read and copied


@given(sizes=st.lists(SIZES, min_size=1, max_size=8), num_threads=NUM_THREADS)
@settings(max_examples=15)
def test_read_and_copied_as_they_were_written(files, sizes, num_threads):
    layout = layout_of(sizes)
    sources = [random_bits(torch.uint8, size) for size in sizes]
    data, checksums = mapped_file(files, layout, sources)
    file, path = files.new(layout, "source")
    os.pwrite(file, data, 0)
    copier = Copier(num_threads)
    for hashed in (True, False):
        # Full of something else before, and a bit too long, as memory that is used again.
        memory = torch.full((layout.checksums_offset + 64,), 0xA5, dtype=torch.uint8)
        found = FileTensors(memory, layout)
        digests = transfer.read_tensors(file, path, layout, found, copier, hashed=hashed)
        assert digests == (checksums if hashed else None)
        for view, source in zip(found.views, sources, strict=True):
            assert torch.equal(view, source)
        assert (memory[layout.checksums_offset :] == 0xA5).all()
        destination, copy = files.new(layout, "copy", size=0)
        digests = transfer.read_tensors(
            file, path, layout, handed(destination), copier, hashed=hashed
        )
        assert digests == (checksums if hashed else None)
        assert copy.read_bytes() == data[: layout.checksums_offset]
    files.assert_no_other_is_open()
    copier.close()
    files.close()


@given(
    sizes=st.lists(SIZES, min_size=1, max_size=6).filter(any),
    share=st.floats(0, 1, exclude_max=True),
    num_threads=NUM_THREADS,
)
@settings(max_examples=15)
def test_a_file_that_is_too_short_is_refused(files, sizes, share, num_threads):
    layout = layout_of(sizes)
    file, path = files.new(layout, "short", size=int(share * layout.checksums_offset))
    other, _ = files.new(layout, "other")
    memory = FileTensors(torch.empty(layout.checksums_offset, dtype=torch.uint8), layout)
    copier = Copier(num_threads)
    with pytest.raises(dbuffer.StoreCorruptError):
        transfer.read_tensors(file, path, layout, memory, copier, hashed=True)
    with pytest.raises(dbuffer.StoreCorruptError):
        transfer.read_tensors(file, path, layout, handed(other), copier, hashed=True)
    copier.close()
    files.close()


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EIO, dbuffer.StoreAccessError), (errno.ESTALE, dbuffer.StoreNotFoundError)],
)
def test_a_read_that_fails_ends_all_threads_before_it_is_told(files, monkeypatch, number, kind):
    """Nobody writes into memory behind the back of who was told of an error."""
    layout = layout_of([8 * SPAN_BYTES])
    file, path = files.new(layout, "source")
    memory = FileTensors(torch.empty(layout.checksums_offset, dtype=torch.uint8), layout)
    preadv, gate, running = os.preadv, threading.Event(), set()

    def read(descriptor: int, buffers: Any, offset: int) -> int:
        if offset == 0:
            gate.set()
            raise OSError(number, os.strerror(number))
        running.add(offset)
        gate.wait(TIMEOUT_S)
        time.sleep(0.02)
        try:
            return preadv(descriptor, buffers, offset)
        finally:
            running.remove(offset)

    monkeypatch.setattr(os, "preadv", read)
    copier = Copier(4)
    with pytest.raises(kind, match=str(path)):
        transfer.read_tensors(file, path, layout, memory, copier, hashed=True)
    assert not running
    copier.close()
