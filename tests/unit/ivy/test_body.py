"""Refusals of bodies: they say what is wrong, and no more of the client's own text than a person reads."""

import pytest

from hortus.errors import InvalidInput
from hortus.ivy.body import decoder
from hortus.ivy.openai import EmbeddingsRequest

read = decoder(EmbeddingsRequest)


def test_a_name_of_any_length_is_told_in_short():
    with pytest.raises(InvalidInput) as e:
        read(b'{"' + b"x" * 1_000_000 + b'": 1}')
    assert len(e.value.message) < 1000
    assert len(e.value.param or "") < 1000
    assert "unknown field" in e.value.message


@pytest.mark.parametrize(
    ("body", "words"), [(b"", "empty"), (b" \n", "empty"), (b'{"input": "x"', "ends in the middle")]
)
def test_a_body_that_is_not_whole_says_so(body, words):
    with pytest.raises(InvalidInput, match=words) as refused:
        read(body)
    assert "surrogate" not in refused.value.message


@pytest.mark.parametrize(
    "body", [b'{"model":"m","input":"\\ud800"}', b'{"\\ud800":1}', b'{"model":"m","input":"\\udc00 x"}']
)
def test_half_a_surrogate_pair_is_named(body):
    with pytest.raises(InvalidInput, match="surrogate"):
        read(body)
