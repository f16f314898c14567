"""A connection over a transport that is none: order, bounds, back-pressure, clients that leave."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ivy_stubs import Stream
from patience import PATIENCE_S

from hortus.ivy import connection
from hortus.ivy.http1 import HEAD_BYTES, path_of
from hortus.ivy.server import Door

GOOD = json.dumps({"model": "mini", "input": "a"}).encode()


def post(body: bytes = GOOD, *headers: bytes) -> bytes:
    lines = [b"POST /v1/embeddings HTTP/1.1", *headers, b"content-length: %d" % len(body), b"", body]
    return b"\r\n".join(lines)


async def rounds(count: int = 20) -> None:
    """Let whatever could happen at once happen."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_pipelined_requests_wait_in_order_and_reading_stops(client):
    client.encoder.hold = asyncio.Event()
    wire = Stream(client.app)
    wire.feed(post() + b"GET /health HTTP/1.1\r\n\r\n" + post(b"{"))
    await rounds()
    assert not wire.reading
    assert wire.statuses == []
    client.encoder.hold.set()
    await wire.until(3)
    assert wire.statuses == [200, 200, 400]
    assert wire.reading
    assert not wire.lost


async def test_a_client_that_does_not_read_gets_no_second_answer_until_it_does(client):
    wire = Stream(client.app)
    wire.feed(post() + post())
    wire.connection.pause_writing()
    await wire.until(1)
    await rounds()
    assert wire.statuses == [200]
    assert len(client.encoder.batches) == 1
    wire.connection.resume_writing()
    await wire.until(2)


async def test_a_client_that_never_reads_is_cut_off_and_a_slow_one_is_not(client, monkeypatch):
    monkeypatch.setattr(connection, "STALL_S", 0.02)
    wire = Stream(client.app)
    wire.feed(post())
    wire.unsent = 1000
    wire.connection.pause_writing()
    await wire.until(1)
    for left in (800, 600, 400):
        wire.unsent = left
        await asyncio.wait([wire.connection._task], timeout=0.021)
    assert client.app.in_flight == 0
    await asyncio.wait_for(wire.connection.closed, PATIENCE_S)


@pytest.mark.parametrize("drips", [False, True])
async def test_a_head_without_end_is_refused(client, drips):
    wire = Stream(client.app)
    head = b"GET /health HTTP/1.1\r\nx-long: " + b"x" * (HEAD_BYTES + 1) + (b"" if drips else b"\r\n\r\n")
    step = 5000 if drips else len(head)
    for at in range(0, len(head), step):
        wire.feed(head[at : at + step])
    await wire.until(1)
    assert wire.statuses == [400]
    assert str(HEAD_BYTES).encode() in wire.written
    assert drips == wire.lost  # one that did end leaves the connection good


