"""The operations of `--dtype fp8` on the GPU: products in e4m3, everything else as in bfloat16. An `ops` module (see twin.py).

A product's input is quantised by the kernel that makes it (quantise.py), where that is one of ours: the sum and norm that
end a block, silu(gate) * up, an activation. What comes from elsewhere (attention, embeddings, LayerNorm) is quantised by a
kernel of its own. It pays from about 1,000 tokens a step on: for fewer, bfloat16 has products of our own (skinny.py), and e4m3
has not. Does not know models.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hortus.errors import StartError
from hortus.rose.kernels import fp8_twin, quack, quantise, rms
from hortus.rose.kernels.dense import paired
from hortus.rose.kernels.fp8_twin import Quantised
from hortus.rose.kernels.fused import (
    add_layer_norm,
    add_layer_norm_,
    add_rms_norm_,
    embed_layer_norm,
    embed_rms_norm,
    gelu_,
    picked,
    pool,
    residual,
    rms_norm,
)
from hortus.rose.kernels.heads import in_pairs, norm_turn_
from hortus.rose.kernels.linear import ACTIVATIONS, Linear, LinearFactory, Rows, plain
from hortus.rose.kernels.quantise import glu
from hortus.rose.kernels.twin import Rotary

__all__ = [
    "Rotary",
    "activated",
    "add_layer_norm",
    "add_layer_norm_",
    "add_norm",
    "add_rms_norm_",
    "embed_layer_norm",
    "embed_rms_norm",
    "gated",
    "gelu_",
    "glu",
    "linear",
    "picked",
    "pool",
    "prove",
    "residual",
    "rms_norm",
    "turned",
]

log = logging.getLogger(__name__)

MULTIPLE = 16
"""Widths and depths that the product takes are multiples of it."""

MANY_GATED = 512
"""Tokens from which quack's gated product, then rounding, is faster than the library's, then silu and rounding, on one H200."""


def linear(weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Linear:
    """A LinearFactory. Keeps the weight in e4m3; one of odd sizes as it is, and its product plain."""
    width, depth = weight.shape
    if width % MULTIPLE or depth % MULTIPLE:
        _tell(width, depth)
        as_it_is = plain(weight, bias, activation)
        return lambda x: as_it_is(x.exact().to(weight.dtype) if isinstance(x, Quantised) else x)
    product = _product(fp8_twin.quantise(weight), bias, weight.dtype)
    return product if activation is None else lambda x: ACTIVATIONS[activation](product(x))


def library(weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Linear:
    """As linear; beside this one nothing else multiplies."""
    return linear(weight, bias, activation)


def _product(weight: Quantised, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    return lambda x: _multiplied(_quantised(x), weight, bias, dtype)


def _quantised(x: Rows) -> Quantised:
    return x if isinstance(x, Quantised) else quantise.rows(x.contiguous())


def _multiplied(x: Quantised, weight: Quantised, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if not x.values.is_cuda:  # Triton's interpreter has no product
        return fp8_twin.multiplied(x, weight, bias, dtype)
    return torch._scaled_mm(
        x.values, weight.values.t(), x.scale, weight.scale.t(), bias=bias, out_dtype=dtype, use_fast_accum=True
    )


@functools.cache
def _tell(width: int, depth: int) -> None:
    log.info("fp8: matrices of %d x %d stay bfloat16: the product takes multiples of %d", width, depth, MULTIPLE)


def activated(weight: Tensor, bias: Tensor | None, activation: str, linear: LinearFactory) -> Callable[[Rows], Rows]:
    """As twin.activated; what it gives is quantised."""
    if activation not in quantise.ACTIVATED:
        return linear(weight, bias, activation)
    whole = linear(weight, bias)
    return lambda x: quantise.activated(whole(x), activation)


def gated(gate: Tensor, up: Tensor, linear: LinearFactory) -> Callable[[Rows], Rows]:
    """As twin.gated; what it gives is quantised."""
    pairs = paired(gate, up)
    fits = pairs.dtype == torch.bfloat16 and pairs.shape[0] % MULTIPLE == pairs.shape[1] % MULTIPLE == 0
    fits = fits and linear is not library and pairs.is_cuda
    many = quack.gated_e4m3(pairs.device.index) if fits and quack.here(pairs.device.index) else None
    if many is None:
        whole = linear(pairs)
        return lambda x: quantise.silu_pairs(whole(x))
    kept = fp8_twin.quantise(pairs)
    few = _product(kept, None, pairs.dtype)

    def run(x: Rows) -> Rows:
        x = _quantised(x)
        return quantise.rows(many(x, kept)) if len(x.values) >= MANY_GATED else quantise.silu_pairs(few(x))

    return run


def add_norm(
    weight: Tensor, bias: Tensor | None, norm: Tensor, eps: float, linear: LinearFactory, *, last: bool = False
) -> Callable[[Rows, Tensor], Rows]:
    """As twin.add_norm; what it gives is quantised, unless it is the last."""
    whole = linear(weight, bias)
    normed = rms.add_rms_norm_ if last else quantise.add_rms_norm_
    return lambda x, residual: normed(whole(x), residual, norm, eps)


def turned(
    weight: Tensor,
    bias: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    rotary: Any,
    heads: int,
    kv_heads: int,
    eps: float,
    linear: LinearFactory,
) -> Callable[[Rows, Tensor], Tensor]:
    """As heads.turned."""
    weight, bias, q_norm, k_norm = in_pairs(weight, bias, q_norm, k_norm, rotary, heads + kv_heads)
    product = linear(weight, bias)

    def run(x: Rows, positions: Tensor) -> Tensor:
        qkv = product(x)
        norm_turn_(qkv, q_norm, k_norm, rotary.cos, rotary.sin, positions, heads, kv_heads, eps)
        return qkv

    return run


def prove(device: torch.device) -> None:
    """Run a small product with and without a bias against plain PyTorch's; StartError when it fails or is wrong."""
    x, weight, bias = (
        torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in ((80, 256), (96, 256), (96,))
    )
    try:
        for b in (None, bias):
            got = linear(weight, b)(x).float()
            want = fp8_twin.linear(weight, b)(x).float()
            if not float((got - want).norm() / want.norm()) < 0.01:
                raise ArithmeticError("it is not the product of its inputs")
    except Exception as e:  # noqa: BLE001  other packages' compilers and libraries: whatever fails, there is bfloat16
        raise StartError(
            f"--dtype fp8: PyTorch {torch.__version__}'s product in e4m3 does not work on "
            f"{torch.cuda.get_device_name(device)} ({type(e).__name__}: {e}); use --dtype bfloat16"
        ) from None
