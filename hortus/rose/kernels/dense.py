"""A layer's products joined with what follows them, on the GPU: two operations of the `ops` modules (see twin.py).

Which body runs hangs on the number of tokens alone, so eager, captured and replayed steps of one shape agree to the bit:

    gated      <= 128 tokens  skinny.product: one kernel
               from 384 on    quack's product (CuTe DSL, Hopper) with the same epilogue, where the package is installed
               else           the library's product, then one kernel over its output
    add_norm   <= 256 tokens  skinny.product in parts, added by the norm's kernel
               else           the library's product, which adds into the residual in its own epilogue, then the norm

Figures: docs/benchmarks.md; what lost: docs/decisions/. Does not know models.
"""

# Arguments of Triton kernels are pointers and scalars of the device, for which Python has no types.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import warnings
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hortus.rose.kernels import skinny
from hortus.rose.kernels.launch import early
from hortus.rose.kernels.linear import Linear, LinearFactory
from hortus.rose.kernels.rms import add_rms_norm_, rms_norm, sum_rms_norm_

log = logging.getLogger(__name__)

FEW_GATED, FEW_ADDED, MANY_GATED = 128, 256, 384
"""Tokens at which another body is the faster, on one H200."""

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


@functools.cache
def _quack(dtype: torch.dtype, index: int | None) -> Callable[[Tensor, Tensor], Tensor] | None:
    """quack's gated product, tried once; None, with the reason in the log, where it cannot run."""
    if torch.cuda.get_device_capability(index) != (9, 0):
        log.info("quack's gated product is not used: it is tuned here for Hopper only")
        return None
    if importlib.util.find_spec("quack") is None:
        log.info("quack's gated product is not used: install hortus[gpu] for large steps that are 8 %% faster")
        return None
    try:
        with warnings.catch_warnings():  # the compiler's remarks on its own code
            warnings.simplefilter("ignore")
            gemm = importlib.import_module("quack.gemm_interface").gemm_act
            shape = importlib.import_module("quack.gemm_config").GemmConfig(
                tile_m=128, tile_n=192, pingpong=True, cluster_m=2, cluster_n=1,
                is_dynamic_persistent=False, device_capacity=9,
            )  # fmt: skip

            def run(x: Tensor, weight: Tensor) -> Tensor:
                out: Tensor = gemm(x, weight.t(), activation="swiglu", store_preact=False, tuned=False, config=shape)[1]
                return out

            # Compiles, some seconds: at start, not in somebody's request. One kernel serves all sizes.
            x = torch.randn(384, 256, device="cuda", dtype=dtype)
            weight = torch.randn(384, 256, device="cuda", dtype=dtype)
            ours = run(x, weight).float()
            gap = (ours - silu_pairs(x @ weight.t()).float()).norm() / ours.norm()
            if not float(gap) < 0.02:
                raise RuntimeError(f"its result is off by {float(gap):.3g}")
    except Exception as e:  # noqa: BLE001  another package's compiler: whatever fails, the library's product remains
        log.warning("quack's gated product is not used: %s: %s", type(e).__name__, e)
        return None
    log.info("gated products of %d tokens and more: quack", MANY_GATED)
    return run


def gated(gate: Tensor, up: Tensor, linear: LinearFactory) -> Linear:
    """As twin.gated. Keeps one weight, its rows in pairs."""
    if not (gate.is_cuda and gate.dtype in (torch.bfloat16, torch.float16)):
        product = linear(paired(gate, up))
        return lambda x: silu_pairs(product(x))
    weight = paired(gate, up)
    width, depth = gate.shape
    cut = skinny.tile(FEW_GATED, width, depth, gated=True)
    many = _quack(weight.dtype, weight.device.index) if width % 8 == 0 and depth % 8 == 0 else None

    def run(x: Tensor) -> Tensor:
        tokens = x.shape[0]
        if tokens <= FEW_GATED and cut is not None:
            small = skinny.tile(tokens, width, depth, gated=True)
            assert small is not None, "whether a width can be cut does not hang on the tokens"
            return skinny.product(x, weight, small, gated=True)
        if tokens >= MANY_GATED and many is not None:
            return many(x, weight)
        return silu_pairs(torch.mm(x, weight.t()))

    return run


def add_norm(
    weight: Tensor, bias: Tensor | None, norm: Tensor, eps: float, linear: LinearFactory
) -> Callable[[Tensor, Tensor], Tensor]:
    """As twin.add_norm."""
    if bias is not None or not (weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)):
        product = linear(weight, bias)
        return lambda x, residual: add_rms_norm_(product(x), residual, norm, eps)
    width, depth = weight.shape
    turned = weight.t()

    def run(x: Tensor, residual: Tensor) -> Tensor:
        tokens = x.shape[0]
        if tokens <= FEW_ADDED and (cut := skinny.tile(tokens, width, depth)) is not None:
            return sum_rms_norm_(skinny.product(x, weight, cut), residual, norm, eps)
        torch.addmm(residual, x, turned, out=residual)
        return rms_norm(residual, norm, eps)

    return run