async def test_trailers_are_bounded_and_change_nothing(client):
    wire = Stream(client.app)
    chunks = b"%x\r\n%b\r\n0\r\n" % (len(GOOD), GOOD)
    wire.feed(b"POST /v1/embeddings HTTP/1.1\r\nx-request-id: mine\r\ntransfer-encoding: chunked\r\n\r\n" + chunks)
    wire.feed(b"x-request-id: other\r\n\r\n")
    await wire.until(1)
    assert wire.statuses == [200]
    assert b"x-request-id: mine" in wire.written
    wire.feed(b"POST /v1/embeddings HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"x: ")
    for _ in range(20):
        wire.feed(b"y" * 5000)
    await wire.until(2)
    assert wire.statuses == [200, 400]


@pytest.mark.parametrize("at", [0, 1, 20])
@pytest.mark.parametrize("whole", [True, False])
async def test_a_client_that_leaves_at_any_moment_is_counted_once(client, at, whole):
    client.encoder.hold = asyncio.Event()
    wire = Stream(client.app)
    wire.feed(post() if whole else post()[:-3])
    await rounds(at)
    wire.close()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wait([wire.connection._task])
    assert client.count("cancelled") == 1
    assert client.encoder.outstanding == 0
    assert client.app.in_flight == 0
    assert not wire.written


async def test_idle_connections_are_closed_and_busy_ones_not(client, monkeypatch):
    monkeypatch.setattr(connection, "KEEP_ALIVE_S", 0.03)
    client.encoder.hold = asyncio.Event()
    idle, busy = Stream(client.app), Stream(client.app)
    busy.feed(post())
    await asyncio.wait_for(idle.connection.closed, PATIENCE_S)
    assert not busy.lost
    client.encoder.hold.set()
    await busy.until(1)
    await asyncio.wait_for(busy.connection.closed, PATIENCE_S)


async def test_what_a_client_wants_to_know_of_its_connection(client):
    old, older, closing = (Stream(client.app) for _ in range(3))
    old.feed(post(GOOD, b"connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0"))
    older.feed(post().replace(b"HTTP/1.1", b"HTTP/1.0"))
    closing.feed(post(GOOD, b"connection: close") + b"more")
    for wire, word, lost in (old, b"keep-alive", False), (older, b"close", True), (closing, b"close", True):
        await wire.until(1)
        await rounds()
        assert wire.statuses == [200]
        assert b"\r\nconnection: " + word in wire.written
        assert wire.lost == lost


async def test_a_body_refused_unseen_is_the_connections_last(made):
    """The client may send it or not: what comes next could be either."""
    wire = Stream(made(max_body_bytes=10).app)
    wire.feed(b"POST /v1/embeddings HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 11\r\n\r\n")
    await wire.until(1)
    assert wire.statuses == [413]
    assert b"connection: close" in wire.written
    wire.feed(b"x" * 11)
    assert wire.lost


@pytest.mark.parametrize("head", [b"GET /health", b"POST /nothing", b"DELETE /v1/embeddings"])
@pytest.mark.parametrize("some", [b"", b"x"])
async def test_a_body_answered_unseen_is_the_connections_last(client, head, some):
    wire = Stream(client.app)
    wire.feed(head + b" HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n" + some)
    await wire.until(1)
    assert b"connection: close" in wire.written
    assert b" 100 " not in wire.written


async def test_a_client_of_http_1_0_is_not_told_to_continue(client):
    wire = Stream(client.app)
    whole = post(GOOD, b"Expect: 100-continue", b"connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0")
    wire.feed(whole[:-3])
    await rounds()
    assert not wire.written
    wire.feed(whole[-3:])
    await wire.until(1)
    assert wire.statuses == [200]
    assert b"connection: keep-alive" in wire.written


async def test_the_rest_of_a_refused_body_is_waited_for_only_so_long(client, monkeypatch):
    monkeypatch.setattr(connection, "DISCARD_S", 0.02)
    wire = Stream(client.app)
    wire.feed(b"POST /nothing HTTP/1.1\r\ncontent-length: 100\r\n\r\nxxx")
    await wire.until(1)
    assert wire.statuses == [404]
    await asyncio.wait_for(wire.connection.closed, PATIENCE_S)


async def test_the_end_of_draining_answers_whatever_has_begun(client):
    client.encoder.hold = asyncio.Event()
    whole, half, fresh, idle = (Stream(client.app) for _ in range(4))
    whole.feed(post())
    half.feed(post()[:-3])
    await rounds()
    fresh.feed(post())  # its task has not begun
    client.app.drain()
    for wire in (whole, half, fresh, idle):
        wire.connection.drain()
    assert [wire.lost for wire in (whole, half, fresh, idle)] == [False, False, False, True]
    for wire in (whole, half, fresh):
        wire.connection.cut()
        await wire.until(1)
        assert wire.statuses == [503]
        assert b'"draining"' in wire.written
    assert client.count("draining") == 3


async def test_requests_behind_a_running_one_are_answered_when_draining(client):
    client.encoder.hold = asyncio.Event()
    wire = Stream(client.app)
    wire.feed(post() + post() + post())
    await rounds()
    client.app.drain()
    wire.connection.drain()
    client.encoder.hold.set()
    await wire.until(3)
    assert wire.statuses == [200, 503, 503]
    assert bytes(wire.written).count(b"connection: close") == 1
    await asyncio.wait_for(wire.connection.closed, PATIENCE_S)


async def test_what_is_unread_when_draining_does_not_cost_the_answers(client):
    """Closing on bytes that nobody has read resets a connection: they are read and thrown away until the client closes."""

    class Halves(Stream):
        said_end = False

        def can_write_eof(self) -> bool:
            return True

        def write_eof(self) -> None:
            self.said_end = True

    client.encoder.hold = asyncio.Event()
    wire = Halves(client.app)
    wire.feed(post() + post())
    assert not wire.reading
    client.app.drain()
    client.encoder.hold.set()
    await wire.until(2)
    await rounds()
    assert (wire.reading, wire.said_end, wire.lost) == (True, True, False)
    wire.feed(post())
    await rounds()
    assert wire.statuses == [200, 503] or wire.statuses == [503, 503]
    wire.close()


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/a?b=/c", "/a"),
        (b"/a%20b", "/a b"),
        (b"//a", "//a"),
        (b"http://host:1/a?b", "/a"),
        (b"*", "*"),
        (b"/v1/models/a%2Fb", "/v1/models/a/b"),
    ],
)
def test_paths(target, path):
    assert path_of(target) == path


