"""Epilogues of our own for quack's matrix product (CuTe DSL): what is done to a tile while it is still in registers.

Imported only where the package `quack` is. The functions below are traced by its compiler; their parameters are named as
it wants them. Does not know models.
"""

# Traced, not run: the values have no Python types.
# ruff: noqa: ANN001, ANN002, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-not-found, import-untyped, misc"

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from quack import activation
from quack.epilogue.frontend import gemm_epilogue, pack, unpack
from quack.epilogue.head_rmsnorm import HeadRstd
from quack.epilogue.ops import ColVecLoad, RowVecLoad
from quack.epilogue.rotary import RotaryCosSinTMALoad

_SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
"""Of this file: quack keeps kernels on disk and would know a class of ours by its name alone, whatever it did before."""

# A tile is as wide as a head, so a whole tile is turned or none of it: the first `turned` tiles of a row of tiles are. That
# is known where a tile begins, and costs its elements nothing. What it replaces, two more rows of factors, cost a twentieth.


class _Angles(RotaryCosSinTMALoad):
    """A table [T, 256], of whose rows turned tiles read the first half, the others the second."""

    def __init__(self, name, turned) -> None:
        super().__init__(name)
        self.turned = turned

    def config_key(self):
        return (self.turned, _SOURCE)

    def load_g2s_copy_fn(self, gemm, params, smem_tensor, tile_coord_mnkl, *rest):
        row, column, *others = tile_coord_mnkl
        which = (row, Int32(column >= self.turned), *others)
        return super().load_g2s_copy_fn(gemm, params, smem_tensor, which, *rest)


class _Factor(HeadRstd):
    """What norms a row of a head; 1 in tiles that are not turned."""

    def __init__(self, name, eps, turned) -> None:
        super().__init__(name, eps=eps)
        self.turned = turned

    def config_key(self):
        return (self.eps, self.turned, _SOURCE)

    def begin(self, gemm, param, smem_tensor, ctx):
        return (*super().begin(gemm, param, smem_tensor, ctx), ctx.tile_coord_mnkl[1] >= self.turned)

    @cute.jit
    def fn_prepass_end(self, gemm, state):
        super().fn_prepass_end(gemm, state)
        if state[1]:
            state[0][5].fill(1.0)  # the rows' finished statistics


def _squares(acc):
    return {"rms": acc * acc}


def _turned(acc, angle, rms, weight):
    """Per-head RMSNorm and rotation of neighbours. weight is 1 where nothing is normed."""
    first, second = unpack(acc * (rms * weight))
    c, s = unpack(angle)
    return {"D": pack(first * c - second * s, first * s + second * c)}


@functools.cache
def turned(eps: float, heads: int) -> Any:
    """The product whose columns are heads: the first `heads`, q and k, normed and turned, v as it is. A kernel for each pair."""
    return gemm_epilogue(
        ops={
            "angle": _Angles("angle", heads),
            "rms": _Factor("rms", eps, heads),
            "weight": RowVecLoad("weight"),
        },
        prepass=_squares,
        prepass_outs=("rms",),
        mode="acc_pair",
    )(_turned)


def _plain(acc):
    return {"D": acc}


plain = gemm_epilogue(ops={})(_plain)
"""The product as it is."""


def _gated(acc):
    gate, up = unpack(acc)
    return {"postact": activation.swiglu(gate, up)}


gated = gemm_epilogue(ops={}, outputs=("postact",), mode="acc_pair")(_gated)
"""silu(gate) * up, of columns in turn."""


def _biased(acc, bias):
    return {"D": acc + bias}


def _gelu(acc, bias):
    return {"D": activation.gelu_erf(acc + bias)}


biased = gemm_epilogue(ops={"bias": RowVecLoad("bias")})(_biased)
gelu = gemm_epilogue(ops={"bias": RowVecLoad("bias")})(_gelu)


def _gated_e4m3(acc, scale, column):
    gate, up = unpack(acc * column * scale)
    return {"postact": activation.swiglu(gate, up)}


gated_e4m3 = gemm_epilogue(
    ops={"scale": ColVecLoad("scale"), "column": RowVecLoad("column")}, outputs=("postact",), mode="acc_pair"
)(_gated_e4m3)
"""silu(gate) * up of a product in e4m3, whose rows and columns have scales."""
