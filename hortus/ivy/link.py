"""One replica as a gateway sees it: a connection that is made again whenever it breaks, and one stream over it.

Knows gRPC and the protocol. Does not know the other replicas, or what becomes of a request that it loses.

A message takes whatever has been asked since the last. Pings tell a replica that is busy from one that is
stopped: they are answered however long a step takes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from hortus import traces
from hortus.config import LinkConfig
from hortus.errors import DeadlineExceeded, EngineError, HortusError, RequestError
from hortus.ivy.address import Target
from hortus.metrics import Metrics
from hortus.protocol import wire
from hortus.protocol.credentials import channel, client_credentials, shown
from hortus.protocol.streams import GrpcStream, Stream, connect_local
from hortus.protocol.wire import GOOD_MESSAGE_BYTES, Ask, Asks, Description
from hortus.types import Result, TokenBatch

log = logging.getLogger(__name__)

CONNECT_S = 5.0
"""For connecting and asking what the replica serves."""
PING_S = 1.0
"""Between pings; a quarter of --silence-s where that is shorter."""
_LATE_S = 0.25
"""A replica answers a deadline itself. When nothing has come by this much later, we do."""
_RETRY_S = (0.05, 0.5)
"""First and longest pause before connecting again; it doubles in between."""


class Lost(Exception):
    """The replica went away with the request: whether it ran there is not known, no answer will come."""


class Refused(HortusError):
    """The replica must not be used; the message says why."""


class Link:
    """See the module. All methods belong to one event loop."""

    def __init__(
        self, target: Target, config: LinkConfig, metrics: Metrics, accept: Callable[[Description], None]
    ) -> None:
        """accept: raises Refused for a replica that must not be used; called at every connection. StartError when the
        --link-* flags are wrong."""
        self._credentials = client_credentials(config)
        self.target = target
        self.outstanding = 0
        """Tokens sent and not answered."""
        self.up_since = 0.0
        """time.monotonic() of the latest connection."""
        self.draining = False
        """It finishes what it has and takes nothing new; or nobody wants it any more (retire)."""
        self.rests_until = 0.0
        """It said that its engine does not answer: leave it alone until then, if there is another."""
        self.why = "not connected yet"
        """Why it is not up; of one that is, why it was lost the last time."""
        self.losses, self.lost_at = 0, 0.0
        """How often it was up and broke, and time.monotonic() of the last."""
        self.up = False
        self._config, self._metrics, self._accept = config, metrics, accept
        self._waiting: dict[int, tuple[asyncio.Future[Result], float | None, int]] = {}
        """By number: who waits, until when, for how many rows."""
        self._unsent: deque[tuple[int, TokenBatch, float | None, bytes]] = deque()
        self._cancelled: list[int] = []
        self._numbers = itertools.count(1)
        self._ping = 0
        self._heard = 0.0
        self._said_draining = False
        self._retired = False
        self._stream: Stream | None = None
        """While it is up."""
        self._task: asyncio.Task[None] | None = None
        self._channel: Any = None

    def __repr__(self) -> str:
        return self.target.address

    def start(self) -> None:
        """Connect, and keep connecting."""
        self._task = asyncio.create_task(self._run())

    def retire(self) -> None:
        """Take nothing new; close when nothing is outstanding any more."""
        self.draining = self._retired = True
        if not self._waiting and self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Break the link. What is outstanding is Lost."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def encode(self, batch: TokenBatch, deadline: float | None) -> Result:
        """Rows from this replica. Raises Lost, or the RequestError that it answered. Only while `up`."""
        number, tokens = next(self._numbers), len(batch.ids)
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future, deadline, batch.rows
        self._unsent.append((number, batch, deadline, traces.current.get()))
        self.outstanding += tokens
        self._wake()
        try:
            return await future
        finally:
            self.outstanding -= tokens
            if self._waiting.pop(number, None) is not None:  # no answer has come: cancelled, or its deadline passed
                self._cancelled.append(number)
                self._wake()
            if self._retired and not self._waiting and self._task is not None:
                self._task.cancel()

    async def fetch(self, path: str) -> bytes:
        """One of the replica's small files. Only while `up`; Lost when it breaks."""
        call = self._channel.unary_stream(wire.FETCH)(wire.pack_fetch(path), metadata=shown(self._config), timeout=60)
        try:
            return b"".join([wire.read_piece(data) async for data in call])
        except grpc.RpcError as e:
            raise Lost(_reason(e)) from None

    # The connection

    async def _run(self) -> None:
        pause, longest = _RETRY_S
        while True:
            begin = time.monotonic()
            try:
                await self._session()
            except asyncio.CancelledError:
                self._lose("the gateway has let it go")
                raise
            except Exception as e:  # noqa: BLE001 - gRPC has many ways to say that a connection broke; the next is made
                self._broken(_reason(e))
            if time.monotonic() - begin > longest:
                pause = _RETRY_S[0]  # it held for a while
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))
            pause = min(2 * pause, longest)

    async def _session(self) -> None:
        """One connection, from describing to breaking. Always raises."""
        metadata = shown(self._config)
        async with channel(self.target.address, self.target.host, self._credentials) as connection:
            describe = connection.unary_unary(wire.DESCRIBE)
            data = await describe(wire.pack_describe(), metadata=metadata, timeout=CONNECT_S)
            told = wire.read_description(data)
            self._accept(told)
            stream = self._stream = await self._open(connection, told)
            self._channel = connection
            self._unsent.clear()
            self._cancelled.clear()
            self._heard = self.up_since = time.monotonic()
            self._said_draining = told.draining
            self.draining = told.draining or self._retired
            self.rests_until, self.up = 0.0, True
            log.info("replica %s is up%s", self, " (draining)" if self.draining else "")
            tasks = [asyncio.ensure_future(part) for part in (stream.run(self._take, self._following), self._watch())]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
            finally:
                self.up, self._stream = False, None
                stream.close()
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                for task in tasks:
                    if not task.cancelled():
                        task.exception()  # the first one has been raised

    async def _open(self, connection: Any, told: Description) -> Stream:
        """The stream for Encode: beside gRPC where the replica offers that and we reach it, else over gRPC."""
        if told.stream_socket and self.target.address.startswith("unix:"):
            # By its name beside the socket that we came through: the replica may know the folder by another path than we do,
            # and under the path that it tells another replica may listen here.
            here = Path(self.target.address.removeprefix("unix:")).with_name(Path(told.stream_socket).name)
            try:
                return await connect_local(str(here))
            except OSError as e:
                log.warning("replica %s: %s cannot be reached (%s); taking gRPC", self, here, e)
        return GrpcStream(connection.stream_stream(wire.ENCODE)(metadata=shown(self._config)))

    def _broken(self, why: str) -> None:
        if self.up_since:
            self.losses, self.lost_at = self.losses + 1, time.monotonic()
            self._metrics.replica_losses.inc()
            log.warning("replica %s is lost with %d requests: %s", self, len(self._waiting), why)
        elif why != self.why:
            log.info("replica %s cannot be used yet: %s", self, why)
        self._lose(why)

    def _lose(self, why: str) -> None:
        waiting, self._waiting = self._waiting, {}
        self.why, self.up, self.up_since = why, False, 0.0
        for future, _, _ in waiting.values():
            if not future.done():
                future.set_exception(Lost(why))

    def _wake(self) -> None:
        if self._stream is not None:
            self._stream.wake()

    def _take(self, data: bytes | None) -> None:
        """A message of the replica's."""
        if data is None:
            raise Refused("it ended the stream")
        self._heard = time.monotonic()
        message = wire.read_replies(data)
        if message.draining and not self._said_draining:
            self._said_draining = self.draining = True
            log.info("replica %s is draining", self)
        for number, result in message.answers:
            found = self._waiting.pop(number, None)
            if found is None or found[0].done():
                continue
            if found[2] == len(result.rows):
                found[0].set_result(result)
            else:
                found[0].set_exception(EngineError(f"replica {self} answered {len(result.rows)} rows, not {found[2]}"))
        for number, error in message.failures:
            found = self._waiting.pop(number, None)
            if found is not None and not found[0].done():
                found[0].set_exception(error)

    def _following(self) -> bytes | None:
        """The next message to the replica."""
        return wire.pack_asks(self._gather()) if self._unsent or self._cancelled or self._ping else None

    def _gather(self) -> Asks:
        message = Asks([], self._cancelled, self._ping)
        self._cancelled, self._ping = [], 0
        size, now = 0, time.monotonic()
        while self._unsent and size < GOOD_MESSAGE_BYTES:
            number, batch, deadline, trace = self._unsent.popleft()
            if number in self._waiting:
                size += wire.ask_bytes(batch)
                left_ms = float("inf") if deadline is None else (deadline - now) * 1000
                message.asks.append(Ask(number, batch, left_ms, trace))
        return message

    async def _watch(self) -> None:
        """Ping, and find what waits for nothing."""
        pings = itertools.count(1)
        every = min(PING_S, self._config.silence_s / 4)
        before = time.monotonic()
        while True:
            self._ping = next(pings)
            self._wake()
            await asyncio.sleep(every)
            now = time.monotonic()
            if now - before > 2 * every:
                self._heard = now  # it was we who were held up
            before = now
            if now - self._heard > self._config.silence_s:
                raise Refused(f"silent for {now - self._heard:.1f} s (--silence-s)")
            for number, (future, deadline, _) in list(self._waiting.items()):
                if deadline is not None and deadline + _LATE_S < now and not future.done():
                    future.set_exception(DeadlineExceeded("no answer from the replica by the deadline (--timeout-s)"))
                    self._waiting.pop(number)
                    self._cancelled.append(number)


_HINTS = (
    ("WRONG_VERSION_NUMBER", "it speaks no TLS, which --link-ca asks for"),
    ("Hostname Verification", "its certificate is not for the name in --replica"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not of the authority in --link-ca"),
    (
        "Socket closed",
        "it may want TLS (--link-ca) with a certificate of its own authority's (--link-cert, --link-key)",
    ),
    ("Failed parsing HTTP/2", "what listens there is no `hortus tulip`"),
)
"""What gRPC says of a connection that cannot be made, and what that means in our flags."""


def _reason(error: BaseException) -> str:
    if not isinstance(error, grpc.aio.AioRpcError):
        return str(error) or type(error).__name__
    said = str(error.details() or error.code().name)
    if "failed to connect" not in said:
        return said
    return next((f"{hint}: {said}" for sign, hint in _HINTS if sign in said), said)


def told_of_itself(error: RequestError) -> bool:
    """Whether a replica's answer is about the replica rather than about the request: another one may do better."""
    return error.code in ("draining", "not_ready")
