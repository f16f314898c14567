"""DeBERTa v2's convolution: after the first block each token's neighbours are added to it (transformers' ConvLayer).

    x = norm(block(e) + activation(convolution(e)))        e: the embeddings

Of packed tokens it is one product: each row beside its neighbours' rows, zeros where a sequence ends. Does not know families.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from hortus.rose.kernels.linear import Linear

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Convolution:
    """As config.json and the checkpoint have it."""

    width: int
    """Tokens that a result sees, itself in the middle: odd."""
    activation: str
    """A key of kernels.linear.ACTIVATIONS."""
    name: str = "encoder.conv.conv"
    norm: str = "encoder.conv.LayerNorm"

    def shapes(self, hidden: int) -> Shapes:
        both = {self.norm + ".weight": (hidden,), self.norm + ".bias": (hidden,)}
        return both | {self.name + ".weight": (hidden, hidden, self.width), self.name + ".bias": (hidden,)}


def as_matrix(weight: Tensor) -> Tensor:
    """[out, in, width] -> [out, width in], for rows that `beside` made."""
    return weight.transpose(1, 2).flatten(1).contiguous()


def beside(x: Tensor, positions: Tensor, width: int) -> Tensor:
    """[T, hidden], [T] -> [T, width hidden]: each row among its neighbours, from the one furthest back.

    A neighbour is of the same sequence when its position is as far off as it is: positions begin at 0 in each.
    """
    half, tokens = width // 2, len(x)
    rows, places = F.pad(x, (0, 0, half, half)), F.pad(positions, (half, half), value=-1)
    parts = []
    for step in range(width):
        same = places[step : step + tokens] == positions + (step - half)
        # Chosen, not multiplied by zero: what is not finite stays in its sequence.
        parts.append(torch.where(same[:, None], rows[step : step + tokens], 0.0))
    return torch.cat(parts, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbours:
    """A Convolution, ready to run."""

    width: int
    product: Linear
    norm: tuple[Tensor, Tensor]
    eps: float
    ops: ModuleType

    def __call__(self, embedded: Tensor, x: Tensor, positions: Tensor) -> Tensor:
        """[T, hidden] before and after the first block -> what the second takes."""
        y: Tensor = self.ops.add_layer_norm(
            self.product(beside(embedded, positions, self.width)), x, *self.norm, self.eps
        )
        return y
