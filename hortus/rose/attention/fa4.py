"""FlashAttention 4 (CuTe DSL), for Hopper and Blackwell: one kernel a call, no host work, lengths read on the device.

Comes from the package flash-attn-4, which compiles a kernel in 2 to 5 s at the first call of a head shape. A module
`fa4mini` with the same kernels compiled ahead is preferred where there is one.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from hortus.rose.attention import Heads
from hortus.rose.attention.choose import Gpu
from hortus.types import Int32


def refuse(heads: Heads, gpu: Gpu, dtype: torch.dtype) -> str | None:
    """Why it cannot run, or None."""
    if gpu.capability[0] not in (9, 10):
        return f"needs Hopper or Blackwell (compute capability 9 or 10), {gpu.name} has {gpu.capability[0]}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16, not {dtype}"
    most = 256 if gpu.capability[0] == 9 else 128
    if heads.head_dim % 8 or heads.head_dim > most:
        return f"needs a head_dim of 8, 16, .. {most} on this device, not {heads.head_dim}"
    if _source(heads, gpu, dtype) is None:
        return "needs the package flash-attn-4: install hortus[gpu]"
    return None


def _source(heads: Heads, gpu: Gpu, dtype: torch.dtype) -> str | None:
    """Module that has the kernel: ahead-of-time, just-in-time, or none."""
    if gpu.capability == (9, 0) and importlib.util.find_spec("fa4mini") is not None:
        mode = "w" if heads.window is not None else "c" if heads.causal else "n"
        try:
            importlib.import_module("fa4mini").kernel(dtype, heads.heads // heads.kv_heads, heads.head_dim, mode)
        except FileNotFoundError:
            pass  # not one of the shapes compiled ahead
        else:
            return "fa4mini"
    # Looking for flash_attn.cute imports flash_attn, which may be FlashAttention 2 without such a part.
    if importlib.util.find_spec("flash_attn") is not None and importlib.util.find_spec("flash_attn.cute") is not None:
        return "flash_attn.cute"
    return None


class Fa4Attention:
    name = "fa4"
    capturable = True

    def __init__(self, heads: Heads, gpu: Gpu, dtype: torch.dtype) -> None:
        source = _source(heads, gpu, dtype)
        assert source is not None, "made only after refuse() said nothing"
        self._call = _ahead(heads) if source == "fa4mini" else _just_in_time(heads)
        self._cu: Tensor | None = None

    def plan(self, cu_seqlens_cpu: Int32, cu_seqlens: Tensor, max_seqlen: int) -> None:
        # The longest length is not passed on: it would only pick another kernel to compile.
        self._cu = cu_seqlens

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self._cu is not None, "plan() comes before run()"
        return self._call(q, k, v, self._cu)


_Call = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _window(heads: Heads) -> tuple[int, int] | None:
    """(left, right) tokens visible, None: all."""
    if heads.window is None:
        return None
    return heads.window, 0 if heads.causal else heads.window


def _ahead(heads: Heads) -> _Call:
    varlen = importlib.import_module("fa4mini").varlen
    window, scale, causal = _window(heads), heads.scale, heads.causal

    def call(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        varlen(q, k, v, cu, cu, out, scale, causal=causal, window=window)
        return out

    return call


def _just_in_time(heads: Heads) -> _Call:
    varlen = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    window, scale, causal = _window(heads) or (None, None), heads.scale, heads.causal

    def call(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        out: Tensor = varlen(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, softmax_scale=scale, causal=causal, window_size=window
        )[0]
        return out

    return call
