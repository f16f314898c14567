"""Bytes that no client library would send, over raw sockets. Every one gets an answer, and nothing else is hurt."""

from __future__ import annotations

import json
import time

import pytest
from gateway_server import read_answer
from patience import PATIENCE_S, until_seen

LIMIT = 1_000_000
GOOD = b'{"model":"mini","input":"a"}'


def post(body: bytes, *headers: bytes, length: int | None = None) -> bytes:
    head = [b"POST /v1/embeddings HTTP/1.1", b"host: x", *headers]
    if length is not None or not any(h.lower().startswith(b"transfer-encoding") for h in headers):
        head.append(b"content-length: %d" % (len(body) if length is None else length))
    return b"\r\n".join([*head, b"", body])


def chunked(*parts: bytes) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (*parts, b""))
    return post(body, b"transfer-encoding: chunked")


def error(body: bytes) -> dict:
    told = json.loads(body)["error"]
    assert set(told) == {"message", "type", "param", "code"}
    return told


@pytest.fixture(autouse=True)
def _the_server_is_unhurt(server):
    yield
    assert server.raw(post(GOOD))[0] == 200


def test_chunked_bodies_are_read(server):
    assert server.raw(chunked(GOOD[:5], GOOD[5:9], GOOD[9:]))[0] == 200


def test_a_body_in_drips_is_read(server):
    request = post(GOOD)
    with server.connect() as sock:
        for i in range(0, len(request), 40):
            sock.sendall(request[i : i + 40])
            time.sleep(0.005)
        assert read_answer(sock)[0] == 200


@pytest.mark.parametrize("close", [b"connection: close", b"connection: keep-alive"])
@pytest.mark.parametrize("how", ["length", "chunks"])
def test_a_body_too_large_is_answered_while_it_is_still_sent(server, close, how):
    """The client sends all of it before it reads, as most do: it must find the answer, not a reset."""
    part = b"x" * 65536
    with server.connect() as sock:
        if how == "length":
            sock.sendall(post(b"", close, length=64 * len(part)))
            for _ in range(64):
                sock.sendall(part)
        else:
            sock.sendall(post(b"", close, b"transfer-encoding: chunked"))
            for _ in range(64):
                sock.sendall(b"%x\r\n%b\r\n" % (len(part), part))
            sock.sendall(b"0\r\n\r\n")
        status, body = read_answer(sock)
        assert status == 413
        assert "--max-body-bytes" in error(body)["message"]
        if close == b"connection: keep-alive":  # and the connection is still good
            sock.sendall(post(GOOD))
            assert read_answer(sock)[0] == 200
        else:
            assert sock.recv(1) == b""


@pytest.mark.parametrize("path", [b"/nope", b"/v1/models"])
def test_other_refusals_do_not_reset_large_bodies_either(server, path):
    with server.connect() as sock:
        sock.sendall(b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 4000000\r\n\r\n" % path)
        for _ in range(40):
            sock.sendall(b"x" * 100_000)
        assert read_answer(sock)[0] in (404, 405)


def test_expect_continue_is_answered_before_a_large_body_is_sent(server):
    with server.connect() as sock:
        sock.sendall(post(b"", b"expect: 100-continue", length=LIMIT + 1))
        assert read_answer(sock)[0] == 413
    with server.connect() as sock:
        sock.sendall(post(b"", b"expect: 100-continue", length=len(GOOD)))
        assert sock.recv(100).startswith(b"HTTP/1.1 100")
        sock.sendall(GOOD)
        assert read_answer(sock)[0] == 200


def test_a_length_too_small_makes_the_rest_a_bad_request(server):
    with server.connect() as sock:
        sock.sendall(post(GOOD, length=10))
        data = b""
        while part := sock.recv(65536):
            data += part
    answers = [part.partition(b"\r\n\r\n") for part in data.split(b"HTTP/1.1 ")[1:]]
    assert [head.split()[0] for head, _, _ in answers] == [b"400", b"400"]
    assert "truncated" in error(answers[0][2])["message"]
    assert "not a valid HTTP request" in error(answers[1][2])["message"]


def test_a_length_too_large_waits_until_the_timeout(run):
    with run(timeout_s=0.2) as server, server.connect() as sock:
        sock.sendall(post(GOOD, length=1000))
        status, body = read_answer(sock)
        assert status == 504
        assert "--timeout-s" in error(body)["message"]


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS to a plain port
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"BREW / HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
    ids=lambda d: repr(d[:30]),
)
def test_what_is_not_http_gets_400_in_our_shape(server, data):
    status, body = server.raw(data)
    assert status == 400
    assert error(body)["code"] == "invalid_input"


