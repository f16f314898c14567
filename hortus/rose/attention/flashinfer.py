"""FlashInfer's ragged prefill, FA2 and FA3: the fastest for many middling sequences, for steps outside graphs.

plan() lays out the work on the host once a batch. A captured graph would need a plan before each replay, written to
buffers fixed at capture, for every shape: not worth it, because the steps small enough for a graph are where
FlashAttention 4 wins anyway (docs/attention.md). So these backends are not capturable here.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from hortus.rose.attention import Heads
from hortus.rose.attention.choose import Gpu
from hortus.types import Int32

_WORKSPACE_BYTES = 32 * 1024 * 1024
"""FlashInfer's scratch for split keys, which we turn off (results then depend on a sequence alone)."""


def refuse(kind: str, heads: Heads, gpu: Gpu, dtype: torch.dtype) -> str | None:
    """Why `kind` (fa2 or fa3) cannot run, or None."""
    if kind == "fa3" and gpu.capability != (9, 0):
        return f"needs Hopper (compute capability 9.0), {gpu.name} has {gpu.capability[0]}.{gpu.capability[1]}"
    if gpu.capability < (8, 0):
        return f"needs compute capability 8.0 or later, {gpu.name} has {gpu.capability[0]}.{gpu.capability[1]}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16, not {dtype}"
    if heads.head_dim not in (64, 128, 256):
        return f"needs a head_dim of 64, 128 or 256, not {heads.head_dim}"
    if heads.window is not None and not heads.causal:
        return "has no window that is limited on both sides"
    if importlib.util.find_spec("flashinfer") is None:
        return "needs the package flashinfer-python: install hortus[gpu]"
    return None


class FlashInferAttention:
    capturable = False

    def __init__(self, kind: str, heads: Heads, device: torch.device, dtype: torch.dtype) -> None:
        self.name = f"flashinfer_{kind}"
        self._heads, self._dtype = heads, dtype
        wrapper = importlib.import_module("flashinfer.prefill").BatchPrefillWithRaggedKVCacheWrapper
        scratch = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # Two, in turn: a plan is staged through one pinned buffer a wrapper, which the copy of the batch before may
        # still be reading while the host plans the next.
        self._wrappers: list[Any] = [wrapper(scratch, "NHD", backend=kind) for _ in range(2)]
        self._staged: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._options: dict[str, Any] = {"disable_split_kv": True} if kind == "fa2" else {}

    def plan(self, cu_seqlens_cpu: Int32, cu_seqlens: Tensor, max_seqlen: int) -> None:
        self._turn ^= 1
        if (event := self._staged[self._turn]) is not None:
            event.synchronize()
        h = self._heads
        host = torch.from_numpy(cu_seqlens_cpu)
        self._wrappers[self._turn].plan(
            cu_seqlens, cu_seqlens, h.heads, h.kv_heads, h.head_dim,
            causal=h.causal, sm_scale=h.scale, q_data_type=self._dtype,
            window_left=-1 if h.window is None else h.window,
            qo_indptr_cpu=host, kv_indptr_cpu=host, **self._options,
        )  # fmt: skip
        event = self._staged[self._turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self._wrappers[self._turn].run(q, k, v)
        return out
