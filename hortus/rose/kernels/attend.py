"""Attention for steps of few tokens, and the product before it, which norms and turns: two kernels from a layer's input to o's.

The physics. Below some hundred tokens attention computes next to nothing: what a layer waits for is a kernel that norms and turns
q and k in place, and one that reads them again, each with its launch and its first bytes from memory. So the product that makes
q, k and v turns what it has in registers, where pairs are neighbours, and leaves each head's sum of squares beside it; a head's
norm is then a factor of its scores, one a row of q and one a row of k.

A row's sequence begins at its number less its position, and two rows see each other if they begin at the same place. (Padding
rows all have position 0, so each is a sequence.) A broken value (not finite) reaches only who sees it: 0 times it would be NaN,
so it breaks those scores, and counts as 0 itself.

Does not know models.
"""

# Arguments of Triton kernels are pointers and scalars of the device, for which Python has no types.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hortus.rose.attention import Heads
from hortus.rose.kernels import skinny
from hortus.rose.kernels.heads import Rotary, Turned
from hortus.rose.kernels.launch import early, roomy
from hortus.rose.network import Inputs

MOST_TOKENS = 64
"""Tokens up to which it is the faster, on one H200: docs/decisions/010-gpu-small-steps.md."""

_ROWS, _WARPS = 16, 4
"""Of a program; up to _ROWS tokens it reads so few keys, too: 0.646 ms a step instead of 0.661."""


