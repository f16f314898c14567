"""Epilogues of our own for quack's matrix product (CuTe DSL): what is done to a tile while it is still in registers.

Imported only where the package `quack` is. The functions below are traced by its compiler; their parameters are named as
it wants them. Does not know models.
"""

# Traced, not run: the values have no Python types.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-not-found, import-untyped"

from __future__ import annotations

import functools
from typing import Any

from quack.epilogue.frontend import gemm_epilogue, pack, unpack
from quack.epilogue.head_rmsnorm import HeadRstd
from quack.epilogue.ops import RowVecLoad
from quack.epilogue.rotary import rotary_cos_sin_load


def _squares(acc):
    return {"rms": acc * acc}


def _turned(acc, angle, rms, weight, turns, stays):
    """Per-head RMSNorm and rotation of neighbours, in columns where turns = 1; those where stays = 1 are left alone.

    weight is 0 in the latter, so that one expression serves both: x (rms weight + stays).
    """
    first, second = unpack(acc * (rms * weight + stays))
    c, s = unpack(angle * turns)
    one, _ = unpack(stays)
    c = c + one
    return {"D": pack(first * c - second * s, first * s + second * c)}


@functools.cache
def turned(eps: float) -> Any:
    """The product whose columns are heads: q and k normed and turned, v as it is. One compiled kernel an eps."""
    return gemm_epilogue(
        ops={
            "angle": rotary_cos_sin_load("angle"),
            "rms": HeadRstd("rms", eps=eps),
            "weight": RowVecLoad("weight"),
            "turns": RowVecLoad("turns"),
            "stays": RowVecLoad("stays"),
        },
        prepass=_squares,
        prepass_outs=("rms",),
        mode="acc_pair",
    )(_turned)
