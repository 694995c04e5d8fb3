"""Rotary layouts, against what a rotary embedding does: attention scores must not change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dbuffer
from dbuffer.integrations.atropos import permute_for_rotary


def angles(length: int, head_dim: int) -> torch.Tensor:
    """``[length, head_dim // 2]``: by how much each pair is turned at each position."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return torch.arange(length, dtype=torch.float64)[:, None] * frequencies


def turn_interleaved(heads: torch.Tensor) -> torch.Tensor:
    """``[heads, length, head_dim]`` with elements 2i and 2i+1 as a complex number, turned."""
    turns = torch.polar(torch.tensor(1.0, dtype=torch.float64), angles(*heads.shape[1:]))
    pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2)


def turn_in_halves(heads: torch.Tensor) -> torch.Tensor:
    turns = angles(*heads.shape[1:])
    first, second = heads.chunk(2, -1)
    sine, cosine = turns.sin(), turns.cos()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def project(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, num_heads: int
) -> torch.Tensor:
    return (hidden @ weight.t() + bias).unflatten(-1, (num_heads, -1)).transpose(0, 1)


heads = st.integers(1, 4)
halves = st.integers(1, 8)


@given(heads, st.integers(1, 3), halves, st.integers(1, 6), st.integers(0, 2**16))
def test_scores_are_those_of_the_other_layout(num_kv_heads, group, half, length, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden_size, num_heads = 5, num_kv_heads * group

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden = random(length, hidden_size)
    query = random(2 * half * num_heads, hidden_size), random(2 * half * num_heads)
    key = random(2 * half * num_kv_heads, hidden_size), random(2 * half * num_kv_heads)

    def scores(turn: object, query: object, key: object) -> torch.Tensor:
        queries = turn(project(hidden, *query, num_heads))
        keys = turn(project(hidden, *key, num_kv_heads)).repeat_interleave(group, 0)
        return queries @ keys.transpose(1, 2)

    expected = scores(turn_interleaved, query, key)
    permuted = scores(
        turn_in_halves,
        [permute_for_rotary(tensor, num_heads) for tensor in query],
        [permute_for_rotary(tensor, num_kv_heads) for tensor in key],
    )
    torch.testing.assert_close(permuted, expected)


@pytest.mark.parametrize(
    ("shape", "num_heads"), [((6, 2), 2), ((8,), 3), ((8,), 0), ((), 1), ((0, 4), 1)]
)
def test_what_has_no_such_heads_is_refused(shape, num_heads):
    with pytest.raises(dbuffer.InvalidWeightsError):
        permute_for_rotary(torch.zeros(shape), num_heads)
