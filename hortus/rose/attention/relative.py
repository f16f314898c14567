"""Biases on attention scores by how far apart two tokens are: MPNet's learned buckets, ALiBi's lines.

Does not know layers or batches.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class DistanceBias:
    """A Bias that asks for the lengths of q and k alone."""

    def __init__(self, by_distance: Tensor) -> None:
        """by_distance: [heads, 2 longest - 1], query minus key, from 1 - longest up."""
        self._by_distance = by_distance
        self._longest = (by_distance.shape[1] + 1) // 2

    def __call__(self, q: Tensor, k: Tensor, first: int) -> Tensor:
        """[1, heads, queries, keys], a view of the table: nothing is copied, however long the sequence."""
        queries, keys = q.shape[2], k.shape[2]
        lo = self._longest - keys + first
        return self._by_distance[:, lo : lo + queries + keys - 1].unfold(1, keys, 1).unsqueeze(0)

    def square(self, length: int) -> Tensor:
        """Of a whole sequence, keys in their order: [heads, length, length]."""
        lo = self._longest - length
        return self._by_distance[:, lo : lo + 2 * length - 1].unfold(1, length, 1).flip(2).contiguous()


def learned(table: Tensor, longest: int) -> DistanceBias:
    """MPNet's: table [buckets, heads], for sequences of up to `longest` tokens."""
    apart = torch.arange(1 - longest, longest, device=table.device)
    return DistanceBias(table[buckets(-apart, len(table))].t().contiguous())


def buckets(apart: Tensor, count: int, furthest: int = 128) -> Tensor:
    """Bucket of each distance (key minus query): half of them for each direction; half of those exact, the rest widening.

    Raffel et al., arXiv 1910.10683, in float32 as transformers' MPNetEncoder computes it: boundaries depend on rounding.
    """
    half = count // 2
    exact = half // 2
    far = apart.abs()
    wide = exact + (torch.log(far.float() / exact) / math.log(furthest / exact) * (half - exact)).long()
    return torch.where(apart > 0, half, 0) + torch.where(far < exact, far, wide.clamp(max=half - 1))


def alibi(heads: int, longest: int, *, device: torch.device, dtype: torch.dtype) -> DistanceBias:
    """-slope times the distance, either way (Press et al., arXiv 2108.12409)."""
    far = torch.arange(1 - longest, longest, device=device).abs()
    slope = torch.tensor(slopes(heads), device=device)
    return DistanceBias((slope[:, None] * -far).to(dtype))


def slopes(heads: int) -> list[float]:
    """Each head's. A power of two of heads has a geometric series; other numbers borrow every other one of the next's."""
    whole = 1 << (heads.bit_length() - 1)
    found = [2.0 ** (-8.0 * (i + 1) / whole) for i in range(whole)]
    return found if whole == heads else found + slopes(2 * whole)[::2][: heads - whole]
