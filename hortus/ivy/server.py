"""The port: bound first, served until a signal, drained, closed.

Does not know HTTP, routes or models.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType
from typing import cast

from hortus.config import IvyConfig
from hortus.errors import Overloaded, StartError
from hortus.ivy.app import App
from hortus.ivy.connection import Connection
from hortus.ivy.exchange import Request
from hortus.ivy.http1 import written
from hortus.stopping import Patience

log = logging.getLogger("hortus.ivy")

Started = Callable[[str], Awaitable[None]]

BACKLOG = 2048
RESERVED_FILES = 128
"""Open files left for everything but connections: models, replicas, logs."""
SELDOM_S = 10.0
"""Between two lines of a log about the same mistake of clients."""
MOST_FILES = 2**20
"""Of a system that sets no limit."""


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
    tls = _tls(config)
    sock = bind(config.host, config.port, reuse_port=config.reuse_port)
    stop = asyncio.Event() if stop is None else stop
    loading = asyncio.create_task(_load(started, address_of(sock, "https" if tls else "http")))
    loading.add_done_callback(lambda task: stop.set() if task.cancelled() or task.exception() else None)
    connections: set[Connection] = set()
    door = Door(app, connections, room_for_connections())
    try:
        with _signals(stop, app.reload):
            server = await asyncio.get_running_loop().create_server(door, sock=sock, ssl=tls, backlog=BACKLOG)
            await stop.wait()
            if not (
                loading.done() and not loading.cancelled() and loading.exception()
            ):  # that is told by whoever runs this
                log.info("stopping: finishing %d requests, at most %g s", app.in_flight, config.drain_s)
            app.drain()
            loading.cancel()
            server.close()
            sock.close()
            await _drain(connections, config.drain_s)
        with contextlib.suppress(asyncio.CancelledError):
            await loading
    finally:
        loading.cancel()
        sock.close()
        app.close()


def room_for_connections() -> int:
    """How many this process has open files for, with its own limit raised as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    with contextlib.suppress(OSError, ValueError):  # a system may know better
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (MOST_FILES if soft == resource.RLIM_INFINITY else soft) - RESERVED_FILES)


class Seldom:
    """When to log what a client can do as often as it likes."""

    def __init__(self) -> None:
        self._said = float("-inf")
        self.since = 0
        """How often it happened without a line."""

    def now(self) -> bool:
        """It happened; whether it is time for a line."""
        if time.monotonic() - self._said < SELDOM_S:
            self.since += 1
            return False
        self._said = time.monotonic()
        return True


class Door:
    """Makes the connections. One more than there is room for is told so at once and closed: without this the system would close
    it without a word, and a server out of files could not even open its own."""

    def __init__(self, app: App, connections: set[Connection], room: int) -> None:
        self._app, self._connections, self._room = app, connections, room
        self._leaving: set[_Refusal] = set()
        self._seldom = Seldom()

    def __call__(self) -> asyncio.Protocol:
        """The protocol of the next connection."""
        if len(self._connections) < self._room:
            return Connection(self._app, self._connections)
        if self._seldom.now():
            log.warning(
                "%d connections are open, as many as there are open files for (ulimit -n): refusing more", self._room
            )
        return _Refusal(self._app, self._room, self._leaving)


class _Refusal(asyncio.Protocol):
    """A connection too many: one answer, whatever it asks, and a second to read it."""

    def __init__(self, app: App, room: int, leaving: set[_Refusal]) -> None:
        self._app, self._room, self._leaving = app, room, leaving

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        if len(self._leaving) >= RESERVED_FILES // 2:
            transport.abort()
            return
        self._leaving.add(self)
        error = Overloaded(f"this server has {self._room} connections, as many as its open files allow (ulimit -n)")
        request = Request("", "", {}, 0.0, client="", keep_alive=False)
        transport.writelines(written(request, self._app.refused(error)))
        if transport.can_write_eof():
            transport.write_eof()
            asyncio.get_running_loop().call_later(1.0, transport.close)
        else:
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leaving.discard(self)


async def _drain(connections: set[Connection], drain_s: float) -> None:
    """Close connections as their requests are answered; after drain_s answer those that are left, and give that a moment."""
    for step, wait_s in (Connection.drain, drain_s), (Connection.cut, 1.0), (Connection.abort, 1.0):
        for connection in tuple(connections):
            step(connection)
        if connections:
            await asyncio.wait([c.closed for c in connections], timeout=wait_s)


async def _load(started: Started | None, address: str) -> None:
    if started is not None:
        await started(address)


def _handshakes() -> type[ssl.SSLObject]:
    """TLS connections whose failed handshakes are told in the log, seldom: the event loop says nothing of them, and a client that
    speaks plain HTTP sees a closed connection, without a word."""
    seldom = Seldom()

    class Handshake(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as e:
                if seldom.now():
                    plain = e.reason == "HTTP_REQUEST"
                    log.warning(
                        "a client's TLS handshake failed: %s%s",
                        "it speaks plain HTTP to this HTTPS port (--tls-cert); its address must begin with https://"
                        if plain
                        else (e.reason or str(e)).replace("_", " ").lower(),
                        f" ({seldom.since} more since the last such line)" if seldom.since else "",
                    )
                    seldom.since = 0
                raise

    return Handshake


def _tls(config: IvyConfig) -> ssl.SSLContext | None:
    if config.tls_cert is None:
        if config.tls_key is not None:
            raise StartError("--tls-key needs --tls-cert, the certificate that it belongs to")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as e:
        raise StartError(f"--tls-cert {config.tls_cert}, --tls-key {config.tls_key}: {e}") from None
    context.sslobject_class = _handshakes()
    return context


@contextlib.contextmanager
def _signals(stop: asyncio.Event, reload: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop`; a later one (see stopping.py) ends the process at once, with the status shells expect.
    SIGHUP reloads."""
    loop, patience = asyncio.get_running_loop(), Patience()

    def handle(number: int, frame: FrameType | None) -> None:
        if patience.lost():
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
