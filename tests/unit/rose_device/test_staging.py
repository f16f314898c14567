import numpy as np
import torch
from fake_device import FakeDevice, random_batch
from hypothesis import given
from hypothesis import strategies as st

from hortus.rose.graphs import sequence_bucket, token_bucket
from hortus.rose.staging import Layout, Ring, cut

lengths = st.lists(st.integers(1, 700), min_size=1, max_size=60)


@given(lengths, st.integers(1, 4096))
def test_cut_covers_in_order_within_the_limit(sizes, most):
    cu = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    pieces = cut(cu, most)
    assert pieces[0][0] == 0
    assert pieces[-1][1] == len(sizes)
    for (lo, hi), after in zip(pieces, [*pieces[1:], (len(sizes), 0)], strict=True):
        assert lo < hi == after[0]
        assert hi - lo == 1 or cu[hi] - cu[lo] <= most


def test_cut_takes_few_and_even_pieces():
    same = np.arange(0, 101 * 512, 512, dtype=np.int32)
    assert [hi - lo for lo, hi in cut(same, 4096)] == [7] * 4 + [8] * 9
    assert [hi - lo for lo, hi in cut(np.arange(0, 260 * 16, 16, dtype=np.int32), 4096)] == [129, 130]
    assert cut(np.array([0], np.int32), 10) == []
    assert cut(np.array([0, 9000], np.int32), 4096) == [(0, 1)]


@given(lengths, st.booleans(), st.integers(0, 2**32 - 1))
def test_a_filled_block_is_whole(sizes, typed, seed):
    batch = random_batch(np.random.default_rng(seed), sizes, typed)
    layout = Layout(sequence_bucket(len(batch)), token_bucket(batch.total_tokens), typed)
    block = np.full(layout.size, 0x7F7F7F7F, np.int32)
    layout.fill(block, batch)
    inputs = layout.inputs(torch.from_numpy(block))
    n, t = len(batch), batch.total_tokens
    assert (inputs.ids[:t].numpy() == batch.ids).all()
    assert not inputs.ids[t:].any()
    assert (inputs.positions[:t].numpy() == np.concatenate([np.arange(s) for s in sizes])).all()
    assert not inputs.positions[t:].any()
    cu = inputs.cu_seqlens.numpy()
    assert (cu == layout.cu_seqlens(block)).all()
    assert len(cu) == layout.sequences + 2
    assert (cu[: n + 1] == batch.cu_seqlens).all()
    assert (cu[n + 1 : -1] == t).all()
    assert cu[-1] == layout.tokens
    if typed:
        assert (inputs.token_types[:t].numpy() == batch.token_types).all()
        assert not inputs.token_types[t:].any()
    else:
        assert inputs.token_types is None


def test_a_slot_grows_by_powers_of_two_and_comes_back():
    ring = Ring(FakeDevice(), 4)
    slot = ring.take()
    slot.reserve(5000, 20)
    assert len(slot.array) == 8192
    assert slot.rows_array.shape == (32, 4)
    assert slot.array.ctypes.data == slot.block.data_ptr()
    assert ring.take() is not slot
    ring.give(slot)
    assert ring.take() is slot
