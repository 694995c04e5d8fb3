"""Attestation: whether a model that serves has the weights of its last switch.

After a switch, `RankModel.attest` compares the parameters with the staged version, byte by byte, in
a background thread. `RankModel.attest` also computes a digest of the parameters, for later checks
without the version.

Attestation does not detect writes after the comparison, unless the next switch patches. It does not
check layers that the engine's reload fills, buffers that are not published, or a kernel's own
memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by their size in bytes. Most are signed: torch supports few unsigned ones."""

_BLOCK_BYTES = 64 << 20
"""Number of bytes compared at a time. The number is small, as a device may have little free
memory."""

_CHUNK_BYTES = 32 << 20
"""Number of bytes digested at a time. Digesting takes three times this memory. An H200 reads such a
chunk in four times the time that launching the six kernels for it takes."""

_ODD = (0x9E3779B97F4A7C15 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
"""Odd constants without a pattern: the golden ratio's, and one of SplitMix64 (Steele et al., 2014).
"""


def flat(parameter: torch.Tensor) -> torch.Tensor:
    """View a parameter as flat integers. The parameter must not share memory with another one."""
    plain = parameter.detach()
    return as_integers(plain.as_strided((plain.numel(),), (1,), plain.storage_offset()))


def as_integers(values: torch.Tensor) -> torch.Tensor:
    """View the elements' bits as integers of the same size."""
    return values.view(_INTEGERS[values.itemsize])


def same_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether copying the source into the target would leave the target's bytes unchanged."""
    target, source = (tensor.reshape(tensor.shape or (1,)) for tensor in (target, source))
    rows = max(1, len(target) * _BLOCK_BYTES // max(1, target.nbytes))
    blocks = zip(torch.split(target, rows), torch.split(source, rows), strict=True)
    return all(
        _same_bits(block, copied.to(device=block.device, dtype=block.dtype))
        for block, copied in blocks
    )


def _same_bits(*blocks: torch.Tensor) -> bool:
    pair = [as_integers(block) for block in blocks]
    # torch compares element by element, so elements of eight bytes take half the time of elements
    # of two bytes.
    if all(
        bits.is_contiguous() and not (bits.nbytes % 8 or bits.storage_offset() * bits.itemsize % 8)
        for bits in pair
    ):
        pair = [bits.view(-1).view(torch.int64) for bits in pair]
    return torch.equal(*pair)


@torch.no_grad()
def digest_of_all(parameters: Iterable[torch.Tensor]) -> int:
    """Return a digest of the bytes of parameters, and of their order.

    All must be on the same device.

    The digest is a sum of 64-bit words, each multiplied by a different number (multilinear hashing,
    Carter and Wegman, 1979). A change of a single word always changes the digest. A change of
    several words leaves the digest the same only by chance. The digest does not protect against
    bytes chosen on purpose.
    """
    sums: list[torch.Tensor] = []
    numbers = torch.empty(0)
    for views in _chunks(parameters):
        num_bytes = sum(view.numel() for view in views)
        words = torch.zeros(-(-num_bytes // 8), dtype=torch.int64, device=views[0].device)
        torch.cat(views, out=words.view(torch.uint8)[:num_bytes])
        if numbers.numel() < words.numel():
            numbers = _numbers(words.numel(), words.device)
        # Without this step, changes of the highest bits of two words would cancel out.
        mixed = _upper_half(words)
        mixed ^= words
        mixed *= numbers[: words.numel()]
        sums.append(mixed.sum())
    total = 0
    for part in torch.stack(sums).tolist() if sums else ():
        total = (total * _ODD[0] + part) % (1 << 64)
    return total


def _chunks(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield lists of views of all bytes, in order. Each list but the last has `_CHUNK_BYTES`."""
    views: list[torch.Tensor] = []
    room = _CHUNK_BYTES
    for parameter in parameters:
        unread = flat(parameter).view(torch.uint8)
        while unread.numel():
            views.append(unread[:room])
            unread = unread[room:]
            room -= views[-1].numel()
            if not room:
                yield views
                views, room = [], _CHUNK_BYTES
    if views:
        yield views


def _upper_half(words: torch.Tensor) -> torch.Tensor:
    """Return the upper halves of 64-bit words. The mask removes the sign bits of torch's shift."""
    return (words >> 32).bitwise_and_(0xFFFFFFFF)


def _numbers(count: int, device: torch.device) -> torch.Tensor:
    """Return distinct odd numbers, in an order without a pattern."""
    numbers = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    numbers *= _ODD[0]
    numbers ^= _upper_half(numbers)
    numbers *= _ODD[1]
    return numbers.bitwise_or_(1)
