"""The matrix product of a layer, as an object: made once from a weight, called once a step.

An object and not a function, so that a device may keep the weight in the layout its library wants. Does not know what
the layer is for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

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


class Linear(Protocol):
    """y = activation(x weight^T + bias)."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in] -> [T, out], the same dtype."""


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


_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.ops.aten.gelu_,
    "relu": torch.relu_,
}


def packed(weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Linear:
    """The CPU's."""
    act = (_IN_PLACE.get(activation) or ACTIVATIONS[activation]) if activation else None

    def run(x: Tensor) -> Tensor:
        y = F.linear(x, weight, bias)
        return act(y) if act else y

    return run
