"""The port: bound first, served until a signal, drained, closed. The one file that knows uvicorn.

Does not know routes or models.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType
from typing import Any, cast

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hortus.config import IvyConfig
from hortus.errors import StartError
from hortus.ivy.app import App

log = logging.getLogger("hortus.ivy")

Started = Callable[[str], Awaitable[None]]

BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Longer than the pools of common clients keep an idle connection, so that it is they who close it: a server that closes
first resets a request that is just being sent."""


def bind(host: str, port: int, *, reuse_port: bool = False, listen: bool = True) -> socket.socket:
    """A listening socket (or one that only holds the port); StartError when the address cannot be had. Port 0 takes a free one.

    reuse_port: other processes that say so too may listen on the same port; the kernel deals connections out.
    """
    if not 0 <= port <= 65535:
        raise StartError(f"--port {port}: ports are 0 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as e:
        raise StartError(f"--host {host} --port {port}: {e}") from None
    family, kind, proto, _, address = found[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        if listen:
            sock.listen(BACKLOG)
    except OSError as e:
        sock.close()
        reason = (e.strerror or str(e)).lower()
        raise StartError(
            f"cannot listen on {host} port {port}: {reason} (--host, --port; port 0 takes a free one)"
        ) from None
    sock.setblocking(False)
    return sock


def address_of(sock: socket.socket, scheme: str = "http") -> str:
    """http://HOST:PORT of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"{scheme}://{host}:{port}"


async def serve(
    app: App, config: IvyConfig, *, started: Started | None = None, stop: asyncio.Event | None = None
) -> None:
    """Open the port, await started(address) beside serving, and serve until SIGTERM, SIGINT or `stop`; then drain.

    started: loads the model and calls app.open. Its exception ends the server and is raised here; a signal cancels it.
    Draining: no new connections, 503 to new requests, requests in flight get config.drain_s seconds, those that are left
    then get 503. A second signal ends the process at once. StartError when the port cannot be had.
    """
    server = _server(app, config)
    sock = bind(config.host, config.port, reuse_port=config.reuse_port)
    stop = asyncio.Event() if stop is None else stop
    loading = asyncio.create_task(_load(started, address_of(sock, "https" if config.tls_cert else "http")))
    loading.add_done_callback(lambda task: stop.set() if task.cancelled() or task.exception() else None)
    try:
        with _signals(stop, app.reload):
            async with asyncio.TaskGroup() as group:
                group.create_task(server.serve(sockets=[sock]))
                await stop.wait()
                log.info("stopping: finishing %d requests, at most %g s", app.in_flight, config.drain_s)
                app.drain()
                loading.cancel()
                server.should_exit = True
            # Requests cut off by the end of drain_s have been cancelled; give their answers a moment to leave.
            if server.server_state.tasks:
                await asyncio.wait(set(server.server_state.tasks), timeout=1)
        with contextlib.suppress(asyncio.CancelledError):
            await loading
    finally:
        loading.cancel()
        sock.close()
        app.close()


async def _load(started: Started | None, address: str) -> None:
    if started is not None:
        await started(address)


class _Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with two changes.

    Offers to upgrade are declined by answering as usual. Java's HttpClient offers h2c with every request to a plain port; the
    parser takes such a request to end with its head, so that its body is lost and the connection with it. Here the head is
    read again without the offer, by a fresh parser, which then finds the body.

    And uvicorn's one own answer, to bytes that are not HTTP, gets the shape of all our errors.
    """

    _offer = False
    """The head being read offers an upgrade."""

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as stop:
                    if not self._offer:  # CONNECT: there is nothing to go on with
                        raise httptools.HttpParserError from None
                    data = self._head_without_offer() + data[stop.args[0] :]
                    self._offer = False
                    self.parser = httptools.HttpRequestParser(self)
        except httptools.HttpParserError:
            self.send_400_response("")

    def on_headers_complete(self) -> None:
        self._offer = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if not self._offer:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._offer:
            super().on_message_complete()

    def _head_without_offer(self) -> bytes:
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name not in (b"upgrade", b"connection")]
        if not self.parser.should_keep_alive():
            lines.append(b"connection: close")
        return b"\r\n".join([*lines, b"", b""])

    def send_400_response(self, msg: str) -> None:
        told = {
            "message": "not a valid HTTP request",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_input",
        }
        body = msgspec.json.encode({"error": told})
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: it raises the signal again at the end, and the exit would not be 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(app: App, config: IvyConfig) -> _Server:
    if config.tls_key is not None and config.tls_cert is None:
        raise StartError("--tls-key needs --tls-cert, the certificate that it belongs to")
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # a line a bad connection; ours says what matters
    settings = uvicorn.Config(
        cast(Any, app),
        http=_Protocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
    )
    try:
        settings.load()
    except (OSError, ssl.SSLError) as e:
        raise StartError(f"--tls-cert {config.tls_cert}, --tls-key {config.tls_key}: {e}") from None
    settings.timeout_graceful_shutdown = cast(int, config.drain_s)
    return _Server(settings)


@contextlib.contextmanager
def _signals(stop: asyncio.Event, reload: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop`; the second one ends the process at once, with the status shells expect. SIGHUP reloads."""
    loop = asyncio.get_running_loop()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            log.warning("second signal: exiting at once")
            os._exit(128 + number)
        loop.call_soon_threadsafe(stop.set)

    def hang_up(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(reload)

    handlers = {signal.SIGTERM: handle, signal.SIGINT: handle, signal.SIGHUP: hang_up}
    try:
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    except ValueError:  # not the main thread (tests, embedding): only `stop` ends it
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
