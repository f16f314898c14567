"""Attention over packed sequences: one small interface, several backends, a measured choice.

`plan` runs once a batch (host work, such as FlashInfer's schedule); `run` once a layer. Does not know models or graphs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hortus.types import Int32


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """The shape of one attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False
    window: int | None = None
    """Tokens visible to each side (sliding window); None: all."""
    scaled: float | None = None
    """What scores are multiplied by, where it is not 1 / sqrt(head_dim)."""

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim) if self.scaled is None else self.scaled


class Bias(Protocol):
    def __call__(self, q: Tensor, k: Tensor, first: int) -> Tensor:
        """What is added to the scores of some sequences of one length: [n or 1, heads, queries, keys].

        q: [n, heads, queries, head_dim], the tokens from `first` on; k: [n, heads, keys, head_dim], all tokens, the last first:
        so a bias by distance is a view of its table, each row a step further on.
        """


class AttentionFactory(Protocol):
    def __call__(self, heads: Heads, bias: Bias | None = None) -> Attention: ...


class Attention(Protocol):
    """A backend, made for one Heads and one device. May keep the plan of the current batch."""

    @property
    def name(self) -> str: ...

    def plan(self, cu_seqlens_cpu: Int32, cu_seqlens: Tensor, max_seqlen: int) -> None:
        """Prepare for one batch. cu_seqlens_cpu, cu_seqlens: [N + 1] int32 on host and device; max_seqlen a bound."""

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """softmax(q k^T scale) v within each sequence.

        q: [T, heads, head_dim]; k, v: [T, kv_heads, head_dim]; last dimension contiguous, rows may be strided (views of
        one fused qkv). -> [T, heads, head_dim] contiguous.

        Every row belongs to a sequence: cu_seqlens[-1] == T. Where a graph pads tokens, the padding rows are the last
        sequence (empty when nothing is padded). The fast kernels leave rows of no sequence unwritten, and read whole
        tiles of k and v past a sequence's end, where one NaN spoils a real row: so no such row may exist.
        """
