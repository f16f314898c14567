"""The fake engine: a row depends on its own sequence only; time and faults are as asked."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import timed

from hortus.tulip.fake import FakeEngine, fake_rows
from hortus.types import TokenBatch


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 30521), min_size=1, max_size=20), min_size=1, max_size=8))
def test_rows_do_not_depend_on_neighbours(sequences):
    together = fake_rows(TokenBatch.of(sequences), 64)
    alone = np.concatenate([fake_rows(TokenBatch.of([s]), 64) for s in sequences])
    np.testing.assert_array_equal(together, alone)
    assert together.dtype == np.float32
    assert np.isfinite(together).all()
    norms = np.linalg.norm(together, axis=1)
    assert ((norms > 0.3) & (norms < 3)).all()


def test_rows_tell_order_length_and_types_apart():
    rows = fake_rows(TokenBatch.of([[1, 2], [2, 1], [1, 2, 0], [1], [0], [0, 0]]), 384)
    assert len(np.unique(rows, axis=0)) == 6
    one = TokenBatch.of([[1, 2], [1, 2]])
    typed = TokenBatch(one.ids, one.cu_seqlens, np.array([0, 0, 0, 1], np.uint8))
    a, b = fake_rows(typed, 384)
    np.testing.assert_array_equal(a, fake_rows(one, 384)[0])
    assert not np.array_equal(a, b)
    np.testing.assert_allclose(fake_rows(TokenBatch.of([[7]]), 3)[0], [0.283042, -0.8747519, -0.8273022], rtol=1e-5)


@timed
def test_steps_run_one_after_the_other():
    engine = FakeEngine(delay_s=0.03)
    begin = time.monotonic()
    first, second = engine.step(TokenBatch.of([[1]])), engine.step(TokenBatch.of([[2]]))
    assert time.monotonic() - begin < 0.03
    assert not first.ready()
    first.result()
    assert time.monotonic() - begin >= 0.03
    assert first.ready()
    second.result()
    assert time.monotonic() - begin >= 0.06


def test_synchronous_steps_come_back_finished():
    engine = FakeEngine(delay_s=0.01, asynchronous=False)
    begin = time.monotonic()
    assert engine.step(TokenBatch.of([[1]])).ready()
    assert time.monotonic() - begin >= 0.01


def test_faults():
    engine = FakeEngine(width=8)
    engine.nan_id, engine.fail_id = 5, 6
    engine.step_errors[2] = MemoryError("step")
    rows = engine.step(TokenBatch.of([[1], [4, 5], [1]])).result()
    assert np.isnan(rows).all(axis=1).tolist() == [False, True, False]
    with pytest.raises(RuntimeError, match="token id 6"):
        engine.step(TokenBatch.of([[6]])).result()
    with pytest.raises(MemoryError):
        engine.step(TokenBatch.of([[1]]))
    engine.hold()
    lazy = engine.step(TokenBatch.of([[1]]))
    assert not lazy.ready()
    engine.release()
    assert lazy.ready()
    assert list(engine.shapes) == [(3, 4), (1, 1), (1, 1), (1, 1)]


def test_spans_have_rows_of_their_own():
    plain = TokenBatch.of([[1, 2, 3], [4, 5]])
    spans = np.array([[0, 3], [1, 2], [3, 4], [4, 5]], np.int32)
    rows = fake_rows(TokenBatch(plain.ids, plain.cu_seqlens, None, spans, np.array([2, 2], np.int32)), 8)
    np.testing.assert_array_equal(rows[0], fake_rows(plain, 8)[0])
    assert len({r.tobytes() for r in rows}) == 4
    alone = TokenBatch(plain.ids[3:], np.array([0, 2], np.int32), None, spans[2:] - 3, np.array([2], np.int32))
    np.testing.assert_array_equal(rows[2:], fake_rows(alone, 8))


def test_a_classifier_is_as_wide_as_its_labels():
    info = FakeEngine(kind="classify", labels=("no", "yes")).info
    assert (info.width, info.kind, info.labels) == (2, "classify", ("no", "yes"))
