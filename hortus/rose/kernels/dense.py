"""A layer's products, joined with what follows them, on the GPU: operations of the `ops` modules (see twin.py).

Which body runs hangs on the number of tokens alone, so eager, captured and replayed steps of one shape agree to the bit:

    product    few tokens     skinny.product, for wide weights
               else           the library's product
    gated      few tokens     preload.gated_product, or skinny.product: one kernel
               from 193 on    quack's product (CuTe DSL, Hopper) with the same epilogue, where the package is installed
               else           the library's product, then one kernel over its output
    add_norm   few tokens     preload.product, or skinny.product in parts, added by the norm's kernel
               else           the library's product, added by the norm's kernel

Few: some hundred, and not in wide models. preload.py (Hopper, where quack is installed) and skinny.py have the sizes.

Figures: docs/benchmarks.md; what lost: docs/decisions/. Does not know models.
"""

# Arguments of Triton kernels are pointers and scalars of the device, for which Python has no types.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hortus.rose.kernels import preload, quack, skinny
from hortus.rose.kernels.launch import early, roomy
from hortus.rose.kernels.linear import Linear, LinearFactory, library
from hortus.rose.kernels.rms import add_rms_norm_, sum_rms_norm_

MANY_GATED = 193
"""Tokens from which quack's product is faster than the library's and a kernel, on one H200."""

_FLAT = 1024


@triton.jit
def _silu_pairs(pairs, out, n, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start * 2 + tl.arange(0, 2 * BLOCK)
    both = tl.load(pairs + at, mask=at < 2 * n, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    to = start + tl.arange(0, BLOCK)
    tl.store(out + to, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=to < n)


def silu_pairs(pairs: Tensor) -> Tensor:
    """silu(gate) * up for pairs [T, 2 I] contiguous, gate 0, up 0, gate 1, .. -> [T, I]."""
    assert pairs.is_contiguous(), "silu_pairs walks memory, not rows"
    out = pairs.new_empty(pairs.shape[0], pairs.shape[1] // 2)
    on, n = early(pairs), out.numel()
    _silu_pairs[(triton.cdiv(n, _FLAT),)](pairs, out, n, _FLAT, on, num_warps=4, launch_pdl=on)
    return out


def paired(gate: Tensor, up: Tensor) -> Tensor:
    """[I, K] and [I, K] -> [2 I, K], row by row in turn."""
    return torch.stack([gate, up], 1).flatten(0, 1)


def _fast(weight: Tensor, linear: LinearFactory) -> bool:
    return (
        linear is not library and weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16) and roomy(weight)
    )


def product(weight: Tensor, bias: Tensor | None, linear: LinearFactory) -> Linear:
    """x weight^T + bias."""
    width, depth = weight.shape
    large = linear(weight, bias)
    if bias is not None or not _fast(weight, linear):
        return large

    def run(x: Tensor) -> Tensor:
        cut = skinny.whole(x.shape[0], width, depth)
        return large(x) if cut is None else skinny.product(x, weight, cut)

    return run


class Gated:
    """As what twin.gated gives, in a format of two bytes: one weight, its rows in pairs."""

    def __init__(self, gate: Tensor, up: Tensor) -> None:
        self.weight = paired(gate, up)
        self._width, self._depth = gate.shape
        self._few, self._many = preload.can_gate(self.weight), None
        if self._width % 8 == 0 and self._depth % 8 == 0 and quack.here(gate.device.index):
            self._many = quack.gated(gate.dtype, gate.device.index)

    def __call__(self, x: Tensor) -> Tensor:
        if self._few and (tile := preload.gated(x.shape[0], self._width, self._depth)) is not None:
            return preload.gated_product(x, self.weight, tile)
        if (cut := skinny.gated(x.shape[0], self._width, self._depth)) is not None:
            return skinny.product(x, self.weight, cut, gated=True)
        if x.shape[0] >= MANY_GATED and self._many is not None:
            out: Tensor = self._many(x, self.weight)
            return out
        return silu_pairs(torch.mm(x, self.weight.t()))


def gated(gate: Tensor, up: Tensor, linear: LinearFactory) -> Linear:
    """As twin.gated."""
    if _fast(gate, linear):
        return Gated(gate, up)
    whole = linear(paired(gate, up))
    return lambda x: silu_pairs(whole(x))


class Added:
    """As what twin.add_norm gives, in a format of two bytes and without a bias."""

    def __init__(self, weight: Tensor, norm: Tensor, eps: float) -> None:
        self.weight, self.norm, self._eps = weight, norm, eps
        self._few, self._turned = preload.can_add(weight), weight.t()

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        if self._few and (tile := preload.added(x.shape[0], *self.weight.shape)) is not None:
            y = preload.product(x, self.weight, tile)
            if tile.parts > 1:
                return sum_rms_norm_(y, residual, self.norm, self._eps)
            return add_rms_norm_(y, residual, self.norm, self._eps, y)
        if (cut := skinny.split(x.shape[0], *self.weight.shape)) is not None:
            return sum_rms_norm_(skinny.product(x, self.weight, cut), residual, self.norm, self._eps)
        y = torch.mm(x, self._turned)
        # In place: large steps then touch as much memory as if the library had added in its epilogue, which it cannot in
        # float16 of bfloat16 (decisions/013).
        return add_rms_norm_(y, residual, self.norm, self._eps, y)


def add_norm(
    weight: Tensor, bias: Tensor | None, norm: Tensor, eps: float, linear: LinearFactory, *, last: bool = False
) -> Callable[[Tensor, Tensor], Tensor]:
    """As twin.add_norm."""
    if bias is None and _fast(weight, linear):
        return Added(weight, norm, eps)
    whole = linear(weight, bias)
    return lambda x, residual: add_rms_norm_(whole(x), residual, norm, eps)
