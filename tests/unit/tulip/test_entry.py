"""What the scheduler's own door refuses: whatever Ivy would have refused, said by name."""

from __future__ import annotations

import numpy as np
import pytest

from hortus.tulip.entry import faults
from hortus.types import ModelInfo, TokenBatch

INFO = ModelInfo(name="m", width=4, max_tokens=100, vocab_size=50)


def fault(sequences):
    return faults([TokenBatch.of(sequences)], INFO, 8)[0]


@pytest.mark.parametrize("good", [[[0]], [[49] * 100], [[1] * 64], [[1], [2, 3]], [[5]] * 8])
def test_good(good):
    assert fault(good) is None


@pytest.mark.parametrize(
    ("sequences", "code", "said"),
    [
        ([], "invalid_input", "no sequences"),
        ([[]], "invalid_input", "sequence 0 is empty"),
        ([[1], [], [2]], "invalid_input", "sequence 1 is empty"),
        ([[1], [1] * 101], "context_length_exceeded", "sequence 1 has 101 tokens"),
        ([[50]], "invalid_input", "token id 50 of sequence 0"),
        ([[-1]], "invalid_input", "token id -1 of sequence 0"),
        ([[1, 2], [3, 50]], "invalid_input", "token id 50 of sequence 1"),
        ([[1] * 99 + [-5]], "invalid_input", "token id -5"),
        ([[1]] * 9, "invalid_input", "at most 8"),
    ],
)
def test_refused_by_name(sequences, code, said):
    error = fault(sequences)
    assert error is not None
    assert error.code == code
    assert said in error.message


def test_types_of_tokens_that_the_model_has_not_are_refused():
    batch = TokenBatch(np.ones(5, np.int32), np.array([0, 2, 5], np.int32), np.array([0, 1, 0, 2, 1], np.uint8))
    error = faults([batch], INFO, 8, types=2)[0]
    assert error is not None
    assert (error.code, error.param) == ("invalid_input", "input[1]")
    assert error.message == "token type 2 of sequence 1 is none of this model's, 0 to 1"
    assert faults([batch], INFO, 8, types=3) == faults([batch], INFO, 8) == [None]  # 0: the model reads none


def test_each_ask_alone():
    batches = [TokenBatch.of([[1]]), TokenBatch.of([[99]]), TokenBatch.of([[2]])]
    assert [f is None for f in faults(batches, INFO, 8)] == [True, False, True]
    wrong = TokenBatch(np.array([1, 2**31 - 1], np.int32), np.array([0, 1, 2], np.int32))
    assert faults([wrong], INFO, 8)[0] is not None


@pytest.mark.parametrize(
    ("spans", "counts", "said"),
    [
        ([[0, 2], [2, 3]], [1, 1], None),
        ([[0, 1], [1, 2], [2, 3]], [2, 1], None),
        ([[0, 3], [2, 3]], [1, 1], "sequence 0"),
        ([[0, 2], [1, 3]], [1, 1], "sequence 1"),
        ([[0, 0], [2, 3]], [1, 1], "sequence 0"),
        ([[-1, 2], [2, 3]], [1, 1], "sequence 0"),
        ([[0, 1], [0, 2]], [2, 0], "sequence 1 has no span"),
    ],
)
def test_spans_stay_in_their_sequence(spans, counts, said):
    plain = TokenBatch.of([[1, 2], [3]])
    spanned = TokenBatch(plain.ids, plain.cu_seqlens, None, np.array(spans, np.int32), np.array(counts, np.int32))
    error = faults([spanned], INFO, 8)[0]
    assert said is None if error is None else said in error.message
