"""Products in 8-bit floating point (e4m3), in plain PyTorch: what fp8.py is held to, and what says how much accuracy it costs.

A row of a weight (an output channel) and a row of activations (a token) each have one scale, their greatest magnitude over 448,
e4m3's greatest number (Micikevicius et al., arXiv 2209.05433): nothing has to be calibrated, and no token's numbers hang
on its neighbours'. A row that is not finite gets the scale NaN, so that all that is made of it is NaN, as in any other format.

Here numbers are rounded to e4m3, turned back and multiplied in float32. Does not know models or devices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hortus.rose.kernels.linear import ACTIVATIONS, Linear

GREATEST = 448.0
LEAST = 1e-30
"""A row whose greatest magnitude is less counts as this: its numbers become 0, and no scale overflows when inverted."""


class Quantised(NamedTuple):
    """Rows in e4m3: values x scale."""

    values: Tensor
    """[rows, depth] float8_e4m3fn, contiguous."""
    scale: Tensor
    """[rows, 1] float32."""

    def exact(self) -> Tensor:
        """[rows, depth] float32."""
        return self.values.float() * self.scale


def quantise(x: Tensor) -> Quantised:
    """x: [rows, depth] of any floating format. Rounded to nearest, ties to even."""
    most = x.float().abs().amax(1, keepdim=True)
    whole = torch.isfinite(most)
    most = most.clamp(min=LEAST)
    # A division, as the kernels do it: a number over a tensor would be its reciprocal times the number.
    values = torch.where(whole, x.float() * (torch.full_like(most, GREATEST) / most), 0.0)
    scale = torch.where(whole, most * (1 / GREATEST), torch.nan)
    return Quantised(values.to(torch.float8_e4m3fn), scale)


def multiplied(x: Quantised, weight: Quantised, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x weight^T + bias, summed in float32 and rounded once: [T, K], [N, K], [N] -> [T, N]."""
    return F.linear(x.exact(), weight.exact(), None if bias is None else bias.float()).to(dtype)


def linear(weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Linear:
    """A LinearFactory (see linear.py). Results have the weight's format."""
    kept, act = quantise(weight), ACTIVATIONS[activation] if activation else None

    def run(x: Tensor) -> Tensor:
        y = multiplied(quantise(x), kept, bias, weight.dtype)
        return act(y) if act else y

    return run
