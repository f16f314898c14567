"""Samples and the stream of them: what they say, that nothing is done while nobody looks, that they end."""

from __future__ import annotations

import asyncio
import json
from collections import deque

import pytest
from ivy_stubs import Client
from patience import PATIENCE_S

from hortus.errors import Draining, NotReady, Overloaded
from hortus.ivy import watch
from hortus.ivy.watch import COLUMNS, Replica, Watch, read, sample
from hortus.metrics import Metrics


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(watch, "EVERY_S", 0.02)
    monkeypatch.setattr(watch, "ASK_EVERY_S", 0.02)


def told(piece: bytes) -> dict:
    assert piece.startswith(b"data: ")
    assert piece.endswith(b"\n\n")
    return json.loads(piece[6:])


async def stream(watch_: Watch):
    answer = await watch_.watch(None)
    assert answer.content_type == b"text/event-stream"
    return answer.pieces


def row(before: dict, now: dict, seconds: tuple[float, ...] = (), elapsed_s: float = 2.0) -> dict:
    return dict(zip(COLUMNS, sample(before, now, elapsed_s, seconds, 1000.04), strict=True))


def test_a_sample_of_a_gateway_and_of_an_engine():
    metrics = Metrics()
    before = read(metrics)
    metrics.requests.counts["ok"] += 10
    metrics.requests.counts["overloaded"] += 3
    metrics.request_tokens.observe(600)
    got = row(before, read(metrics), tuple(x / 1000 for x in range(1, 101)))
    assert got == {
        **dict.fromkeys(COLUMNS),
        "at": 1000, "tokens_per_s": 300, "requests_per_s": 6.5, "p50_ms": 51, "p99_ms": 100, "in_flight": 0,
        "errors_per_s": {"overloaded": 1.5},
    }  # fmt: skip
    metrics.batch_limit_tokens.set(2048)
    for tokens, sequences in ((100, 4), (300, 6)):
        metrics.batch_tokens.observe(tokens)
        metrics.batch_sequences.observe(sequences)
    metrics.queue_tokens.set(50)
    metrics.queue_bulk_tokens.set(20)
    metrics.graph_steps.labels("replay").inc(4)
    metrics.graph_steps.labels("capture").inc(2)
    metrics.graphs.set(7)
    metrics.device_memory_bytes.set(1e9)
    got = row(before, read(metrics))
    wanted = {
        "tokens_per_s": 200, "steps_per_s": 1, "step_tokens": 200, "step_sequences": 5, "queue_short_tokens": 30,
        "queue_bulk_tokens": 20, "replays_per_s": 2, "captures_per_s": 1, "eager_per_s": 0, "graphs": 7,
        "memory_bytes": 1e9, "p50_ms": None, "p99_ms": None,
    }  # fmt: skip
    assert {k: got[k] for k in wanted} == wanted
    assert row(read(metrics), read(metrics))["step_tokens"] is None


@pytest.mark.parametrize("count", [1, 2, 3, 1000])
def test_quantiles_are_times_that_there_were(count):
    metrics = Metrics()
    seconds = tuple(x / 1000 for x in range(count))
    got = row(read(metrics), read(metrics), seconds)
    assert got["p50_ms"] in {round(s * 1e3, 3) for s in seconds}
    assert got["p50_ms"] <= got["p99_ms"] <= round(seconds[-1] * 1e3, 3)


async def test_nothing_is_sampled_while_nobody_looks(client: Client):
    seen = client.app._watch
    await client.post(input="a")
    assert seen.seconds is None
    assert not seen._tasks
    one, two = await stream(seen), await stream(seen)
    assert seen.watchers == 0  # not before they are read
    first = told(await anext(one))
    assert first["columns"] == list(COLUMNS)
    assert first["rows"] == []
    assert first["state"] == "ready"
    assert seen.watchers == 1
    await client.post(input="a b c")
    rows = told(await anext(one))["rows"]
    assert len(rows) == 1
    assert "columns" in told(await anext(two))
    assert await anext(one) is await anext(two)  # encoded once
    tasks = set(seen._tasks)
    assert len(tasks) == 2
    await one.aclose()
    assert seen.watchers == 1
    await two.aclose()
    assert seen.watchers == 0
    assert seen.seconds is None
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    again = await stream(seen)
    assert len(told(await anext(again))["rows"]) >= 2  # what was seen before is still there
    await again.aclose()


