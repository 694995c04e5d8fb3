"""Attestation: whether a model that serves holds the version of its last switch.

After a switch, parameters are compared with the staged version, byte by byte. Their digest is taken
then, on the device where they are; so a later look needs nothing of the version.

`RankModel.attest` compares, in the stager's thread. When a follower asks, `RankReceiver.attest`
collects the results of all ranks, and writes ``attested_at`` into the engine's record. The follower
reads it there, for the label and the metric. If a rank has other weights, all ranks reload theirs.

A write after the comparison stays unseen, unless the next switch patches; and so do writes into
layers that stay with the reload, into buffers that are not published, and into a kernel's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes by their size: torch computes with few unsigned ones."""

_BLOCK_BYTES = 64 << 20
"""Bytes compared at a time: a device may have little room."""

_CHUNK_BYTES = 32 << 20
"""Bytes digested at a time, in three times as much memory. Each takes some six kernels to launch,
which is a quarter of the time that an H200 would take to read them."""

_ODD = (0x9E3779B97F4A7C15 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
"""Odd constants without a pattern: the golden ratio's, and one of SplitMix64 (Steele et al., 2014).
"""


def flat(parameter: torch.Tensor) -> torch.Tensor:
    """View a parameter that shares its memory with no other, as flat integers."""
    plain = parameter.detach()
    return as_integers(plain.as_strided((plain.numel(),), (1,), plain.storage_offset()))


def as_integers(values: torch.Tensor) -> torch.Tensor:
    """View the bits as integers of the elements' size."""
    return values.view(_INTEGERS[values.itemsize])


def same_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a target has the bytes that a copy of the source into it leaves."""
    target, source = (tensor.reshape(tensor.shape or (1,)) for tensor in (target, source))
    rows = max(1, len(target) * _BLOCK_BYTES // max(1, target.nbytes))
    blocks = zip(torch.split(target, rows), torch.split(source, rows), strict=True)
    return all(
        _same_bits(block, copied.to(device=block.device, dtype=block.dtype))
        for block, copied in blocks
    )


def _same_bits(*blocks: torch.Tensor) -> bool:
    pair = [as_integers(block) for block in blocks]
    # Elements are compared one by one: of eight bytes, that takes half the time of two's.
    if all(
        bits.is_contiguous() and not (bits.nbytes % 8 or bits.storage_offset() * bits.itemsize % 8)
        for bits in pair
    ):
        pair = [bits.view(-1).view(torch.int64) for bits in pair]
    return torch.equal(*pair)


@torch.no_grad()
def digest_of_all(parameters: Iterable[torch.Tensor]) -> int:
    """Return a digest of the bytes of parameters of one device, and of their places.

    It is a sum of 64-bit words, each multiplied by a number of its own (multilinear hashing, Carter
    and Wegman, 1979). Any change of one word changes it; others stay unseen by chance alone. It is
    no protection from somebody who chooses the bytes.
    """
    sums: list[torch.Tensor] = []
    numbers = torch.empty(0)
    for views in _chunks(parameters):
        num_bytes = sum(view.numel() for view in views)
        words = torch.zeros(-(-num_bytes // 8), dtype=torch.int64, device=views[0].device)
        torch.cat(views, out=words.view(torch.uint8)[:num_bytes])
        if numbers.numel() < words.numel():
            numbers = _numbers(words.numel(), words.device)
        # Alone, a change of the highest bits of two words would add up to nothing.
        mixed = _upper_half(words)
        mixed ^= words
        mixed *= numbers[: words.numel()]
        sums.append(mixed.sum())
    total = 0
    for part in torch.stack(sums).tolist() if sums else ():
        total = (total * _ODD[0] + part) % (1 << 64)
    return total


def _chunks(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield views of all bytes, in their order; each list but the last is of one length."""
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
    """Return the upper halves of words of 64 bits. torch alone would repeat their signs above."""
    return (words >> 32).bitwise_and_(0xFFFFFFFF)


def _numbers(count: int, device: torch.device) -> torch.Tensor:
    """Return different odd numbers, in an order without a pattern."""
    numbers = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    numbers *= _ODD[0]
    numbers ^= _upper_half(numbers)
    numbers *= _ODD[1]
    return numbers.bitwise_or_(1)
