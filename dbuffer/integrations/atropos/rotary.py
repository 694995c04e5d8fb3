r"""The two layouts of rotary position embeddings, and the way from one to the other.

A rotary embedding turns pairs of a head's elements, pair *i* by an angle of its own. Models differ
in what is a pair: elements :math:`2i` and :math:`2i+1` (interleaved: Meta's checkpoints, GPT-J), or
:math:`i` and :math:`i + d/2` (in halves: Hugging Face, GPT-NeoX). A query or key projection is
taken from one to the other by the order of its rows; attention scores stay what they were, as long
as queries and keys are taken both.
"""

from __future__ import annotations

import torch

from dbuffer.errors import InvalidWeightsError


def permute_for_rotary(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """From interleaved pairs to halves.

    Args:
        tensor: weight ``[num_heads * head_dim, in_features]`` or bias ``[num_heads * head_dim]`` of
            a query or key projection.
        num_heads: heads of just this projection: keys may have fewer.

    Returns:
        A new tensor of the same shape.

    Raises:
        InvalidWeightsError: (a ``ValueError``) its rows are not so many heads of even size.
    """
    _check(tensor, num_heads)
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def unpermute_for_rotary(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """From halves to interleaved pairs: the inverse of :func:`permute_for_rotary`."""
    _check(tensor, num_heads)
    halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _check(tensor: torch.Tensor, num_heads: int) -> None:
    if num_heads < 1 or not tensor.ndim or not tensor.shape[0] or tensor.shape[0] % (2 * num_heads):
        raise InvalidWeightsError(
            f"a tensor of shape {list(tensor.shape)} has no {num_heads} heads of even size in its "
            "rows: give the projection's own number of heads"
        )
