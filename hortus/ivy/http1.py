"""HTTP/1.1: bytes to Requests, an Answer to bytes. Knows httptools. Does not know sockets, time, or what becomes of a request.

A client's heads are alike to the byte, but for content-length. So the head of a POST is looked up, and taken as the parser read
it before: what it says hangs on nothing but its bytes. `_learn` has the conditions.
"""

from __future__ import annotations

import http
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from typing import NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

import httptools

from hortus.config import IvyConfig
from hortus.errors import InvalidInput, RequestError
from hortus.ivy.exchange import Answer, Request

log = logging.getLogger("hortus.ivy")

HEAD_BYTES = 64 * 1024
"""Most bytes of a request's head, and of trailers."""
JOIN_BYTES = 64 * 1024
"""Smaller bodies are copied behind their head: one buffer is cheaper to send than two."""

_ONCE = {b"authorization", b"content-length", b"host", b"transfer-encoding"}
"""Headers that say whose a request is, for whom, or where it ends. A proxy in front may go by another of two lines than this
server does, so that each sees another request: two are refused, not chosen from."""

HEADS, KNOWN_BYTES = 256, 2048
"""Heads that are remembered, and the longest."""
_ONE_TIME = {b"expect", b"upgrade", b"transfer-encoding", b"x-hortus-timeout-ms"}
"""With these there is more to do than to read a head."""

_STATUS = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in http.HTTPStatus}


class Known(NamedTuple):
    """What a head said."""

    path: str
    headers: dict[bytes, bytes]
    """Shared by all requests of this head: not to be changed."""
    body_bytes: int
    handler: Callable[[Request], Awaitable[Answer]]


class Judge(Protocol):
    """What a reader needs of App."""

    config: IvyConfig
    heads: dict[bytes, Known]
    """Of requests that were admitted, with the empty line at their end. Kept by its readers."""

    def admit(self, request: Request) -> None:
        """Judge a request by its head: sets `handler` or `ended`."""


