"""What a request needed is free once it has been answered or its client has gone, by counting references alone.

The cyclic collector runs seldom on a busy server, and what it has to find stays until then: a client that sends large bodies
again and again would fill the memory with them. Here it is off.
"""

from __future__ import annotations

import gc
import json
import logging
import socket
import struct
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from types import CoroutineType, FrameType, TracebackType

import pytest
from gateway_server import Server, read_answer, running
from patience import until_seen

from hortus.config import TulipConfig
from hortus.ivy.connection import Connection
from hortus.ivy.exchange import PIECE_BYTES, Answer, Request
from hortus.ivy.http1 import Reader
from hortus.tulip.fake import FakeEngine
from hortus.tulip.scheduler import Asked
from hortus.types import TokenBatch

PER_REQUEST = (
    Request,
    Answer,
    Asked,
    TokenBatch,
    BaseException,
    FrameType,
    TracebackType,
    CoroutineType,
    Connection,
    Reader,
)
"""What must not wait for the collector: each holds a request's bytes, texts, ids or rows, or may."""

LONG = ["some words " * 200] * 40
"""Read in threads, and of several chunks."""


def post(route: str = "/v1/embeddings", headers: str = "", **body: object) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {route} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {len(data)}\r\n\r\n".encode() + data


def embed(headers: str = "", **more: object) -> bytes:
    return post(headers=headers, **{"model": "mini", "input": "a", **more})