@pytest.mark.parametrize("target", [b"/\xff", b"http://[x/"])
def test_what_is_no_path(target):
    with pytest.raises(ValueError):
        path_of(target)


def chunked(*parts: bytes) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (*parts, b""))
    return b"POST /embed HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + body


OFFER = (b"connection: upgrade, http2-settings", b"upgrade: h2c", b"http2-settings: AA")
KINDS = {
    post(): 200,
    post(b"{"): 400,
    post(GOOD, *OFFER): 200,
    post(GOOD, b"content-encoding: gzip"): 400,
    chunked(b'{"inp', b'uts":"a"}'): 200,
    chunked(b"x" * 300, b"x" * 300): 413,
    post(b"x" * 600): 413,
    b"GET /health?a=b HTTP/1.1\r\n\r\n": 200,
    b"GET /health HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc": 200,
    b"POST /nothing HTTP/1.1\r\ncontent-length: 9\r\n\r\nGET / HTT": 404,
    b"HEAD /nothing HTTP/1.1\r\n\r\n": 404,
}


@pytest.fixture
def small(made):
    return made(max_body_bytes=500)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=6),
    st.sampled_from([b"", b"nonsense\r\n\r\n"]),
    st.data(),
)
async def test_where_the_bytes_are_cut_makes_no_difference(small, requests, rest, data):
    wire = Stream(small.app)
    whole = b"".join(requests) + rest
    expected = [KINDS[r] for r in requests] + [400] * bool(rest)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=8)))
    for lo, hi in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        wire.feed(whole[lo:hi])
        await rounds(data.draw(st.sampled_from([0, 1, 9])))
    await wire.until(len(expected))
    await rounds()
    assert wire.statuses == expected
    assert wire.lost == bool(rest)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01",  # TLS to a plain port
        b"nonsense\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nx" + b"y" * HEAD_BYTES,
        b"GET /health HTTP/1.1\r\n\r\n\x00\x01",
    ],
    ids=lambda data: repr(data[:30]),
)
async def test_what_is_not_http_is_counted(client, data):
    wire = Stream(client.app)
    wire.feed(data)
    last = data.startswith(b"GET /health HTTP/1.1\r\n\r\n")
    await wire.until(2 if last else 1)
    assert wire.statuses == [*([200] if last else []), 400]
    assert client.count("invalid_input") == 1
    assert client.count("ok") == 0


async def test_a_connection_too_many_is_counted(client):
    door = Door(client.app, set(), 0)
    for _ in range(2):
        wire = Stream.__new__(Stream)
        refusal = door()
        asyncio.Transport.__init__(wire)
        wire.written, wire.wrote, wire.lost, wire.connection = bytearray(), asyncio.Event(), False, refusal
        refusal.connection_made(wire)
        assert wire.statuses == [429]
    assert client.count("overloaded") == 2
