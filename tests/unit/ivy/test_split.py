import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hortus.ivy.split import cut, split
from hortus.types import TokenBatch


@given(st.lists(st.integers(0, 100), max_size=200), st.integers(1, 150), st.integers(1, 50))
def test_runs_cover_everything_once_within_both_limits(sizes, budget, most):
    runs = cut(sizes, budget, most)
    assert [i for lo, hi in runs for i in range(lo, hi)] == list(range(len(sizes)))
    for n, (lo, hi) in enumerate(runs):
        assert 1 <= hi - lo <= most
        assert sum(sizes[lo:hi]) <= budget or hi - lo == 1
        if n + 1 < len(runs) and hi - lo < most:  # a run ends only where the next item would not fit
            assert sum(sizes[lo : hi + 1]) > budget


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 100), st.integers(1, 20))
def test_chunks_merge_back_to_the_batch(lengths, budget, most):
    batch = TokenBatch.of([list(range(i, i + n)) for i, n in enumerate(lengths)])
    again = TokenBatch.merge(split(batch, budget, most))
    np.testing.assert_array_equal(again.ids, batch.ids)
    np.testing.assert_array_equal(again.cu_seqlens, batch.cu_seqlens)


def test_a_batch_that_fits_is_not_copied():
    batch = TokenBatch.of([[1, 2], [3]])
    assert split(batch, 3) == [batch]