class Reader:
    """What one client sends. Requests are put into `requests` when their head has been read; their body follows."""

    def __init__(self, judge: Judge, requests: deque[Request], client: str) -> None:
        """client: its address, for logs."""
        self._judge, self._requests, self._client = judge, requests, client
        self._lines: list[tuple[bytes, bytes]] = []
        """Headers as they come, and trailers, which nobody wants."""
        self._parser = httptools.HttpRequestParser(self)
        self._reading: Request | None = None
        """Its head has been read, its body not all."""
        self._url = b""
        self._fed = 0
        """Bytes that made no body, since the last that did."""
        self._fresh = True
        """The parser has seen nothing since the end of a request, not even a part of the next one's first word."""
        self._head, self._came = b"", 0
        """What the parser was given since it was fresh: what may be the head, up to the first empty line; bytes in all."""
        self._missing = 0
        """Bytes of the body of a request that the parser knows nothing of."""
        self._read = 0
        """Requests that the parser has read to their end."""
        self._offer = False
        """The head being read offers an upgrade."""
        self.ended = False
        """What still arrives is thrown away."""

    @property
    def between(self) -> bool:
        """No request has been begun that is not complete."""
        return not self._url and self._reading is None

    def feed(self, data: bytes) -> RequestError | None:
        """Take in what has arrived. Returns an error when nothing can be read any more and no request has it in `ended`."""
        if self.ended:
            return None
        if self._missing and self._reading is not None:
            data = self._more(self._reading, data)
        if self._fresh and data:
            at = data.find(b"\r\n\r\n") + 4
            known = self._judge.heads.get(data[:at])
            if known is not None and len(data) - at <= known.body_bytes:
                self._again(known, data[at:])
                return None
            self._fresh, self._head, self._came = False, data[:at], 0
        if not data:
            return None
        self._fed += len(data)
        self._came += len(data)
        read = self._read
        try:
            self._parse(data)
            if self._read != read and self._head:
                self._learn(self._requests[-1], self._read == read + 1)
        except httptools.HttpParserError as e:
            if isinstance(e, httptools.HttpParserCallbackError):
                log.error("a fault in this server while reading a request", exc_info=e)
            return self._break_off(InvalidInput("not a valid HTTP request"))
        return self._break_off(_head_too_large()) if self._fed > HEAD_BYTES else None

    def close(self) -> None:
        """Nothing more comes. The parser holds this reader: it is let go, so that both are free without the collector."""
        self.ended = True
        self._reading = None
        del self._parser

    def _again(self, known: Known, data: bytes) -> None:
        """A request with a head that was read before, and as much of its body as there is."""
        path, headers, self._missing, handler = known
        request = Request("POST", path, headers, self._judge.config.timeout_s, client=self._client, keep_alive=True)
        request.handler = handler
        self._requests.append(request)
        if self._missing == len(data):  # as _more would do, in fewer calls
            self._missing, request.body, request.complete = 0, data, True
        else:
            self._reading = request
            self._more(request, data)

    def _more(self, request: Request, data: bytes) -> bytes:
        """More of its body; what follows it."""
        part, rest = data[: self._missing], data[self._missing :]
        self._missing -= len(part)
        self._fresh = not self._missing
        request.take(part, self._judge.config.max_body_bytes)
        if self._fresh:
            self._reading = None
            request.finish()
        return rest

    def _learn(self, request: Request, alone: bool) -> None:
        """The parser, fresh, was given `_came` bytes, with the first empty line after `_head`, and has read this request to its
        end. Where content-length says that the bytes were all its own, the parser is fresh again, and the head is remembered if
        the request was admitted. Several requests at once, and all after them, stay with the parser."""
        head, self._head = self._head, b""
        size = int(request.headers.get(b"content-length", 0))
        if not alone or not request.complete or not request.keep_alive or len(head) + size != self._came:
            return
        self._fresh = True
        if (
            request.method == "POST"
            and request.ended is None
            and request.handler is not None
            and size
            and len(head) <= KNOWN_BYTES
            and not request.tail
            and _ONE_TIME.isdisjoint(request.headers)
        ):
            if len(self._judge.heads) >= HEADS:
                self._judge.heads.clear()
            self._judge.heads[head] = Known(request.path, request.headers, size, request.handler)

    # The parser's calls: they only note what there is

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._lines.append((name, value))

    def on_headers_complete(self) -> None:
        parser, method = self._parser, self._parser.get_method()
        if parser.should_upgrade():
            self._offer = method != b"CONNECT"
            return
        lines = self._lines
        headers = {name.lower(): value for name, value in lines}
        request = self._reading = Request(
            method.decode("ascii"), "", headers, self._judge.config.timeout_s,
            client=self._client, keep_alive=parser.should_keep_alive(),
        )  # fmt: skip
        self._requests.append(request)
        if b"expect" in headers and parser.get_http_version() == "1.0":
            del headers[b"expect"]  # it would not know what to do with a 100
        if self._fed > HEAD_BYTES and len(self._url) + sum(len(n) + len(v) + 4 for n, v in lines) > HEAD_BYTES:
            request.ended = _head_too_large()
            return
        doubt = _join(headers, lines) if len(headers) != len(lines) else None
        if b"transfer-encoding" in headers:
            doubt = doubt or _check_coding(headers[b"transfer-encoding"], parser.get_http_version())
        if doubt is not None:
            request.ended, request.keep_alive = doubt, False
            return
        try:
            request.path = path_of(self._url)
        except ValueError:
            request.ended = InvalidInput("not a valid HTTP request: its target is no path")
            return
        self._judge.admit(request)

    def on_body(self, body: bytes) -> None:
        self._fed = 0
        if self._reading is not None:
            self._reading.take(body, self._judge.config.max_body_bytes)

    def on_message_complete(self) -> None:
        if self._reading is not None:  # else its offer to upgrade is still to be declined
            self._fed = 0
            self._read += 1
            self._reading.finish()
            self._reading, self._url = None, b""
            self._lines.clear()

    def _parse(self, data: bytes) -> None:
        """Offers to upgrade are declined by answering as usual. Java's HttpClient offers h2c with every request to a plain
        port; the parser takes such a request to end with its head, so that its body would be lost. Here the head is read
        again without the offer, by a fresh parser, which then finds the body."""
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stop:
                if not self._offer:  # CONNECT: there is nothing to go on with
                    raise httptools.HttpParserError from None
                data = self._head_without_offer() + data[stop.args[0] :]
                self._offer, self._url = False, b""
                self._lines.clear()
                self._parser = httptools.HttpRequestParser(self)

    def _head_without_offer(self) -> bytes:
        lines = [b"%b %b HTTP/%b" % (self._parser.get_method(), self._url, self._parser.get_http_version().encode())]
        lines += [b"%b: %b" % line for line in self._lines if line[0].lower() not in (b"upgrade", b"connection")]
        if not self._parser.should_keep_alive():
            lines.append(b"connection: close")
        return b"\r\n".join([*lines, b"", b""])

    def _break_off(self, error: RequestError) -> RequestError | None:
        """The request that it happened in ends so; else it is told by itself, after the answers to those before."""
        self.ended = True
        if (reading := self._reading) is not None:
            self._reading = None
            reading.end(error)
            reading.finish()
            reading.keep_alive = False
            return None
        # What comes after a request that said it was the last does not count.
        return error if not self._requests or self._requests[-1].keep_alive else None


