"""Attention in plain PyTorch: the CPU's backend, and the truth for the others.

Sequences of one length that lie next to each other are one [n, heads, L, d] view of the packed rows, so nothing is
padded, masked or copied, and a sequence's result cannot depend on its neighbours. The CPU engine sorts its batches by
length to make such runs long. Not meant for speed on a GPU.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from hortus.rose.attention import Bias, Heads
from hortus.types import Int32

MOST_BIASES = 1 << 24
"""Most values of a bias at a time: long sequences take their queries in parts."""


class TwinAttention:
    name = "twin"

    def __init__(self, heads: Heads, bias: Bias | None = None) -> None:
        assert bias is None or (heads.window is None and not heads.causal), "no model has both a bias and a mask"
        self._heads, self._bias = heads, bias
        self._runs: list[tuple[int, int, int]] = []
        """(first token, sequences, length) of each run of equal lengths; empty sequences left out."""
        self._masks: dict[int, Tensor] = {}
        """length -> window mask for this batch."""

    def plan(self, cu_seqlens_cpu: Int32, cu_seqlens: Tensor, max_seqlen: int) -> None:
        self._runs = runs(cu_seqlens_cpu.tolist())
        self._masks = {}
        if (window := self._heads.window) is not None:
            for _, _, length in self._runs:
                if length not in self._masks:
                    at = torch.arange(length, device=cu_seqlens.device)
                    gap = at[:, None] - at[None, :]
                    self._masks[length] = (gap.abs() <= window) & ((gap >= 0) | (not self._heads.causal))

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.stride(-1) != 1:  # PyTorch's fast kernel wants heads whole
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if len(self._runs) == 1:
            _, count, length = self._runs[0]
            return self._dense(q, k, v, count, length)
        out = q.new_empty(q.shape)
        for start, count, length in self._runs:
            end = start + count * length
            out[start:end] = self._dense(q[start:end], k[start:end], v[start:end], count, length)
        return out

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, n: int, length: int) -> Tensor:
        """One run: q [n length, heads, d] -> the same shape."""
        h = self._heads
        q, k, v = (t.view(n, length, -1, h.head_dim).transpose(1, 2) for t in (q, k, v))  # [n, heads, length, d]
        if h.kv_heads != h.heads:
            k, v = (t.repeat_interleave(h.heads // h.kv_heads, 1) for t in (k, v))
        if self._bias is None:
            mask = self._masks.get(length)
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=h.causal and mask is None, scale=h.scale
            )
        else:
            out = self._biased(self._bias, q, k, v)
        return out.transpose(1, 2).reshape(n * length, h.heads, h.head_dim)

    def _biased(self, bias: Bias, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[n, heads, length, d] each, and so the result. Keys go backwards, as a Bias has them: their order is no matter."""
        n, heads, length, _ = q.shape
        k, v = k.flip(2), v.flip(2)
        some = max(1, MOST_BIASES // (n * heads * length))
        parts = []
        for first in range(0, length, some):
            part = q[:, :, first : first + some]
            mask = bias(part, k, first)
            if mask.device.type != "cpu":  # a GPU's kernels want aligned rows
                mask = mask.contiguous()
            parts.append(F.scaled_dot_product_attention(part, k, v, attn_mask=mask, scale=self._heads.scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def runs(cu: list[int]) -> list[tuple[int, int, int]]:
    """Neighbours of equal length, joined: cumulative lengths -> (first token, sequences, length); empty ones dropped."""
    found: list[tuple[int, int, int]] = []
    for start, end in itertools.pairwise(cu):
        length = end - start
        if not length:
            continue
        if found and found[-1][2] == length:
            first, count, _ = found[-1]
            found[-1] = (first, count + 1, length)
        else:
            found.append((start, 1, length))
    return found
