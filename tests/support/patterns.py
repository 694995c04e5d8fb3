"""Weights that know their version, name and place."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dbuffer


class Pattern:
    """Tensors whose every element is a function of version, name and position.

    A tensor from another version, under another's name or from another place in the file has no
    element in common with the right one.
    """

    def __init__(self, num_tensors: int = 8, numel: int = 256) -> None:
        self.names = [f"layers.{index}.weight" for index in range(num_tensors)]
        self._numel = numel

    @functools.cached_property
    def _position(self) -> torch.Tensor:
        return torch.arange(self._numel, dtype=torch.int64)

    @functools.cached_property
    def _base(self) -> torch.Tensor:
        return torch.stack([self._position + (index << 24) for index in range(len(self.names))])

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        """What is published as ``version`` (below 2**19)."""
        return dict(zip(self.names, self._base + (version << 44), strict=True))

    def empty(self) -> dict[str, torch.Tensor]:
        """A target to load into."""
        return dict(zip(self.names, torch.zeros_like(self._base), strict=True))

    def version_of(self, tensors: Mapping[str, torch.Tensor]) -> int | None:
        """The version that all of these are of; None if they are a mix."""
        if list(tensors) != self.names:
            return None
        version = int(tensors[self.names[0]][0]) >> 44
        right = torch.unbind(self._base + (version << 44))
        pairs = zip(self.names, right, strict=True)
        return version if all(torch.equal(tensors[name], value) for name, value in pairs) else None


class Sparse(Pattern):
    """A pattern of which each version changes one element in so many: what deltas are for.

    Each tensor tells all versions from one another still.
    """

    def __init__(self, num_tensors: int = 8, numel: int = 256, one_in: int = 16) -> None:
        super().__init__(num_tensors, numel)
        self.names = [f"sparse.{index}.weight" for index in range(num_tensors)]
        self._one_in = one_in

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        changed_at = version - (version - self._position) % self._one_in
        return dict(zip(self.names, self._base + (changed_at.clamp(min=0) << 44), strict=True))

    def version_of(self, tensors: Mapping[str, torch.Tensor]) -> int | None:
        if list(tensors) != self.names:
            return None
        version = int(tensors[self.names[0]].max()) >> 44
        right = self.weights(version)
        return version if all(torch.equal(tensors[name], right[name]) for name in right) else None


SMALL = Pattern()

OTHER = Pattern(num_tensors=5, numel=700)

SPARSE = Sparse()


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
        loaded: dict[str, torch.Tensor] = {}

        def load(pairs: Any) -> None:
            loaded.update((name, tensor.clone()) for name, tensor in pairs)

        version = receiver.load_into(load)
    if version is not None:
        pattern = next(p for p in (*patterns, SMALL, OTHER, SPARSE) if p.names == list(loaded))
        assert pattern.version_of(loaded) == version
    return version


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
