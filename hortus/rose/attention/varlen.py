"""PyTorch's own variable-length attention: FlashAttention 2, in every CUDA build of torch.

The call below is the one torch.nn.attention.varlen makes, without the extra kernel that fills a random state nobody
reads. Lengths are read on the device, so graphs replay with others; the longest length given at capture sizes the grid.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hortus.rose.attention import Heads
from hortus.rose.attention.choose import Gpu
from hortus.types import Int32


def refuse(heads: Heads, gpu: Gpu, dtype: torch.dtype) -> str | None:
    """Why it cannot run, or None."""
    if gpu.capability < (8, 0):
        return f"needs compute capability 8.0 or later, {gpu.name} has {gpu.capability[0]}.{gpu.capability[1]}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16, not {dtype}"
    if heads.head_dim % 8 or heads.head_dim > 256:
        return f"needs a head_dim of 8, 16, .. 256, not {heads.head_dim}"
    return None


class VarlenAttention:
    name = "varlen"
    capturable = True

    def __init__(self, heads: Heads) -> None:
        self._heads = heads
        self._cu: Tensor | None = None
        self._longest = 0
        window = -1 if heads.window is None else heads.window
        self._window = (window, 0 if heads.causal else window)

    def plan(self, cu_seqlens_cpu: Int32, cu_seqlens: Tensor, max_seqlen: int) -> None:
        self._cu, self._longest = cu_seqlens, max_seqlen

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, self._cu, self._cu, self._longest, self._longest, 0.0, self._heads.causal, False,
            scale=self._heads.scale, window_size_left=self._window[0], window_size_right=self._window[1],
        )[0]  # fmt: skip
        return out
