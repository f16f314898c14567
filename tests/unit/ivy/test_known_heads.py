"""A head that was read before says what it said then, however the bytes arrive."""

from __future__ import annotations

import random
from collections import deque

import pytest

from hortus.config import IvyConfig
from hortus.ivy.app import App
from hortus.ivy.exchange import Request
from hortus.ivy.http1 import HEADS, KNOWN_BYTES, Known, Reader
from hortus.metrics import Metrics

KEY = b"authorization: Bearer k\r\n"


def post(path: bytes = b"/v1/embeddings", body: bytes = b'{"input":"a"}', more: bytes = b"", key: bytes = KEY) -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: h\r\n%b%bcontent-length: %d\r\n\r\n%b" % (path, key, more, len(body), body)


class Forgetful(dict[bytes, Known]):
    """Remembers nothing: the parser reads every request."""

    def __setitem__(self, head: bytes, known: Known) -> None:
        pass


@pytest.fixture
def app() -> App:
    return App(IvyConfig(api_keys="k", max_body_bytes=1000), Metrics())


def told(r: Request) -> tuple[object, ...]:
    error = None if r.ended is None else (r.ended.code, r.ended.message)
    handler = getattr(r.handler, "__qualname__", None)
    return r.method, r.path, r.tail, r.headers, r.timeout_s, r.keep_alive, r.complete, r.body, error, handler, r.client


def read(app: App, chunks: list[bytes], *, forgetful: bool = False) -> tuple[list[tuple[object, ...]], list[str]]:
    """What a new connection makes of these bytes: (its requests, errors beside them)."""
    known = app.heads
    if forgetful:
        app.heads = Forgetful()
    requests: deque[Request] = deque()
    reader = Reader(app, requests, "10.0.0.1")
    errors = [error.message for chunk in chunks if (error := reader.feed(chunk)) is not None]
    reader.close()
    app.heads = known
    return [told(r) for r in requests], errors


def test_the_parser_is_spared(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: deque[Request] = deque()
    reader = Reader(app, requests, "")
    assert reader.feed(post()) is None
    assert len(app.heads) == 1
    monkeypatch.setattr(reader, "_parse", lambda data: pytest.fail("read again"))
    head, body = post(body=b'{"input":"b"}').split(b"\r\n\r\n")
    for chunks in ([post()], [head + b"\r\n\r\n", body], [head + b"\r\n\r\n" + body[:3], body[3:5], body[5:]]):
        for chunk in chunks:
            assert not (requests[-1].complete and reader.between is False)
            assert reader.feed(chunk) is None
        assert reader.between
        assert requests[-1].complete
    assert [r.body for r in requests] == [b'{"input":"a"}'] * 2 + [body] * 2
    assert len({id(r) for r in requests}) == 4


PARTS = [
    *[post()] * 6,
    post(body=b"{}"),
    post(body=b""),
    post(more=b"x-request-id: 7\r\n"),
    post(more=b"connection: keep-alive\r\n"),
    post(more=b"X-Hortus-Timeout-Ms: 50\r\n"),
    post(more=b"Expect: 100-continue\r\n"),
    post(more=b"connection: Upgrade\r\nupgrade: h2c\r\n"),
    post(more=b"connection: close\r\n"),
    post(more=b"content-length: 13\r\n"),
    post(key=b""),
    post(key=b"authorization: Bearer wrong\r\n"),
    post(path=b"/nowhere"),
    post(path=b"/v1/models"),
    post(body=b"x" * 2000),
    post(body=b"\r\n\r\n" + post()),
    b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n",
    b"GET /v1/models/x HTTP/1.1\r\nhost: h\r\n" + KEY + b"\r\n",
    b"POST /v1/embeddings HTTP/1.0\r\nconnection: keep-alive\r\n" + KEY + b"content-length: 2\r\n\r\n{}",
    b"POST /v1/embeddings HTTP/1.1\r\nhost: h\r\n" + KEY + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"POST /v1/embeddings HTTP/1.1\nhost: h\n" + KEY + b"content-length: 2\n\n{}",
    b"\r\n" + post(),
    b"PO",
    b"\x00\r\n\r\n",
    b"GET http://h/health HTTP/1.1\r\n\r\n",
]


@pytest.mark.parametrize("seed", range(40))
def test_as_the_parser_reads_it(app: App, seed: int) -> None:
    """Requests of all kinds one after another, on connections of one server, whole, in pieces and several at once."""
    rng = random.Random(seed)
    for _ in range(40):
        parts = rng.choices(PARTS, k=rng.randint(1, 6))
        if rng.random() < 0.5:
            chunks = parts
        else:
            whole = b"".join(parts)
            cuts = sorted(rng.randint(0, len(whole)) for _ in range(rng.randint(0, 5)))
            chunks = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True) if a < b]
        assert read(app, chunks) == read(app, chunks, forgetful=True), chunks
    assert all(b"\r\n\r\n" in head and known.path == "/v1/embeddings" for head, known in app.heads.items())


def test_what_is_remembered_is_bounded(app: App) -> None:
    for n in range(3 * HEADS):
        read(app, [post(more=b"x-n: %d\r\n" % n)])
        assert len(app.heads) <= HEADS
    long = post(more=b"x-long: %b\r\n" % (b"x" * KNOWN_BYTES))
    read(app, [long])
    assert max(map(len, app.heads)) <= KNOWN_BYTES


def test_what_is_refused_is_not_remembered(app: App) -> None:
    for bad in (post(key=b""), post(path=b"/nowhere"), post(body=b"x" * 2000), post(more=b"expect: 100-continue\r\n")):
        read(app, [bad])
    assert not app.heads