@pytest.mark.parametrize(
    "body",
    [
        rb'{"model":"mini","input":"x \ud83d"}',
        b'{"model":"mini","input":"\xff"}',
        b'{"model":"mini","input":' + b"[" * 500_000,
    ],
    ids=lambda b: repr(b[:40]),
)
def test_bad_json_is_400(server, body):
    assert server.raw(post(body))[0] == 400


def test_pipelined_requests_are_answered_in_order(server):
    with server.connect() as sock:
        sock.sendall(post(GOOD) + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + post(b"{"))
        data = b""
        while data.count(b"HTTP/1.1 ") < 3 or not data.endswith(b"}}"):
            data += sock.recv(65536)
    assert [part.split()[0] for part in data.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"400"]


def test_old_http_and_head(server):
    status, _ = server.raw(post(GOOD).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert status == 200
    with server.connect() as sock:
        sock.sendall(b"HEAD /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        data = b""
        while part := sock.recv(65536):
            data += part
    assert data.startswith(b"HTTP/1.1 200")
    assert data.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"GET /health?x=1", 200),
        (b"GET http://example.org/health", 200),
        (b"GET //health", 404),
        (b"GET /%ff%00%0d%0a", 404),
        (b"GET /v1/models/a%2Fb", 404),
        (b"GET /\xff", 400),
        (b"OPTIONS *", 404),
        (b"CONNECT example.org:443", 400),
        (b"DELETE /v1/models/mini", 405),
        (b"TRACE /health", 405),
    ],
    ids=repr,
)
def test_odd_targets_get_an_answer(server, line, expected):
    status, body = server.raw(line + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    assert status == expected
    assert status == 200 or error(body)


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket", b"nonsense"])
def test_an_offer_to_upgrade_is_declined_by_a_plain_answer(server, upgrade):
    """Java's HttpClient offers h2c with every request to a plain port."""
    offer = (
        b"connection: upgrade, http2-settings",
        b"upgrade: " + upgrade,
        b"http2-settings: AAMAAABkAARAAAAAAAIAAAAA",
    )
    with server.connect() as sock:
        for _ in range(3):
            sock.sendall(post(GOOD, *offer))
            assert read_answer(sock)[0] == 200
        whole = post(GOOD, *offer)
        for part in whole[:60], whole[60:-10], whole[-10:-3], whole[-3:]:
            sock.sendall(part)
            time.sleep(0.01)
        assert read_answer(sock)[0] == 200
        sock.sendall(chunked(GOOD).replace(b"host: x", b"\r\n".join([b"host: x", *offer])))
        assert read_answer(sock)[0] == 200
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"\r\n".join(offer) + b"\r\n\r\n")
        assert read_answer(sock)[0] == 200


def test_a_client_that_asks_and_never_reads_is_not_worked_for(run):
    """Its answers stay undone instead of filling memory; when it reads after all, they come, in order."""
    with run() as server:
        ask = json.dumps({"inputs": ["a"] * 1000}).encode()
        request = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(ask), ask)
        with server.connect() as sock:
            sock.sendall(request * 12)  # about 4 MB an answer
            seen, end = 0.0, time.monotonic() + PATIENCE_S
            while (now := server.sample("hortus_requests_total", code="ok")) > seen or not seen:
                assert time.monotonic() < end
                seen = now
                time.sleep(0.5)
            assert seen <= 6
            size = 0
            while size < 12 * 3_000_000 or server.sample("hortus_requests_total", code="ok") < 12:
                part = sock.recv(1 << 20)
                assert part
                size += len(part)


def test_a_client_that_stops_sending_in_the_middle_costs_nothing(run):
    with run() as server:
        for data in (b"", b"GE", b"GET /health HTTP/1.1\r\nx: y", post(GOOD)[:-5], b"\r\n\r\n"):
            with server.connect() as sock:
                sock.sendall(data)
        until_seen(lambda: server.sample("hortus_requests_total", code="cancelled") == 1)
        until_seen(lambda: server.sample("hortus_requests_in_flight") == 0)
