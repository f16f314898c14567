"""Biases on attention scores by how far apart two tokens are: MPNet's learned buckets, ALiBi's lines.

Does not know layers or batches.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

KEPT = 1 << 24
"""Most values kept from call to call: 64 MB of float32."""


class DistanceBias:
    """A Bias that asks for the lengths of q and k alone."""

    def __init__(self, by_distance: Tensor) -> None:
        """by_distance: [heads, 2 longest - 1], from the key furthest before its query to the one furthest after it."""
        self._by_distance = by_distance
        self._longest = (by_distance.shape[1] + 1) // 2
        self._kept: dict[tuple[int, int, int], Tensor] = {}

    def __call__(self, q: Tensor, k: Tensor, first: int) -> Tensor:
        """[1, heads, queries, keys]: the same in every layer, so it is kept for the next one."""
        return self.between(k.shape[2], first, q.shape[2])

    def between(self, length: int, first: int = 0, queries: int | None = None) -> Tensor:
        """Of `queries` tokens from `first` on (None: all) of a sequence of that length: [1, heads, queries, length]."""
        queries = length if queries is None else queries
        at = length, first, queries
        if (found := self._kept.get(at)) is None:
            if sum(x.numel() for x in self._kept.values()) > KEPT:
                self._kept.clear()
            lo = self._longest - first - queries
            some = self._by_distance[:, lo : lo + length + queries - 1]
            # Row r of the unfolded begins r further on: the last query's row first.
            found = self._kept[at] = some.unfold(1, length, 1).flip(1).unsqueeze(0)
        return found


def learned(table: Tensor, longest: int) -> DistanceBias:
    """MPNet's: table [buckets, heads], for sequences of up to `longest` tokens."""
    apart = torch.arange(1 - longest, longest, device=table.device)  # key minus query
    return DistanceBias(table[buckets(apart, len(table))].t().contiguous())


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
