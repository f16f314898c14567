"""One HTTP exchange over ASGI: a request's body read within its limits, one answer written.

Knows ASGI's messages. Does not know routes, models or what a body means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from hortus.errors import BodyTooLarge, Cancelled, InvalidInput
from hortus.types import Timings

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
    timings: Timings | None = None
    """Where the time went, for answers that ran the model."""


class Request:
    """What came in; its body once `read` has been awaited."""

    __slots__ = ("_receive", "body", "body_left", "deadline", "headers", "method", "name", "path", "tail", "timeout_s")

    def __init__(self, scope: Message, receive: Receive, begin: float, timeout_s: float) -> None:
        """begin: time.monotonic() seconds."""
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.tail = ""
        """What follows the route, for routes that take a name."""
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        """Names in lower case; of a header given twice the last."""
        self.name = ""
        """The request's id, in its answer and in logs."""
        self.timeout_s = timeout_s
        self.deadline = begin + timeout_s
        """time.monotonic() seconds."""
        self.body = b""
        self.body_left = self.headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in self.headers
        """Part of the body has not been read yet."""
        self._receive = receive

    def shorten(self, timeout_ms: bytes) -> None:
        """Take the client's own time limit; it can only be shorter. InvalidInput when it is no number of milliseconds."""
        try:
            asked_s = float(timeout_ms) / 1e3
        except ValueError:
            asked_s = 0.0
        if not 0 < asked_s < float("inf"):
            raise InvalidInput(
                f"x-hortus-timeout-ms: {timeout_ms.decode('latin-1')!r:.40} is no number of milliseconds"
            )
        if asked_s < self.timeout_s:
            self.deadline += asked_s - self.timeout_s
            self.timeout_s = asked_s

    async def read(self, limit: int) -> None:
        """Take in the whole body. The caller bounds the wait.

        limit: bytes, whether the client says the length or sends chunks. Raises BodyTooLarge; InvalidInput for a
        compressed body; Cancelled when the client has gone.
        """
        length = int(self.headers.get(b"content-length", 0))
        if length > limit:
            raise _too_large(f"{length} bytes", limit)
        encoding = self.headers.get(b"content-encoding", b"identity")
        if encoding.lower() != b"identity":
            raise InvalidInput(f"content-encoding {encoding.decode('latin-1')!r:.40} is not supported; send plain JSON")
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
