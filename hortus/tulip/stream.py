"""One gateway's Encode call: asks to the scheduler, answers back.

A reader gives asks to the scheduler; a writer sends whatever has been answered since its last write began: the busier the
link, the more answers a message, the less a message costs each of them. Knows the messages and the scheduler. Does not know
what carries the messages.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections import deque

from hortus.errors import Cancelled, EngineError, RequestError
from hortus.protocol import wire
from hortus.protocol.streams import Stream
from hortus.protocol.wire import GOOD_MESSAGE_BYTES, MAX_MESSAGE_BYTES, Malformed, Replies
from hortus.tulip.entry import faults
from hortus.tulip.scheduler import Scheduler
from hortus.tulip.spans import Spans
from hortus.types import ModelInfo, Result

log = logging.getLogger(__name__)

_UNSENT_BYTES = MAX_MESSAGE_BYTES
"""A stream that has this much left to send is not read any further: a slow gateway holds up itself, and no memory."""


class GatewayStream:
    """run() until it ends, then close()."""

    def __init__(self, scheduler: Scheduler, info: ModelInfo, messages: Stream, spans: Spans | None = None) -> None:
        self._scheduler, self._info, self._messages, self._spans = scheduler, info, messages, spans
        self._max_rows = MAX_MESSAGE_BYTES // (4 * info.width)
        self._live: dict[int, asyncio.Future[Result]] = {}
        self._ready: deque[tuple[int, Result | RequestError]] = deque()
        self._unsent_bytes = 0
        self._pong = 0
        self._draining = False
        self._ended = False
        """The gateway sends no more."""
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._empty = asyncio.Event()

    async def run(self) -> None:
        """Until the gateway ends the stream (what is in is still answered), or it breaks."""
        reader = asyncio.ensure_future(self._read())
        writer = asyncio.ensure_future(self._write())
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_EXCEPTION)
            for task in (reader, writer):
                if task.done():
                    task.result()
        finally:
            reader.cancel()
            writer.cancel()
            await asyncio.wait((reader, writer))
            for task in (reader, writer):
                if not task.cancelled():
                    task.exception()  # the first one has been raised

    def close(self) -> None:
        """Drop what is still wanted: its gateway is gone."""
        live, self._live = self._live, {}
        for future in live.values():
            future.cancel()

    def say_draining(self) -> None:
        self._draining = True
        self._wake.set()

    async def flushed(self, timeout_s: float) -> None:
        """Wait until everything answered has been written, or for so long."""
        self._wake.set()
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            log.warning("a gateway does not read its answers; leaving it")

    async def _read(self) -> None:
        while True:
            data = await self._messages.read()
            if data is None:
                self._ended = True
                self._wake.set()
                return
            self._take(wire.read_asks(data))
            if not self._room.is_set():
                await self._room.wait()

    def _take(self, message: wire.Asks) -> None:
        now = time.monotonic()
        asks = message.asks
        for ask, fault in zip(asks, faults([a.batch for a in asks], self._info, self._max_rows), strict=True):
            if ask.number in self._live:
                raise Malformed(f"ask number {ask.number} is in use")
            deadline = None if math.isinf(ask.deadline_ms) else now + ask.deadline_ms / 1000
            try:
                if fault is not None:
                    raise fault
                future = self._scheduler.submit(ask.batch, deadline=deadline)
            except RequestError as e:
                self._answer(ask.number, e)
                if ask.trace and self._spans is not None:
                    self._spans.record(ask.trace, ask.batch, time.time_ns(), e)
                continue
            self._live[ask.number] = future
            future.add_done_callback(functools.partial(self._done, ask.number))
            if ask.trace and self._spans is not None:
                future.add_done_callback(functools.partial(self._traced, ask, time.time_ns()))
        for number in message.cancelled:
            if dropped := self._live.pop(number, None):
                dropped.cancel()
        if message.ping:
            self._pong = message.ping
            self._wake.set()

    def _done(self, number: int, future: asyncio.Future[Result]) -> None:
        if self._live.pop(number, None) is None or future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._answer(number, future.result())
        else:
            self._answer(number, error if isinstance(error, RequestError) else EngineError(repr(error)))

    def _traced(self, ask: wire.Ask, begin_ns: int, future: asyncio.Future[Result]) -> None:
        assert self._spans is not None, "only then is it called"
        error = Cancelled("nobody waits any more") if future.cancelled() else future.exception()
        self._spans.record(ask.trace, ask.batch, begin_ns, error or future.result())

    def _answer(self, number: int, answer: Result | RequestError) -> None:
        self._ready.append((number, answer))
        if isinstance(answer, Result):
            self._unsent_bytes += answer.rows.nbytes
            if self._unsent_bytes > _UNSENT_BYTES:
                self._room.clear()
        self._wake.set()

    async def _write(self) -> None:
        said_draining = False
        while True:
            if self._ready or self._pong or (self._draining and not said_draining):
                message, size = self._gather()
                said_draining = message.draining
                await self._messages.write(wire.pack_replies(message))
                self._unsent_bytes -= size
                if self._unsent_bytes <= _UNSENT_BYTES:
                    self._room.set()
                continue
            if self._ended and not self._live:
                return
            if self._draining and not self._live:
                self._empty.set()
            self._wake.clear()
            await self._wake.wait()

    def _gather(self) -> tuple[Replies, int]:
        """What goes into the next message, and the bytes of its rows."""
        message = Replies(pong=self._pong, draining=self._draining)
        self._pong = 0
        size = 0
        while self._ready and size < GOOD_MESSAGE_BYTES:
            number, answer = self._ready.popleft()
            if isinstance(answer, Result):
                size += answer.rows.nbytes
                message.answers.append((number, answer))
            else:
                message.failures.append((number, answer))
        return message, size
