"""A whole model as one function of packed tokens: trunk, pooling and head. The seam between models and devices.

The CPU path calls it; the GPU path calls it eagerly or inside a graph capture. Does not know batches, streams or
graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hortus.types import Int32


@dataclass(slots=True)
class Inputs:
    """One step's inputs on the device. Filled by the device path (for the GPU: views of static buffers)."""

    ids: Tensor
    """[T] int32."""
    positions: Tensor
    """[T] int32, 0.. within each sequence (a model adds its own offset)."""
    token_types: Tensor | None
    """[T] int32, or None: all zero."""
    cu_seqlens: Tensor
    """[N + 1] int32; the last entry is T. A graph's padding tokens are its last sequence, whose row is ignored."""


class Network(Protocol):
    """Weights and code of one model, on one device, in one dtype."""

    width: int

    def plan(self, cu_seqlens_cpu: Int32, cu_seqlens: Tensor, max_seqlen: int) -> None:
        """Host work once a batch, outside any graph (attention backends that need it)."""

    def forward(self, inputs: Inputs) -> Tensor:
        """[N, width] float32 rows on the device: pooled, Dense modules applied; not cut, not finally normalised.

        Pure device work, no synchronisation on a GPU (it must be capturable).
        """
