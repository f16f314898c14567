"""A learned bias on attention scores by how far apart two tokens are, as MPNet has it. Does not know layers or batches."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class RelativeBias:
    """Called with a length, gives what is added to the scores of a sequence of that length."""

    def __init__(self, table: Tensor, positions: int) -> None:
        """table: [buckets, heads]; positions: the longest sequence."""
        self._positions = positions
        apart = torch.arange(1 - positions, positions, device=table.device)  # key minus query
        self._by_distance = table[buckets(apart, len(table))].t().contiguous()  # [heads, 2 positions - 1]

    def __call__(self, length: int) -> Tensor:
        """[heads, length, length], query by key."""
        some = self._by_distance[:, self._positions - length : self._positions + length - 1]
        # Row r of the unfolded begins r further on: the last query's row first.
        return some.unfold(1, length, 1).flip(1)


def buckets(apart: Tensor, count: int, furthest: int = 128) -> Tensor:
    """Bucket of each distance (key minus query): half of them for each direction; half of those exact, the rest widening.

    Raffel et al., arXiv 1910.10683, in float32 as transformers' MPNetEncoder computes it: boundaries depend on rounding.
    """
    half = count // 2
    exact = half // 2
    far = apart.abs()
    wide = exact + (torch.log(far.float() / exact) / math.log(furthest / exact) * (half - exact)).long()
    return torch.where(apart > 0, half, 0) + torch.where(far < exact, far, wide.clamp(max=half - 1))
