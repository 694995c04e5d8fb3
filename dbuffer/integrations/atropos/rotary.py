"""Conversion between the two layouts of rotary position embeddings.

A rotary embedding rotates pairs of a head's d elements. There are two layouts of the pairs:

* interleaved (Meta's checkpoints, GPT-J): pair i has the elements 2i and 2i+1;
* halves (Hugging Face, GPT-NeoX): pair i has the elements i and i + d/2.

The conversion reorders the rows of query and key projections. Attention scores stay the same if
both projections are converted.
"""

from __future__ import annotations

import torch

from dbuffer.errors import InvalidWeightsError


def permute_for_rotary(w: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Return a projection converted from interleaved pairs to halves, as a new tensor.

    Args:
        w: weight ``[n_heads * head_dim, in_features]`` or bias ``[n_heads * head_dim]`` of a query
            or key projection.
        n_heads: number of heads in the projection. Keys can have fewer heads than queries.
    """
    if n_heads < 1 or not w.ndim or not w.shape[0] or w.shape[0] % (2 * n_heads):
        raise InvalidWeightsError(
            f"the rows of a tensor of shape {list(w.shape)} cannot be split into {n_heads} heads "
            "with an even number of rows each: pass the number of heads of this projection"
        )
    pairs = w.reshape(n_heads, -1, 2, *w.shape[1:])
    return pairs.transpose(1, 2).reshape(w.shape)


def permute_for_rotary_1d(w: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Call :func:`permute_for_rotary`, which also converts biases. Atropos has both names."""
    return permute_for_rotary(w, n_heads)
