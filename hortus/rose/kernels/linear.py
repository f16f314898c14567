"""The matrix product of a layer, as an object: made once from a weight, called once a step.

An object and not a function, so that a device may keep the weight in the layout its library wants. Does not know what
the layer is for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": lambda x: x.tanh(),
}


Rows = Any
"""[T, K] in the format that a device's products read: a Tensor, or fp8_twin.Quantised."""


class Linear(Protocol):
    """y = activation(x weight^T + bias)."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in] -> [T, out], the same dtype. Either may have any strides: see `swapped`."""


class LinearFactory(Protocol):
    def __call__(self, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Linear:
        """weight: [out, in]; bias: [out]; activation: a key of ACTIVATIONS. The weight may be kept as it is."""


def plain(weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Linear:
    """PyTorch's own product, any device and dtype."""
    act = ACTIVATIONS[activation] if activation else None

    def run(x: Tensor) -> Tensor:
        y = F.linear(x, weight, bias)
        return act(y) if act else y

    return run


def library(weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Linear:
    """As plain. A device that is given this one multiplies by nothing else, whatever kernels of its own it has."""
    return plain(weight, bias, activation)


FEW = 32
"""Up to this many tokens, `swapped` multiplies the other way round. Measured: docs/decisions/002-cpu-path.md."""

IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {"gelu": torch.ops.aten.gelu_, "relu": torch.relu_}
"""Those of ACTIVATIONS that may overwrite their input."""


def swapped(weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Linear:
    """The CPU's: for few tokens (weight x^T)^T, so that the library splits and streams the weight, not the few tokens.

    The library copies one operand into its own layout at every call. For few tokens that copy, of the whole weight, is
    most of the time; asked the other way round, it copies the tokens instead. The result is left
    transposed: most readers do not mind.
    """
    act = (IN_PLACE.get(activation) or ACTIVATIONS[activation]) if activation else None
    column = None if bias is None else bias.unsqueeze(1)

    def run(x: Tensor) -> Tensor:
        tokens = x.shape[0]
        if tokens > FEW:
            y = F.linear(x, weight, bias)
            return act(y) if act else y
        if (t := columns(tokens)) != tokens:
            x = torch.cat([x, x.new_zeros(t - tokens, x.shape[1])])
        y = torch.mm(weight, x.t()) if column is None else torch.addmm(column, weight, x.t())
        if act:
            y = act(y)
        return y[:, :tokens].t()

    return run


def columns(tokens: int) -> int:
    """Columns to fill up to in `swapped`: the library takes twice as long for 15 as for 16, and for 31 as for 32.

    Up to 4 it has other ways, as fast as they are.
    """
    return tokens if tokens <= 4 else max(16, -(-tokens // 8) * 8)