@pytest.fixture(scope="module", autouse=True)
def _only_what_is_new() -> Iterator[None]:
    """The collector need not walk what was there before: it takes a tenth of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def counted() -> Iterator[None]:
    """Nothing that a request leaves may be for the collector to find."""
    gc.collect()
    gc.disable()
    logging.disable()  # pytest keeps what is logged
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = Counter(type(x).__qualname__ for x in gc.garbage if isinstance(x, PER_REQUEST))
        frames = [x.f_code.co_qualname for x in gc.garbage if isinstance(x, FrameType)]
        errors = [repr(x)[:100] for x in gc.garbage if isinstance(x, BaseException)]
        assert not left, (left, frames, errors)
    finally:
        logging.disable(logging.NOTSET)
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.collect()


PATHS = {
    "in process": lambda where: None,
    "TLS": lambda where: None,
    "beside gRPC": lambda where: f"unix:{where}/t",
    "gRPC": lambda where: "127.0.0.1:0",
}


@pytest.fixture(scope="module", params=PATHS)
def server(request, tmp_path_factory, pair) -> Iterator[Server]:
    """Its engine takes a step of 16 sequences at most, and is held or made to fail by tests."""
    where = tmp_path_factory.mktemp("m")
    engine = FakeEngine(name="mini", max_tokens=256, batch_tokens=1024)
    tulip = TulipConfig(max_queue_tokens=20_000)
    tls = dict(zip(("tls_cert", "tls_key"), pair, strict=True)) if request.param == "TLS" else {}
    with running(engine, tulip, listen=PATHS[request.param](where), max_body_bytes=200_000, **tls) as server:
        server.raw(embed())
        yield server


REFUSED = {
    "json": (embed()[:-1] + b"x", 400),
    "field": (embed(nothing=1), 400),
    "value": (embed(encoding_format="none"), 400),
    "model": (embed(model="other"), 404),
    "prompt": (embed(prompt_name="none"), 400),
    "ids": (embed(input=[[5], [10**9]]), 400),
    "too long": (embed(input=["a " * 500] * 1), 400),
    "too long, in threads": (embed(input=["a " * 1000] * 30), 400),
    "overloaded": (embed(input=[[5] * 250] * 3), 429),
    "too large": (embed(input="a" * 300_000), 413),
    "route": (post("/none", x="y" * 1000), 404),
    "method": (post("/health", x="y" * 1000), 405),
    "kind": (post("/predict", inputs="a"), 424),
    "late": (embed("x-hortus-timeout-ms: 30\r\n"), 504),
    "late chunks": (embed("x-hortus-timeout-ms: 30\r\n", input=LONG, truncate=True), 504),
    "not finite": (embed(input=[[7]]), 500),
    "engine": (embed(input=[[6]]), 500),
    "engine, chunks": (embed(input=[[5] * 250] * 15 + [[6] * 250], truncate=True), 500),
    "answered": (embed(), 200),
    "answered chunks": (embed(input=LONG, truncate=True), 200),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_answered(server, counted, kind):
    data, status = REFUSED[kind]
    server.engine.nan_id, server.engine.fail_id = 7, 6
    if status == 504:
        server.engine.hold()
    busy = filled(server) if status == 429 else []
    with server.connect() as sock:
        for _ in range(2):
            sock.sendall(data)
            assert read_answer(sock)[0] == status
        for other in busy:
            other.close()
        settle(server)


def filled(server: Server) -> list[socket.socket]:
    """Clients that wait for a held engine, so many that one more is refused. One after another: of those that come at once the
    queue takes fewer, and then has room as soon as two steps have left it."""
    server.engine.hold()
    refused = lambda: server.sample("hortus_requests_total", code="overloaded")  # noqa: E731
    before, busy = refused(), []
    while refused() == before:
        busy.append(server.connect())
        busy[-1].sendall(embed(input=[[5] * 250] * 3))
        until_seen(lambda: refused() > before or server.app.in_flight == len(busy))
    return busy


def settle(server: Server) -> None:
    server.engine.release()
    until_seen(lambda: not server.app.in_flight)
    until_seen(lambda: not server.sample("hortus_batches_in_flight"))
    until_seen(lambda: not alive(), 5)


def alive() -> list[object]:
    """Requests that have not ended, and what they hold."""
    return [x for x in gc.get_objects() if isinstance(x, (Request, Asked))]


LEAVING = {
    "in its head": embed()[:30],
    "in its body": embed(input="a" * 50_000)[:-9],
    "in work": embed(),
    "in work, chunks": embed(input=LONG, truncate=True),
    "behind another": embed() * 3,
    "behind another, in its body": embed() + embed(input="a" * 9_000)[:-9],
    "behind another, in its head": embed() + embed()[:30],
    "in its answer": embed(input=[[5]] * 2_000),
    "in pieces": b"GET /watch HTTP/1.1\r\nhost: x\r\n\r\n",
}


@pytest.mark.parametrize("kind", LEAVING)
def test_left(server, counted, kind):
    before = server.sample("hortus_requests_total", code="cancelled"), server.sample("hortus_requests_total", code="ok")
    if "work" in kind or "behind" in kind:
        server.engine.hold()
    steps = server.engine.steps
    sock = server.connect()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.sendall(LEAVING[kind])
    if "work" in kind or "behind" in kind:
        until_seen(lambda: server.engine.steps > steps)
    elif "answer" in kind or "pieces" in kind:
        assert sock.recv(100)
    if server.linked:  # one way to leave, or the other
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    if "behind" in kind:
        until_seen(lambda: not server.app.in_flight, 10)  # while the engine is held
        gone = 1 if "head" in kind else 2 if "body" in kind else 3
        until_seen(lambda: server.sample("hortus_requests_total", code="cancelled") == before[0] + gone)
        assert server.sample("hortus_requests_total", code="ok") == before[1]
    settle(server)


@pytest.mark.parametrize("status", [504, 413])
def test_what_came_of_a_refused_body_is_let_go_while_its_client_still_dawdles(server, status):
    with server.connect() as sock:
        head = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\n"
        if status == 504:
            sock.sendall(head + b"x-hortus-timeout-ms: 150\r\ncontent-length: 190000\r\n\r\n" + b"x" * 150_000)
        else:
            sock.sendall(head + b"transfer-encoding: chunked\r\n\r\n40000\r\n" + b"x" * 210_000)
        assert read_answer(sock)[0] == status
        held = [(x.complete, x.body, sum(map(len, x._parts))) for x in alive() if isinstance(x, Request)]
        assert held == [(False, b"", 0)]
    settle(server)


@pytest.mark.parametrize("size", [1, 2, 600, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1])
def test_a_body_takes_its_own_size_however_small_its_parts(size):
    """A chunk of two bytes would be an object of 35, and a place in a list."""
    total = 60_000 * size if size < 3 else 2_000_000
    whole = bytes(range(256)) * (total // 256)
    parts = (whole[at : at + size] for at in range(0, len(whole), size))
    request = Request("POST", "", {}, 1.0, client="", keep_alive=True)
    tracemalloc.start()
    try:
        for part in parts:
            request.take(part, len(whole))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.2 * len(whole) + PIECE_BYTES
    request.finish()
    assert request.body == whole
    assert isinstance(request.body, bytes)
    request.take(b"x", len(whole))
    assert request.ended is not None
