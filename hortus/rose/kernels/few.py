"""All layers of a post-norm trunk for few tokens on a CPU: the fast twin of `Bert.forward`'s loop.

A short text reads every weight for a handful of tokens, so what is between the products shows: here nothing is copied,
allocated or called that need not be. Products leave values as columns, [features, T] (why: see kernels/linear.swapped), and
a head's rows of such a matrix are already what attention multiplies. Sequences that share a step are kept apart by a mask:
for so few tokens that costs less than doing them apart. Does not know files or embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hortus.rose.attention import Heads
from hortus.rose.attention.relative import DistanceBias
from hortus.rose.kernels.linear import ACTIVATIONS, IN_PLACE, columns
from hortus.types import Int32

FEW_TOKENS = 128
"""Most tokens of a step for which this is faster. Measured: docs/decisions/002-cpu-path.md."""

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One block's tensors: (weight [out, in], bias [out]) of four matrices, (weight, bias) [H] of two LayerNorms."""

    qkv: Pair
    out: Pair
    attention_norm: Pair
    up: Pair
    down: Pair
    norm: Pair


class Few(Protocol):
    def __call__(self, x: Tensor, cu_seqlens_cpu: Int32, rows: Tensor | None = None) -> Tensor:
        """x: [T, H] embedded tokens; cu_seqlens_cpu: [N + 1] on the host -> [T, H] after the last layer.

        rows, int32, at most T: of these tokens alone.
        """


class FewFactory(Protocol):
    def __call__(
        self, layers: list[LayerWeights], heads: Heads, eps: float, activation: str, bias: DistanceBias | None = None
    ) -> Few:
        """The weights are kept, not copied."""


def few(layers: list[LayerWeights], heads: Heads, eps: float, activation: str, bias: DistanceBias | None = None) -> Few:
    """See FewFactory. float32; bidirectional attention without a window, as many key heads as query heads."""
    n, d, scale = heads.heads, heads.head_dim, heads.scale
    hidden = n * d
    act, act_ = ACTIVATIONS[activation], IN_PLACE.get(activation)
    inner = layers[0].up[0].shape[0] if layers else 0
    # Biases as columns once, and everything a layer needs in one tuple: looking attributes up 100 times shows.
    parts = [
        (
            *(p for w, b in (layer.qkv, layer.out, layer.up, layer.down) for p in (w, b.unsqueeze(1))),
            *layer.attention_norm,
            *layer.norm,
        )
        for layer in layers
    ]
    size = (hidden,)
    addmm, add, layer_norm = torch.addmm, torch.add, torch.layer_norm

    def run(x: Tensor, cu_seqlens_cpu: Int32, rows: Tensor | None = None) -> Tensor:
        real = x.shape[0]
        t = columns(real)
        if t != real:
            x = torch.cat([x, x.new_zeros(t - real, hidden)])
        new, hidden_from = x.new_empty, _mask(cu_seqlens_cpu, t)
        if bias is not None:  # by distance in the packed row, which within a sequence is the distance
            hidden_from = hidden_from + bias.square(t)
        qkv, a, z, u = new(3 * hidden, t), new(hidden, t), new(hidden, t), new(inner, t)
        scores, shares, summed = new(n, t, t), new(n, t, t), new(t, hidden)
        q, k, v = qkv.view(3, n, d, t).unbind(0)
        q, shares_t, a_heads, z_rows = q.transpose(1, 2), shares.transpose(1, 2), a.view(n, d, t), z.t()
        for part in parts:
            w_qkv, b_qkv, w_out, b_out, w_up, b_up, w_down, b_down, g1, c1, g2, c2 = part
            addmm(b_qkv, w_qkv, x.t(), out=qkv)  # [3 H, T]
            torch.baddbmm(hidden_from, q, k, alpha=scale, out=scores)  # [heads, T, T]
            torch.softmax(scores, -1, out=shares)
            torch.bmm(v, shares_t, out=a_heads)  # [heads, d, T]: a is [H, T]
            if rows is not None and part is parts[-1]:
                real = len(rows)
                t = columns(real)
                kept = F.pad(rows, (0, t - real))
                x, a = x.index_select(0, kept), a.index_select(1, kept)
                z, u, summed = new(hidden, t), new(inner, t), new(t, hidden)
                z_rows = z.t()
            addmm(b_out, w_out, a, out=z)
            x = layer_norm(add(x, z_rows, out=summed), size, g1, c1, eps)
            addmm(b_up, w_up, x.t(), out=u)
            addmm(b_down, w_down, act_(u) if act_ else act(u), out=z)
            x = layer_norm(add(x, z_rows, out=summed), size, g2, c2, eps)
        return x[:real]

    return run


def _mask(cu_seqlens_cpu: Int32, total: int) -> Tensor:
    """[T, T] (or [1], when there is nothing to hide): 0 within a sequence, -inf across; filled-up columns are one more."""
    if len(cu_seqlens_cpu) == 2 and cu_seqlens_cpu[1] == total:
        return torch.zeros(1)
    owner = np.searchsorted(cu_seqlens_cpu, np.arange(total), "right")
    return torch.from_numpy(np.where(owner[:, None] == owner, np.float32(0), np.float32(-np.inf)))