def written(request: Request, answer: Answer) -> list[bytes]:
    """The whole answer as it is sent, in one piece when it is small; the head of one whose body comes in parts or pieces."""
    body = answer.body
    size = len(body) if isinstance(body, bytes) else answer.size
    length = b"" if answer.pieces is not None else b"content-length: %d\r\n" % size
    if not request.keep_alive:
        length += b"connection: close\r\n"
    elif b"connection" in request.headers:  # HTTP/1.0 wants to hear it
        length += b"connection: keep-alive\r\n"
    head = b"%bdate: %b\r\ncontent-type: %b\r\n%b%b\r\n" % (
        _STATUS[answer.status], _date(), answer.content_type, answer.headers, length,
    )  # fmt: skip
    if request.method == "HEAD" or answer.status == 304:  # told how long the body is, and spared it
        return [head]
    if isinstance(body, list):
        return [head]
    return [head + body] if size <= JOIN_BYTES else [head, body]


def path_of(target: bytes) -> str:
    """The path of a request's target, decoded; also of http://host/path. ValueError when it is none."""
    path = target.decode("ascii")
    path = path.partition("?")[0] if path.startswith("/") else urlsplit(path).path
    return unquote(path) if "%" in path else path


def waits_for_100(request: Request) -> bool:
    """It sends its body once told to."""
    expected = request.headers.get(b"expect")
    return expected is not None and b"100-continue" in (e.strip() for e in expected.lower().split(b","))


def _join(headers: dict[bytes, bytes], lines: list[tuple[bytes, bytes]]) -> RequestError | None:
    """Make one list of each header that has several lines (RFC 9110, 5.3). An error where there may be but one."""
    values: dict[bytes, list[bytes]] = {}
    for name, value in lines:
        values.setdefault(name.lower(), []).append(value)
    for name, several in values.items():
        if len(several) > 1 and name in _ONCE:
            return InvalidInput(f"not a valid HTTP request: {len(several)} {name.decode()} headers; send one")
        if name in headers:
            headers[name] = b", ".join(several)
    return None


def _check_coding(coding: bytes, version: str) -> RequestError | None:
    """An error for a body that this server and a proxy in front of it might take to end in different places."""
    if version == "1.0":
        return InvalidInput("not a valid HTTP request: HTTP/1.0 has no transfer-encoding")
    if coding.strip().lower() != b"chunked":
        return InvalidInput(f"transfer-encoding {coding.decode('latin-1')!r:.40} is not supported; chunked is")
    return None


def _head_too_large() -> InvalidInput:
    return InvalidInput(f"not a valid HTTP request: its headers have more than {HEAD_BYTES} bytes")


_second, _now = 0, b""


def _date() -> bytes:
    """For the Date header; made once a second."""
    global _second, _now
    if (second := int(time.time())) != _second:
        _second, _now = second, formatdate(second, usegmt=True).encode()
    return _now
