"""What the tests of deltas share: versions in guarded memory, and deltas between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from dbuffer.errors import StoreCorruptError
from dbuffer.format import delta
from dbuffer.format.delta import DeltaHeader
from dbuffer.format.layout import Layout, TensorSpec
from dbuffer.format.lineage import VersionId
from dbuffer.io.changes import find_changes
from dbuffer.io.copier import Copier
from dbuffer.io.delta import encode_delta
from dbuffer.io.tensors import DTYPES, FileTensors

BASE, ID = VersionId(f"{1:016x}", 7), VersionId(f"{2:016x}", 8)
GUARD_BYTES = 4096
_GUARD = 0xA5


class Guarded(FileTensors):
    """Tensors in memory, with bytes around and between them that nobody may write."""

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        self.all = torch.full((2 * GUARD_BYTES + layout.checksums_offset,), _GUARD).byte()
        super().__init__(self.all[GUARD_BYTES : len(self.all) - GUARD_BYTES], layout)
        for index, tensor in enumerate(tensors):
            self.flat(index).copy_(flat_bytes(tensor))

    def flat(self, index: int) -> torch.Tensor:
        """One tensor's bytes."""
        start = self.layout.offsets[index]
        return self._bytes[start : start + self.layout.sizes[index]]

    def assert_guarded(self) -> None:
        rest = self.all.clone()
        for index, size in enumerate(self.layout.sizes):
            start = GUARD_BYTES + self.layout.offsets[index]
            rest[start : start + size] = _GUARD
        assert (rest == _GUARD).all(), "bytes that belong to no tensor were written"


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def random_tensor(dtype: str, numel: int, rng: np.random.Generator) -> torch.Tensor:
    """Any bits: numbers, NaNs of any payload, denormal ones."""
    kind = DTYPES[dtype]
    data = rng.integers(0, 2 if dtype == "bool" else 256, numel * kind.itemsize, np.uint8)
    return as_tensor(data, kind)


def as_tensor(data: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as a flat tensor, also if there are none."""
    tensor = torch.empty(data.size, dtype=torch.uint8)
    return tensor.copy_(torch.from_numpy(data.reshape(-1))).view(dtype)


def changed(tensor: torch.Tensor, share: float, rng: np.random.Generator) -> torch.Tensor:
    """Other bits in about this share of the elements; in at least one, if there is to be any."""
    data = flat_bytes(tensor).clone().numpy().reshape(tensor.numel(), tensor.dtype.itemsize)
    which = rng.random(len(data)) < share
    if share and len(data):
        which[rng.integers(len(data))] = True
    data[which, rng.integers(data.shape[1])] ^= 1
    return as_tensor(data, tensor.dtype)


def layout_of(tensors: Sequence[torch.Tensor], dtypes: Sequence[str]) -> Layout:
    pairs = enumerate(zip(tensors, dtypes, strict=True))
    return Layout.of([TensorSpec(f"t{i}", d, tuple(t.shape)) for i, (t, d) in pairs])


class Step(NamedTuple):
    """Two versions, and the delta that leads from one to the other."""

    layout: Layout
    layout_xxh3: str
    before: list[torch.Tensor]
    after: list[torch.Tensor]
    encoded: bytes
    """The header, with its prefix."""
    chunks: list[bytes]

    @property
    def header(self) -> DeltaHeader:
        return decoded(self.encoded, self)

    @property
    def num_bytes(self) -> int:
        return len(self.encoded) + sum(map(len, self.chunks))

    def contents(self, *, of_after: bool = False) -> Guarded:
        return Guarded(self.layout, self.after if of_after else self.before)


def decoded(header: bytes, step: Step) -> DeltaHeader:
    def read(start: int, num_bytes: int) -> bytes:
        assert num_bytes <= delta.MAX_HEADER_BYTES
        return header[start : start + num_bytes]

    return delta.decode_header(read, step.layout, step.layout_xxh3)


def make_step(
    before: list[torch.Tensor],
    after: list[torch.Tensor],
    dtypes: Sequence[str],
    copier: Copier,
    *,
    hashed: bool = True,
) -> Step:
    layout = layout_of(before, dtypes)
    sides = Guarded(layout, before), Guarded(layout, after)
    found = find_changes(sides[0].data, sides[1].data, layout, copier)
    checksums = tuple(map(copier.checksums, sides)) if hashed else None
    layout_xxh3 = layout.xxh3
    encoded, *chunks = encode_delta(
        found.chunks, checksums, base=BASE, version=ID, layout_xxh3=layout_xxh3
    )
    return Step(layout, layout_xxh3, before, after, encoded, chunks)


def random_step(
    rng: np.random.Generator,
    dtypes: Sequence[str],
    sizes: Sequence[int],
    shares: Sequence[float],
    copier: Copier,
    **options: bool,
) -> Step:
    """A delta between random tensors, of which about these shares changed."""
    before = [random_tensor(d, n, rng) for d, n in zip(dtypes, sizes, strict=True)]
    after = [changed(t, share, rng) for t, share in zip(before, shares, strict=True)]
    return make_step(before, after, dtypes, copier, **options)


def verify_result(header: DeltaHeader, contents: FileTensors, copier: Copier) -> None:
    """Compare the changed tensors with the checksums that the delta gives for them.

    Raises:
        StoreCorruptError: a tensor differs, or the delta has no checksums.
    """
    if (checksums := header.record.checksums) is None:
        raise StoreCorruptError("the delta has no checksums")
    found, specs = copier.checksums(contents), contents.layout.specs
    wrong = [specs[at].name for at, checksum in checksums if found[at] != int(checksum, 16)]
    if wrong:
        raise StoreCorruptError(
            f"{len(wrong)} tensors are not what delta {header.record.id} leads to: {wrong}"
        )
