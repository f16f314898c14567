"""RMSNorm on the GPU, alone or after a sum: of one addend, or of the float32 parts of a split product.

One program a row, held in registers, so that the statistic costs no second read. See fused.py for the physics, and
launch.py for why a kernel reads its weight before it waits. Does not know models.
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


@triton.jit
def _rms_norm(
    x, residual, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    at = t * WIDTH + cols
    w = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if PARTS == 0:
        f = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    else:
        f = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        for part in tl.static_range(PARTS):
            skip = part * tl.num_programs(0).to(tl.int64) * WIDTH
            f += tl.load(x + skip + at, mask=mask, other=0.0).to(tl.float32)
        # The sum is rounded before the norm reads it: what the next layer sees is what was normed, as in the twin.
        summed = f.to(residual.dtype.element_ty)
        tl.store(residual + at, summed, mask=mask)
        f = summed.to(tl.float32)
    y = f * tl.rsqrt(tl.sum(f * f, 0) / WIDTH + eps) * w
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


def _run(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, parts: int) -> Tensor:
    like = x if residual is None else residual
    assert x.is_contiguous(), "the norm walks whole rows"
    assert like.is_contiguous(), "the norm walks whole rows"
    rows, width = like.shape
    out = torch.empty_like(like)
    block, warps = row(width)
    on = early(x)
    _rms_norm[(rows,)](
        x, residual, weight, out, eps, width, block, parts, on, num_warps=warps, launch_pdl=on
    )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) -> [T, H]. x: [T, H] contiguous."""
    return _run(x, None, weight, eps, 0)


def add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place, then RMSNorm(residual) -> [T, H]. x, residual: [T, H] contiguous."""
    return _run(x, residual, weight, eps, 1)


def sum_rms_norm_(parts: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += all of parts [P, T, H] float32, added in order; then RMSNorm(residual) -> [T, H]."""
    return _run(parts, residual, weight, eps, parts.shape[0])
