"""few.py's way through all layers, and for the shortest steps its twin in C (few.c), where that has been built.

The package's installation builds it when there is a C compiler; without one everything works, more slowly. Loaded with ctypes:
it is C alone, knows no Python, and runs without the GIL. Does not know files or embeddings.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hortus import native
from hortus.rose.attention import Heads
from hortus.rose.attention.relative import DistanceBias
from hortus.rose.kernels import few as calls
from hortus.rose.kernels.few import Few, LayerWeights
from hortus.types import Int32

log = logging.getLogger(__name__)

MOST_TOKENS = 48
"""Most tokens of a step for which C is faster. Measured: docs/decisions/002-cpu-path.md."""

_ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")
"""In the order of few.c's enum."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """few.c, or None where it was not built (or long ago) or this processor cannot run it (x86 without AVX2)."""
    found = native.load(Path(__file__).with_name("few.c"))
    if found is None or not found.hortus_few_runs_here():
        return None
    if not hasattr(found, "hortus_few_rows"):
        log.warning("few.c was built from an earlier source, the slower way is taken: install again")
        return None
    pointer, number, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
    found.hortus_few_new.argtypes = [number] * 5 + [real] * 2 + [pointer]
    found.hortus_few_new.restype = pointer
    found.hortus_few_rows.argtypes = [*[pointer] * 4, number, pointer, number, number]
    found.hortus_few_rows.restype = None
    found.hortus_few_free.argtypes = [pointer]
    found.hortus_few_free.restype = None
    return found


def few(layers: list[LayerWeights], heads: Heads, eps: float, activation: str, bias: DistanceBias | None = None) -> Few:
    """See few.FewFactory."""
    long = calls.few(layers, heads, eps, activation, bias)
    library_ = library()
    if library_ is None or bias is not None or activation not in _ACTIVATIONS or not layers:
        return long
    short = _Compiled(library_, layers, heads, eps, activation)
    return lambda x, cu_seqlens_cpu, rows=None: (short if len(x) <= MOST_TOKENS else long)(x, cu_seqlens_cpu, rows)


class _Compiled:
    """A Few of up to MOST_TOKENS tokens."""

    def __init__(
        self, library: ctypes.CDLL, layers: list[LayerWeights], heads: Heads, eps: float, activation: str
    ) -> None:
        pairs = [pair for o in layers for pair in (o.qkv, o.out, o.up, o.down, o.attention_norm, o.norm)]
        self._kept = [part.contiguous() for pair in pairs for part in pair]  # no copy where it lies so already
        if any(part.dtype != torch.float32 for part in self._kept):
            raise TypeError("the compiled path takes float32 weights")
        pointers = (ctypes.c_void_p * len(self._kept))(*[part.data_ptr() for part in self._kept])
        self._trunk = library.hortus_few_new(
            len(layers), heads.heads, heads.head_dim, layers[0].up[0].shape[0],
            _ACTIVATIONS.index(activation), eps, heads.scale, pointers,
        )  # fmt: skip
        if not self._trunk:
            raise MemoryError("no memory for the buffers of short steps")
        weakref.finalize(self, library.hortus_few_free, self._trunk)
        self._run = library.hortus_few_rows

    def __call__(self, x: Tensor, cu_seqlens_cpu: Int32, rows: Tensor | None = None) -> Tensor:
        x = x.contiguous()
        kept, at = len(x), None
        if rows is not None:
            rows = rows.int().contiguous()
            kept, at = len(rows), rows.data_ptr()
            assert kept <= len(x), "the buffers hold the step's tokens"
        y = x.new_empty(kept, x.shape[1])
        cu = np.ascontiguousarray(cu_seqlens_cpu, np.int32)
        self._run(
            self._trunk, x.data_ptr(), y.data_ptr(), cu.ctypes.data, len(cu) - 1, at, kept, torch.get_num_threads()
        )
        return y
