"""A device that finishes its work as late as a test wants, and a network simple enough to know the answer of.

The stream is a queue of closures. Nothing runs when it is enqueued; `advance` and waiting on an event run it, in order, as
a GPU's stream would. Memory starts out poisoned, so that what was never written shows.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from hortus.types import TokenBatch

POISON = 0x7F7F7F7F


class FakeEvent:
    def __init__(self, device):
        self._device, self.serial = device, None

    def query(self):
        assert self.serial is not None, "an event was asked before it was recorded"
        return self._device.done >= self.serial

    def synchronize(self):
        if self._device.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        while not self.query():
            self._device.advance()


class Later:
    """A result on the device that is not computed yet."""

    def __init__(self):
        self.rows = None


class FakeGraph:
    def __init__(self, device, body):
        self._device, self._body, self._later = device, body, Later()

    def replay(self):
        assert self in self._device.alive, "a dropped graph was replayed"
        self._device.enqueue("replay", lambda: setattr(self._later, "rows", self._body()))
        return self._later


class FakeDevice:
    name = "fake"
    total_bytes = 1 << 30

    def __init__(self):
        self.queue = deque()
        self.enqueued = self.done = 0
        self.log = []  # what the host did and what the device did, in the order it happened
        self.broken = False
        self.alive = []
        self.fail_next = []  # exceptions for the coming runs, None for one that goes well
        self.fail_captures = 0
        self.relieved = 0
        self.threads = 0

    def enqueue(self, what, work):
        self.enqueued += 1
        self.log.append(("enqueued", what))
        self.queue.append((what, work))

    def advance(self):
        what, work = self.queue.popleft()
        with torch.inference_mode():
            work()
        self.done += 1
        self.log.append(("done", what))

    def enter(self):
        self.threads += 1

    def pinned(self, *size, dtype):
        return torch.full(size, POISON if dtype == torch.int32 else torch.nan, dtype=dtype)

    def empty(self, ints):
        return torch.full((ints,), POISON, dtype=torch.int32)

    def event(self):
        return FakeEvent(self)

    def record(self, event):
        event.serial = self.enqueued

    def upload(self, to, host):
        assert to.shape == host.shape
        self.enqueue("upload", lambda: to.copy_(host))

    def download(self, to, rows):
        self.enqueue("download", lambda: to.copy_(rows.rows[: len(to)]))

    def run(self, body):
        if self.fail_next and (e := self.fail_next.pop(0)) is not None:
            raise e
        later = Later()
        self.enqueue("run", lambda: setattr(later, "rows", body()))
        return later

    def capture(self, body):
        if self.fail_captures:
            self.fail_captures -= 1
            raise torch.OutOfMemoryError("no room for a graph")
        graph = FakeGraph(self, body)
        self.alive.append(graph)
        return graph

    def drop_graphs(self):
        self.alive.clear()

    def relieve(self):
        self.relieved += 1

    def synchronize(self):
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        while self.queue:
            self.advance()

    def reserved_bytes(self):
        return 0


class FakeNetwork:
    """Row = [sum of ids, sum of id x (position + 1), tokens, sum of types] of each slot; checks that inputs are whole."""

    width = 4
    longest_matters = False

    def __init__(self):
        self.plans = []

    def look(self, ids_cpu, cu_seqlens_cpu):
        pass

    def plan(self, cu_seqlens_cpu, cu_seqlens, max_seqlen):
        assert np.diff(cu_seqlens_cpu).max() <= max_seqlen
        assert len(cu_seqlens_cpu) == len(cu_seqlens)
        self.plans.append(max_seqlen)

    def hidden_like(self, tokens):
        return torch.full((tokens, 4), torch.nan, dtype=torch.float64)

    def hidden(self, inputs):
        cu = inputs.cu_seqlens.long()
        assert int(cu[-1]) == len(inputs.ids), "every row belongs to a sequence"
        assert (cu.diff() >= 0).all()
        types = inputs.token_types if inputs.token_types is not None else torch.zeros_like(inputs.ids)
        ids, positions = inputs.ids.double(), inputs.positions.double() + 1
        return torch.stack([ids, ids * positions, torch.ones_like(ids), types.double()], 1)

    def forward(self, inputs):
        return self.pooled(self.hidden(inputs), inputs)

    def pooled(self, values, inputs):
        cu = inputs.cu_seqlens.long()
        if inputs.span_tokens is not None:
            values, cu = values[inputs.span_tokens.long()], inputs.span_cu_seqlens.long()
            assert int(cu[-1]) == len(values), "every token of a span is in a span"
        sums = torch.cat([values.new_zeros(1, 4), values.cumsum(0)])
        return (sums[cu[1:]] - sums[cu[:-1]]).float()


def expected(batch: TokenBatch) -> np.ndarray:
    starts = np.repeat(batch.cu_seqlens[:-1], batch.lengths)
    positions = np.arange(batch.total_tokens) - starts
    rows = []
    for a, b in batch._all_spans():
        ids = batch.ids[a:b].astype(float)
        types = 0 if batch.token_types is None else batch.token_types[a:b].astype(float).sum()
        rows.append([ids.sum(), (ids * (positions[a:b] + 1)).sum(), b - a, types])
    return np.array(rows, np.float32)


def random_batch(rng, lengths, typed=False, spans=False) -> TokenBatch:
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    types = rng.integers(0, 2, cu[-1]).astype(np.uint8) if typed else None
    ids = rng.integers(0, 1000, cu[-1]).astype(np.int32)
    if not spans:
        return TokenBatch(ids, cu, types)
    counts = rng.integers(1, 6, len(lengths)).astype(np.int32)
    owners = np.repeat(np.arange(len(lengths)), counts)
    firsts = rng.integers(cu[owners], cu[owners + 1])
    ends = rng.integers(firsts, cu[owners + 1]) + 1
    return TokenBatch(ids, cu, types, np.stack([firsts, ends], 1).astype(np.int32), counts)