async def test_requests_are_timed_and_counted_but_not_the_watching(client: Client):
    pieces = await stream(client.app._watch)
    await anext(pieces)
    for _ in range(3):
        await client.post(input="a")
    await client.post(input=[])
    got = dict(zip(COLUMNS, told(await anext(pieces))["rows"][0], strict=True))
    await pieces.aclose()
    assert got["p99_ms"] >= got["p50_ms"] > 0
    assert set(got["errors_per_s"]) == {"invalid_input"}
    assert got["requests_per_s"] == pytest.approx(4 * got["errors_per_s"]["invalid_input"], rel=0.01)


async def test_who_comes_late_gets_the_history_and_who_is_slow_what_was_missed(client: Client):
    seen = client.app._watch
    slow = await stream(seen)
    await anext(slow)
    other = await stream(seen)
    for _ in range(5):
        await anext(other)
    missed = told(await anext(slow))["rows"]
    assert len(missed) >= 3
    late = await stream(seen)
    assert [r[0] for r in told(await anext(late))["rows"]][: len(missed)] == [r[0] for r in missed]
    assert isinstance(seen._rows, deque)
    assert seen._rows.maxlen == 300
    for pieces in (slow, other, late):
        await pieces.aclose()


async def test_how_the_server_is(client: Client):
    state, failing = "starting", False

    class Readiness:
        async def check(self) -> None:
            if failing:
                raise NotReady("the engine did not answer a probe")

    here = [Replica("unix:/a", "down", "not connected yet", 0, None, 0, None)]
    seen = Watch(Metrics(), lambda: state, lambda: Readiness(), lambda: here, shared_port=True)
    pieces = await stream(seen)
    first = told(await anext(pieces))
    assert (first["state"], first["shared_port"], first["step_limit_tokens"]) == ("starting", True, None)
    assert first["replicas"][0]["why"] == "not connected yet"
    assert isinstance(first["process"], int)
    state, failing = "ready", True
    async with asyncio.timeout(PATIENCE_S):
        while (now := told(await anext(pieces)))["state"] != "failing":
            pass
    assert now["reason"] == "the engine did not answer a probe"
    failing = False
    async with asyncio.timeout(PATIENCE_S):
        while (now := told(await anext(pieces)))["state"] != "ready":
            pass
    state = "draining"
    seen.end()
    assert told(await anext(pieces))["state"] == "draining"
    with pytest.raises(StopAsyncIteration):
        await anext(pieces)
    assert seen.watchers == 0
    with pytest.raises(Draining):
        await stream(seen)


async def test_a_fault_in_a_sample_is_logged_and_the_stream_goes_on(client: Client, monkeypatch, caplog):
    pieces = await stream(client.app._watch)
    await anext(pieces)
    monkeypatch.setattr(watch, "sample", lambda *a: 1 / 0)
    assert told(await anext(pieces))["state"] == "ready"
    monkeypatch.undo()
    assert "no sample" in caplog.text
    await pieces.aclose()


async def test_only_so_many_may_look(client: Client, monkeypatch):
    monkeypatch.setattr(watch, "MOST_WATCHERS", 1)
    pieces = await stream(client.app._watch)
    await anext(pieces)
    with pytest.raises(Overloaded, match="1 pages watch"):
        await client.app._watch.watch(None)
    await pieces.aclose()


async def test_over_http_it_needs_a_key_and_ends_with_the_server(made):
    from ivy_stubs import Wire

    client = made(api_keys="secret")
    assert (await client.request("GET", "/watch")).status == 401

    class Endless(Wire):
        def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
            pass

    wire = Endless(client.app)
    wire.feed(b"GET /watch HTTP/1.1\r\nauthorization: Bearer secret\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        while wire.written.count(b"data: ") < 3:
            wire.wrote.clear()
            await wire.wrote.wait()
        assert not client.count("ok")
        client.app.drain()
        wire.connection.drain()
        await wire.connection.closed
    assert b'"state":"draining"' in wire.written
    assert client.app._watch.watchers == 0
