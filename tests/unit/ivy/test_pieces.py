"""Answers whose body comes in pieces: over a transport that is none, and over real sockets that read slowly or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from ivy_stubs import Client, Wire
from patience import PATIENCE_S, until

from hortus.ivy import connection
from hortus.ivy.connection import Connection
from hortus.ivy.exchange import Answer, Request

GET = b"GET /pieces HTTP/1.1\r\n\r\n"


class Source:
    """Pieces that a test hands out one by one; knows whether somebody is still listening."""

    def __init__(self, client: Client) -> None:
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.begun = self.ended = 0
        client.app._routes["/pieces"] = {"GET": self.answer}

    async def answer(self, request: Request) -> Answer:
        return Answer(b"", content_type=b"text/plain", pieces=self._pieces())

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        self.begun += 1
        try:
            while (piece := await self.queue.get()) is not None:
                if piece == b"fault":
                    raise RuntimeError("on purpose")
                yield piece
        finally:
            self.ended += 1


class Stream(Wire):
    """A transport that tells the connection to wait whenever the test says so."""

    full, reading = False, True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high

    def write(self, data: bytes) -> None:
        super().write(data)
        if self.full:
            self.connection.pause_writing()

    def get_write_buffer_size(self) -> int:
        return 10 if self.full else 0


@pytest.fixture
def source(client) -> Source:
    return Source(client)


async def test_pieces_go_out_as_they_come_and_the_connection_ends_with_them(client, source):
    wire = Stream(client.app)
    wire.feed(GET + GET)
    await until(lambda: source.begun)
    head = bytes(wire.written).lower()
    assert head.startswith(b"http/1.1 200 ")
    assert b"content-length" not in head
    assert b"connection: close" in head
    assert b"x-request-id" in head
    assert wire.reading  # else nobody would see the client leave
    assert client.app.in_flight == 0  # watching is no work
    source.queue.put_nowait(b"one")
    await until(lambda: wire.written.endswith(b"\r\n\r\none"))
    wire.feed(b"whatever a client may still say")
    for piece in (b"two", None):
        source.queue.put_nowait(piece)
    await until(lambda: wire.lost)
    assert wire.written.endswith(b"onetwo")
    assert (source.begun, source.ended) == (1, 1)  # the second request had no connection to be answered on


async def test_head_has_no_pieces_and_a_fault_ends_them(client, source, caplog):
    wire = Stream(client.app)
    wire.feed(GET.replace(b"GET", b"HEAD"))
    await until(lambda: wire.lost)
    assert wire.written.endswith(b"\r\n\r\n")
    assert not source.begun
    wire = Stream(client.app)
    wire.feed(GET)
    source.queue.put_nowait(b"fault")
    await until(lambda: wire.lost)
    assert "in the middle of its answer" in caplog.text


async def test_a_client_that_leaves_ends_the_source(client, source):
    for held in (False, True):
        wire = Stream(client.app)
        wire.feed(GET)
        await until(lambda: source.begun > source.ended)
        if held:
            wire.full = True
            source.queue.put_nowait(b"x")
            await until(lambda w=wire: w.connection._full is not None)
        wire.close()
        await until(lambda: source.begun == source.ended)


async def test_a_slow_reader_is_waited_for_and_one_that_reads_nothing_is_cut_off(client, source, monkeypatch):
    monkeypatch.setattr(connection, "STALL_S", 0.05)
    wire = Stream(client.app)
    wire.feed(GET)
    await until(lambda: source.begun)
    assert wire.high == 0
    wire.full = True
    source.queue.put_nowait(b"one")
    await until(lambda: wire.connection._full is not None)
    source.queue.put_nowait(b"two")
    wire.full = False
    wire.connection.resume_writing()
    await until(lambda: wire.written.endswith(b"onetwo"))
    wire.full = True
    source.queue.put_nowait(b"three")
    await asyncio.wait_for(wire.connection.closed, PATIENCE_S)
    assert source.ended == 1


@pytest.mark.parametrize("reads", [True, False])
async def test_a_stopping_server_does_not_wait_for_a_client_that_does_not_read(client, source, monkeypatch, reads):
    monkeypatch.setattr(connection, "LAST_S", 0.05)
    wire = Stream(client.app)
    wire.feed(GET)
    await until(lambda: source.begun)
    if not reads:  # already before, or from the last piece on
        wire.full = True
        source.queue.put_nowait(b"x")
        await until(lambda: wire.connection._full is not None)
    client.app.drain()
    wire.connection.drain()
    assert wire.lost == (not reads)
    if reads:
        wire.full = True
        source.queue.put_nowait(b"last")
        await asyncio.wait_for(wire.connection.closed, PATIENCE_S)
        assert wire.written.endswith(b"last")


async def test_a_source_that_does_not_end_is_cut_with_the_rest(client, source):
    wire = Stream(client.app)
    wire.feed(GET)
    await until(lambda: source.begun)
    client.app.drain()
    wire.connection.drain()
    assert not wire.lost
    wire.connection.cut()
    assert wire.lost
    await until(lambda: source.ended)


@contextlib.asynccontextmanager
async def listening(app) -> AsyncIterator[tuple[int, set[Connection]]]:
    connections: set[Connection] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(app, connections), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], connections
    finally:
        server.close()
        for open_one in tuple(connections):
            open_one.abort()
            await open_one.closed


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_over_a_real_socket(client, source, version):
    async with listening(client.app) as (port, connections):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /pieces HTTP/%b\r\n\r\n" % version)
        await reader.readuntil(b"\r\n\r\n")
        source.queue.put_nowait(b"a" * 1_000_000)
        assert len(await reader.readexactly(1_000_000)) == 1_000_000
        source.queue.put_nowait(None)
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        await until(lambda: not connections)


async def test_a_real_socket_that_does_not_read_holds_up_its_own_source_only(client, source):
    async with listening(client.app) as (port, connections):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(GET)
            await until(lambda: source.begun)
            for _ in range(20):
                source.queue.put_nowait(b"a" * 1_000_000)
            await until(lambda: any(c._full is not None for c in connections))
            assert source.queue.qsize() > 0  # nothing piles up in memory
        await until(lambda: source.ended)
        await until(lambda: not connections)
