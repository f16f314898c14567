"""Attention in which the tokens that fill a sequence up see the others and are not seen: ColBERT's expanded queries.

Only queries of late interaction have such tokens, and they are short, so this is plain PyTorch on every device; steps without
them run by the device's own backend. Which tokens these are follows from the ids: those at a sequence's end that are the
expansion token. Does not know models.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hortus.rose.attention import Attention, Bias, Heads
from hortus.rose.attention.twin import runs
from hortus.types import Int32


class Unseen:
    """Finds the unseen tokens of a step, and gives it attention that hides them. One a model."""

    def __init__(self, token: int) -> None:
        self._token = token
        self.seen: list[int] | None = None
        """Tokens of each sequence that are seen, in this step; None: all of all."""

    def find(self, ids: Int32, cu_seqlens: Int32) -> None:
        """ids, cu_seqlens: of the step, on the host."""
        self.seen = None
        hidden = ids == self._token
        if not hidden.any():
            return
        seen = []
        for start, end in itertools.pairwise(cu_seqlens.tolist()):
            others = np.flatnonzero(~hidden[start:end])
            # Nothing else: then there is nothing to see but these.
            seen.append(int(others[-1]) + 1 if len(others) else end - start)
        if seen != np.diff(cu_seqlens).tolist():
            self.seen = seen

    def around(self, inner: Attention, heads: Heads, bias: Bias | None = None) -> UnseenAttention:
        """An attention that is `inner` in all other steps."""
        return UnseenAttention(self, inner, heads, bias)


class UnseenAttention:
    """One layer kind's attention; see Attention."""

    def __init__(self, unseen: Unseen, inner: Attention, heads: Heads, bias: Bias | None) -> None:
        self._unseen, self._inner, self._heads, self._bias = unseen, inner, heads, bias
        self.name = inner.name
        self._runs: list[tuple[int, int, int, Tensor, Tensor]] | None = None
        """(first token, sequences, length, what is added to their scores, who sees nothing) of each run of equal lengths."""

    def plan(self, cu_seqlens_cpu: Int32, cu_seqlens: Tensor, max_seqlen: int) -> None:
        self._runs = None
        if self._unseen.seen is None:
            self._inner.plan(cu_seqlens_cpu, cu_seqlens, max_seqlen)
            return
        seen = iter([n for n, length in zip(self._unseen.seen, np.diff(cu_seqlens_cpu), strict=True) if length])
        found: list[tuple[int, int, int, Tensor, Tensor]] = []
        for start, count, length in runs(cu_seqlens_cpu.tolist()):
            keys = torch.tensor(list(itertools.islice(seen, count)), device=cu_seqlens.device)
            found.append((start, count, length, *self._mask(keys, length)))
        self._runs = found

    def _mask(self, keys: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """[n, 1, length, length] float32, 0 where a query sees a key, -inf elsewhere; and
        [n, 1, length, 1], the queries that see none: a window may end before the filled places. keys: [n]."""
        h, at = self._heads, torch.arange(length, device=keys.device)
        gap = at[:, None] - at[None, :]
        sees = (at < keys[:, None])[:, None, None, :]  # [n, 1, 1, length]
        if h.causal:
            sees = sees & (gap >= 0)
        if h.window is not None:
            sees = sees & (gap.abs() <= h.window)
        sees = sees.expand(-1, -1, length, -1)
        return torch.where(sees, 0.0, -torch.inf), ~sees.any(-1, keepdim=True)

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._runs is None:
            return self._inner.run(q, k, v)
        h, out = self._heads, q.new_empty(q.shape)
        for start, n, length, mask, blind in self._runs:
            end = start + n * length
            a, b, c = (t[start:end].reshape(n, length, -1, h.head_dim).transpose(1, 2) for t in (q, k, v))
            if h.kv_heads != h.heads:
                b, c = (t.repeat_interleave(h.heads // h.kv_heads, 1) for t in (b, c))
            mask = mask.to(q.dtype)
            if self._bias is not None:
                mask = mask + self._bias(a, b.flip(2), 0).flip(3)
            y = F.scaled_dot_product_attention(a, b, c, attn_mask=mask, scale=h.scale)
            y = y.masked_fill(blind, 0.0)  # as the reference has it, whatever the kernel makes of a row of -inf
            out[start:end] = y.transpose(1, 2).reshape(n * length, h.heads, h.head_dim)
        return out
