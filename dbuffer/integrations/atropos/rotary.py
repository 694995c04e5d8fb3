r"""Conversion between the two layouts of rotary position embeddings.

A rotary embedding turns pairs of a head's elements, pair *i* by an angle of its own. Models differ
in what is a pair: elements :math:`2i` and :math:`2i+1` (interleaved: Meta's checkpoints, GPT-J), or
:math:`i` and :math:`i + d/2` (in halves: Hugging Face, GPT-NeoX). A query or key projection is
taken from one to the other by the order of its rows; attention scores stay what they were, as long
as queries and keys are taken both.
"""

from __future__ import annotations

import torch

from dbuffer.errors import InvalidWeightsError


def permute_for_rotary(w: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Convert a projection from interleaved pairs to halves.

    Args:
        w: weight ``[n_heads * head_dim, in_features]`` or bias ``[n_heads * head_dim]`` of a query
            or key projection.
        n_heads: heads of just this projection: keys may have fewer.

    Returns:
        A new tensor of the same shape.

    Raises:
        InvalidWeightsError: (a ``ValueError``) its rows are not so many heads of even size.
    """
    _check(w, n_heads)
    pairs = w.reshape(n_heads, -1, 2, *w.shape[1:])
    return pairs.transpose(1, 2).reshape(w.shape)


def permute_for_rotary_1d(w: torch.Tensor, n_heads: int) -> torch.Tensor:
    """:func:`permute_for_rotary`, under the name that Atropos has for biases."""
    return permute_for_rotary(w, n_heads)


def unpermute_for_rotary(w: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Convert a projection from halves to interleaved pairs."""
    _check(w, n_heads)
    halves = w.reshape(n_heads, 2, -1, *w.shape[1:])
    return halves.transpose(1, 2).reshape(w.shape)


def _check(w: torch.Tensor, n_heads: int) -> None:
    if n_heads < 1 or not w.ndim or not w.shape[0] or w.shape[0] % (2 * n_heads):
        raise InvalidWeightsError(
            f"a tensor of shape {list(w.shape)} cannot be split into {n_heads} heads of an even "
            "number of rows: give the projection's own number of heads"
        )
