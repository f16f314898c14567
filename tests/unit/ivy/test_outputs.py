import base64
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hortus.errors import NonFinite
from hortus.ivy.outputs import as_base64, as_numbers, check_finite, finish

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
rows_strategy = arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=finite)


@given(rows_strategy)
def test_both_encodings_carry_the_same_bits(rows):
    numbers = np.array([json.loads(b"[" + text + b"]") for text in as_numbers(rows)]).astype(np.float32)
    packed = np.array([np.frombuffer(base64.b64decode(text, validate=True), "<f4") for text in as_base64(rows)])
    assert numbers.tobytes() == packed.tobytes() == rows.tobytes()


def test_random_bit_patterns_survive_as_numbers():
    rows = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    rows = rows[np.isfinite(rows)][None]
    assert np.array(json.loads(b"[" + as_numbers(rows)[0] + b"]")).astype(np.float32).tobytes() == rows.tobytes()


@given(rows_strategy)
def test_normalised_rows_have_norm_one_or_stay_zero(rows):
    out = finish(rows, None, True)
    assert np.isfinite(out).all()
    norms = np.linalg.norm(out.astype(np.float64), axis=1)
    raw = np.linalg.norm(rows.astype(np.float64), axis=1)
    np.testing.assert_allclose(norms[raw > 1e-12], 1, atol=1e-5)
    assert not out[raw == 0].any()


def test_cut_comes_before_the_norm():
    rows = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    np.testing.assert_array_equal(finish(rows, 3, False), rows[:, :3])
    np.testing.assert_allclose(np.linalg.norm(finish(rows, 3, True), axis=1), 1, rtol=1e-6)
    assert finish(rows, 8, False) is rows


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_rows_are_named(bad):
    rows = np.zeros((4, 3), np.float32)
    check_finite(rows)
    rows[2, 1] = bad
    with pytest.raises(NonFinite, match="input 12") as caught:
        check_finite(rows, 10)
    assert caught.value.param == "input[12]"
