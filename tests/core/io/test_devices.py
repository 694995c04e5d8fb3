"""Copies through page-locked pieces, with main memory in place of a GPU's; on a GPU: `-m gpu`."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from dbuffer.errors import StoreAccessError
from dbuffer.io import devices
from dbuffer.io.copier import Copier
from dbuffer.receive.stager import StagingMemory

PIECE_BYTES = 4096


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(devices, "_PIECE_BYTES", (PIECE_BYTES,))


@pytest.fixture
def copier():
    copier = Copier(2)
    yield copier
    copier.close()


def tensors():
    """Tensors that fill a piece, that are longer, short, strided, empty, or a single number."""
    torch.manual_seed(0)
    return [
        torch.randn(PIECE_BYTES // 4),
        torch.randn(3 * PIECE_BYTES),
        torch.randn(7, dtype=torch.float64),
        torch.randn(70, 130).t(),
        torch.randn(5, 3, 1001)[:, ::2],
        torch.randn(64, 3).bfloat16(),
        torch.tensor(3),
        torch.empty(0),
        torch.randn(9, 0),
        torch.randint(0, 2, (2 * PIECE_BYTES + 1,)).bool(),
        torch.randn(33, dtype=torch.complex64),
    ]


@pytest.mark.parametrize("copy", [devices.to_device, devices.from_device])
class TestCopies:
    @pytest.mark.parametrize("dtype", [None, torch.float16], ids=["as it is", "cast"])
    def test_brings_every_byte(self, copy, copier, dtype):
        sources = [each for each in tensors() if dtype is None or each.is_floating_point()]
        targets = [torch.zeros(each.shape, dtype=dtype or each.dtype) for each in sources]
        copy(pairs_of(copy, targets, sources), copier.copy_tensors)
        for target, source in zip(targets, sources, strict=True):
            assert torch.equal(target, source.to(target.dtype))

    def test_writes_into_strided_targets(self, copy, copier):
        source = torch.randn(70, 130)
        target = torch.zeros(130, 140).t()[:140:2]
        copy(pairs_of(copy, [target], [source]), copier.copy_tensors)
        assert torch.equal(target, source)


def pairs_of(copy, targets, sources):
    pairs = zip(targets, sources, strict=True)
    return list(pairs) if copy is devices.from_device else [(s, t) for t, s in pairs]


class TestPageLock:
    @pytest.fixture
    def runtime(self, monkeypatch):
        """CUDA's runtime, which locks all that it is asked to."""
        runtime = Mock(cudaHostRegister=Mock(return_value=0))
        monkeypatch.setattr(devices, "_cuda_runtime", lambda: runtime)
        return runtime

    def test_locks_memory_in_one_call_and_unlocks_it_once(self, runtime):
        """A copy across the border of two locks would be refused."""
        lock = devices.PageLock(4096, devices.PageLock.max_bytes)
        lock.release()
        lock.release()
        runtime.cudaHostRegister.assert_called_once_with(4096, (512 << 30) - 1, 0)
        runtime.cudaHostUnregister.assert_called_once_with(4096)

    def test_memory_that_is_too_long_is_staged_unlocked(self, runtime, monkeypatch, caplog):
        monkeypatch.setattr(devices.PageLock, "max_bytes", 8191)
        with pytest.raises(StoreAccessError, match="8192 bytes"):
            devices.PageLock(4096, 8192)
        memory = StagingMemory(pinned=True)
        assert memory.resized(8192).numel() == 8192
        assert "8192 bytes" in caplog.text
        runtime.cudaHostRegister.assert_not_called()
        memory.resized(8191)
        runtime.cudaHostRegister.assert_called_once()
        memory.free()
