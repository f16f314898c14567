"""FlashAttention 4 (CuTe DSL), for Hopper and Blackwell: one kernel a call, no host work, lengths read on the device.

Comes from the package flash-attn-4, which compiles a kernel in 2 to 5 s at the first call of a head shape.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hortus.rose.attention import Heads
from hortus.rose.attention.choose import Gpu
from hortus.rose.kernels import PROCESSORS
from hortus.types import Int32

log = logging.getLogger(__name__)


def refuse(heads: Heads, gpu: Gpu, dtype: torch.dtype) -> str | None:
    """Why it cannot run, or None."""
    if gpu.capability[0] not in (9, 10):
        return f"needs Hopper or Blackwell (compute capability 9 or 10), {gpu.name} has {gpu.capability[0]}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16, not {dtype}"
    most = 256 if gpu.capability[0] == 9 else 128
    if heads.head_dim % 8 or heads.head_dim > most:
        return f"needs a head_dim of 8, 16, .. {most} on this device, not {heads.head_dim}"
    try:
        # Looking for flash_attn.cute imports flash_attn, which may be FlashAttention 2 without such a part.
        if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
            return "needs the package flash-attn-4: install hortus[gpu]"
        asked = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "tile_mn", *_options(heads)))
        inspect.signature(_forward()).bind(None, None, None, **asked)
    except Exception as e:  # noqa: BLE001  another package, of any version: whatever fails, there is another way
        return f"needs the package flash-attn-4 in a version that this one knows ({type(e).__name__}: {e})"
    return None


def _forward() -> Callable[..., Any]:
    """Not the public function around it, which leaves no choice of tiles."""
    found: Callable[..., Any] = importlib.import_module("flash_attn.cute.interface")._flash_attn_fwd
    return found


def _options(heads: Heads) -> dict[str, Any]:
    return {
        "softmax_scale": heads.scale,
        "causal": heads.causal,
        "window_size_left": heads.window,  # tokens visible, None: all
        "window_size_right": 0 if heads.causal and heads.window is not None else heads.window,
    }


def tile(tokens: int, heads: int, head_dim: int) -> tuple[int, int] | None:
    """(queries, keys) of a program on Hopper; None: the package's own, 128 queries, or 192 where head_dim is 64 or less. Pure.

    Small where all programs run at once all the same. One H200, us a call, own first: 16 heads of 128, one sequence of 128, 256,
    512, 576 tokens 5.6, 7.1, 10.0, 11.7 -> 4.1, 5.3, 7.8, 15.5, sequences of 64 5.6, 5.9, 6.2, 6.2 -> 3.6, 3.8, 4.4, 6.7; 12
    heads of 64, one sequence of 128, 512 tokens 5.2, 9.8 -> 3.5, 6.4, of 1,024 15.1 -> 12.4 with 128 queries.
    """
    if head_dim > 128:
        return None
    if heads * -(-tokens // 64) <= PROCESSORS:
        return 64, 64
    return (128, 128) if head_dim <= 64 and heads * tokens <= 192 * PROCESSORS else None


class Fa4Attention:
    name = "fa4"
    capturable = True

    def __init__(self, heads: Heads) -> None:
        _launch_early()
        self._forward = _forward()
        self._shape = (heads.heads, heads.head_dim) if torch.cuda.get_device_capability()[0] == 9 else None
        self._options = _options(heads)
        self._cu: Tensor | None = None

    def plan(self, cu_seqlens_cpu: Int32, cu_seqlens: Tensor, max_seqlen: int) -> None:
        # The longest length is not passed on: it would only pick another kernel to compile.
        self._cu = cu_seqlens

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self._cu is not None, "plan() comes before run()"
        cut = None if self._shape is None else tile(q.shape[0], *self._shape)
        out: Tensor = self._forward(
            q, k, v, cu_seqlens_q=self._cu, cu_seqlens_k=self._cu, tile_mn=cut, **self._options
        )[0]
        return out


@functools.cache
def _launch_early() -> None:
    """Teach the package's Hopper kernel to be launched while the kernel before it still runs (kernels/launch.py has the rules).

    The package asks for its class by name when it compiles, so ours stands there instead: the same kernel, which waits
    before its first read and lets the next one start at once. Safe for whoever else calls it. Where the package is not as
    expected, its own kernel is used, 2 us a call later.
    """
    try:
        interface: Any = importlib.import_module("flash_attn.cute.interface")
        kernel, arch = interface.FlashAttentionForwardSm90, importlib.import_module("cutlass.cute").arch
        wait, go_on = arch.griddepcontrol_wait, arch.griddepcontrol_launch_dependents
        load, launched = kernel.load, kernel.kernel
    except (ImportError, AttributeError) as e:
        log.info("FlashAttention 4 is not launched early: %s", e)
        return

    # The loading warps read first, and what they load is all that the others wait for.
    def loads(self: Any, *args: Any) -> Any:
        go_on()
        wait()
        return load(self, *args)

    def launcher(self: Any, *args: Any) -> Any:
        made = launched(self, *args)
        made.launch = functools.partial(made.launch, use_pdl=True)
        return made

    interface.FlashAttentionForwardSm90 = type(
        "FlashAttentionForwardSm90", (kernel,), {"load": loads, "kernel": launcher}
    )
