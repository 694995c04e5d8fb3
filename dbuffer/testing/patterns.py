"""Test weights whose values show version, name and position."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dbuffer.runtime.lazy import cached_property


class Pattern:
    """Test tensors whose elements are functions of version, tensor name and position.

    A tensor with the data of another version, of another tensor, or of another position in the file
    differs from the expected tensor in every element.
    """

    def __init__(self, num_tensors: int = 8, numel: int = 256) -> None:
        self.names = [f"layers.{index}.weight" for index in range(num_tensors)]
        self._numel = numel

    @cached_property
    def _position(self) -> torch.Tensor:
        return torch.arange(self._numel, dtype=torch.int64)

    @cached_property
    def _base(self) -> torch.Tensor:
        return torch.stack([self._position + (index << 24) for index in range(len(self.names))])

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a version. The version must be below 2**19."""
        return dict(zip(self.names, self._base + (version << 44), strict=True))

    def empty(self) -> dict[str, torch.Tensor]:
        """Return tensors with the pattern's names and shapes, to load a version into."""
        return dict(zip(self.names, torch.zeros_like(self._base), strict=True))

    def version_of(self, tensors: Mapping[str, torch.Tensor]) -> int | None:
        """Return the version of ``tensors``, or None if the tensors are a mix of versions."""
        if list(tensors) != self.names:
            return None
        version = int(tensors[self.names[0]][0]) >> 44
        right = torch.unbind(self._base + (version << 44))
        pairs = zip(self.names, right, strict=True)
        return version if all(torch.equal(tensors[name], value) for name, value in pairs) else None


class Sparse(Pattern):
    """Pattern whose versions differ in few elements, to test deltas.

    The largest element of each tensor shows the version.

    Args:
        one_in: a version changes one of ``one_in`` elements of each tensor.
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
