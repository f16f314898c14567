"""The engine on a CPU: one step is computed at once, in pieces that fit the cache.

Knows Network and TokenBatch. Does not know threads of ours, queues or HTTP, or which model it runs. PyTorch's products
release the GIL, so the event loop runs on while a step computes.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hortus.errors import EngineError, OutOfMemory
from hortus.metrics import Metrics
from hortus.rose.network import Inputs, Network, ranges
from hortus.types import Float32, Int32, ModelInfo, TokenBatch

log = logging.getLogger(__name__)

PIECE_TOKENS = 2048
"""Most tokens computed together: activations of all-MiniLM (hidden 384, 1536 inside) are then 25 MB.

Measured: docs/decisions/002-cpu-path.md."""
BATCH_TOKENS = 2048
"""Advised to the scheduler: one piece. More gains nothing here, and a short query waits for a step to end."""


@dataclass(frozen=True, slots=True)
class Done:
    """A LazyTensor that has nothing left to do."""

    rows: Float32 | None
    error: EngineError | None = None

    def ready(self) -> bool:
        return True

    def result(self) -> Float32:
        if self.error is not None:
            raise self.error
        assert self.rows is not None, "a step gives rows or an error"
        return self.rows


class CpuEngine:
    """An Engine (see types.py) that computes in `step` and returns a finished result."""

    def __init__(self, network: Network, info: ModelInfo, metrics: Metrics | None = None) -> None:
        self.network = network  # open to benches and tests
        self.metrics = metrics or Metrics()
        self.metrics.device_memory_bytes.set_function(_resident_bytes)
        if hasattr(os, "sysconf"):
            self.metrics.device_memory_total_bytes.set(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        self._info = info

    @property
    def info(self) -> ModelInfo:
        return self._info

    def quick(self, batch: TokenBatch) -> bool:
        """Never: it computes inside `step`."""
        return False

    def step(self, batch: TokenBatch) -> Done:
        """Compute a batch. Never raises: result() does, EngineError or OutOfMemory."""
        try:
            with torch.inference_mode():
                rows = self._rows(batch)
        except Exception as e:  # noqa: BLE001  whatever fails fails this batch, not the step thread
            self.metrics.step_failures.inc()
            log.error("a step failed: %s: %s", type(e).__name__, e)
            return Done(None, _error(e, batch))
        self.metrics.tokens.inc(batch.total_tokens)
        return Done(rows)

    def close(self) -> None:
        """Nothing to free that the process's end does not."""

    def _rows(self, batch: TokenBatch) -> Float32:
        if len(batch) == 1:
            return self._piece(batch)
        pieces = cut(batch.cu_seqlens, PIECE_TOKENS)
        if len(pieces) == 1 and _sorted(batch.lengths):
            return self._piece(batch)
        rows = np.empty((batch.rows, self._info.width), np.float32)
        for piece in pieces:
            rows[_rows_of(batch, piece)] = self._piece(_take(batch, piece))
        return rows

    def _piece(self, batch: TokenBatch) -> Float32:
        cu = batch.cu_seqlens
        cu_seqlens = _tensor(cu)
        types, tokens, ends = batch.token_types, None, None
        if batch.spans is not None:
            tokens, ends = map(torch.from_numpy, ranges(batch.spans[:, 0], batch.spans[:, 1] - batch.spans[:, 0]))
        inputs = Inputs(
            ids=_tensor(batch.ids),
            positions=torch.from_numpy(positions(cu)),
            token_types=None if types is None or not types.any() else torch.from_numpy(types.astype(np.int32)),
            cu_seqlens=cu_seqlens,
            span_tokens=tokens,
            span_cu_seqlens=ends,
        )
        self.network.look(batch.ids, cu)
        self.network.plan(cu, cu_seqlens, batch.max_seqlen)
        rows: Float32 = self.network.forward(inputs).numpy()
        return rows


def _tensor(array: Int32) -> torch.Tensor:
    """Over the same memory where it may be written to, as PyTorch wants; what came over a wire is copied."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def cut(cu_seqlens: Int32, most: int) -> list[Int32]:
    """Sequences by ascending length, in pieces of at most `most` tokens (a longer sequence alone): lists of indices.

    Sorted, so that equal lengths meet and attention needs no padding.
    """
    lengths = np.diff(cu_seqlens)
    order = np.argsort(lengths, kind="stable").astype(np.int32)
    if int(cu_seqlens[-1]) <= most:
        return [order]
    ends = np.cumsum(lengths[order])
    pieces = []
    start, done = 0, 0
    while start < len(order):
        stop = max(int(np.searchsorted(ends, done + most, "right")), start + 1)
        pieces.append(order[start:stop])
        start, done = stop, int(ends[stop - 1])
    return pieces


def positions(cu_seqlens: Int32) -> Int32:
    """[T] int32: 0.. within each sequence."""
    if len(cu_seqlens) == 2:
        return np.arange(cu_seqlens[-1], dtype=np.int32)
    return ranges(np.zeros(len(cu_seqlens) - 1, np.int32), np.diff(cu_seqlens))[0]


def _sorted(lengths: Int32) -> bool:
    return bool((lengths[1:] >= lengths[:-1]).all())


def _take(batch: TokenBatch, which: Int32) -> TokenBatch:
    """Some sequences of a batch, in the order of `which`."""
    index, cu = ranges(batch.cu_seqlens[which], batch.lengths[which])
    types = None if batch.token_types is None else batch.token_types[index]
    if batch.spans is None or batch.span_counts is None:
        return TokenBatch(batch.ids[index], cu, types)
    counts = batch.span_counts[which]
    moved = np.repeat(cu[:-1] - batch.cu_seqlens[which], counts)
    return TokenBatch(batch.ids[index], cu, types, batch.spans[_rows_of(batch, which)] + moved[:, None], counts)


def _rows_of(batch: TokenBatch, which: Int32) -> Int32:
    """Rows of the result that belong to some sequences, in the order of `which`."""
    if batch.span_counts is None:
        return which
    first = np.cumsum(batch.span_counts, dtype=np.int32) - batch.span_counts
    return ranges(first[which], batch.span_counts[which])[0]


def _resident_bytes() -> int:
    """Memory this process holds; 0 where the system has no /proc to ask."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _error(e: Exception, batch: TokenBatch) -> EngineError:
    if isinstance(e, MemoryError) or "can't allocate memory" in str(e):
        return OutOfMemory(
            f"a step of {len(batch)} sequences and {batch.total_tokens} tokens (longest {batch.max_seqlen}) does not "
            "fit the memory; lower --max-batch-tokens or --max-length"
        )
    return EngineError(f"the step failed: {e}")
