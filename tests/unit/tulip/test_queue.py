"""The queue against a model of it: every sequence leaves once, in order, within the limits, and the totals are exact."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hortus.errors import InvalidInput, Overloaded
from hortus.tulip.queue import Queue, Work, decide, fitting
from hortus.types import TokenBatch

SHAPE = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def work(lengths, deadline=None, first_id=0):
    """A work whose sequence i is full of the id first_id + i, so that sequences can be told apart."""
    batch = TokenBatch.of([[first_id + i] * n for i, n in enumerate(lengths)])
    return Work(batch, 0.0, deadline, len(batch), batch.total_tokens)


def taken_ids(taken):
    return [int(w.batch.ids[w.batch.cu_seqlens[i]]) for w, lo, hi in taken.slices for i in range(lo, hi)]


@settings(max_examples=200, deadline=None)
@given(shapes=st.lists(SHAPE, max_size=12), budget=st.integers(1, 100), sequences=st.integers(1, 10))
def test_first_come_first_served_whole_and_within_the_limits(shapes, budget, sequences):
    queue = Queue(10**6)
    first = 0
    lengths = []
    for shape in shapes:
        queue.put(work(shape, first_id=first))
        first += len(shape)
        lengths += shape
    out = []
    while len(queue):
        begin = len(out)
        taken = queue.take(budget, sequences, now=0.0)
        out += taken_ids(taken)
        mine = lengths[begin : len(out)]
        assert taken.expired == []
        assert (taken.sequences, taken.tokens) == (len(mine), sum(mine))
        assert 1 <= len(mine) <= sequences
        assert sum(mine) <= budget or len(mine) == 1
        # Full: the next one would not have fitted.
        if len(out) < len(lengths):
            assert len(mine) == sequences or sum(mine) + lengths[len(out)] > budget
        assert (queue.sequences, queue.tokens) == (len(lengths) - len(out), sum(lengths[len(out) :]))
    assert out == list(range(first))
    assert queue.take(budget, sequences, now=0.0) == ([], 0, 0, [])


OPERATION = st.one_of(
    st.tuples(st.just("put"), SHAPE, st.one_of(st.none(), st.integers(1, 30))),
    st.tuples(st.just("take"), st.integers(1, 60), st.integers(1, 6)),
    st.tuples(st.just("drop"), st.integers(0, 30)),
    st.tuples(st.just("time"), st.integers(1, 10)),
)


@settings(max_examples=200, deadline=None)
@given(operations=st.lists(OPERATION, max_size=40))
def test_any_history_keeps_totals_exact_and_loses_nothing(operations):
    queue, now, first = Queue(300), 0, 0
    works, waiting = [], {}  # waiting: the model, work -> its ids and lengths still to come, in order of arrival
    for what, *args in operations:
        if what == "put":
            shape, deadline = args
            w = work(shape, None if deadline is None else now + deadline, first)
            if sum(shape) + sum(n for items in waiting.values() for _, n in items) > 300:
                with pytest.raises((Overloaded, InvalidInput)):
                    queue.put(w)
                continue
            queue.put(w)
            works.append(w)
            waiting[w] = [(first + i, n) for i, n in enumerate(shape)]
            first += len(shape)
        elif what == "take":
            before = {w: len(items) for w, items in waiting.items()}
            taken = queue.take(*args, now)
            for w, dropped in taken.expired:
                assert w.deadline <= now
                assert dropped == before[w] == len(waiting.pop(w))
            expected = [i for items in waiting.values() for i, _ in items][: taken.sequences]
            assert taken_ids(taken) == expected
            for w, lo, hi in taken.slices:
                assert w.deadline is None or w.deadline > now
                del waiting[w][: hi - lo]
                if not waiting[w]:
                    del waiting[w]
        elif what == "drop" and args[0] < len(works):
            w = works[args[0]]
            assert queue.drop(w) == len(waiting.pop(w, []))
        elif what == "time":
            now += args[0]
        items = [item for items in waiting.values() for item in items]
        assert (len(queue), queue.sequences, queue.tokens) == (len(waiting), len(items), sum(n for _, n in items))
        assert queue.works() == list(waiting)


@given(lengths=SHAPE, tokens=st.integers(0, 200), sequences=st.integers(1, 20), data=st.data())
def test_fitting_agrees_with_counting(lengths, tokens, sequences, data):
    lo = data.draw(st.integers(0, len(lengths) - 1))
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    n = 0
    while lo + n < len(lengths) and n < sequences and sum(lengths[lo : lo + n + 1]) <= tokens:
        n += 1
    assert fitting(cu, lo, tokens, sequences) == n


def test_a_sequence_longer_than_the_batch_runs_alone():
    queue = Queue(1000)
    for lengths in ([3], [50, 2], [4]):
        queue.put(work(lengths))
    shapes = []
    while len(queue):
        taken = queue.take(10, 100, now=0.0)
        shapes.append((taken.sequences, taken.tokens))
    assert shapes == [(1, 3), (1, 50), (2, 6)]


def test_limits_are_named():
    queue = Queue(100)
    queue.put(work([60]))
    with pytest.raises(Overloaded, match=r"60 tokens wait, 41 more .* 100 \(--max-queue-tokens\)"):
        queue.put(work([41]))
    with pytest.raises(InvalidInput, match=r"101 tokens .* 100 \(--max-queue-tokens\)"):
        queue.put(work([100, 1]))
    queue.put(work([40]))
    assert (queue.tokens, queue.sequences) == (100, 2)


def test_a_large_token_limit_does_not_overflow():
    queue = Queue(2**40)
    queue.put(work([5, 5, 5]))
    assert queue.take(2**40, 2, now=0.0).sequences == 2


@pytest.mark.parametrize(
    ("in_flight", "sequences", "tokens", "expected"),
    [
        (0, 0, 0, False),
        (0, 1, 1, True),  # idle: at once
        (1, 1, 1, False),  # busy: grow
        (1, 31, 100, False),
        (1, 32, 100, True),  # enough sequences
        (1, 2, 499, False),
        (1, 2, 500, True),  # half a batch of tokens
        (2, 999, 9999, False),  # never more than max_in_flight
    ],
)
def test_decide(in_flight, sequences, tokens, expected):
    assert (
        decide(
            in_flight=in_flight,
            waiting_sequences=sequences,
            waiting_tokens=tokens,
            max_in_flight=2,
            max_batch_tokens=1000,
            overlap_sequences=32,
        )
        is expected
    )


# --- two lanes


@settings(max_examples=200, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.booleans(), SHAPE), max_size=14),
    budget=st.integers(8, 120),
    sequences=st.integers(8, 20),
)
def test_lanes_keep_their_order_their_shares_and_every_sequence(shapes, budget, sequences):
    over = 40
    queue = Queue(10**6, bulk_over=over)
    waiting = {False: [], True: []}
    first = 0
    for _, shape in shapes:
        w = work(shape, first_id=first)
        queue.put(w)
        assert w.bulk == (sum(shape) > over)
        waiting[w.bulk] += [(first + i, n) for i, n in enumerate(shape)]
        first += len(shape)
    while len(queue):
        both = bool(waiting[True]) and bool(waiting[False])
        taken = queue.take(budget, sequences, now=0.0)
        got = {False: [], True: []}
        for w, lo, hi in taken.slices:
            got[w.bulk] += [(int(w.batch.ids[w.batch.cu_seqlens[i]]), int(w.batch.lengths[i])) for i in range(lo, hi)]
        assert len({id(s.work) for s in taken.slices}) == len(taken.slices), "a work is one slice"
        for lane in (False, True):
            assert got[lane] == waiting[lane][: len(got[lane])], "first come, first served in each lane"
            del waiting[lane][: len(got[lane])]
        tokens = {lane: sum(n for _, n in got[lane]) for lane in got}
        assert (taken.sequences, taken.tokens) == (len(got[False]) + len(got[True]), sum(tokens.values()))
        assert 1 <= taken.sequences <= sequences
        assert taken.tokens <= budget or taken.sequences == 1
        assert tokens[True] <= budget / 2 or len(got[True]) == 1, "bulk gets half a batch at most"
        if both:
            assert got[True], "bulk does not starve"
        assert queue.tokens == sum(n for lane in waiting.values() for _, n in lane)
        assert queue.sequences == sum(map(len, waiting.values()))
    assert waiting == {False: [], True: []}


def test_short_works_go_first_and_bulk_fills_up_to_half():
    queue = Queue(10**6, bulk_over=100)
    for _ in range(3):
        queue.put(work([50] * 20, first_id=1000))
    queue.put(work([10], first_id=1))
    taken = queue.take(800, 100, 0.0)
    assert taken_ids(taken)[0] == 1
    assert taken.tokens == 10 + 400
    for _ in range(100):
        queue.put(work([10], first_id=2))
    taken = queue.take(800, 1000, 0.0)
    assert sum(w.bulk for w, lo, hi in taken.slices for _ in range(lo, hi)) == 2, "its least share, an eighth"
    assert taken.tokens == 800


def test_bulk_leaves_room_in_the_queue():
    queue = Queue(800, bulk_over=100)
    queue.put(work([50] * 10))
    with pytest.raises(Overloaded, match=r"700 \(--max-queue-tokens, an eighth kept"):
        queue.put(work([50] * 5))
    with pytest.raises(InvalidInput, match="more than the queue ever holds: 700"):
        queue.put(work([50] * 15))
    for _ in range(30):
        queue.put(work([10]))
    with pytest.raises(Overloaded, match="limit of 800 "):
        queue.put(work([10]))
