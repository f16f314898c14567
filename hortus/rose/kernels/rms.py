"""RMSNorm on the GPU: alone, of embeddings, or of the residual (residual.py) after a sum. The sum is of one addend or of a split
product's float32 parts.

A program holds its rows in registers, so that the statistic costs no second read. See fused.py for the physics, and
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
from hortus.rose.kernels.residual import PART, WHOLE, form

MANY, TOGETHER = 2048, 4
"""From so many rows on a program takes several, so that more reads are under way at once: 4,096 rows of 1,024 values in 3.4 us
on one H200, where a program a row takes 5.4; at 1,024 rows it would be 1.9 instead of 1.7."""


@triton.jit
def _rms_norm(
    x, residual, weight, out, rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    w = tl.load(weight + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    mask = (t < rows)[:, None] & (cols < WIDTH)[None, :]
    at = t.to(tl.int64)[:, None] * WIDTH + cols[None, :]
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if PARTS == 0:
        f = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    else:
        f = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32) * WHOLE
        for part in tl.static_range(PARTS):
            f += tl.load(x + part * rows * WIDTH + at, mask=mask, other=0.0).to(tl.float32)
        # The sum is rounded before the norm reads it: what the next layer sees is what was normed, as in the twin.
        kept = (f * PART).to(residual.dtype.element_ty)
        tl.store(residual + at, kept, mask=mask)
        f = kept.to(tl.float32) * WHOLE
    y = f * tl.rsqrt(tl.sum(f * f, 1) / WIDTH + eps)[:, None] * w[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _embed_rms_norm(
    ids, word, residual, weight, out, factor, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    w = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.load(ids + t).to(tl.int64)
    f = tl.load(word + i * WIDTH + cols, mask=mask, other=0.0).to(tl.float32) * factor
    kept = (f * PART).to(residual.dtype.element_ty)
    tl.store(residual + t * WIDTH + cols, kept, mask=mask)
    f = kept.to(tl.float32) * WHOLE
    y = f * tl.rsqrt(tl.sum(f * f, 0) / WIDTH + eps) * w
    tl.store(out + t * WIDTH + cols, y.to(out.dtype.element_ty), mask=mask)


def embed_rms_norm(ids: Tensor, word: Tensor, scale: float, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """scale * word[ids] for word [V, H], ids [T] -> (as a residual, [T, H]; normed, [T, H] in word's dtype)."""
    tokens, width = ids.shape[0], word.shape[1]
    residual = torch.empty(tokens, width, dtype=form(word.dtype), device=word.device)
    out = word.new_empty(tokens, width)
    block, warps = row(width)
    on = early(word)
    _embed_rms_norm[(tokens,)](
        ids, word, residual, weight, out, scale, eps, width, block, on, num_warps=warps, launch_pdl=on
    )  # fmt: skip
    return residual, out


def _run(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, parts: int, out: Tensor) -> Tensor:
    like = x if residual is None else residual
    assert x.is_contiguous(), "the norm walks whole rows"
    assert like.is_contiguous(), "the norm walks whole rows"
    rows, width = like.shape
    block, warps = row(width)
    on, together = early(x), TOGETHER if rows >= MANY else 1
    _rms_norm[(triton.cdiv(rows, together),)](
        x, residual, weight, out, rows, eps, width, block, together, parts, on, num_warps=warps, launch_pdl=on
    )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) -> [T, H]. x: [T, H] contiguous."""
    return _run(x, None, weight, eps, 0, torch.empty_like(x))


def add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """residual += x in place, then RMSNorm(residual) -> out (may be x), else [T, H] in x's dtype. All [T, H] contiguous."""
    return _run(x, residual, weight, eps, 1, torch.empty_like(x) if out is None else out)


def sum_rms_norm_(parts: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += all of parts [P, T, H] float32, added in order; then RMSNorm(residual) -> [T, H] in the weight's dtype."""
    out = torch.empty_like(residual, dtype=weight.dtype)
    return _run(parts, residual, weight, eps, parts.shape[0], out)
