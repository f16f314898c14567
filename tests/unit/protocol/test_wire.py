"""The wire format: what goes in comes out, what is no message is Malformed and nothing worse, the generated code is fresh."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hortus import errors
from hortus.protocol import generate, wire
from hortus.protocol import hortus_pb2 as pb
from hortus.protocol.wire import Ask, Asks, Description, File, Malformed, Replies
from hortus.types import ModelInfo, Result, Timings, TokenBatch, all_finite

INFO = ModelInfo(name="a/b", revision="f" * 40, width=4, max_tokens=8, vocab_size=100, normalize=True)

sequences = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=0, max_size=6), min_size=0, max_size=4)


def test_the_generated_code_is_what_protoc_makes_of_the_proto(tmp_path):
    generate.generate(tmp_path)
    for name in generate.MADE:
        assert (tmp_path / name).read_text() == (generate.HERE / name).read_text(), (
            "run: python -m hortus.protocol.generate"
        )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(sequences, st.booleans(), st.floats(0, 1e6, width=32)), max_size=5),
    st.lists(st.integers(0, 2**64 - 1)),
)
def test_asks_come_back(asks, cancelled):
    given_asks = []
    for number, (lists, typed, deadline) in enumerate(asks):
        batch = TokenBatch.of(lists)
        types = np.arange(len(batch.ids)).astype(np.uint8) if typed else None
        given_asks.append(Ask(number, TokenBatch(batch.ids, batch.cu_seqlens, types), deadline))
    got = wire.read_asks(wire.pack_asks(Asks(given_asks, cancelled, 7)))
    assert (got.cancelled, got.ping, len(got.asks)) == (cancelled, 7, len(given_asks))
    for a, b in zip(given_asks, got.asks, strict=True):
        assert (a.number, a.deadline_ms) == (b.number, b.deadline_ms)
        np.testing.assert_array_equal(a.batch.ids, b.batch.ids)
        np.testing.assert_array_equal(a.batch.cu_seqlens, b.batch.cu_seqlens)
        assert b.batch.cu_seqlens.dtype == np.int32
        none = np.zeros(len(a.batch.ids), np.uint8)
        np.testing.assert_array_equal(
            none if a.batch.token_types is None else a.batch.token_types,
            none if b.batch.token_types is None else b.batch.token_types,
        )


def test_traces_travel_with_the_asks_that_have_one():
    batch, trace = TokenBatch.of([[1]]), bytes(range(25))
    for given_traces in ([b"", trace, b""], [b"", b""], [trace]):
        asks = [Ask(n, batch, trace=t) for n, t in enumerate(given_traces)]
        data = wire.pack_asks(Asks(asks))
        assert [a.trace for a in wire.read_asks(data).asks] == given_traces
        assert bool(pb.Asks.FromString(data).traces) == any(given_traces)


def test_replies_come_back():
    rows = np.arange(20, dtype=np.float32).reshape(5, 4)
    answers = [
        (3, Result(rows[:2], Timings(0.0, 1.5, 2.5))),
        (2**63, Result(rows[2:][::-1])),
        (9, Result(np.zeros((0, 4), np.float32))),
    ]
    failures = [(4, errors.Overloaded("full", retry_after_s=2.5)), (5, errors.TooLong("long", param="input[1]"))]
    got = wire.read_replies(wire.pack_replies(Replies(answers, failures, 8, True)))
    assert (got.pong, got.draining) == (8, True)
    for (n, a), (m, b) in zip(answers, got.answers, strict=True):
        assert n == m
        np.testing.assert_array_equal(a.rows, b.rows)
        assert (a.timings.queue_ms, a.timings.device_ms) == (b.timings.queue_ms, b.timings.device_ms)
    assert all(result.together.once(all_finite) for _, result in got.answers)
    answers[1][1].rows[0, 0] = np.inf
    assert not any(
        result.together.once(all_finite) for _, result in wire.read_replies(wire.pack_replies(Replies(answers))).answers
    )
    (_, full), (_, long) = got.failures
    assert isinstance(full, errors.Overloaded)
    assert (full.message, full.retry_after_s) == ("full", 2.5)
    assert (type(long), long.message, long.param) == (errors.TooLong, "long", "input[1]")


@pytest.mark.parametrize("code", sorted(errors.TABLE))
def test_every_error_code_comes_back(code):
    data = pb.Replies(failures=[pb.Failure(number=1, code=code, message="m")]).SerializeToString()
    [(_, error)] = wire.read_replies(data).failures
    assert (error.code, error.message) == (code, "m")


def test_a_code_of_a_newer_peer_is_an_engine_error_that_names_it():
    data = pb.Replies(failures=[pb.Failure(number=1, code="new_thing", message="m")]).SerializeToString()
    [(_, error)] = wire.read_replies(data).failures
    assert (error.code, error.message) == ("engine_error", "new_thing: m")


@pytest.mark.parametrize(
    "change",
    [
        {"numbers": b"123"},
        {"counts": b""},
        {"counts": np.array([2], "<u4").tobytes()},
        {"counts": np.array([2**32 - 1], "<u4").tobytes()},
        {"lengths": np.array([2**32 - 1], "<u4").tobytes()},
        {"lengths": np.array([4], "<u4").tobytes()},
        {"ids": b"1234567"},
        {"token_types": b"1"},
        {"deadlines_ms": np.array([np.nan], "<f4").tobytes()},
        {"cancelled": b"1"},
        {"traces": b"1" * 24},
        {"traces": b"1" * 50},
    ],
    ids=str,
)
def test_asks_that_contradict_themselves(change):
    message = pb.Asks.FromString(wire.pack_asks(Asks([Ask(1, TokenBatch.of([[1, 2, 3]]))])))
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(Malformed, match=next(iter(change)) + "|lengths|ids"):
        wire.read_asks(message.SerializeToString())


@pytest.mark.parametrize("change", [{"rows": b"1234"}, {"width": 0}, {"width": 3}, {"counts": b"1234"}], ids=str)
def test_replies_that_contradict_themselves(change):
    message = pb.Replies.FromString(wire.pack_replies(Replies([(1, Result(np.zeros((2, 4), np.float32)))])))
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(Malformed):
        wire.read_replies(message.SerializeToString())


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_are_anything(data):
    for read in (wire.read_asks, wire.read_replies, wire.read_description, wire.read_describe, wire.read_fetch):
        with contextlib.suppress(Malformed):
            read(data)


def test_a_description_comes_back_and_ignores_what_is_newer():
    told = Description(INFO, "abc", (File("tokenizer.json", 12, "ff"),), draining=True)
    data = wire.pack_description(told)
    assert wire.read_description(data) == told
    message = pb.Description.FromString(data)
    message.info = message.info.replace(b'"name"', b'"newer": 1, "name"')
    assert wire.read_description(message.SerializeToString()).info == INFO
    message.info = b'{"name": "a"}'
    with pytest.raises(Malformed, match="width"):
        wire.read_description(message.SerializeToString())
