import pytest
from hypothesis import given
from hypothesis import strategies as st

from hortus.errors import StartError
from hortus.rose.graphs import How, Rules, Shape, State, bucket, decide, token_bucket, warm_shapes

RULES = Rules(graphs=True, max_tokens=4096, longest_matters=False)


def test_buckets_of_tokens():
    tokens = {1: 16, 16: 16, 17: 64, 64: 64, 65: 128, 1024: 1024, 1025: 1280, 4000: 4096}
    assert {t: token_bucket(t) for t in tokens} == tokens
    tokens = {1: 16, 17: 256, 1024: 1024, 1025: 2048}
    assert {t: token_bucket(t, 256) for t in tokens} == tokens
    assert warm_shapes("all", most_tokens=512, longest=512, cap=99, fine=256)[-1] == (1, 16)


@given(st.integers(1, 512), st.integers(1, 4096), st.data(), st.booleans())
def test_a_step_fits_its_bucket_and_waste_is_bounded(sequences, tokens, data, longest_matters):
    tokens = max(sequences, tokens)
    longest = data.draw(st.integers(-(-tokens // sequences), tokens - sequences + 1))
    shape = bucket(sequences, tokens, longest, False, longest_matters=longest_matters)
    assert sequences <= shape.sequences < 2 * sequences + 1
    assert tokens <= shape.tokens < tokens + (64 if tokens <= 1024 else 256)
    assert shape.longest >= max(longest, shape.tokens - tokens)
    again = bucket(shape.sequences, shape.tokens, 1, False, longest_matters=False)
    assert again[:2] == shape[:2]


def test_first_eager_then_capture_then_replay():
    shape = Shape(4, 128, 128, False)
    for state, how in (
        (None, How.EAGER),
        (State.SEEN, How.CAPTURE),
        (State.HELD, How.REPLAY),
        (State.REFUSED, How.EAGER),
    ):
        known = {} if state is None else {shape: state}
        assert decide(3, 100, 50, False, known=known, rules=RULES) == (how, shape, True)


def test_token_types_are_another_graph():
    known = {Shape(4, 128, 128, False): State.HELD}
    assert decide(3, 100, 50, True, known=known, rules=RULES).how is How.EAGER


def test_large_steps_and_switched_off_graphs_are_eager():
    assert decide(3, 4097, 4000, False, known={}, rules=RULES) == (How.EAGER, Shape(3, 4160, 4000, False), False)
    off = Rules(graphs=False, max_tokens=4096, longest_matters=False)
    known = {Shape(4, 128, 128, False): State.HELD}
    assert decide(3, 100, 50, False, known=known, rules=off).how is How.EAGER


def test_warm_shapes():
    assert warm_shapes("1x128, 8x1024", most_tokens=4096, longest=2048, cap=9) == [(8, 8192), (1, 128)]
    everything = warm_shapes("all", most_tokens=4096, longest=512, cap=10_000)
    assert (8, 4096) in everything
    assert (4, 4096) not in everything  # four sequences of 1024: longer than the model takes
    assert all(bucket(n, t, 1, False, longest_matters=False)[:2] == (n, t) for n, t in everything)
    assert warm_shapes("all", most_tokens=4096, longest=512, cap=3) == everything[:3]


@pytest.mark.parametrize("text", ["", "8", "8x", "0x5", "8x9999", "8x128;1x2", "all,1x2", "8 x 128"])
def test_warm_refuses_by_name(text):
    with pytest.raises(StartError, match="--warm"):
        warm_shapes(text, most_tokens=4096, longest=512, cap=9)
