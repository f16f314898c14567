"""Headers on several lines and in several spellings: lists are joined, and what could be read in two ways is refused."""

from __future__ import annotations

import asyncio

import pytest
from ivy_stubs import Stream

from hortus.ivy.exchange import takes_gzip
from hortus.ivy.http1 import HEAD_BYTES, Reader, waits_for_100

GOOD = b'{"model":"mini","input":"a"}'
LENGTH = b"content-length: %d" % len(GOOD)
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD)


def head(*lines: bytes, start: bytes = b"POST /v1/embeddings HTTP/1.1") -> bytes:
    return b"\r\n".join([start, *lines, b"", b""])


def read(client, *lines: bytes, start: bytes = b"GET /health HTTP/1.1"):
    """The request that a head makes."""
    requests: list = []
    reader = Reader(client.app, requests, "")
    assert reader.feed(head(*lines, start=start)) is None
    reader.close()
    (request,) = requests
    return request


async def answers(client, data: bytes, step: int = 1 << 20, count: int = 1) -> tuple[list[int], bool]:
    """Statuses on one connection, at least `count`, and whether it was closed."""
    wire = Stream(client.app)
    for at in range(0, len(data), step):
        if not wire.lost:
            wire.feed(data[at : at + step])
    await wire.until(count)
    for _ in range(40):
        await asyncio.sleep(0)
    return wire.statuses, wire.lost


@pytest.mark.parametrize("spellings", [(b"x-a", b"x-a", b"x-a"), (b"X-A", b"x-a", b"X-A"), (b"x-A", b"X-a", b"x-a")])
def test_lines_of_one_header_are_one_list_in_order(client, spellings):
    lines = [b"%b: %d" % (name, i) for i, name in enumerate(spellings)]
    request = read(client, lines[0], b"x-b: other", *lines[1:])
    assert request.headers == {b"x-a": b"0, 1, 2", b"x-b": b"other"}
    assert request.ended is None
    assert request.keep_alive


def test_lists_mean_the_same_on_one_line_and_on_several(client):
    assert takes_gzip(read(client, b"accept-encoding: br", b"Accept-Encoding: gzip").headers[b"accept-encoding"])
    assert not takes_gzip(read(client, b"accept-encoding: *", b"Accept-Encoding: gzip;q=0").headers[b"accept-encoding"])
    assert waits_for_100(read(client, b"expect: 100-continue ", b"Expect: 100-Continue"))
    assert b"expect" not in read(client, b"expect: a", b"Expect: b", start=b"GET /health HTTP/1.0").headers


@pytest.mark.parametrize(
    ("lines", "body"),
    [
        ([LENGTH, LENGTH], GOOD),
        ([LENGTH, b"Content-Length: 3"], GOOD),
        ([b"content-length: 3, 3"], b"abc"),
        ([LENGTH, b"transfer-encoding: chunked"], CHUNKS),
        ([b"Transfer-Encoding: chunked", LENGTH], CHUNKS),
        ([b"transfer-encoding: chunked, identity"], CHUNKS),
        ([b"transfer-encoding: identity, chunked"], CHUNKS),
        ([b"transfer-encoding: gzip, chunked"], CHUNKS),
        ([b"transfer-encoding: identity"], CHUNKS),
        ([b"transfer-encoding: xchunked"], CHUNKS),
        ([b"transfer-encoding: chunked", b"Transfer-Encoding: identity"], CHUNKS),
        ([b"Transfer-Encoding: identity", b"transfer-encoding: chunked"], CHUNKS),
        ([b"transfer-encoding: gzip", b"transfer-encoding: chunked"], CHUNKS),
        ([b"transfer-encoding: chunked", b"TRANSFER-ENCODING: chunked"], CHUNKS),
        ([b"host: a", b"Host: a", LENGTH], GOOD),
        ([b"host: a", b"x: y", b"host: b", LENGTH], GOOD),
        ([b"authorization: Bearer a", b"Authorization: Bearer b", LENGTH], GOOD),
        ([b"Authorization: Bearer a", b"Authorization: Bearer a", LENGTH], GOOD),
    ],
    ids=lambda part: repr(b"|".join(part)) if isinstance(part, list) else "",
)
async def test_a_request_that_another_server_might_read_otherwise_is_the_connections_last(client, lines, body):
    """Neither is it done, nor what comes behind it: that may be part of it."""
    behind = head(LENGTH) + GOOD
    for start in (b"POST /v1/embeddings HTTP/1.1", b"GET /health HTTP/1.1", b"DELETE /x HTTP/1.1"):
        for step in (1, 7, 1 << 20):
            assert await answers(client, head(*lines, start=start) + body + behind, step) == ([400], True)
    assert not client.encoder.batches
    assert client.count("invalid_input") == 9


async def test_http_1_0_has_no_chunks(client):
    old = b"POST /v1/embeddings HTTP/1.0"
    for lines in ([b"transfer-encoding: chunked"], [b"transfer-encoding: chunked", b"connection: keep-alive"]):
        assert await answers(client, head(*lines, start=old) + CHUNKS) == ([400], True)


async def test_one_of_each_is_served_with_space_around_it(client):
    for coding in (b"chunked", b" Chunked  ", b"CHUNKED"):
        whole = head(b"host: a", b"authorization: Bearer a", b"transfer-encoding:" + coding) + CHUNKS
        assert await answers(client, whole * 2, count=2) == ([200, 200], False)


async def test_two_lines_behind_an_offer_to_upgrade_are_seen_too(client):
    """Its head is read a second time, without the offer."""
    offer = [b"connection: upgrade", b"upgrade: h2c"]
    assert await answers(client, head(*offer, b"host: a", b"Host: b", LENGTH) + GOOD) == ([400], True)
    lists = head(*offer, b"accept-encoding: a", b"accept-encoding: b", LENGTH) + GOOD
    assert await answers(client, lists, 9) == ([200], False)


async def test_a_head_of_many_equal_lines_is_bounded(client):
    lines = [b"x: y"] * (HEAD_BYTES // 5)
    assert await answers(client, head(*lines, start=b"GET /health HTTP/1.1")) == ([400], False)
    few = [b"x: y"] * (HEAD_BYTES // 7)
    assert await answers(client, head(*few, LENGTH) + GOOD) == ([200], False)
