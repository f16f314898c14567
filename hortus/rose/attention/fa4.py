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
        asked = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "tile_mn", "num_threads", *_options(heads)))
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


SMALL = 64, 64
MANY = 256
"""For more sequences than this the package compiles another kernel, which searches for the sequence that a tile is of. Such steps
are seldom: all are given the same tiles and programs, so that it is one kernel."""


def tile(tokens: int, sequences: int, heads: int, head_dim: int) -> tuple[int, int] | None:
    """(queries, keys) of a tile on Hopper; None: the package's own, 128 queries, or 192 where head_dim is 64 or less. Pure.

    Small where all programs run at once all the same. One H200, us a call, own first: 16 heads of 128, one sequence of 128, 256,
    512, 576 tokens 5.6, 7.1, 10.0, 11.7 -> 4.1, 5.3, 7.8, 15.5, sequences of 64 5.6, 5.9, 6.2, 6.2 -> 3.6, 3.8, 4.4, 6.7; 12
    heads of 64, one sequence of 128, 512 tokens 5.2, 9.8 -> 3.5, 6.4. Those heads with 128 queries: one sequence of 1,024 tokens
    15.1 -> 12.4, 4,096 99 -> 116; 8 and 25 of 512 26, 58 -> 20, 62; 100 of 128 37 -> 31 (the last four by programs that go on).
    """
    if head_dim > 128:
        return None
    if sequences <= MANY and heads * -(-tokens // 64) <= PROCESSORS:
        return SMALL
    most = 384 if tokens <= 512 * sequences else 192
    short = tokens <= 128 * sequences or heads * tokens <= most * PROCESSORS
    return (128, 128) if head_dim <= 64 and short else None


def goes_on(tokens: int, sequences: int, heads: int, *, causal: bool) -> bool:
    """Whether programs that go on from tile to tile (hopper.py) are faster than one for each of many tiles. Pure.

    Causal tiles take times that differ, the more the longer a sequence is, and a stride does not see that. 16 heads of 128, us a
    call, a program for each first: 25 of 512 tokens 104 -> 88, 100 of 128 97 -> 54, but 5 of 512 23 -> 26, 16 of 16 to 2,048
    236 -> 257, one of 4,096 121 -> 136.
    """
    return not causal or sequences > MANY or (tokens <= 512 * sequences and heads * tokens >= 512 * PROCESSORS)


class Fa4Attention:
    name = "fa4"
    capturable = True

    def __init__(self, heads: Heads) -> None:
        self._hopper = torch.cuda.get_device_capability()[0] == 9
        self._forward = _forward()
        self._heads, self._options = heads, _options(heads)
        self._cu: Tensor | None = None

    def plan(self, cu_seqlens_cpu: Int32, cu_seqlens: Tensor, max_seqlen: int) -> None:
        # The longest length is not passed on: it would only pick another kernel to compile.
        self._cu = cu_seqlens

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self._cu is not None, "plan() comes before run()"
        options, h = self._options, self._heads
        if self._hopper:
            size = q.shape[0], self._cu.shape[0] - 1
            cut = tile(*size, h.heads, h.head_dim)
            many = _ours() and cut != SMALL and goes_on(*size, h.heads, causal=h.causal)
            options = options | {"tile_mn": cut, "num_threads": GOES_ON if many else ONE_TILE}
        try:
            out: Tensor = self._forward(q, k, v, cu_seqlens_q=self._cu, cu_seqlens_k=self._cu, **options)[0]
        except torch.OutOfMemoryError:
            raise
        except Exception as e:
            # What fails in a capture says nothing: it has run before.
            if not self._hopper or torch.cuda.is_current_stream_capturing() or not _given_up(e):
                raise
            return self.run(q, k, v)
        return out


GOES_ON, ONE_TILE = 512, 384
"""What to give as num_threads, to say which programs are wanted: the one argument that makes the package compile another kernel
and that its Hopper kernel otherwise does not heed, since it counts its threads itself."""


_failed: list[str] = []
"""How our form of the Hopper kernel failed, which is then used no more."""


def _ours() -> bool:
    return not _failed and _changed()


def _given_up(e: Exception) -> bool:
    """Whether it was our form that failed, and the package's own stands in its place now: another version may look the same from
    outside, and be compiled only when it is first called."""
    if not _ours():
        return False
    _failed.append(f"{type(e).__name__}: {e}")  # not the exception itself, which would hold the step's tensors
    importlib.import_module("hortus.rose.attention.hopper").undo()
    log.warning("FlashAttention 4 is used as it is, its kernel changed by us fails: %s", _failed[-1])
    return True


@functools.cache
def _changed() -> bool:
    """Teach the package our form of its Hopper kernel. Where it is not as expected, its own is used, later and slower."""
    try:
        importlib.import_module("hortus.rose.attention.hopper").use()
    except (ImportError, AttributeError, TypeError) as e:
        log.info("FlashAttention 4 is neither launched early nor goes on from tile to tile: %s", e)
        return False
    return True
