"""One client's connection: its requests answered one at a time and in order.

A request is judged by its head, answered in a task of its own once its body is there (or at once when nobody wants the body),
and leaves in one write. What has arrived of the next ones waits, and then so does the client: reading stops. A client that
leaves cancels its request's task. An answer in pieces, too, waits for a client that reads slowly; it is the connection's last.
Knows a transport, time and tasks. Does not know HTTP's bytes, routes, ports or signals.
"""

from __future__ import annotations

import asyncio
import logging
import select
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol, cast

from hortus.errors import Cancelled, DeadlineExceeded, Draining, EngineError, RequestError
from hortus.ivy.exchange import Answer, Request, error_answer
from hortus.ivy.http1 import Judge, Reader, waits_for_100, written
from hortus.ivy.split import cut

log = logging.getLogger("hortus.ivy")

LOOK_S = 0.25
"""Between two looks whether a client has left whose further requests wait unread."""
KEEP_ALIVE_S = 75.0
"""Longer than the pools of common clients keep an idle connection, so that it is they who close it: a server that closes
first resets a request that is just being sent. A head may take as long to arrive."""
DISCARD_S = 10.0
"""Seconds for which the rest of a refused body is read and thrown away. Closing on a client that still sends would reset
the connection, and it would see that instead of the answer."""
STALL_S = 60.0
"""A client that takes nothing of its answer for so long is cut off."""
WRITE_BYTES = 512 * 1024
"""Of a large body, handed over before the event loop gets its turn."""
LAST_S = 1.0
"""The same for the last piece of an answer in pieces when the server is stopping."""


class Application(Judge, Protocol):
    """What a connection needs of App."""

    draining: bool

    async def answer(self, request: Request) -> Answer | None:
        """None when nobody is there to read it."""

    def refused(self, error: RequestError) -> Answer:
        """The answer to what is no request, counted."""


