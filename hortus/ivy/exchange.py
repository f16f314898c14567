"""One HTTP exchange over ASGI: a request's body read within its limits, one answer written.

Knows ASGI's messages. Does not know routes, models or what a body means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from hortus.errors import BodyTooLarge, Cancelled, InvalidInput

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

DISCARD_S = 10.0
"""Seconds for which the rest of a refused body is read and thrown away. Closing on a client that still sends would reset
the connection, and it would see that instead of the answer."""


@dataclass(slots=True)
class Answer:
    """What goes back."""

    body: bytes
    status: int = 200
    headers: Headers = field(default_factory=list)
    content_type: bytes = b"application/json"


class Request:
    """What came in; its body once `read` has been awaited."""

    __slots__ = ("_encoding", "_length", "_receive", "body", "body_left", "deadline", "id", "method", "path", "tail")

    def __init__(self, scope: Message, receive: Receive, deadline: float) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.tail = ""
        """What follows the route, for routes that take a name."""
        self.id: bytes | None = None
        """The client's x-request-id, as sent."""
        self.deadline = deadline
        """time.monotonic() seconds."""
        self.body = b""
        self.body_left = False
        """Part of the body has not been read yet."""
        self._length: int | None = None
        self._encoding: bytes | None = None
        self._receive = receive
        for name, value in scope["headers"]:
            if name == b"content-length":
                self._length = int(value)
                self.body_left = self._length > 0
            elif name == b"transfer-encoding":
                self.body_left = True
            elif name == b"x-request-id":
                self.id = value
            elif name == b"content-encoding" and value.lower() != b"identity":
                self._encoding = value

    async def read(self, limit: int) -> None:
        """Take in the whole body. The caller bounds the wait.

        limit: bytes, whether the client says the length or sends chunks. Raises BodyTooLarge; InvalidInput for a
        compressed body; Cancelled when the client has gone.
        """
        if self._length is not None and self._length > limit:
            raise _too_large(f"{self._length} bytes", limit)
        if self._encoding is not None:
            raise InvalidInput(
                f"content-encoding {self._encoding.decode('latin-1')!r:.40} is not supported; send plain JSON"
            )
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Cancelled("the client went away before its body was complete")
            part = message.get("body", b"")
            self.body_left = more = message.get("more_body", False)
            size += len(part)
            if size > limit:
                raise _too_large(f"more than {limit} bytes", limit)
            parts.append(part)
        self.body = parts[0] if len(parts) == 1 else b"".join(parts)

    async def discard(self) -> None:
        """Read the rest of the body, at most for DISCARD_S, and keep nothing of it."""
        try:
            async with asyncio.timeout(DISCARD_S):
                while self.body_left:
                    message = await self._receive()
                    self.body_left = message["type"] == "http.request" and message.get("more_body", False)
        except TimeoutError:
            return

    async def gone(self) -> None:
        """Return once the client has gone. Only after the body has been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def write(request: Request, answer: Answer, send: Send, headers: Headers) -> None:
    """Send the answer, whole, with its length; then let the client finish sending if it has not."""
    await send(
        {
            "type": "http.response.start",
            "status": answer.status,
            "headers": [
                (b"content-type", answer.content_type),
                (b"content-length", b"%d" % len(answer.body)),
                *answer.headers,
                *headers,
            ],
        }
    )
    if request.body_left:
        await send({"type": "http.response.body", "body": answer.body, "more_body": True})
        await request.discard()
        await send({"type": "http.response.body", "body": b""})
    else:
        await send({"type": "http.response.body", "body": answer.body})


def _too_large(size: str, limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has {size}, this server takes at most {limit} (--max-body-bytes); send fewer inputs")
