"""Views of a mapped file, parallel copies and checksums."""

from __future__ import annotations

import mmap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbuffer.format.layout import BLOCK_BYTES, Layout, TensorSpec
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import (
    MappedTensors,
    is_plain,
    split_evenly,
)
from tests.support.patterns import bits, checksum_of, random_bits

SIZES = (0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 17, 5)


@pytest.fixture
def make_mapped(tmp_path):
    """Map one file, made for some specs, as often as asked for."""
    path = tmp_path / "weights"

    def make(specs: list[TensorSpec], access: int = mmap.ACCESS_WRITE) -> MappedTensors:
        layout = Layout.of(specs)
        with path.open("a+b") as file:
            file.truncate(layout.layout_offset + 64)
            return MappedTensors(file.fileno(), layout.layout_offset + 64, layout, access=access)

    make.path = path
    return make


@pytest.fixture
def byte_specs():
    return [TensorSpec(f"t{size}", "uint8", (size,)) for size in SIZES]


@pytest.fixture(params=[1, 2, 5])
def copier(request):
    copier = Copier(request.param)
    yield copier
    copier.close()


class TestSplitEvenly:
    @given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 9))
    def test_each_index_is_in_one_slice_and_none_is_much_larger_than_its_share(self, sizes, parts):
        slices = split_evenly(sizes, parts)
        covered = [index for first, end in slices for index in range(first, end)]
        assert covered == list(range(len(sizes)))
        assert 1 <= len(slices) <= parts
        share = -(-sum(sizes) // parts)
        for first, end in slices:
            assert first < end, "torch's functions for lists of tensors refuse an empty one"
            assert sum(sizes[first:end]) <= share + max(sizes)


class Source:
    def __init__(self, done):
        self.done = done

    def work(self, first, _end):
        self.done.append(first)


class TestCopier:
    @pytest.mark.parametrize("hashed", [False, True])
    def test_writes_reads_and_hashes(self, make_mapped, copier, byte_specs, hashed):
        mapped = make_mapped(byte_specs)
        sources = [random_bits(torch.uint8, size) for size in SIZES]
        targets = [torch.zeros_like(source) for source in sources]
        expected = [checksum_of(bits(source)) for source in sources]
        assert copier.write(mapped, sources, hashed=hashed) == (expected if hashed else None)
        assert copier.checksums(mapped) == expected
        assert all(map(torch.equal, sources, mapped.views))
        assert copier.read(mapped, targets, hashed=hashed) == (expected if hashed else None)
        assert all(map(torch.equal, sources, targets))

    def test_a_failure_in_any_thread_is_raised(self, make_mapped, copier):
        mapped = make_mapped([TensorSpec(str(n), "float32", (1000,)) for n in range(20)])
        for wrong in (0, 10, 19):
            targets = [torch.zeros(1000 if n != wrong else 999) for n in range(20)]
            with pytest.raises(RuntimeError):
                copier.read(mapped, targets)

    def test_closing_ends_its_threads(self, make_mapped, byte_specs):
        before = set(threading.enumerate())
        Copier(1).checksums(make_mapped(byte_specs))  # in the caller's thread
        assert set(threading.enumerate()) <= before
        copier = Copier(4)
        copier.checksums(make_mapped(byte_specs))
        assert set(threading.enumerate()) - before
        copier.close()
        copier.close()
        assert set(threading.enumerate()) - before == set()

    def test_a_thread_that_gets_no_turn_keeps_nothing(self, monkeypatch):
        """What it kept mapped would keep the room of a file that was replaced."""
        late, done = [], []
        monkeypatch.setattr(ThreadPoolExecutor, "submit", lambda _pool, call: late.append(call))
        copier, source = Copier(4), Source(done)
        kept = weakref.ref(source)
        copier.in_parallel(source.work, [(0, 1), (1, 2), (2, 3), (3, 4)])
        del source
        assert len(late) == 3
        assert kept() is None
        for call in late:
            call()
        assert done == [0, 1, 2, 3]
        copier.close()


def test_what_can_be_copied_byte_by_byte():
    real, complex_ = torch.zeros(4, 4), torch.zeros(4, dtype=torch.complex64)
    assert all(is_plain(one, torch.float32) for one in (real, torch.nn.Parameter(real), real[1:]))
    for tensor, dtype in (
        (real, torch.float64),
        (real[:, 1:], torch.float32),
        (real.t(), torch.float32),
        (complex_.conj(), torch.complex64),
        (complex_[:1].conj().imag, torch.float32),
        (torch.empty(4, device="meta"), torch.float32),
    ):
        assert not is_plain(tensor, dtype)
