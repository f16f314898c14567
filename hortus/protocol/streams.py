"""The two ways that Encode's messages travel: gRPC, and a plain Unix socket between processes of one machine.

Both carry the same bytes. A gRPC message costs its two ends about 0.4 ms between them, most of it in gRPC's own threads; on
one machine a length and the message through a socket of the event loop do the same. Does not know what the messages say.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any, Protocol

import grpc

from hortus.protocol.wire import MAX_MESSAGE_BYTES, Malformed

_LENGTH = struct.Struct("<I")
_BUFFER_BYTES = 2**20


class Stream(Protocol):
    """Messages both ways."""

    async def read(self) -> bytes | None:
        """The next message; None when the other side has ended its half. Raises whatever the broken link raises."""

    async def write(self, data: bytes) -> None:
        """Send a message; returns when another one may follow."""

    def close(self) -> None:
        """Break it, both ways. Idempotent."""


class GrpcStream:
    """Over a gRPC call: the client's (StreamStreamCall) or the server's (ServicerContext)."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def read(self) -> bytes | None:
        data = await self._call.read()
        return None if data is grpc.aio.EOF else data

    async def write(self, data: bytes) -> None:
        await self._call.write(data)

    def close(self) -> None:
        cancel = getattr(self._call, "cancel", None)
        if cancel is not None:
            cancel()


class LocalStream:
    """Over a Unix socket: each message behind its length, uint32 little-endian."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        writer.transport.set_write_buffer_limits(high=_BUFFER_BYTES)

    async def read(self) -> bytes | None:
        try:
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        except asyncio.IncompleteReadError:
            # There are no halves here: whoever closes has gone.
            raise ConnectionResetError("the other side has gone") from None
        if size > 2 * MAX_MESSAGE_BYTES:
            raise Malformed(f"a message of {size} bytes")
        return await self._reader.readexactly(size)

    async def write(self, data: bytes) -> None:
        self._writer.writelines((_LENGTH.pack(len(data)), data))
        await self._writer.drain()

    def close(self) -> None:
        self._writer.transport.abort()


async def connect_local(path: str) -> LocalStream:
    """Raises OSError."""
    return LocalStream(*await asyncio.open_unix_connection(path, limit=_BUFFER_BYTES))


async def listen_local(path: str, serve: Any) -> asyncio.Server:
    """Call serve(LocalStream) for each connection, in a task of its own. Raises OSError."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(LocalStream(reader, writer))

    return await asyncio.start_unix_server(accept, path, limit=_BUFFER_BYTES)
