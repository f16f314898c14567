"""The two ways that Encode's messages travel: gRPC, and a plain Unix socket between processes of one machine.

Both carry the same bytes. A gRPC message costs its two ends about 0.4 ms between them, most of it in gRPC's own threads; on
one machine a length and the message through a socket of the event loop do the same, and there no task waits for either end:
what has arrived is handed on at once. Does not know what the messages say.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, cast

import grpc

from hortus.protocol.wire import MAX_MESSAGE_BYTES, Malformed

_LENGTH = struct.Struct("<I")
_BUFFER_BYTES = 2**20

Taken = Callable[[bytes | None], None]
"""Is given each message that arrives, and None when the other side has ended its half."""
Next = Callable[[], bytes | None]
"""The next message to send; None while there is none."""


class Stream(Protocol):
    """Messages both ways. What is to be sent is asked for when it can be sent, so that what gathers meanwhile goes together."""

    async def run(self, taken: Taken, following: Next) -> None:
        """Carry messages. Only ends by raising: what either of the two raised, or whatever a broken link raises."""

    def wake(self) -> None:
        """There may be something to send: `following` is asked, soon and until it has nothing."""

    def hold(self) -> None:
        """Read no further until release()."""

    def release(self) -> None: ...

    def close(self) -> None:
        """Break it, both ways. Idempotent."""


class GrpcStream:
    """Over a gRPC call: the client's (StreamStreamCall) or the server's (ServicerContext)."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._room.set()
        self.wake, self.hold, self.release = self._news.set, self._room.clear, self._room.set

    async def run(self, taken: Taken, following: Next) -> None:
        tasks = [asyncio.ensure_future(self._read(taken)), asyncio.ensure_future(self._write(following))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.exception()  # the first one has been raised

    async def _read(self, taken: Taken) -> None:
        while (data := await self._call.read()) is not grpc.aio.EOF:
            taken(data)
            await self._room.wait()
        taken(None)

    async def _write(self, following: Next) -> None:
        while True:
            self._news.clear()
            while (data := following()) is not None:
                await self._call.write(data)
            await self._news.wait()

    def close(self) -> None:
        cancel = getattr(self._call, "cancel", None)
        if cancel is not None:
            cancel()


class LocalStream(asyncio.Protocol):
    """Over a Unix socket: each message behind its length, uint32 little-endian. There are no halves: whoever closes has gone."""

    def __init__(self, serve: Callable[[LocalStream], Awaitable[None]] | None = None) -> None:
        """serve: what to do with it once it is connected, in a task of its own."""
        self._serve = serve
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._taken: Taken
        self._following: Next
        self._unread = bytearray()
        self._held = True
        """Nothing is handed on; so before run()."""
        self._full = self._asking = False
        """Nothing may be written; what there is to send is about to be asked for."""
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._error: BaseException = ConnectionResetError("the other side has gone")

    async def run(self, taken: Taken, following: Next) -> None:
        self._taken, self._following = taken, following
        self.release()
        self.wake()
        await self._ended
        raise self._error

    def wake(self) -> None:
        if not self._asking:
            self._asking = True
            self._loop.call_soon(self._send)

    def hold(self) -> None:
        self._held = True
        self._transport.pause_reading()

    def release(self) -> None:
        if self._held:
            self._held = False
            self._transport.resume_reading()
            self._hand_on()

    def close(self) -> None:
        self._transport.abort()

    def _send(self) -> None:
        self._asking = False
        try:
            while not self._full and not self._ended.done() and (data := self._following()) is not None:
                self._transport.write(_LENGTH.pack(len(data)) + data)
        except Exception as e:  # noqa: BLE001 - run() raises it
            self._end(e)

    def _hand_on(self) -> None:
        """The messages that are there whole."""
        unread, at = self._unread, 0
        try:
            while len(unread) >= at + 4 and not self._held and not self._ended.done():
                (size,) = _LENGTH.unpack_from(unread, at)
                if size > 2 * MAX_MESSAGE_BYTES:
                    raise Malformed(f"a message of {size} bytes")
                if len(unread) < at + 4 + size:
                    break
                at += 4 + size
                self._taken(bytes(memoryview(unread)[at - size : at]))
        except Exception as e:  # noqa: BLE001 - run() raises it
            self._end(e)
        del unread[:at]

    def _end(self, error: BaseException) -> None:
        if not self._ended.done():
            self._error = error
            self._ended.set_result(None)
        self._transport.abort()

    # The transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        if self._serve is not None:
            self._task = asyncio.ensure_future(self._serve(self))

    def data_received(self, data: bytes) -> None:
        self._unread += data
        self._hand_on()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(self._error)


async def connect_local(path: str) -> LocalStream:
    """Raises OSError."""
    _, stream = await asyncio.get_running_loop().create_unix_connection(LocalStream, path)
    return stream


async def listen_local(path: str, serve: Callable[[LocalStream], Awaitable[None]]) -> asyncio.Server:
    """Call serve(LocalStream) for each connection, in a task of its own. Raises OSError."""
    return await asyncio.get_running_loop().create_unix_server(lambda: LocalStream(serve), path)
