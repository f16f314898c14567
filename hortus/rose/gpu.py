"""The engine on a GPU: `step` enqueues a batch and returns at once; the rows arrive on the host by themselves.

Knows Network, Graphs, Ring and Device. Does not know HTTP, queues, asyncio, or which model it runs.

    step:   cut -> (stage -> upload -> eager | capture | replay -> download) for each piece -> event
    result: wait for the event -> copy out of the ring

A large batch is cut into even pieces of at most PIECE_TOKENS at sequence boundaries: their activations stay near the L2
cache's size, and every piece is small enough to replay a graph.
"""

from __future__ import annotations

import dataclasses
import logging
import time

import numpy as np
import torch

from hortus.config import RoseConfig
from hortus.errors import EngineError, OutOfMemory, StartError
from hortus.metrics import Metrics
from hortus.rose.device import CudaDevice, Device
from hortus.rose.graphs import Graphs, Rules, warm_shapes
from hortus.rose.lazy import Rows
from hortus.rose.network import Network
from hortus.rose.staging import Ring, Slot, cut
from hortus.types import ModelInfo, TokenBatch

log = logging.getLogger(__name__)

PIECE_TOKENS = 17408
"""Most tokens a piece. As many rows of 128 as an H200 has multiprocessors, 16,896, fill whole rounds of every kernel's tiles, and
this is what even pieces of such a size come to. Measured on one with the 0.6B shape, 100 x 512: pieces of 12,800 are 4 % slower a
token, 8,192 6 %, and larger ones no faster."""
BATCH_TOKENS = 4096
"""Advised to the scheduler: a batch that a short query has to wait for is a quarter of a piece, and 3 % slower a token.

Both: docs/decisions/011-gpu-large-steps.md."""
REHEARSED = (
    *((tokens, 1) for tokens in (16, 64, 128, 192, 256, 320, 512, 1024, 2048, BATCH_TOKENS)),
    *((BATCH_TOKENS, sequences) for sequences in (8, 32, 300)),
    (PIECE_TOKENS, 1),
)
"""(tokens, sequences) of steps that between them run every kernel of a batch, and of a text that is longer: where one takes over
from another stands in kernels/skinny.py, preload.py, biased.py, dense.py, quack.py, attend.py, rms.py, pooling.py and
attention/fa4.py."""
PIECES = ((PIECE_TOKENS, PIECE_TOKENS // 512), (PIECE_TOKENS, PIECE_TOKENS // 128))
"""The same of larger batches, where those are asked for (--max-batch-tokens)."""


class GpuEngine:
    """An Engine (see types.py). `step` from one thread at a time, `result` of what it returns from another."""

    def __init__(
        self,
        network: Network,
        info: ModelInfo,
        config: RoseConfig,
        metrics: Metrics | None = None,
        *,
        device: Device | None = None,
        piece_tokens: int = PIECE_TOKENS,
    ) -> None:
        """Captures what --warm asks for. Raises StartError when that is malformed or fails.

        device: the seam for tests. piece_tokens: most tokens a piece.
        """
        self.network = network  # open to benches and tests, which run it by other rules
        self._device: Device = CudaDevice() if device is None else device
        self._piece_tokens = piece_tokens
        self.metrics = metrics or Metrics()
        self._info = dataclasses.replace(info, batch_tokens=min(BATCH_TOKENS, piece_tokens), bulk_tokens=piece_tokens)
        self._ring = Ring(self._device, network.width)
        rules = Rules(
            graphs=config.cuda_graphs and bool(getattr(network, "capturable", True)),
            max_tokens=config.graph_max_tokens,
            longest_matters=bool(getattr(network, "longest_matters", True)),
            spans=getattr(network, "unseen", None) is None,
            fine=config.graph_bucket,
        )
        # The allocator's own count, not the driver's: it neither waits nor fails, whatever the device is doing.
        self.metrics.device_memory_bytes.set_function(self._device.reserved_bytes)
        self.metrics.device_memory_total_bytes.set(self._device.total_bytes)
        self._rounded = 4 * max(config.graph_bucket, 64)  # most rows that rounding adds to a piece
        self._dead: str | None = None
        self._closed = False
        with torch.inference_mode():
            self._device.enter()
            self.graphs = Graphs(self._device, network, rules, cap=config.graph_cap, metrics=self.metrics)
        if config.warm is not None and config.cuda_graphs:
            self._warm(config)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def quick(self, batch: TokenBatch) -> bool:
        """When it replays one graph, and that is all: ~0.1 ms on the host."""
        # Spans are pooled behind the graph, by kernels that hang on how many and how long they are: one may have to be compiled.
        return (
            self._dead is None
            and batch.spans is None
            and batch.total_tokens <= self._piece_tokens
            and self.graphs.holds(batch)
        )

    def step(self, batch: TokenBatch) -> Rows:
        """Enqueue a batch; see Engine.step.

        Raises OutOfMemory when the batch does not fit even cut in two (only this batch fails), EngineError when
        anything else does. After a fault that the device does not recover from, every later call raises EngineError.
        """
        if self._dead is not None:
            raise EngineError(self._dead)
        with torch.inference_mode():
            self._device.enter()
            slot = self._ring.take()
            try:
                try:
                    self._enqueue(batch, slot, self._piece_tokens)
                except torch.OutOfMemoryError:
                    # Pieces before the one that failed may not have been copied up yet, and the halves are written over them.
                    self._device.synchronize()
                    self._device.relieve()
                    half = min(self._piece_tokens, batch.total_tokens) // 2
                    self._enqueue(batch, slot, max(half, 1))
                self._device.record(slot.event)
            except Exception as e:
                # The slot is not given back: copies into it may be under way.
                raise self._failed(e, batch) from e
        self.metrics.tokens.inc(batch.total_tokens)
        return Rows(self._ring, slot, batch.rows, self._failed)

    def close(self) -> None:
        """Free graphs and their memory. Idempotent; no step may be in flight."""
        if self._closed:
            return
        self._closed = True
        self._dead = self._dead or "the engine is closed"
        try:
            self.graphs.clear()
            self._device.relieve()
        except RuntimeError as e:  # a device that failed can free nothing; the process's end does
            log.warning("closing the device: %s", e)

    def _enqueue(self, batch: TokenBatch, slot: Slot, most: int) -> None:
        """All pieces of at most `most` tokens: upload, run, download into their rows of the slot."""
        pieces = cut(batch.cu_seqlens, most)
        # A bound on the pieces' sizes after rounding up: the rows of a step, in each of three parts, twice the sequences.
        ints = 3 * (batch.total_tokens + self._rounded * len(pieces)) + 2 * (len(batch) + 2 * len(pieces))
        slot.reserve(ints + batch.span_tokens + batch.span_rows + len(pieces), batch.rows)
        at = first = 0
        for lo, hi in pieces:
            piece = batch.slice(lo, hi)
            rows, at = self.graphs.run(piece, slot, at)
            self._device.download(slot.rows[first : first + piece.rows], rows)
            first += piece.rows

    def _failed(self, e: Exception, batch: TokenBatch | None = None) -> EngineError:
        """The error to tell for e. Finds out whether the device lives, since CUDA reports late and at any call."""
        self.metrics.step_failures.inc()
        try:
            self._device.synchronize()
        except RuntimeError as late:
            self._dead = f"the GPU failed and this process cannot use it any more: {late}"
            log.error("%s", self._dead)
            return EngineError(self._dead)
        if isinstance(e, torch.OutOfMemoryError) and batch is not None:
            return OutOfMemory(
                f"a step of {len(batch)} sequences and {batch.total_tokens} tokens (longest {batch.max_seqlen}) does not"
                " fit the GPU's memory, even in halves; lower --max-batch-tokens or --max-length"
            )
        log.error("a step failed: %s: %s", type(e).__name__, e)
        return EngineError(f"the step failed: {e}")

    def rehearse(self, most_tokens: int = 0) -> None:
        """Run a step of each size that will come, for its kernels to be compiled before somebody waits for them: seconds.
        EngineError when one fails; from one that does not fit the memory on they are passed over.

        most_tokens: of a batch; 0: as advised.
        """
        begin = time.perf_counter()
        for tokens, sequences in REHEARSED + (PIECES if most_tokens > BATCH_TOKENS else ()):
            if tokens > self._piece_tokens:
                continue
            sequences = max(sequences, -(-tokens // self._info.max_tokens))
            cu = np.linspace(0, tokens, sequences + 1).astype(np.int32)
            try:
                self.step(TokenBatch(np.zeros(tokens, np.int32), cu)).result()
            except OutOfMemory as e:
                log.warning("%s", e)
                return
        log.info("kernels of all sizes are ready, after %.1f s", time.perf_counter() - begin)

    def _warm(self, config: RoseConfig) -> None:
        """Run each shape of --warm twice, so that it is captured."""
        most = min(config.graph_max_tokens, self._piece_tokens)
        assert config.warm is not None, "called only when --warm is given"
        for sequences, tokens in warm_shapes(
            config.warm, most_tokens=most, longest=self._info.max_tokens, cap=config.graph_cap, fine=config.graph_bucket
        ):
            cu = np.linspace(0, tokens, sequences + 1).astype(np.int32)
            batch = TokenBatch(np.zeros(tokens, np.int32), cu)
            try:
                for _ in range(2):
                    self.step(batch).result()
            except EngineError as e:
                self.close()
                raise StartError(f"--warm {config.warm}: {sequences} sequences, {tokens} tokens in all: {e}") from e
        log.info("warm: %d graphs held", len(self.graphs))
