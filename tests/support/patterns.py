"""Patterns published and read, and tensors of every other kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dbuffer
from dbuffer.testing.patterns import OTHER, SMALL, SPARSE, Pattern


def publish(sender: dbuffer.WeightSender, *versions: int, pattern: Pattern = SMALL) -> None:
    """Send a pattern's weights as each of these versions."""
    for version in versions:
        sender.send(pattern.weights(version), version=version)


def load(receiver: dbuffer.WeightReceiver, pattern: Pattern = SMALL) -> int | None:
    """Load the newest version, if there is a new one; it must be whole."""
    target = pattern.empty()
    version = receiver.load_into(target)
    assert version is None or pattern.version_of(target) == version
    return version


def received(store: Path) -> dict[str, torch.Tensor]:
    """The tensors of the newest version, in memory of their own."""
    with dbuffer.WeightReceiver(store) as receiver, receiver.open(timeout_s=5) as snapshot:
        return {name: tensor.clone() for name, tensor in snapshot.tensors.items()}


def tensordict_of(tensors: dict[str, torch.Tensor]) -> Any:
    """Return a flat TensorDict; its package takes as long to import as torch."""
    from tensordict import TensorDict

    return TensorDict(tensors)


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes: two NaNs may be the same, and 0.0 is not -0.0."""
    plain = tensor.detach().resolve_conj().resolve_neg().flatten()
    # Not `contiguous`: one element of a larger tensor is, and has a stride all the same.
    contiguous = plain.clone(memory_format=torch.contiguous_format)
    return contiguous.view(torch.uint8).numpy().tobytes()


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """The tensors of all names have the same dtype, shape and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        right = expected[name]
        assert (tensor.dtype, tensor.shape) == (right.dtype, right.shape), name
        assert bits(tensor) == bits(right), name


def checksum_of(data: bytes) -> int:
    """A tensor's checksum as the format describes it, by the streaming interface of xxhash."""

    def digest(piece: bytes) -> int:
        state = xxhash.xxh3_64()
        for start in range(0, len(piece), 4096):
            state.update(piece[start : start + 4096])
        return state.intdigest()

    if len(data) <= 1 << 20:
        return digest(data)
    blocks = [data[start : start + (1 << 20)] for start in range(0, len(data), 1 << 20)]
    return digest(b"".join(digest(block).to_bytes(8, "little") for block in blocks))


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of any bits at all, NaNs included."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (num_bytes,), dtype=torch.uint8)
    return data.view(dtype).view(shape)


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element: not all dtypes can be indexed, or compared."""
    return tensor.contiguous().view(-1).view(torch.uint8).view(tensor.numel(), tensor.itemsize)


def patches_between(
    before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
) -> list[dbuffer.SparsePatch]:
    """Patches that lead from one version to the other; also of tensors that are the same."""
    patches = []
    for name, tensor in after.items():
        rows = rows_of(tensor)
        at = (rows_of(before[name]) != rows).any(dim=1).nonzero().view(-1)
        patches.append(dbuffer.SparsePatch(name, at, rows[at].view(-1).view(tensor.dtype)))
    return patches


def odd_tensors(numel: int) -> dict[str, tuple[torch.Tensor, torch.dtype]]:
    """Tensors that do not lie in memory as a file holds them, and the file's dtype."""
    side = max(1, int(numel**0.5))
    square = torch.arange(side * side, dtype=torch.float32).view(side, side)
    complex_numbers = torch.complex(square, -square)
    return {
        "plain": (square, torch.float32),
        "transposed": (square.T, torch.float32),
        "every other": (square.view(-1)[::2], torch.float32),
        "expanded": (square[:1].expand(5, side), torch.float32),
        "cast": (square, torch.bfloat16),
        "cast up": (square.to(torch.float16), torch.float64),
        "cast and transposed": (square.T, torch.float16),
        "cast to bytes": (square / side, torch.float8_e4m3fn),
        "conjugate": (complex_numbers.conj(), torch.complex64),
        "conjugate and transposed": (complex_numbers.mH, torch.complex64),
        "negated": (complex_numbers.conj().imag, torch.float32),
        "parameter": (torch.nn.Parameter(square.T), torch.float32),
        "inside": (square.view(-1)[1:-1], torch.float32),
        "one of a column": (square[:1, 0], torch.float32),
        "none": (square[:0].T, torch.bfloat16),
        "flags": (square > 3, torch.bool),
        "scalar": (torch.tensor(2.5), torch.float32),
    }


def opened(store: Path, version: int | dbuffer.VersionId, pattern: Pattern = SMALL) -> int | None:
    """Return the version whose weights a receiver gets that asks for ``version``, or None."""
    with dbuffer.WeightReceiver(store) as receiver:
        try:
            with receiver.open(version=version, timeout_s=5) as snapshot:
                return pattern.version_of(snapshot.tensors)
        except dbuffer.VersionError:
            return None


def newest(store: Path, *patterns: Pattern, verify: bool = False) -> int | None:
    """The version that a receiver made now reads; it must be whole, and one of the patterns."""
    with dbuffer.WeightReceiver(
        store, receiver_id="newest", verify=verify, num_threads=1
    ) as receiver:
        version, tensors = copy_newest(receiver)
    if version is not None:
        pattern = next(p for p in (*patterns, SMALL, OTHER, SPARSE) if p.names == list(tensors))
        assert pattern.version_of(tensors) == version
    return version


def copy_newest(
    receiver: dbuffer.WeightReceiver,
) -> tuple[int | None, dict[str, torch.Tensor]]:
    """Load the newest version, and return it with copies of its tensors, whichever they are."""
    tensors: dict[str, torch.Tensor] = {}

    def copy(pairs: Any) -> None:
        tensors.update((name, tensor.clone()) for name, tensor in pairs)

    return receiver.load_into(copy), tensors


class Tied(nn.Module):
    """A module whose head may be its embedding, with buffers, one of which is not saved."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.randn(3), persistent=False)


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def _freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def _escaped() -> torch.Tensor:
    tensors: list[torch.Tensor] = []
    torch.func.vmap(lambda tensor: tensors.append(tensor) or tensor)(torch.ones(2, 3))
    return tensors[0]


NO_MEMORY = {
    "fake": _fake,
    "functional": lambda: torch._to_functional_tensor(torch.ones(3)),
    "of a transform": _escaped,
    "freed": _freed,
    "zero": lambda: torch._efficientzerotensor(3),
}
"""Functions that make tensors without values, which ``data_ptr`` alone shows."""
