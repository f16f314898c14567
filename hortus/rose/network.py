"""A whole model as one function of packed tokens: trunk, pooling and head. The seam between models and devices.

The CPU path calls it; the GPU path calls it eagerly or inside a graph capture. Does not know batches, streams or
graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
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
    span_tokens: Tensor | None = None
    """[P] int32: the tokens of all spans, in order (see `ranges`). None: a row a sequence, from all its tokens."""
    span_cu_seqlens: Tensor | None = None
    """[rows + 1] int32: where each span ends among span_tokens; None exactly when those are."""


class Network(Protocol):
    """Weights and code of one model, on one device, in one dtype."""

    width: int

    def look(self, ids_cpu: Int32, cu_seqlens_cpu: Int32) -> None:
        """Before plan(): the step's ids and cumulative lengths on the host; no ids where it may be captured in a graph."""

    def plan(self, cu_seqlens_cpu: Int32, cu_seqlens: Tensor, max_seqlen: int) -> None:
        """Host work once a batch, outside any graph (attention backends that need it)."""

    def forward(self, inputs: Inputs) -> Tensor:
        """[rows, width] float32 on the device, one a sequence or span (further ones mean nothing): pooled, Dense modules applied.

        Not cut, not finally normalised. Pure device work, no synchronisation on a GPU (it must be capturable).
        """

    # The two halves of forward where there are spans, of which a graph takes the first.

    def hidden(self, inputs: Inputs) -> Tensor:
        """[T, hidden], the trunk's. Capturable, as forward."""

    def hidden_like(self, tokens: int) -> Tensor:
        """[tokens, hidden], contents undefined: memory for `hidden`."""

    def pooled(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """The rows of the inputs' spans."""


def ranges(starts: Int32, lengths: Int32) -> tuple[Int32, Int32]:
    """(starts[i] .. starts[i] + lengths[i] - 1 of every i, joined; cumulative lengths, from 0), both int32."""
    cu = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=cu[1:])
    joined = np.arange(cu[-1], dtype=np.int32)
    if len(starts):
        joined += np.repeat(np.subtract(starts, cu[:-1], dtype=np.int32), lengths)
    return joined, cu
