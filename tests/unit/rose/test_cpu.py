"""The CPU engine's own work: pieces, order, errors. With a stand-in network that adds up ids."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from hortus.errors import EngineError, OutOfMemory  # noqa: E402
from hortus.rose import cpu  # noqa: E402
from hortus.rose.cpu import CpuEngine, cut, positions  # noqa: E402
from hortus.rose.network import Inputs  # noqa: E402
from hortus.types import Int32, ModelInfo, TokenBatch  # noqa: E402


class Sums:
    """Row i: sum of ids, of positions, of token types, and the length."""

    width = 4
    fault: Exception | None = None

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []

    def look(self, ids_cpu: Int32, cu_seqlens_cpu: Int32) -> None:
        pass

    def plan(self, cu_seqlens_cpu: Int32, cu_seqlens: torch.Tensor, max_seqlen: int) -> None:
        assert max_seqlen == np.diff(cu_seqlens_cpu).max()
        self.pieces.append(np.diff(cu_seqlens_cpu).tolist())

    def forward(self, inputs: Inputs) -> torch.Tensor:
        if self.fault is not None:
            raise self.fault
        types = torch.zeros_like(inputs.ids) if inputs.token_types is None else inputs.token_types
        assert inputs.ids.dtype == inputs.positions.dtype == types.dtype == torch.int32
        columns = [inputs.ids, inputs.positions, types, torch.ones_like(inputs.ids)]
        cu = inputs.cu_seqlens.tolist()
        if inputs.span_tokens is not None:
            columns, cu = [c[inputs.span_tokens] for c in columns], inputs.span_cu_seqlens.tolist()
        return torch.stack([torch.stack([c[a:b].sum() for c in columns]) for a, b in zip(cu, cu[1:])]).float()  # noqa: B905, RUF007


def engine(network: Sums | None = None) -> CpuEngine:
    return CpuEngine(network or Sums(), ModelInfo(name="m", width=4, max_tokens=5000, vocab_size=100))


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.booleans(), st.sampled_from([1, 50, 200, 10_000]))
def test_rows_come_in_the_batches_order(lengths: list[int], typed: bool, most: int) -> None:
    rng = np.random.default_rng(0)
    batch = TokenBatch.of([rng.integers(0, 100, n).tolist() for n in lengths])
    if typed:
        batch = TokenBatch(batch.ids, batch.cu_seqlens, rng.integers(0, 2, batch.total_tokens).astype(np.uint8))
    network = Sums()
    before, cpu.PIECE_TOKENS = cpu.PIECE_TOKENS, most
    try:
        rows = engine(network).step(batch).result()
    finally:
        cpu.PIECE_TOKENS = before
    for i, n in enumerate(lengths):
        one = batch.slice(i, i + 1)
        types = 0 if one.token_types is None else int(one.token_types.sum())
        assert rows[i].tolist() == [one.ids.sum(), n * (n - 1) / 2, types, n]
    assert sorted(n for piece in network.pieces for n in piece) == sorted(lengths)
    assert all(sum(piece) <= most or len(piece) == 1 for piece in network.pieces)
    assert all(piece == sorted(piece) for piece in network.pieces)


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.sampled_from([1, 50, 10_000]), st.integers(0, 9))
def test_spans_have_rows_of_their_own(lengths: list[int], most: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = TokenBatch.of([rng.integers(0, 100, n).tolist() for n in lengths])
    spans, counts = [], []
    for start, n in zip(batch.cu_seqlens.tolist(), lengths, strict=False):
        ends = np.sort(rng.choice(np.arange(1, n + 1), rng.integers(1, n + 1), replace=False)).tolist()
        counts.append(len(ends))
        spans += [(start + rng.integers(0, b), start + b) for b in ends]
    batch = TokenBatch(batch.ids, batch.cu_seqlens, None, np.array(spans, np.int32), np.array(counts, np.int32))
    before, cpu.PIECE_TOKENS = cpu.PIECE_TOKENS, most
    try:
        rows = engine().step(batch).result()
    finally:
        cpu.PIECE_TOKENS = before
    assert rows[:, 0].tolist() == [batch.ids[a:b].sum() for a, b in spans]
    assert rows[:, 3].tolist() == [b - a for a, b in spans]


def test_cut_and_positions() -> None:
    cu = np.array([0, 5, 7, 10, 17], np.int32)
    assert [p.tolist() for p in cut(cu, 100)] == [[1, 2, 0, 3]]
    assert [p.tolist() for p in cut(cu, 10)] == [[1, 2, 0], [3]]
    assert [p.tolist() for p in cut(cu, 1)] == [[1], [2], [0], [3]]
    assert positions(cu).tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 0, 1, 2, 3, 4, 5, 6]


def test_an_error_is_the_results() -> None:
    network = Sums()
    network.fault = RuntimeError("broken")
    e = engine(network)
    lazy = e.step(TokenBatch.of([[1, 2]]))
    assert lazy.ready()
    with pytest.raises(EngineError, match="the step failed: broken"):
        lazy.result()
    network.fault = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    with pytest.raises(OutOfMemory, match="--max-batch-tokens"):
        e.step(TokenBatch.of([[1, 2]])).result()
    assert e.metrics.registry.get_sample_value("hortus_step_failures_total") == 2
    network.fault = None
    assert e.step(TokenBatch.of([[1, 2]])).result()[0, 0] == 3
    assert e.metrics.registry.get_sample_value("hortus_tokens_total") == 2
    e.close()
    e.close()


def test_arrays_that_may_only_be_read_are_taken_without_a_warning() -> None:
    """As they come over a wire. Warnings are errors in tests."""
    batch = TokenBatch(
        np.frombuffer(np.array([5, 6, 7, 8, 9], np.int32).tobytes(), np.int32),
        np.frombuffer(np.array([0, 2, 5], np.int32).tobytes(), np.int32),
    )
    made = engine()
    np.testing.assert_array_equal(made.step(batch).result()[:, 0], [11, 24])
    np.testing.assert_array_equal(made.step(batch.slice(0, 1)).result()[:, 0], [11])
