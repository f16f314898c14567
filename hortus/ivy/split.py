"""Cuts one large request into chunks. Pure; does not know who runs them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hortus.types import Int32, TokenBatch


def cut(sizes: Sequence[int] | Int32, budget: int, most: int) -> list[tuple[int, int]]:
    """Runs (lo, hi) of neighbours that cover all items in order.

    sizes: one non-negative size an item (tokens, or characters). A run's sizes sum to at most `budget` and it has at most
    `most` items; an item larger than the budget gets a run of its own. Runs are filled greedily, so that only where the
    next item would not fit does one end.
    """
    ends = np.cumsum(np.asarray(sizes, np.int64))
    count, lo, runs = len(ends), 0, []
    while lo < count:
        before = int(ends[lo - 1]) if lo else 0
        fits = int(np.searchsorted(ends, before + budget, side="right"))
        hi = min(max(fits, lo + 1), lo + most, count)
        runs.append((lo, hi))
        lo = hi
    return runs


def split(batch: TokenBatch, budget: int, most: int = 512) -> list[TokenBatch]:
    """The batch's sequences, in order, in chunks of at most `budget` tokens and `most` sequences (views, no copy).

    `most` is for requests of very short texts, so that they are shared out too.
    """
    if len(batch.cu_seqlens) - 1 <= most and len(batch.ids) <= budget:
        return [batch]
    return [batch.slice(lo, hi) for lo, hi in cut(batch.lengths, budget, most)]
