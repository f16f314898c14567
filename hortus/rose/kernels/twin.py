"""The plain PyTorch bodies of every fused kernel: the CPU's path and the truth that fused.py is tested against.

T = packed tokens, H = hidden size, N = sequences. Norm statistics are computed in float32 whatever the dtype, and
the result is rounded once, as the Triton bodies do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hortus.rose.kernels.linear import ACTIVATIONS, Linear, LinearFactory

FEW_PICKED = 16
"""Up to so many tokens of a step, finding and gathering the rows that a head reads costs a CPU as much as leaving the others out
saves: docs/decisions/014-only-rows-that-are-read.md."""


def residual(x: Tensor) -> Tensor:
    """x [T, H] as what the blocks of a pre-norm model add to: float32. A device may keep it in a form of its own."""
    return x.float()


def embed_rms_norm(ids: Tensor, word: Tensor, scale: float, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """scale * word[ids] for word [V, H], ids [T] -> (as a residual, [T, H]; normed, [T, H] in word's dtype)."""
    x = residual(F.embedding(ids, word))
    if scale != 1.0:
        x = x * scale
    return x, _rms_norm(x, weight, eps, word.dtype)


def embed_layer_norm(
    ids: Tensor,
    positions: Tensor,
    token_types: Tensor | None,
    word: Tensor,
    position: Tensor | None,
    token_type: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """BERT's input: LayerNorm(word[ids] + position[positions] + token_type[types]) -> [T, H].

    token_types None means all zero.
    """
    x = F.embedding(ids, word)
    if token_type is not None:
        x = x + (token_type[0] if token_types is None else F.embedding(token_types, token_type))
    if position is not None:
        x = x + F.embedding(positions, position)
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm(x + residual) -> [T, H] (post-norm, BERT)."""
    return F.layer_norm(residual + x, (x.shape[-1],), weight, bias, eps)


def add_layer_norm_(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """residual += x in place, then LayerNorm(residual) -> [T, H] in x's dtype (pre-norm, ModernBERT)."""
    residual.add_(x)
    b = None if bias is None else bias.float()
    return F.layer_norm(residual, (x.shape[-1],), weight.float(), b, eps).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) -> [T, H] (Zhang & Sennrich 2019, arXiv 1910.07467)."""
    return _rms_norm(x, weight, eps, x.dtype)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    f = x.float()
    f = f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps)
    return (f * weight.float()).to(dtype)


def add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place, then RMSNorm(residual) -> [T, H] in x's dtype (pre-norm, Qwen3)."""
    residual.add_(x)
    return _rms_norm(residual, weight, eps, x.dtype)


def qk_norm_rope_(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    eps: float,
) -> None:
    """Per-head RMSNorm (weights None: none) and rotary embedding of q and k, in place in qkv.

    qkv: [T, (heads + 2 kv_heads) head_dim]. cos, sin: [positions, head_dim / 2] float32 tables; rotate-half pairing
    (x[i], x[i + head_dim/2]) as in transformers' apply_rotary_pos_emb.
    """
    n = heads + kv_heads
    x = qkv[:, : n * head_dim].view(-1, n, head_dim).float()
    if q_weight is not None and k_weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        x = x * torch.cat([q_weight.expand(heads, -1), k_weight.expand(kv_heads, -1)]).float()
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    a, b = x.chunk(2, -1)
    y = torch.cat([a * c - b * s, b * c + a * s], -1)
    qkv[:, : n * head_dim] = y.flatten(1).to(qkv.dtype)


class Rotary:
    """The rotary tables of a model: cos, sin [positions, d / 2] float32. `at` once a step, what it gives to each layer."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin

    def at(self, positions: Tensor) -> Tensor:
        return positions


def turned(
    weight: Tensor,
    bias: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    rotary: Rotary,
    heads: int,
    kv_heads: int,
    eps: float,
    linear: LinearFactory,
) -> Callable[[Tensor, Tensor], Tensor]:
    """An object made once from a weight [(heads + 2 kv_heads) d, K]: (x, rotary.at(..)) -> q, k, v of every token.

    -> [T, (heads + 2 kv_heads) d]: q and k normed (see qk_norm_rope_) and turned. A device may keep another order of the
    values within each head of q and k, the same in both: no score depends on it.
    """
    product = linear(weight, bias)

    def run(x: Tensor, positions: Tensor) -> Tensor:
        qkv = product(x)
        d = 2 * rotary.cos.shape[1]
        qk_norm_rope_(qkv, q_norm, k_norm, rotary.cos, rotary.sin, positions, heads, kv_heads, d, eps)
        return qkv

    return run


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2 I], gate first -> [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def gated(gate: Tensor, up: Tensor, linear: LinearFactory) -> Linear:
    """An object made once from two weights [I, K]: x [T, K] -> silu(x gate^T) * (x up^T), [T, I].

    A product and nothing else reads what it gives: a device may give it as linear.Rows.
    """
    product = linear(torch.cat([gate, up]))
    return lambda x: gated_silu(product(x))


def activated(weight: Tensor, bias: Tensor | None, activation: str, linear: LinearFactory) -> Linear:
    """An object made once from a weight [I, K]: x [T, K] -> activation(x weight^T + bias), [T, I], as `gated` for others."""
    return linear(weight, bias, activation)


def add_norm(
    weight: Tensor, bias: Tensor | None, norm: Tensor, eps: float, linear: LinearFactory, *, last: bool = False
) -> Callable[[Tensor, Tensor], Tensor]:
    """An object made once from a weight [H, K]: (x [T, K], residual [T, H]) -> RMSNorm of the new residual, [T, H].

    residual += x weight^T + bias, in place. What ends every block of a pre-norm model is one operation, so that a device
    may add in the product's own epilogue, or in the norm. Products and nothing else read what it gives, so a device
    may give that as linear.Rows; not so the last one, which ends the trunk.
    """
    product = linear(weight, bias)
    return lambda x, residual: add_rms_norm_(product(x), residual, norm, eps)


def glu(both: Tensor, activation: str, first: int) -> Tensor:
    """[T, 2 I] -> [T, I]: one half (0: the first) activated, times the other. activation: gelu, gelu_tanh, silu, relu.

    A product and nothing else reads what it gives: a device may give it as linear.Rows.
    """
    halves = both.chunk(2, -1)
    return ACTIVATIONS[activation](halves[first]) * halves[1 - first]


def gelu_(x: Tensor) -> Tensor:
    """Exact (erf) GELU; may overwrite x."""
    return F.gelu(x)


def picked(cu_seqlens: Tensor, tokens: int, mode: str) -> Tensor | None:
    """Which of T packed tokens `pool` reads in mode cls or last: [N] int32, one a sequence; of an empty one, any.

    None where it does not pay to leave the others out of what follows the last attention. A device may give further rows,
    after those, of any token.
    """
    if tokens <= max(FEW_PICKED, len(cu_seqlens) - 1):
        return None
    at = cu_seqlens[:-1] if mode == "cls" else cu_seqlens[1:] - 1
    return at.clamp(0, tokens - 1)


def pool(x: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    """One row a sequence from packed x [T, H] -> [N, H] float32.

    mode: mean, cls (first token), last, max, mean_sqrt_len, weightedmean (weights 1..n, as sentence-transformers).
    Sums accumulate in float32. A sequence of no tokens (a padding slot of a graph) gives a row of zeros.
    """
    if mode in ("cls", "last"):
        cu = cu_seqlens.long()
        index = cu[:-1] if mode == "cls" else cu[1:] - 1
        rows = x[index.clamp(0, x.shape[0] - 1)].float()
        return rows.masked_fill((cu.diff() == 0).unsqueeze(1), 0.0)
    total_tokens = int(cu_seqlens[-1])
    if mode == "mean" and len(cu_seqlens) == 2 and total_tokens:
        return x[:total_tokens].mean(0, keepdim=True, dtype=torch.float32)  # one short text: fewer calls
    # A bag of rows is a sequence: one call, parallel over sequences, each summed in its order, 0 for an empty one.
    at = torch.arange(total_tokens, device=x.device, dtype=cu_seqlens.dtype)
    x = x.float()
    if mode in ("mean", "max"):
        return F.embedding_bag(at, x, cu_seqlens, mode=mode, include_last_offset=True)
    n = cu_seqlens.diff()
    weights: Tensor | None = None
    if mode == "weightedmean":
        weights = (at - torch.repeat_interleave(cu_seqlens[:-1], n) + 1).float()
        total = n.float() * (n.float() + 1) / 2
    else:
        total = n.float().sqrt()
    rows = F.embedding_bag(at, x, cu_seqlens, mode="sum", per_sample_weights=weights, include_last_offset=True)
    return rows / total.clamp(min=1e-9).unsqueeze(1)
