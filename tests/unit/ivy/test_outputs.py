import base64
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hortus.errors import InvalidInput, NonFinite, StartError
from hortus.ivy.outputs import (
    FORMS,
    Quantizer,
    as_base64,
    as_numbers,
    check_finite,
    cosines,
    finish,
    read_ranges,
    sigmoid,
    softmax,
    texts_of,
)

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
    with pytest.raises(NonFinite, match=r"input\[12\]") as caught:
        check_finite(rows, lambda i: f"input[{10 + i}]")
    assert caught.value.param == "input[12]"


# --- codes

ROWS = np.random.default_rng(3).standard_normal((50, 24)).astype(np.float32)
RANGES = np.stack([ROWS.min(0), ROWS.max(0)])


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_codes_are_sentence_transformers_own(precision):
    quantization = pytest.importorskip("sentence_transformers.util.quantization")
    rows = np.concatenate([ROWS, np.zeros((1, 24), np.float32)])  # zero is on the edge between two bits
    theirs = quantization.quantize_embeddings(rows, precision, ranges=RANGES)
    ours = Quantizer(ranges=RANGES).codes(rows, precision, None, False)
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)


def test_a_constant_dimension_divides_by_one():
    same = np.ones((3, 2), np.float32)
    assert Quantizer(ranges=np.ones((2, 2), np.float32)).codes(same, "uint8", None, False).tolist() == [[0, 0]] * 3


def test_int8_without_ranges_is_refused_and_so_are_ranges_of_another_size():
    with pytest.raises(InvalidInput, match="--int8-ranges"):
        Quantizer().check("int8", 24)
    with pytest.raises(InvalidInput, match="24 dimensions, not of 8"):
        Quantizer(ranges=RANGES).check("uint8", 8)
    Quantizer(ranges=RANGES).check("int8", 24)
    Quantizer().check("ubinary", 8)
    with pytest.raises(InvalidInput, match="no uint8"):
        Quantizer(tanh=True).check("uint8", 24)


def test_pplx_codes_are_its_formula():
    torch = pytest.importorskip("torch")
    rule = Quantizer(tanh=True)
    x = torch.from_numpy(ROWS)
    wanted = torch.clamp(torch.round(torch.tanh(x) * 127), -128, 127).to(torch.int8).numpy()
    got = rule.codes(ROWS, "int8", None, True)  # what normalising would do is not done
    assert np.abs(got.astype(int) - wanted).max() <= 1
    assert (got == wanted).mean() > 0.99
    # Halves go to the even neighbour: 127 tanh(x) = 2.5 becomes 2, 3.5 becomes 4.
    halves = np.arctanh(np.array([[2.5, 3.5, -2.5]], np.float64) / 127).astype(np.float32)
    exact = np.tanh(halves) * np.float32(127)
    assert rule.codes(halves, "int8", None, False).tolist() == np.rint(exact).astype(int).tolist()


def test_pplx_bits_come_from_the_floats():
    x = np.array([[-0.001, 0.0, 0.001, -5, 5, 5, 5, 5, 5]], np.float32)
    rule = Quantizer(tanh=True)
    assert rule.codes(x, "int8", None, False)[0, :3].tolist() == [0, 0, 0]
    assert rule.codes(x, "ubinary", None, False).tolist() == [[0b01101111, 0b10000000]]
    assert rule.codes(x, "lsb", None, False).tolist() == [[0b11110110, 0b00000001]]
    assert rule.codes(x, "binary", None, False).tolist() == [[0b01101111 - 128, 0]]
    assert Quantizer().codes(x, "ubinary", None, False)[0, 0] == 0b00101111  # elsewhere zero is no one


@pytest.mark.parametrize("name", ["int8", "base64_int8", "binary", "base64_binary"])
def test_cut_then_quantised_is_quantised_then_cut(name):
    form = FORMS[name]
    rule = Quantizer(tanh=True)
    whole, cut = rule.codes(ROWS, form.precision, None, False), rule.codes(ROWS, form.precision, 16, False)
    np.testing.assert_array_equal(whole[:, : cut.shape[1]], cut)
    assert len(texts_of(ROWS, form, rule, 16, False)) == 50


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros((3, 2), np.float32),
        np.zeros((2, 2), np.int64),
        np.float32([[1], [0]]),
        np.zeros((2, 2), np.float32),
        np.float32([[0], [np.nan]]),
        np.float64([[-1e308], [1e308]]),  # not finite in float32
        np.float32([[-3e38], [3e38]]),  # nor is what lies between
    ],
)
def test_ranges_are_checked_at_start(tmp_path, bad):
    np.save(tmp_path / "r.npy", bad)
    with pytest.raises(StartError, match="--int8-ranges"):
        read_ranges(str(tmp_path / "r.npy"))
    with pytest.raises(StartError, match="--int8-ranges"):
        read_ranges(str(tmp_path / "none.npy"))
    (tmp_path / "empty.npy").write_bytes(b"")
    np.savez(tmp_path / "several.npz", a=np.float32([[0], [1]]))
    for name in ("empty.npy", "several.npz"):
        with pytest.raises(StartError, match="--int8-ranges"):
            read_ranges(str(tmp_path / name))


@given(arrays(np.float32, (3, 4), elements=finite))
def test_chances_are_chances(logits):
    with np.errstate(under="ignore"):
        s, p = sigmoid(logits), softmax(logits)
    assert ((s >= 0) & (s <= 1)).all()
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-5)


def test_cosines_of_zero_are_zero():
    assert cosines(np.zeros(3, np.float32), np.ones((2, 3), np.float32)).tolist() == [0, 0]
    assert cosines(np.float32([1e30, 0, 0]), np.float32([[1e-30, 0, 0], [-1, 0, 0]])).tolist() == [1, -1]
