"""What passes between a connection and the application: a Request whose body is in, an Answer to send.

Knows HTTP's words, not its bytes. Does not know sockets, routes, models or what a body means.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from hortus.errors import BodyTooLarge, InvalidInput, MethodNotAllowed, Overloaded, RequestError
from hortus.types import Timings

Body = bytes | list[bytes]
WHOLE_BYTES = 1024 * 1024
"""Bodies up to this size are put together: that takes a fraction of a millisecond."""
PIECE_BYTES = 64 * 1024
"""Of a body that comes in smaller parts."""


@dataclass(slots=True)
class Answer:
    """What goes back."""

    body: Body
    """In parts where it is large: putting hundreds of megabytes together holds up everybody else (see `body_of`)."""
    status: int = 200
    headers: bytes = b""
    """Further lines of its head, each with the end of line behind it."""
    content_type: bytes = b"application/json"
    timings: Timings | None = None
    """Where the time went, for answers that ran the model."""
    pieces: AsyncGenerator[bytes, None] | None = None
    """A body that comes bit by bit, instead of `body`: it ends with its connection. Closed when the client leaves; whoever
    makes it ends it when the app drains."""

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return len(self.body) if isinstance(self.body, bytes) else sum(map(len, self.body))


def body_of(left: bytes, parts: Sequence[bytes], right: bytes, comma: bytes = b",") -> Body:
    """left, the parts with commas between them, right: as one while that is quickly done, else uncopied."""
    if sum(map(len, parts)) <= WHOLE_BYTES:
        return b"".join([left, comma.join(parts), right])
    out = [left]
    for part in parts:
        out += (part, comma)
    out[-1] = right
    return out


def takes_gzip(accepted: bytes) -> bool:
    """What Accept-Encoding says of gzip (RFC 9110, 12.5.3): a weight of 0 refuses it, and what is not named may be meant by *."""
    weights: dict[bytes, float] = {}
    for entry in accepted.lower().split(b","):
        name, *terms = (part.strip() for part in entry.split(b";"))
        weight = next((t[2:] for t in terms if t.startswith(b"q=")), b"1")
        try:
            weights[name.removeprefix(b"x-")] = float(weight)
        except ValueError:
            weights[name.removeprefix(b"x-")] = 0.0
    return weights.get(b"gzip", weights.get(b"*", 0.0)) > 0


class Request:
    """What came in. Made by the connection when the head is read, judged by App.admit, answered once the body is there too."""

    __slots__ = (
        "_parts",
        "_size",
        "begun",
        "body",
        "client",
        "complete",
        "deadline",
        "ended",
        "handler",
        "headers",
        "keep_alive",
        "method",
        "name",
        "names",
        "path",
        "sent",
        "tail",
        "task",
        "timeout_s",
    )

    def __init__(
        self, method: str, path: str, headers: dict[bytes, bytes], timeout_s: float, *, client: str, keep_alive: bool
    ) -> None:
        self.method, self.path, self.client = method, path, client
        self.tail = ""
        """What follows the route, for routes that take a name."""
        self.headers = headers
        """Names in lower case; what is given on several lines is one list, with commas."""
        self.keep_alive = keep_alive
        """The client may send another on this connection."""
        self.name = ""
        """The request's id, in its answer and in logs."""
        self.names: Mapping[str, str] = {}
        """What its body calls fields that errors speak of (body.py)."""
        self.handler: Callable[[Request], Awaitable[Answer]] | None = None
        """Set by App.admit."""
        self.task: asyncio.Task[None] | None = None
        """Answers it. Set by the connection, which knows it without asking."""
        self.ended: RequestError | None = None
        """Why it ends without its handler's answer: refused by its head, too large, too slow, or its client gone. Whoever
        cancels its task says so here first."""
        self.timeout_s = timeout_s
        self.body = b""
        self.complete = False
        """All of it has arrived."""
        self.sent = False
        """Its answer has been sent."""
        self._parts: list[bytes | bytearray] = []
        """Gathered to PIECE_BYTES and more but for the first: a body in chunks of a byte or two would take 20 times its size."""
        self._size = 0
        self.begin()

    def begin(self) -> None:
        """Its time starts now."""
        self.begun = time.monotonic()
        self.deadline = self.begun + self.timeout_s
        """time.monotonic() seconds, as is `begun`."""

    @property
    def takes_body(self) -> bool:
        """Its body is wanted: it is one for a handler that reads bodies, and nothing has gone wrong yet."""
        return self.method == "POST" and self.ended is None

    def shorten(self, timeout_ms: bytes) -> None:
        """Take the client's own time limit; it can only be shorter. InvalidInput when it is no number of milliseconds."""
        asked_s = float(timeout_ms) / 1e3 if timeout_ms.isdigit() else 0.0
        if not 0 < asked_s < float("inf"):
            raise InvalidInput(
                f"x-hortus-timeout-ms: {timeout_ms.decode('latin-1')!r:.40} is no number of milliseconds"
            )
        if asked_s < self.timeout_s:
            self.deadline += asked_s - self.timeout_s
            self.timeout_s = asked_s

    def check_body(self, limit: int) -> None:
        """BodyTooLarge for a length of more than `limit` bytes, InvalidInput for a compressed body."""
        length = int(self.headers.get(b"content-length", 0))
        if length > limit:
            raise _too_large(f"{length} bytes", limit)
        encoding = self.headers.get(b"content-encoding")
        if encoding is not None and encoding.lower() != b"identity":
            raise InvalidInput(f"content-encoding {encoding.decode('latin-1')!r:.40} is not supported; send plain JSON")

    def take(self, part: bytes, limit: int) -> None:
        """The next part of the body; one of more than `limit` bytes in all ends the request. What nobody wants is dropped."""
        if self.method != "POST" or self.ended is not None:
            return
        self._size += len(part)
        if self._size > limit:
            self.end(_too_large(f"more than {limit} bytes", limit))
        elif not self._parts or len(part) >= PIECE_BYTES:
            self._parts.append(part)
        elif isinstance(last := self._parts[-1], bytearray) and len(last) < PIECE_BYTES:
            last += part
        else:
            self._parts.append(bytearray(part))

    def finish(self) -> None:
        """The body is complete."""
        parts = self._parts
        self.body = bytes(parts[0]) if len(parts) == 1 else b"".join(parts)  # bytes of bytes copies nothing
        self._parts = []
        self.complete = True

    def end(self, error: RequestError) -> None:
        """It ends so, unless it has an end already. What has come of a body that is not complete is let go at once: its client
        may take its time to leave."""
        self.ended = self.ended or error
        self._parts = []


def _too_large(size: str, limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has {size}, this server takes at most {limit} (--max-body-bytes); send fewer inputs")


def error_answer(error: RequestError) -> Answer:
    """Any error in OpenAI's shape, with the headers that go with it."""
    wire = error.wire
    headers = b""
    if isinstance(error, MethodNotAllowed) and error.allow:
        headers += b"allow: %b\r\n" % error.allow.encode()
    if wire.http == 401:
        headers += b"www-authenticate: Bearer\r\n"
    if wire.http in (429, 503):
        wait_s = error.retry_after_s if isinstance(error, Overloaded) else 1.0
        headers += b"retry-after: %d\r\n" % max(1, math.ceil(wait_s))
    told = {"message": error.message, "type": wire.type, "param": error.param, "code": error.code}
    return Answer(msgspec.json.encode({"error": told}), wire.http, headers)