class Connection(asyncio.Protocol):
    """`connections` holds it while it is open; `closed` is done from then on."""

    def __init__(self, app: Application, connections: set[Connection]) -> None:
        self._app, self._connections = app, connections
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._requests: deque[Request] = deque()
        """The first is being received, worked on or answered; the others wait."""
        self._task: asyncio.Task[None] | None = None
        """Answers the first request."""
        self._entered = False
        """The task has begun: cancelled before, it would not run at all, and its request not be counted."""
        self._timer: asyncio.TimerHandle | None = None
        """Bounds the rest of the first request's body, wanted or not."""
        self._bad: RequestError | None = None
        """To be told once what came before has been answered: these bytes are not HTTP."""
        self._paused = False
        self._looking: asyncio.TimerHandle | None = None
        self._in_pieces = False
        """The first request's answer is being sent piece by piece."""
        self._in_body = False
        """Its body is being sent part by part."""
        self._full: asyncio.Future[None] | None = None
        """Done once the client has taken enough of what was written."""

    # The transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        peer = transport.get_extra_info("peername")
        self._reader = Reader(self._app, self._requests, str(peer[0]) if isinstance(peer, tuple) else "")
        self._since = self._loop.time()
        self._idle = self._loop.call_later(KEEP_ALIVE_S, self._check_idle)

    def data_received(self, data: bytes) -> None:
        if self._reader.between:
            self._since = self._loop.time()
        self._bad = self._reader.feed(data) or self._bad
        if self._requests:
            first = self._requests[0]
            if first.sent:
                self._end(first)
            else:
                self._advance()
            if len(self._requests) > 1 and not self._paused:
                self._paused = True
                self._transport.pause_reading()
                self._look()
        elif self._bad is not None:
            self._tell_bad(self._bad)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self.closed.set_result(None)
        self._idle.cancel()
        if self._looking is not None:
            self._looking.cancel()
        self._stop_timer()
        self._reader.close()
        if not self._requests:
            return
        for request in self._requests:
            request.end(Cancelled("the client went away"))
        first = self._requests[0]
        if self._task is None:
            self._start(first)  # to be counted
        elif self._entered:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._full = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._full is not None and not self._full.done():
            self._full.set_result(None)
        self._full = None

    # The server's calls

    def drain(self) -> None:
        """Close once what has begun is answered."""
        if not self._requests:
            self._transport.close()
        elif self._in_pieces and self._full is not None:  # it does not even read what it has
            self._transport.abort()

    def cut(self) -> None:
        """Time is up: what has begun is answered with Draining, or not at all when its answer is being sent."""
        first = self._requests[0] if self._requests else None
        if first is None or first.sent or self._in_pieces or self._in_body:
            self._transport.abort()
        elif self._task is not None and self._entered:
            self._task.cancel()
        else:
            first.end(Draining("this server shut down before the request had all arrived; send it again"))
            self._advance()

    def abort(self) -> None:
        self._transport.abort()

    # A request's life

    def _advance(self) -> None:
        """Take the first request on as far as what has arrived allows."""
        request = self._requests[0]
        if self._task is not None:
            return
        if request.complete or not request.takes_body:
            if self._timer is not None:
                self._stop_timer()
            self._start(request)
        elif self._timer is None:
            self._timer = self._loop.call_at(
                self._loop.time() + request.deadline - time.monotonic(), self._body_late, request
            )
            if waits_for_100(request):
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _start(self, request: Request) -> None:
        self._entered = False
        self._task = request.task = self._loop.create_task(self._respond(request))

    def _body_late(self, request: Request) -> None:
        self._timer = None
        request.end(
            DeadlineExceeded(
                f"the body had not all arrived after {request.timeout_s:g} s (--timeout-s, or the request's x-hortus-timeout-ms)"
            )
        )
        self._advance()

    async def _respond(self, request: Request) -> None:
        self._entered = True
        # A body that is answered unseen may never be sent, and then what comes next is not it.
        if not request.complete and waits_for_100(request):
            request.keep_alive = False
        try:
            try:
                answer = await self._app.answer(request)
            except Exception:
                log.exception("request %s failed: a fault in this server", request.name)
                answer = error_answer(EngineError("a fault in this server; its log tells more"))
            if self.closed.done():
                return
            if answer is None:  # the engine's side says that nobody waits; whoever does must not wait for ever
                self._transport.abort()
                return
            self._write(request, answer)
            if answer.pieces is not None and request.method != "HEAD":
                await self._write_pieces(request, answer.pieces)
                return
            if isinstance(answer.body, list) and request.method != "HEAD" and not await self._write_parts(answer.body):
                return
            if self._full is not None and not await self._taken():
                return
            request.sent = True
            self._end(request)
        except asyncio.CancelledError:
            # In the middle of its answer. A task that ends cancelled keeps the frames it came through, and they keep it.
            if not self.closed.done():
                raise
        finally:
            if self.closed.done():
                self._count_next()

    def _count_next(self) -> None:
        """The client has gone: what it sent behind is told and counted as what it left, one after another."""
        if self._requests:
            self._requests.popleft()
        if self._requests:
            self._requests[0].begin()
            self._start(self._requests[0])

    def _write(self, request: Request, answer: Answer) -> None:
        last = len(self._requests) < 2  # else those behind it are told as well that this server drains
        if answer.pieces is not None or (self._app.draining and last):
            request.keep_alive = False
        pieces = written(request, answer)
        if len(pieces) == 1:
            self._transport.write(pieces[0])
        else:
            self._transport.writelines(pieces)

    async def _write_parts(self, parts: list[bytes]) -> bool:
        """A large body, some of it at a time, as the client takes it; whether it has taken it. Written at once it would be
        copied, and encrypted, while everybody else waits."""
        self._in_body = True
        try:
            for lo, hi in cut([len(part) for part in parts], WRITE_BYTES, len(parts)):
                self._transport.writelines(parts[lo:hi])
                await asyncio.sleep(0)
                if self.closed.done() or (self._full is not None and not await self._taken()):
                    return False
            return True
        finally:
            self._in_body = False

    async def _write_pieces(self, request: Request, pieces: AsyncGenerator[bytes, None]) -> None:
        """The body of an answer, as it comes; then close. A client that leaves cancels this."""
        self._in_pieces = self._reader.ended = True
        while len(self._requests) > 1:  # no answer can follow; reading goes on, so that a client is seen to leave
            self._requests.pop()
        self._listen()
        self._transport.set_write_buffer_limits(0)  # `_full` then tells of anything that the client has not taken
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    self._transport.write(piece)
                    if self._full is not None and not await self._taken(LAST_S if self._app.draining else STALL_S):
                        return
        except Exception:
            log.exception("request %s failed in the middle of its answer: a fault in this server", request.name)
        self._requests.clear()
        self._transport.close()

    async def _taken(self, stall_s: float | None = None) -> bool:
        """Wait until the client has taken most of its answer, however slowly; whether it has."""
        stall_s = STALL_S if stall_s is None else stall_s
        left = self._transport.get_write_buffer_size()
        while (full := self._full) is not None:
            await asyncio.wait([full], timeout=stall_s)
            before, left = left, self._transport.get_write_buffer_size()
            if not full.done() and left >= before:
                log.info("a client took nothing of its answer for %g s: cut off", stall_s)
                self._transport.abort()
                return False
        return not self.closed.done()

    def _end(self, request: Request) -> None:
        """The first request has been answered; when the client has finished sending it too, go on to the next."""
        if not request.complete:
            if self._timer is None:
                self._timer = self._loop.call_later(DISCARD_S, self._transport.close)
            return
        if self._timer is not None:
            self._stop_timer()
        self._requests.popleft()
        self._task = None
        self._since = self._loop.time()
        if not request.keep_alive or (self._app.draining and not self._requests):
            self._reader.ended = True
            self._requests.clear()
            self._leave()
        elif self._requests:
            self._requests[0].begin()
            if len(self._requests) == 1 and not (self._app.draining and self._requests[0].complete):
                self._listen()
            self._advance()
        elif self._bad is not None:
            self._tell_bad(self._bad)

    def _look(self) -> None:
        """Whether the client has left, every so often while it is not read: what it sent last hides that from the loop."""
        if has_left(self._transport):
            self._transport.abort()
        else:
            self._looking = self._loop.call_later(LOOK_S, self._look)

    def _listen(self) -> None:
        if self._paused:
            self._paused = False
            if self._looking is not None:
                self._looking.cancel()
            self._transport.resume_reading()

    def _tell_bad(self, error: RequestError) -> None:
        """The last word on a connection; what the client still sends is thrown away, so that it can read it."""
        self._bad = None
        request = Request("", "", {}, 0.0, client="", keep_alive=False)
        self._write(request, self._app.refused(error))
        self._linger()

    def _leave(self) -> None:
        """Close, but not on what a client has sent and nobody has read: that would reset the connection before its answers."""
        if self._paused:
            self._listen()
            self._linger()
        else:
            self._transport.close()

    def _linger(self) -> None:
        """Say that nothing more comes, and throw away what does until the client closes, for a while."""
        self._timer = self._loop.call_later(DISCARD_S, self._transport.close)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def _check_idle(self) -> None:
        idle_s = self._loop.time() - self._since
        if not self._requests and idle_s >= KEEP_ALIVE_S:
            self._transport.close()
            return
        left_s = KEEP_ALIVE_S if self._requests else KEEP_ALIVE_S - idle_s
        self._idle = self._loop.call_later(left_s, self._check_idle)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def has_left(transport: asyncio.Transport) -> bool:
    """Whether the client has closed its side, whatever of it is still unread. Only Linux tells."""
    sock = transport.get_extra_info("socket")
    if sock is None or not hasattr(select, "POLLRDHUP"):
        return False
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))
