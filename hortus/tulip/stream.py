"""One gateway's Encode call: asks to the scheduler, answers back.

Each message's asks go to the scheduler at once, and a message goes back with whatever has been answered since the last: the
busier the link, the more answers a message, the less a message costs each of them. Knows the messages and the scheduler. Does
not know what carries the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque

from hortus.errors import Cancelled, RequestError
from hortus.protocol import wire
from hortus.protocol.streams import Stream
from hortus.protocol.wire import GOOD_MESSAGE_BYTES, MAX_MESSAGE_BYTES, Malformed, Replies
from hortus.tulip.entry import faults
from hortus.tulip.scheduler import Asked, Scheduler
from hortus.tulip.spans import Spans
from hortus.types import ModelInfo, Result

log = logging.getLogger(__name__)

_UNSENT_BYTES = MAX_MESSAGE_BYTES
"""A stream that has this much left to send is not read any further: a slow gateway holds up itself, and no memory."""


_FAILURE_BYTES = 512
"""What a failure takes, about, beside its words."""


def _size(answer: Result | RequestError) -> int:
    return answer.rows.nbytes if isinstance(answer, Result) else _FAILURE_BYTES + len(answer.message)


class _Over(Exception):
    """The gateway sends no more, and all that it sent is answered."""


class GatewayStream:
    """run() until it ends, then close()."""

    def __init__(
        self, scheduler: Scheduler, info: ModelInfo, messages: Stream, spans: Spans | None = None, types: int = 0
    ) -> None:
        """types: see entry.faults."""
        self._scheduler, self._info, self._messages, self._spans = scheduler, info, messages, spans
        self._types = types
        self._max_rows = MAX_MESSAGE_BYTES // (4 * info.width)
        self._live: dict[int, Asked] = {}
        """Asks without an answer, by number."""
        self._traced: dict[int, tuple[wire.Ask, int]] = {}
        """Of these, those that are part of a trace, and when each came (time.time_ns())."""
        self._ready: deque[tuple[int, Result | RequestError]] = deque()
        self._unsent_bytes = self._sending_bytes = 0
        """Of answers that have not been sent; of these, in the message being sent."""
        self._held = False
        """The gateway is not read any further."""
        self._pong = 0
        self._draining = self._said_draining = False
        self._ended = False
        """The gateway sends no more."""
        self._empty = asyncio.Event()

    async def run(self) -> None:
        """Until the gateway ends the stream (what is in is still answered), or it breaks."""
        with contextlib.suppress(_Over):
            await self._messages.run(self._take, self._following)

    def close(self) -> None:
        """Drop what is still wanted: its gateway is gone."""
        while self._live:
            self._drop(next(iter(self._live)))

    def say_draining(self) -> None:
        self._draining = True
        self._messages.wake()

    async def flushed(self, timeout_s: float) -> None:
        """Wait until everything answered has been written, or for so long."""
        self._messages.wake()
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            log.warning("a gateway does not read its answers; leaving it")

    def _take(self, data: bytes | None) -> None:
        """A message of the gateway's."""
        if data is None:
            self._ended = True
            self._messages.wake()
            return
        message = wire.read_asks(data)
        now = time.monotonic()
        asks = message.asks
        found = faults([a.batch for a in asks], self._info, self._max_rows, self._types)
        for ask, fault in zip(asks, found, strict=True):
            number = ask.number
            if number in self._live:
                raise Malformed(f"ask number {number} is in use")
            if ask.trace and self._spans is not None:
                self._traced[number] = ask, time.time_ns()
            deadline = None if ask.deadline_ms == math.inf else now + ask.deadline_ms / 1000
            try:
                if fault is not None:
                    raise fault
                self._live[number] = self._scheduler.submit(ask.batch, deadline, self._answered, number)
            except RequestError as e:
                self._answered(number, e)
        for number in message.cancelled:
            if number in self._live:
                self._drop(number)
        if message.ping:
            self._pong = message.ping
            self._messages.wake()

    def _drop(self, number: int) -> None:
        self._scheduler.cancel(self._live.pop(number))
        self._trace(number, Cancelled("nobody waits any more"))

    def _answered(self, number: int, answer: Result | RequestError) -> None:
        self._live.pop(number, None)
        if self._traced:
            self._trace(number, answer)
        self._ready.append((number, answer))
        self._unsent_bytes += _size(answer)
        if self._unsent_bytes > _UNSENT_BYTES and not self._held:
            self._held = True
            self._messages.hold()
        self._messages.wake()

    def _trace(self, number: int, answer: Result | RequestError) -> None:
        if number in self._traced and self._spans is not None:
            ask, begin_ns = self._traced.pop(number)
            self._spans.record(ask.trace, ask.batch, begin_ns, answer)

    def _following(self) -> bytes | None:
        """The next message to the gateway, once the one before has been sent."""
        self._unsent_bytes -= self._sending_bytes
        self._sending_bytes = 0
        if self._held and self._unsent_bytes <= _UNSENT_BYTES:
            self._held = False
            self._messages.release()
        if self._ready or self._pong or self._draining > self._said_draining:
            return wire.pack_replies(self._gather())
        if self._ended and not self._live:
            raise _Over
        if self._draining and not self._live:
            self._empty.set()
        return None

    def _gather(self) -> Replies:
        message = Replies(pong=self._pong, draining=self._draining)
        self._pong, self._said_draining = 0, self._draining
        while self._ready and self._sending_bytes < GOOD_MESSAGE_BYTES:
            number, answer = self._ready.popleft()
            self._sending_bytes += _size(answer)
            if isinstance(answer, Result):
                message.answers.append((number, answer))
            else:
                message.failures.append((number, answer))
        return message
