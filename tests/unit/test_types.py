"""TokenBatch: what slice and merge keep."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hortus.types import TokenBatch


@st.composite
def batches(draw, most: int = 5) -> TokenBatch:
    """A batch with or without token types and spans; ids say where they come from."""
    sequences = draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=most))
    plain = TokenBatch.of(sequences)
    types = np.arange(plain.total_tokens, dtype=np.uint8) % 2 if draw(st.booleans()) else None
    if draw(st.booleans()):
        return TokenBatch(plain.ids, plain.cu_seqlens, types)
    spans, counts = [], []
    for at, ids in zip(plain.cu_seqlens.tolist(), sequences, strict=False):
        inside = draw(
            st.lists(
                st.tuples(st.integers(0, len(ids) - 1), st.integers(1, len(ids))).filter(lambda s: s[0] < s[1]),
                min_size=1,
                max_size=4,
            )
        )
        spans += [(at + a, at + b) for a, b in sorted(inside)]
        counts.append(len(inside))
    return TokenBatch(plain.ids, plain.cu_seqlens, types, np.array(spans, np.int32), np.array(counts, np.int32))


def told(batch: TokenBatch) -> list[tuple[list[int], list[int], list[list[int]]]]:
    """(ids, types, the ids of each span) of every sequence, the slow way."""
    cu, found, row = batch.cu_seqlens.tolist(), [], 0
    for i in range(len(batch)):
        a, b = cu[i], cu[i + 1]
        types = [0] * (b - a) if batch.token_types is None else batch.token_types[a:b].tolist()
        if batch.spans is None:
            spans = [batch.ids[a:b].tolist()]
        else:
            count = int(batch.span_counts[i])
            spans = [batch.ids[x:y].tolist() for x, y in batch.spans[row : row + count].tolist()]
            row += count
        found.append((batch.ids[a:b].tolist(), types, spans))
    return found


def sound(batch: TokenBatch) -> None:
    assert (batch.spans is None) == (batch.span_counts is None)
    assert batch.rows_of(0, len(batch)) == (0, batch.rows)
    if batch.spans is not None:
        assert batch.spans.dtype == batch.span_counts.dtype == np.int32
        assert batch.rows == len(batch.spans) == batch.span_counts.sum()


@given(st.lists(batches(), min_size=1, max_size=4))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_merge_is_the_parts_in_order(parts):
    merged = TokenBatch.merge(parts)
    sound(merged)
    assert told(merged) == [x for p in parts for x in told(p)]
    assert merged.rows == sum(p.rows for p in parts)
    if all(p.spans is None for p in parts):
        assert merged.spans is None


@given(batches(), st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_slices_are_the_sequences(batch, data):
    lo = data.draw(st.integers(0, len(batch)))
    hi = data.draw(st.integers(lo, len(batch)))
    part = batch.slice(lo, hi)
    sound(part)
    assert told(part) == told(batch)[lo:hi]
    first, end = batch.rows_of(lo, hi)
    assert end - first == part.rows
    assert told(TokenBatch.merge([batch.slice(0, lo), part, batch.slice(hi, len(batch))])) == told(batch)
