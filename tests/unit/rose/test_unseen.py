"""Attention whose last tokens are not seen, against a dense mask; and the same on a device that plans ahead."""

import math

import numpy as np
import pytest
import torch

from hortus.rose.attention import Heads
from hortus.rose.attention.twin import TwinAttention
from hortus.rose.attention.unseen import Unseen


def dense(q, k, v, seen, heads):
    """One sequence by the formula."""
    at = torch.arange(len(q))
    gap = at[:, None] - at[None, :]
    sees = (at < seen)[None, :].expand(len(q), -1)
    if heads.causal:
        sees = sees & (gap >= 0)
    if heads.window is not None:
        sees = sees & (gap.abs() <= heads.window)
    k, v = (t.repeat_interleave(heads.heads // heads.kv_heads, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(heads.head_dim)
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize(
    "heads",
    [
        Heads(heads=4, kv_heads=4, head_dim=8),
        Heads(heads=4, kv_heads=2, head_dim=8, causal=True),
        Heads(heads=2, kv_heads=2, head_dim=8, window=3),
    ],
    ids=["all", "causal, shared keys", "window"],
)
def test_last_tokens_are_not_seen(heads):
    torch.manual_seed(0)
    unseen, token = Unseen(9), 9
    sequences = [[1, 2, 9, 9, 9], [1, 9, 2, 9, 9], [3], [9, 9], [4, 5, 6], [1, 2, 3, 4, 9, 9, 9, 9, 9, 9, 9, 9]]
    ids = np.array([i for s in sequences for i in s], np.int32)
    cu = np.cumsum([0, *map(len, sequences)]).astype(np.int32)
    q, k, v = (torch.randn(len(ids), n, 8) for n in (heads.heads, heads.kv_heads, heads.kv_heads))
    attention = unseen.around(TwinAttention(heads), heads)
    unseen.find(ids, cu)
    assert unseen.seen == [2, 3, 1, 2, 3, 4]
    attention.plan(cu, torch.from_numpy(cu), 12)
    got = attention.run(q, k, v)
    for a, b, seen in zip(cu[:-1], cu[1:], unseen.seen, strict=True):
        torch.testing.assert_close(got[a:b], dense(q[a:b], k[a:b], v[a:b], seen, heads))
    for some in (ids[:0], np.full_like(ids, 1)):  # nothing to hide: the device's own backend
        unseen.find(some, cu)
        assert unseen.seen is None
        attention.plan(cu, torch.from_numpy(cu), 12)
        plain = TwinAttention(heads)
        plain.plan(cu, torch.from_numpy(cu), 12)
        torch.testing.assert_close(attention.run(q, k, v), plain.run(q, k, v))
    assert token not in some
