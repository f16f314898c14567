"""The Triton bodies of the operations in twin.py: same names, same arguments, same meaning, for the GPU.

All of them move bytes and hardly compute, so the physics is: read each byte once, write it once, 16 bytes a thread, and
enough programs in flight to cover the latency of memory. A row op gives one program a whole row and keeps it in
registers, so that statistics (float32, two passes: mean, then centred squares) cost no second read. Row widths that are
no power of two (384, 2560) run in the next power of two under a mask: lanes idle, bytes do not.

Nothing here waits for the device, and shapes come from the tensors' host-side sizes only, so every op can be captured
in a CUDA graph. Norms of sums and gates, products joined with what follows them, heads and pooling have their own chapters:
rms.py, layernorm.py, dense.py, heads.py, pooling.py. Does not know models, attention or batches.
"""

# Arguments of Triton kernels are pointers and scalars of the device, for which Python has no types.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hortus.rose.kernels.dense import add_norm, gated
from hortus.rose.kernels.heads import Rotary, turned
from hortus.rose.kernels.launch import row
from hortus.rose.kernels.layernorm import add_layer_norm, add_layer_norm_, glu
from hortus.rose.kernels.pooling import picked, pool
from hortus.rose.kernels.residual import residual
from hortus.rose.kernels.rms import add_rms_norm_, embed_rms_norm, rms_norm
from hortus.rose.kernels.twin import activated

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
    "picked",
    "pool",
    "residual",
    "rms_norm",
    "turned",
]

_FLAT = 1024
"""Elements a program of the elementwise ops: 8 two-byte values (16 bytes) for each of 128 threads."""


@triton.jit
def _layer_norm(x, cols, mask, weight, bias, eps, WIDTH: tl.constexpr, BIAS: tl.constexpr):
    mean = tl.sum(x, 0) / WIDTH
    centred = tl.where(mask, x - mean, 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    y *= tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias + cols, mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def _embed_layer_norm(
    ids, positions, types, word, position, token_type, weight, bias, out, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, POSITION: tl.constexpr, TYPE: tl.constexpr, IDS_OF_TYPE: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    i = tl.load(ids + t).to(tl.int64)
    x = tl.load(word + i * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    if TYPE:
        kind = tl.load(types + t).to(tl.int64) if IDS_OF_TYPE else 0
        x += tl.load(token_type + kind * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    if POSITION:
        p = tl.load(positions + t).to(tl.int64)
        x += tl.load(position + p * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    y = _layer_norm(x, cols, mask, weight, bias, eps, WIDTH, BIAS)
    tl.store(out + t * WIDTH + cols, y.to(out.dtype.element_ty), mask=mask)


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
    """LayerNorm(word[ids] + position[positions] + token_type[types]) -> [T, H]. Types None means all zero."""
    width = word.shape[1]
    out = word.new_empty(ids.shape[0], width)
    block, warps = row(width)
    _embed_layer_norm[(ids.shape[0],)](
        ids, positions, token_types, word, position, token_type, weight, bias, out, eps,
        width, block, position is not None, token_type is not None, token_types is not None, bias is not None,
        num_warps=warps,
    )  # fmt: skip
    return out


@triton.jit
def _gelu(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    f = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    y = 0.5 * f * (1.0 + tl.erf(f * 0.7071067811865476))
    tl.store(x + at, y.to(x.dtype.element_ty), mask=mask)


def gelu_(x: Tensor) -> Tensor:
    """Exact (erf) GELU in place; x contiguous."""
    assert x.is_contiguous(), "gelu_ walks memory, not rows"
    _gelu[(triton.cdiv(x.numel(), _FLAT),)](x, x.numel(), _FLAT, num_warps=4)
    return x
