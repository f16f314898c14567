"""DeBERTa's bias on attention scores: what a token says of a distance, and what a distance says of a token.

He et al., arXiv 2006.03654, 2111.09543; transformers' DebertaV2Model for the details. Unlike a bias by distance it differs
from sequence to sequence and from layer to layer. Does not know layers or batches.
"""

from __future__ import annotations

import torch
from torch import Tensor


class DisentangledBias:
    """A Bias. One of the two terms may be missing."""

    def __init__(self, about_keys: Tensor | None, about_queries: Tensor | None, bucket: Tensor, scale: float) -> None:
        """about_keys, about_queries: [heads, buckets, d], what a query, a key, is multiplied by. bucket: [2 longest - 1], that of
        each distance (query minus key), see `buckets`. scale: what products are multiplied by, as the scores are."""
        self._keys = None if about_keys is None else about_keys * scale
        self._queries = None if about_queries is None else about_queries * scale
        self._bucket, self._longest = bucket, (len(bucket) + 1) // 2

    def __call__(self, q: Tensor, k: Tensor, first: int) -> Tensor:
        """See Bias. -> [n, heads, queries, keys]."""
        queries, keys = q.shape[2], k.shape[2]
        # Every distance there is, from the first query and the last key up. Both terms start a row one further on each time.
        bucket = self._bucket[self._longest - keys + first : self._longest + first + queries - 1]
        found = None
        if self._keys is not None:
            found = _slanted(q @ self._keys[:, bucket].transpose(1, 2), keys)
        if self._queries is not None:
            other = _slanted(k @ self._queries[:, bucket].transpose(1, 2), queries).transpose(2, 3)
            found = other.contiguous() if found is None else torch.add(found, other, out=q.new_empty(other.shape))
        assert found is not None, "a bias without terms is not made"
        return found


def _slanted(x: Tensor, width: int) -> Tensor:
    """[n, heads, rows, rows + width - 1] -> [n, heads, rows, width]: row i from column i on. A view."""
    x = x.contiguous()
    n, heads, rows, all_ = x.shape
    return x.as_strided((n, heads, rows, width), (heads * rows * all_, rows * all_, all_ + 1, 1), x.storage_offset())


def buckets(longest: int, count: int, furthest: int, device: torch.device) -> Tensor:
    """[2 longest - 1] rows of a table of 2 x span: of each distance, query minus key, from 1 - longest up.

    count: exact up to half of it, widening up to `furthest` (span = count); 0: all exact (span = furthest). In float32 as
    transformers computes it: boundaries depend on rounding.
    """
    apart = torch.arange(1 - longest, longest)
    span = count or furthest
    if count:
        middle = count // 2
        far = torch.where(apart.abs() < middle, middle - 1, apart.abs())
        steps = torch.log(far / middle) / torch.log(torch.tensor((furthest - 1) / middle)) * (middle - 1)
        wide = (torch.ceil(steps) + middle) * apart.sign()
        apart = torch.where(far <= middle, apart, wide.long())
    return (apart + span).clamp(0, 2 * span - 1).to(device)
