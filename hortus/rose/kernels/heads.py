"""From a layer's input to its queries, keys and values, on the GPU: one operation of the `ops` modules (see twin.py).

Rotation pairs value i of a head with value i + d/2. Here the rows of the weight are put in another order once, so that
pairs are neighbours: a thread that holds one holds the other, also in a product's own epilogue. Queries and keys are
reordered alike, so no score changes; values keep their order.

Which body runs hangs on the number of tokens alone: quack's product with norm and rotation in its epilogue, where the package is,
up to 512 tokens by preload.py and beyond where its tiles fill the GPU; else a product (dense.py), then one kernel in
place. Does not know models.
"""

# Arguments of Triton kernels are pointers and scalars of the device, for which Python has no types.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hortus.rose.kernels import dense, preload, quack
from hortus.rose.kernels.launch import early
from hortus.rose.kernels.linear import LinearFactory, library

MANY_TURNED = 385
"""Tokens from which quack.py's product with the fused epilogue can be the faster, on one H200: quack.fill decides."""
FEW_TURNED = 65
"""The same of preload.py's."""

_HEADS, _HEAD_WARPS = 16, 4
"""Heads a program of norm_turn_, and its warps."""


@triton.jit
def _norm_turn(
    qkv, q_weight, k_weight, cos, sin, positions, tokens, row_stride, eps,
    Q_HEADS: tl.constexpr, ALL_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # The q and k heads of all tokens, counted through: a program takes HEADS of them, of one token or of several.
    n = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    t, head = (n // ALL_HEADS).to(tl.int64), n % ALL_HEADS
    col = tl.arange(0, 2 * HALF_BLOCK)
    mask = (t < tokens)[:, None] & (col < 2 * HALF)[None, :]
    # Weights and tables are read as tiles: 16 bytes a thread from the L1 cache, where a row that is read once and spread
    # out would go through shared memory and a barrier.
    if NORM:
        at = tl.zeros((HEADS, 1), tl.int32) + col[None, :]
        is_q = (head < Q_HEADS)[:, None]
        w = tl.load(q_weight + at, mask=mask & is_q, other=0.0) + tl.load(k_weight + at, mask=mask & ~is_q, other=0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    first = qkv + (t * row_stride + head * (2 * HALF))[:, None] + col[None, :]
    x = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    half = tl.arange(0, HALF_BLOCK)
    turns = (t < tokens)[:, None] & (half < HALF)[None, :]
    p = tl.load(positions + t, mask=t < tokens, other=0).to(tl.int64)[:, None] * HALF + half[None, :]
    c = tl.load(cos + p, mask=turns, other=0.0)
    s = tl.load(sin + p, mask=turns, other=0.0)
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x, 1) / (2 * HALF) + eps)[:, None] * w.to(tl.float32)
    a, b = tl.split(tl.reshape(x, (HEADS, HALF_BLOCK, 2)))
    y = tl.reshape(tl.join(a * c - b * s, b * c + a * s), (HEADS, 2 * HALF_BLOCK))
    tl.store(first, y.to(qkv.dtype.element_ty), mask=mask)


def norm_turn_(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
) -> None:
    """Per-head RMSNorm (weights None: none) and rotation of q and k, in place in qkv, whose pairs are neighbours.

    qkv: [T, (heads + 2 kv_heads) d], rows may be strided. cos, sin: [positions, d / 2] float32. Weights [d], in pairs.
    """
    n, half, tokens = heads + kv_heads, cos.shape[1], qkv.shape[0]
    norm = q_weight is not None and k_weight is not None
    on = early(qkv)
    _norm_turn[(triton.cdiv(tokens * n, _HEADS),)](
        qkv, q_weight, k_weight, cos, sin, positions, tokens, qkv.stride(0), eps,
        heads, n, half, triton.next_power_of_2(half), _HEADS, norm, on,
        num_warps=_HEAD_WARPS, launch_pdl=on,
    )  # fmt: skip


def neighbours(weight: Tensor, heads: int) -> Tensor:
    """Rows [heads d, ..], each head's value i and i + d/2 put next to each other."""
    d = weight.shape[0] // heads
    return weight.view(heads, 2, d // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


class Angles(NamedTuple):
    """What turns the tokens of one step: the same in every layer."""

    positions: Tensor
    rows: Tensor | None
    """quack.angles' rows, for steps whose product turns them itself."""


@triton.jit(do_not_specialize=["tokens"])  # one kernel for all steps
def _look_up(table, positions, out, tokens, WIDTH: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr):
    t, col = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    live = (t < tokens)[:, None]
    # Both were there before the step's first kernel (launch.py).
    p = tl.load(positions + t, mask=t < tokens, other=0).to(tl.int64)[:, None]
    row = tl.load(table + p * WIDTH + col, mask=live, other=0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    tl.store(out + t.to(tl.int64)[:, None] * WIDTH + col, row, mask=live)


def look_up(table: Tensor, positions: Tensor) -> Tensor:
    """table[positions], [T, a power of two]: a kernel that is launched early, as the library's is not."""
    tokens, width = positions.shape[0], table.shape[1]
    out = table.new_empty(tokens, width)
    on = early(table)
    _look_up[(triton.cdiv(tokens, 8),)](table, positions, out, tokens, width, 8, on, num_warps=4, launch_pdl=on)
    return out


class Rotary:
    """As twin.Rotary."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin
        self._table: Tensor | None = None
        self._least = 0

    def keep_rows(self, least: int) -> None:
        """A product of `least` tokens or more turns by rows of angles: they are kept, and looked up for each step."""
        self._least = least if self._table is None else min(self._least, least)
        if self._table is None:
            self._table = quack.angles(self.cos, self.sin)

    def at(self, positions: Tensor) -> Angles:
        if self._table is None or positions.shape[0] < self._least:
            return Angles(positions, None)
        return Angles(positions, look_up(self._table, positions))


def _may_turn(cos: Tensor) -> bool:
    return cos.is_cuda and cos.shape[1] == 64 and quack.here(cos.device.index)


def in_pairs(
    weight: Tensor, bias: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, rotary: Any, heads: int
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """What `turned` is given, the pairs of q and k as neighbours. heads: those of q and k together."""
    split = heads * 2 * rotary.cos.shape[1]
    weight = torch.cat([neighbours(weight[:split], heads), weight[split:]])
    if bias is not None:
        bias = torch.cat([neighbours(bias[:split], heads), bias[split:]])
    if q_norm is not None and k_norm is not None:
        q_norm, k_norm = neighbours(q_norm, 1), neighbours(k_norm, 1)
    return weight, bias, q_norm, k_norm


class Turned:
    """As what twin.turned gives, but for the order of values within a head of q and k."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, rotary: Rotary,
        heads: int, kv_heads: int, eps: float, linear: LinearFactory,
    ) -> None:  # fmt: skip
        self.weight, self.bias, self.q_norm, self.k_norm = in_pairs(
            weight, bias, q_norm, k_norm, rotary, heads + kv_heads
        )
        self.rotary, self._heads, self._kv_heads, self._eps = rotary, heads, kv_heads, eps
        self.product = dense.product(self.weight, self.bias, linear)
        self._turned, self._few, self._many = heads + kv_heads, False, None
        # In two bytes a value only: the angles are halves, and products of float32 would be rounded too.
        fits = (
            self.weight.dtype.itemsize == 2 and self.weight.shape[1] % 8 == 0 and bias is None and linear is not library
        )
        if fits and self.q_norm is not None and self.k_norm is not None and _may_turn(rotary.cos):
            each = [
                self.q_norm.repeat(heads),
                self.k_norm.repeat(kv_heads),
                torch.ones_like(self.k_norm).repeat(kv_heads),
            ]
            self._each = torch.cat(each).float()
            self._few = preload.can_turn(self.weight, self._turned, eps)
            self._many = quack.turned(self.weight.dtype, self.weight.device.index, eps, self._turned)
        if self._few or self._many is not None:
            rotary.keep_rows(FEW_TURNED if self._few else MANY_TURNED)

    def __call__(self, x: Tensor, angles: Angles) -> Tensor:
        if angles.rows is not None:
            tile = preload.turned(x.shape[0], *self.weight.shape) if self._few else None
            if tile is not None:
                return preload.turned_product(x, self.weight, angles.rows, self._each, self._turned, self._eps, tile)
            if self._many is not None and quack.fill(x.shape[0], self.weight.shape[0]):
                return self._many(x, self.weight, angles.rows, self._each)
        qkv, rotary = self.product(x), self.rotary
        norm_turn_(
            qkv, self.q_norm, self.k_norm, rotary.cos, rotary.sin, angles.positions,
            self._heads, self._kv_heads, self._eps,
        )  # fmt: skip
        return qkv


turned = Turned
