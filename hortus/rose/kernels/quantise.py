"""Rows in e4m3, each with its scale, by the kernel that makes them: what fp8.py's products read. See fp8_twin.py for the format.

As in fused.py and rms.py a program holds a whole row in registers, so that finding its greatest magnitude costs no second
read; a row leaves with one byte a value instead of two. Does not know models.
"""

# Arguments of Triton kernels are pointers and scalars of the device, for which Python has no types.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hortus.rose.kernels import fp8_twin
from hortus.rose.kernels.fp8_twin import Quantised
from hortus.rose.kernels.launch import early, row
from hortus.rose.kernels.residual import PART, WHOLE
from hortus.rose.kernels.rms import MANY, TOGETHER

_GREATEST, _LEAST = tl.constexpr(fp8_twin.GREATEST), tl.constexpr(fp8_twin.LEAST)

ACTIVATED = {"gelu": 0, "gelu_tanh": 1, "relu": 2, "silu": 3}
"""Those of linear.ACTIVATIONS that `activated` knows."""


@triton.jit
def _store(y, values, scale, t, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows t, [ROWS, BLOCK] float32 and 0 beyond WIDTH, as e4m3 and their scales."""
    # Magnitudes are in the order of their bits, and the bits of infinity and NaN are above all others: a maximum of
    # floating numbers would drop NaN.
    most = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    whole = most < 0x7F800000
    most = tl.maximum(most.to(tl.float32, bitcast=True), _LEAST)
    e = tl.where(whole[:, None], y * tl.div_rn(_GREATEST, most)[:, None], 0.0)
    cols = tl.arange(0, BLOCK)
    mask = (t < rows)[:, None] & (cols < WIDTH)[None, :]
    tl.store(values + t.to(tl.int64)[:, None] * WIDTH + cols[None, :], e.to(values.dtype.element_ty), mask=mask)
    tl.store(scale + t, tl.where(whole, most * (1 / _GREATEST), float("nan")), mask=t < rows)


@triton.jit
def _rows(
    x, values, scale, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (t < rows)[:, None] & (cols < WIDTH)[None, :]
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    y = tl.load(x + t.to(tl.int64)[:, None] * WIDTH + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    _store(y, values, scale, t, rows, WIDTH, BLOCK)


@triton.jit
def _add_rms_norm(
    x, residual, weight, values, scale, rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    w = tl.load(weight + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    mask = (t < rows)[:, None] & (cols < WIDTH)[None, :]
    at = t.to(tl.int64)[:, None] * WIDTH + cols[None, :]
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    f = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32) * WHOLE
    f += tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    # The sum is rounded before the norm reads it, as in rms.py.
    kept = (f * PART).to(residual.dtype.element_ty)
    tl.store(residual + at, kept, mask=mask)
    f = kept.to(tl.float32) * WHOLE
    y = f * tl.rsqrt(tl.sum(f * f, 1) / WIDTH + eps)[:, None] * w[None, :]
    _store(y, values, scale, t, rows, WIDTH, BLOCK)


@triton.jit
def _silu_pairs(pairs, values, scale, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    t = tl.program_id(0) + tl.arange(0, 1)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    both = tl.arange(0, 2 * BLOCK)
    at = pairs + t.to(tl.int64)[:, None] * (2 * WIDTH) + both[None, :]
    f = tl.load(at, mask=(both < 2 * WIDTH)[None, :], other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(f, (1, BLOCK, 2)))
    _store(gate * tl.sigmoid(gate) * up, values, scale, t, rows, WIDTH, BLOCK)


@triton.jit
def _act(f, KIND: tl.constexpr):
    if KIND == 0:
        y = 0.5 * f * (1.0 + tl.erf(f * 0.7071067811865476))
    elif KIND == 1:  # 0.5 (1 + tanh(z)) is sigmoid(2 z)
        y = f * tl.sigmoid(1.5957691216057308 * (f + 0.044715 * f * f * f))
    elif KIND == 2:
        y = tl.where(f < 0.0, 0.0, f)  # not a maximum, which drops NaN
    else:
        y = f * tl.sigmoid(f)
    return y


@triton.jit
def _activated(
    x, values, scale, rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, HALF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """HALF: which half of a row of 2 WIDTH values is activated and multiplies the other; -1: a row is WIDTH values."""
    t = tl.program_id(0) + tl.arange(0, 1)
    cols = tl.arange(0, BLOCK)
    mask = (cols < WIDTH)[None, :]
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    WHOLE: tl.constexpr = WIDTH if HALF < 0 else 2 * WIDTH
    at = x + t.to(tl.int64)[:, None] * WHOLE + cols[None, :]
    if HALF < 0:
        y = _act(tl.load(at, mask=mask, other=0.0).to(tl.float32), KIND)
    else:
        y = _act(tl.load(at + HALF * WIDTH, mask=mask, other=0.0).to(tl.float32), KIND)
        y *= tl.load(at + (1 - HALF) * WIDTH, mask=mask, other=0.0).to(tl.float32)
    _store(y, values, scale, t, rows, WIDTH, BLOCK)


def _empty(rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    # Triton's interpreter rounds to e4m3 wrongly (127 becomes 64), so there PyTorch does that, in `_made`.
    form = torch.float8_e4m3fn if device.type == "cuda" else torch.float32
    values = torch.empty(rows, width, dtype=form, device=device)
    return values, torch.empty(rows, 1, dtype=torch.float32, device=device)


def _made(values: Tensor, scale: Tensor) -> Quantised:
    return Quantised(values.to(torch.float8_e4m3fn), scale)


def _together(rows: int, block: int) -> int:
    """Rows a program, as in rms.py, where they fit its registers."""
    return TOGETHER if rows >= MANY and block <= 2048 else 1


def rows(x: Tensor) -> Quantised:
    """As fp8_twin.quantise. x: [T, K] contiguous."""
    assert x.is_contiguous(), "rows are walked whole"
    count, width = x.shape
    values, scale = _empty(count, width, x.device)
    block, warps = row(width)
    on, together = early(x), _together(count, block)
    _rows[(triton.cdiv(count, together),)](
        x, values, scale, count, width, block, together, on, num_warps=warps, launch_pdl=on
    )  # fmt: skip
    return _made(values, scale)


def add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Quantised:
    """As quantise(twin.add_rms_norm_(..)), rounded once. x, residual: [T, H] contiguous."""
    assert x.is_contiguous(), "the norm walks whole rows"
    assert residual.is_contiguous(), "the norm walks whole rows"
    count, width = x.shape
    values, scale = _empty(count, width, x.device)
    block, warps = row(width)
    on, together = early(x), _together(count, block)
    _add_rms_norm[(triton.cdiv(count, together),)](
        x, residual, weight, values, scale, count, eps, width, block, together, on, num_warps=warps, launch_pdl=on
    )  # fmt: skip
    return _made(values, scale)


def silu_pairs(pairs: Tensor) -> Quantised:
    """As quantise(dense.silu_pairs(..)), rounded once. pairs: [T, 2 I] contiguous, gate 0, up 0, gate 1, .. -> [T, I]."""
    assert pairs.is_contiguous(), "rows are walked whole"
    count, width = pairs.shape[0], pairs.shape[1] // 2
    values, scale = _empty(count, width, pairs.device)
    block, warps = row(width)
    on = early(pairs)
    _silu_pairs[(count,)](pairs, values, scale, count, width, block, on, num_warps=warps, launch_pdl=on)
    return _made(values, scale)


def activated(x: Tensor, activation: str) -> Quantised:
    """As quantise(activation(x)), rounded once. x: [T, I] contiguous; activation: a key of ACTIVATED."""
    return _run(x, x.shape[1], activation, -1)


def glu(both: Tensor, activation: str, first: int) -> Quantised:
    """As quantise(twin.glu(..)), rounded once. both: [T, 2 I] contiguous -> [T, I]."""
    return _run(both, both.shape[1] // 2, activation, first)


def _run(x: Tensor, width: int, activation: str, half: int) -> Quantised:
    assert x.is_contiguous(), "rows are walked whole"
    count = x.shape[0]
    values, scale = _empty(count, width, x.device)
    block, warps = row(width)
    on = early(x)
    _activated[(count,)](
        x, values, scale, count, width, block, ACTIVATED[activation], half, on, num_warps=warps, launch_pdl=on
    )  # fmt: skip
    return _made(values, scale)
