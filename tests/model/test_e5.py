"""The real multilingual-e5-small, of 4-bit weights, against golden values of sentence-transformers on the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

A, B, C = "The cat sits on the mat.", "A feline is resting on a rug.", "Stock markets fell sharply on Monday."
GOLDEN = {
    A: [0.048314, -0.007776, -0.024896, -0.045081, 0.090490],
    B: [0.062003, -0.023814, -0.006438, -0.044987, 0.098379],
}
QUERIES = ["how much protein should a female eat", "南瓜的家常做法"]
PASSAGES = [
    "As a general guideline, the CDC's average requirement of protein for women ages 19 to 70 is 46 grams per day. But, as "
    "you can see from this chart, you'll need to increase that if you're expecting or training for a marathon. Check out the "
    "chart below to see how much protein you should be eating each day.",
]


@pytest.fixture(scope="module")
def ours(e5_path: Any, open_ours: Any) -> Any:
    return open_ours(e5_path)


def test_golden_values(ours: Any) -> None:
    rows = ours.encode([f"query: {text}" for text in (A, B, C, "Die Katze sitzt auf der Matte.")])
    for row, first in zip(rows, GOLDEN.values(), strict=False):
        assert np.abs(row[:5] - first).max() < 2e-6
    cosines = rows @ rows.T
    assert np.abs(cosines[0, 1:] - [0.8696, 0.7171, 0.9294]).max() < 1e-4


def test_the_tokenizer(ours: Any) -> None:
    ids = ours.batch(["query: how much protein should a female eat"]).ids
    assert ids.tolist() == [0, 41, 1294, 12, 3642, 5045, 21308, 5608, 10, 117776, 73203, 2]
    assert ours.folder.prompts == {"query": "query: ", "document": "passage: "}


def test_a_query_and_its_passage(ours: Any) -> None:
    """The model card's example."""
    query, other = ours.encode([f"query: {q}" for q in QUERIES])
    (passage,) = ours.encode([f"passage: {p}" for p in PASSAGES])
    assert abs(query @ passage * 100 - 93.205) < 2e-3
    assert abs(other @ passage * 100 - 74.936) < 2e-3
