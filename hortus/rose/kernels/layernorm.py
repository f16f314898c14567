"""LayerNorm of a sum on the GPU, and the gate of an encoder's MLP: operations of the `ops` modules (see twin.py).

A program holds its rows in registers: statistics (mean, then centred squares) in float32, no second read. From many rows on a
program takes several, as RMSNorm's does (rms.py, where that was measured). See fused.py for the physics, and launch.py for why
a kernel reads its weights before it waits. Does not know models.
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

from hortus.rose.kernels.launch import early, row
from hortus.rose.kernels.residual import PART, WHOLE
from hortus.rose.kernels.rms import MANY, TOGETHER

_ACTS = {"gelu": 0, "gelu_tanh": 1, "silu": 2, "relu": 3}
_FLAT = 1024


@triton.jit
def _add_layer_norm(
    x, residual, weight, bias, out, rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
    GROW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        b = tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
    mask = (t < rows)[:, None] & inside[None, :]
    at = t.to(tl.int64)[:, None] * WIDTH + cols[None, :]
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    s = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        s += tl.load(x + part * rows * WIDTH + at, mask=mask, other=0.0)
    before = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    if GROW:  # what the next block sees is what was normed
        kept = ((before * WHOLE + s) * PART).to(residual.dtype.element_ty)
        tl.store(residual + at, kept, mask=mask)
        s = kept.to(tl.float32) * WHOLE
    else:
        s += before
    mean = tl.sum(s, 1) / WIDTH
    centred = tl.where(mask, s - mean[:, None], 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred, 1) / WIDTH + eps)[:, None] * w[None, :]
    if BIAS:
        y += b[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


def _run(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, grow: bool) -> Tensor:
    assert x.is_contiguous(), "the norm walks whole rows"
    assert residual.is_contiguous(), "the norm walks whole rows"
    rows, width = residual.shape
    out = torch.empty(rows, width, dtype=weight.dtype, device=x.device)
    block, warps = row(width)
    on, together, parts = early(x), TOGETHER if rows >= MANY else 1, x.shape[0] if x.dim() == 3 else 1
    _add_layer_norm[(triton.cdiv(rows, together),)](
        x, residual, weight, bias, out, rows, eps, width, block, together, parts, bias is not None, grow, on,
        num_warps=warps, launch_pdl=on,
    )  # fmt: skip
    return out


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm(x + residual) -> [T, H] in the weight's dtype (post-norm, BERT). Contiguous.

    residual: [T, H]; x the same, or [P, T, H] float32, a product in parts (preload.py), which are added in order.
    """
    return _run(x, residual, weight, bias, eps, grow=False)


def add_layer_norm_(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """residual (residual.py) += x in place, then LayerNorm of it (pre-norm, ModernBERT). Else as add_layer_norm."""
    return _run(x, residual, weight, bias, eps, grow=True)


@triton.jit
def _glu(
    both, out, n, INNER: tl.constexpr, FIRST: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    start = at + at // INNER * INNER  # a row of both is two of out
    f = tl.load(both + start + FIRST * INNER, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(both + start + (1 - FIRST) * INNER, mask=mask, other=0.0).to(tl.float32)
    if ACT == 0:
        f *= 0.5 * (1.0 + tl.erf(f * 0.7071067811865476))
    elif ACT == 1:  # tanh(u) is 2 sigmoid(2 u) - 1; below -80 there is nothing left, and exp would overflow
        f *= tl.sigmoid(tl.maximum(1.5957691216057308 * (f + 0.044715 * f * f * f), -80.0))
    elif ACT == 2:
        f *= tl.sigmoid(tl.maximum(f, -80.0))
    else:
        f = tl.where(f < 0, 0.0, f)  # a NaN stays one
    tl.store(out + at, (f * g).to(out.dtype.element_ty), mask=mask)


def glu(both: Tensor, activation: str, first: int) -> Tensor:
    """[T, 2 I] contiguous -> [T, I]: one half (0: the first) activated, times the other. activation: a key of _ACTS."""
    assert both.is_contiguous(), "glu walks memory, not rows"
    out = both.new_empty(both.shape[0], both.shape[1] // 2)
    on, n = early(both), out.numel()
    _glu[(triton.cdiv(n, _FLAT),)](
        both, out, n, out.shape[1], first, _ACTS[activation], _FLAT, on, num_warps=4, launch_pdl=on
    )
    return out