@triton.jit(do_not_specialize=["tokens"])  # one kernel for all steps
def _turned(
    x, weight, out, squares, q_norm, k_norm, cos, sin, positions, tokens,
    DEPTH: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, STEP: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """skinny's product, whose columns are all of one head; squares: [columns / COLS, tokens], of each row's part of a head."""
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    n = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = (rows < tokens)[:, None]
    head, first = n * COLS // DIM, n * COLS % DIM
    is_q, turns = head < HEADS, head < HEADS + KV_HEADS
    # A step's inputs were there before its first kernel, so they may be read before the wait, as weights may (launch.py).
    # Values are neither normed nor turned: by 1, and by no angle.
    col, half = first + tl.arange(0, COLS), first // 2 + tl.arange(0, COLS // 2)
    if NORM:
        w = tl.load(q_norm + col, mask=is_q & (col >= 0), other=0.0).to(tl.float32)
        w += tl.load(k_norm + col, mask=turns & (col >= 0) & (head >= HEADS), other=0.0).to(tl.float32)
        w += tl.where(turns, 0.0, 1.0)
    position = tl.load(positions + rows, mask=rows < tokens, other=0)
    if EARLY:
        skinny.fetch(weight, n.to(tl.int64) * COLS * DEPTH, COLS, DEPTH * 2, DEPTH)
        gdc_launch_dependents()
        gdc_wait()
    k = tl.arange(0, STEP)
    a_at = x + rows.to(tl.int64)[:, None] * DEPTH + k[None, :]
    b_at = weight + (n * COLS + tl.arange(0, COLS)).to(tl.int64)[:, None] * DEPTH + k[None, :]
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for i in range(0, DEPTH, STEP):
        acc = tl.dot(tl.load(a_at + i, mask=live, other=0.0), tl.load(b_at + i).T, acc)
    angle = position[:, None] * (DIM // 2) + half[None, :]
    c = tl.load(cos + angle, mask=live & turns, other=1.0)
    s = tl.load(sin + angle, mask=live & turns, other=0.0)
    y = acc.to(out.dtype.element_ty).to(tl.float32)  # rounded here, as where the norm of a head is a kernel of its own
    if NORM:
        tl.store(squares + n * tokens + rows, tl.sum(y * y, 1), mask=rows < tokens)
        y = y * w[None, :]
    a, b = tl.split(tl.reshape(y, (ROWS, COLS // 2, 2)))
    y = tl.reshape(tl.join(a * c - b * s, b * c + a * s), (ROWS, COLS))
    to = out + rows.to(tl.int64)[:, None] * WIDTH + n * COLS + tl.arange(0, COLS)[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=live)


@triton.jit
def _factor(squares, head, rows, tokens, eps, DIM: tl.constexpr, PARTS: tl.constexpr):
    """What norms a head's rows."""
    total = tl.zeros(rows.shape, tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(squares + (head * PARTS + part) * tokens + rows, mask=rows < tokens, other=0.0)
    return tl.rsqrt(total / DIM + eps)


@triton.jit(do_not_specialize=["tokens"])
def _attend(
    qkv, squares, out, positions, tokens, eps, score_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PARTS: tl.constexpr, CAUSAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """score_scale: times log2(e). KEYS: at least the tokens. PARTS: of a head in squares; 0: no norm."""
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    head, d = tl.program_id(0), tl.arange(0, DIM)
    kv = HEADS + head // (HEADS // KV_HEADS)
    rows, keys = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, KEYS)
    live, there = (rows < tokens)[:, None], (keys < tokens)[:, None]
    start = rows - tl.load(positions + rows, mask=rows < tokens, other=0)
    begin = keys - tl.load(positions + keys, mask=keys < tokens, other=0)
    seen = (start[:, None] == begin[None, :]) & (keys < tokens)[None, :]
    if CAUSAL:
        seen = seen & (keys[None, :] <= rows[:, None])
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    k_at = qkv + keys[:, None] * WIDTH + kv * DIM + d[None, :]
    q = tl.load(qkv + rows[:, None] * WIDTH + head * DIM + d[None, :], mask=live, other=0.0)
    k = tl.load(k_at, mask=there, other=0.0)
    v = tl.load(k_at + KV_HEADS * DIM, mask=there, other=0.0)
    # Bits: a maximum of numbers drops NaN.
    broken = tl.max(v.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1) >= 0x7F800000
    v = tl.where(broken[:, None], 0.0, v)
    s = tl.dot(q, k.T) * score_scale
    if PARTS:
        s *= _factor(squares, head, rows, tokens, eps, DIM, PARTS)[:, None]
        s *= _factor(squares, kv, keys, tokens, eps, DIM, PARTS)[None, :]
    s = tl.where(seen, tl.where(broken[None, :], float("nan"), s), float("-inf"))
    e = tl.exp2(s - tl.max(s, 1)[:, None])
    y = tl.dot(e.to(v.dtype), v) / tl.sum(e, 1)[:, None]
    tl.store(out + rows[:, None] * (HEADS * DIM) + head * DIM + d[None, :], y.to(out.dtype.element_ty), mask=live)


def turned(
    x: Tensor,
    weight: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    rotary: Rotary,
    positions: Tensor,
    heads: Heads,
    tile: skinny.Tile,
) -> tuple[Tensor, Tensor]:
    """x weight^T, [T, (heads + 2 kv_heads) d], q and k times their norms' weights [d], and turned; what `attend` norms them by.

    Pairs that rotate are neighbours in weight and norms; norms None: there are none. The tile's cols divide d; its parts are 1.
    """
    tokens, depth = x.shape
    width, d = weight.shape[0], heads.head_dim
    assert x.is_contiguous(), "the product walks whole rows"
    assert d % tile.cols == 0, f"a head of {d} is not cut evenly by {tile}"
    assert depth % tile.depth == 0, f"a depth of {depth} is not cut evenly by {tile}"
    assert tile.parts == 1, "what is turned must be whole"
    norm = q_norm is not None and k_norm is not None
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    squares = torch.empty(width // tile.cols if norm else 0, tokens, dtype=torch.float32, device=x.device)
    on = early(x)
    _turned[(width // tile.cols, triton.cdiv(tokens, tile.rows))](
        x, weight, out, squares, q_norm, k_norm, rotary.cos, rotary.sin, positions, tokens, depth,
        heads.heads, heads.kv_heads, d, tile.rows, tile.cols, tile.depth, norm, on,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=on,
    )  # fmt: skip
    return out, squares


def attend(qkv: Tensor, squares: Tensor, positions: Tensor, heads: Heads, eps: float) -> Tensor:
    """softmax(q k^T scale) v in each sequence -> [T, heads d], of what `turned` gives. squares may have no rows: no norm.

    A sequence begins where its position, [T] int32, is 0.
    """
    tokens = qkv.shape[0]
    assert tokens <= MOST_TOKENS, f"{tokens} tokens; at most {MOST_TOKENS}"
    assert qkv.is_contiguous(), "rows are walked whole"
    out = qkv.new_empty(tokens, heads.heads * heads.head_dim)
    parts = squares.shape[0] // (heads.heads + 2 * heads.kv_heads)
    on, keys = early(qkv), _ROWS if tokens <= _ROWS else MOST_TOKENS
    _attend[(heads.heads, triton.cdiv(tokens, _ROWS))](
        qkv, squares, out, positions, tokens, eps, heads.scale / math.log(2),
        heads.heads, heads.kv_heads, heads.head_dim, _ROWS, keys, parts, heads.causal, on,
        num_warps=_WARPS, launch_pdl=on,
    )  # fmt: skip
    return out


class Attended:
    """One layer after another: what makes q, k and v, its input -> what attention gives, [T, heads d]."""

    def __init__(self, heads: Heads, eps: float) -> None:
        self.most_tokens, self._heads, self._eps = MOST_TOKENS, heads, eps

    def __call__(self, layer: Turned, x: Tensor, inputs: Inputs) -> Tensor:
        tile = skinny.whole(x.shape[0], *layer.weight.shape)
        assert tile is not None, "whether a width can be cut does not hang on the tokens"
        qkv, squares = turned(
            x, layer.weight, layer.q_norm, layer.k_norm, layer.rotary, inputs.positions, self._heads, tile
        )
        return attend(qkv, squares, inputs.positions, self._heads, self._eps)


def attended(layers: Sequence[Any], heads: Heads, eps: float) -> Attended | None:
    """An AttendedFactory. None where it does not fit."""
    if heads.window is not None or heads.head_dim not in (64, 128):
        return None
    return Attended(heads, eps) if all(map(_fits, layers)) else None


def _fits(layer: Any) -> bool:
    if not isinstance(layer, Turned) or layer.bias is not None or layer.weight.dtype.itemsize != 2:
        return False
    if not roomy(layer.weight):
        return False
    return skinny.whole(MOST_TOKENS, *layer.weight.shape) is not None
