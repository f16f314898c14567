"""Numbers written in C are those that orjson writes, byte for byte."""

from __future__ import annotations

import os

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hortus.ivy import decimals, outputs
from hortus.types import Float32

LEAST, END = 2.0**-24, 2.0**23
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def built() -> None:
    if decimals._library() is None:
        why = "decimals.c was not built: install again with a C compiler"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)


def theirs(rows: Float32) -> list[bytes]:
    return [orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1] for row in rows]


@given(
    arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=st.floats(LEAST, END / 2, width=32)),
    st.booleans(),
)
def test_any_number_in_range(rows: Float32, minus: bool) -> None:
    rows = -rows if minus else rows
    assert decimals.texts(rows) == theirs(rows)


@pytest.mark.parametrize(
    "values",
    [
        RNG.standard_normal(300_000) / 32,
        RNG.random(100_000),
        np.exp(RNG.uniform(np.log(LEAST), np.log(END), 300_000)),
        np.round(RNG.random(100_000) * 1000) / np.array([1, 10, 100, 1e3, 1e5, 1e6])[RNG.integers(0, 6, 100_000)],
        RNG.integers(0, 2**23, 100_000),
        [s * b for e in range(-24, 23) for b in (2.0**e, np.nextafter(np.float32(2.0**e), np.float32(9e9))) for s in (1, -1)],
        [np.nextafter(np.float32(2.0**e), np.float32(0)) for e in range(-23, 24)],
        [s * d * 10.0**e for e in range(-7, 7) for d in range(10) for s in (1, -1)],
        [0.0, -0.0],
    ],
    ids=["unit vectors", "below one", "any size", "short ones", "whole ones", "powers", "before powers", "tens", "zeros"],
)  # fmt: skip
def test_numbers_of_every_kind(values: object) -> None:
    row = np.array(values, np.float32)
    row = np.where((abs(row) >= LEAST) & (abs(row) < END), row, np.float32(0) * row)[None]
    assert decimals.texts(row) == theirs(row)


@pytest.mark.parametrize("value", [LEAST / 2, END, 1e-45, 3.4e38, -END, -LEAST / 1.0001])
def test_the_others_are_left_to_orjson(value: float) -> None:
    rows = np.array([[0.5, 0.25], [1.5, value]], np.float32)
    assert decimals.texts(rows) is None
    assert outputs.as_numbers(rows) == theirs(rows)


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 1), (2, 4096)])
def test_shapes_and_strides(shape: tuple[int, int]) -> None:
    rows = RNG.random((shape[0], 2 * shape[1])).astype(np.float32)
    for part in rows[:, : shape[1]], rows[:, ::2], rows[::-1, : shape[1]]:
        assert decimals.texts(part) == theirs(np.ascontiguousarray(part))


def test_the_longest_numbers_fit() -> None:
    many = -RNG.uniform(1e-6, 9.9e-6, 2_000_000).astype(np.float32)
    longest = sorted(theirs(many[None])[0].split(b","), key=len)[-1]
    assert len(longest) + 1 <= decimals.MOST_CHARS - 2
    row = np.full((1, 4096), float(longest), np.float32)
    assert decimals.texts(row) == [b",".join([longest] * 4096)]
