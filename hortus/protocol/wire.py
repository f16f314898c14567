"""Our nouns to the protocol's bytes and back. The only importer of the generated code; pure, knows no gRPC and no asyncio.

Packing is done for a whole message at once, because that is where coalescing pays: one call for all asks instead of one for
each, of struct or of bytes, since numpy's take several times as long. Reading checks everything that lengths and counts claim,
so that a malformed message is a Malformed and nothing worse; what the numbers mean (a vocabulary, a limit) the scheduler's side
checks in tulip/entry.py.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from hortus import errors
from hortus.errors import HortusError, RequestError
from hortus.protocol import hortus_pb2 as pb
from hortus.traces import CONTEXT_BYTES
from hortus.types import Float32, ModelInfo, Result, Timings, Together, TokenBatch, bounds_of_one

VERSION = 1
"""Changes only when old peers could misread; see docs/protocol.md."""
SERVICE = "hortus.v1.Tulip"
DESCRIBE, FETCH, ENCODE = (f"/{SERVICE}/{name}" for name in ("Describe", "Fetch", "Encode"))
MAX_MESSAGE_BYTES = 64 * 2**20
"""Most bytes of one Encode message. A receiver allows twice that, so that a limit of ours is met first, with its words."""
GOOD_MESSAGE_BYTES = 2 * 2**20
"""Coalescing stops at about this size: larger messages save nothing more, and small answers would wait behind them."""


class Malformed(HortusError):
    """Bytes that are not a message of this protocol. The stream cannot go on."""


@dataclass(slots=True)
class Ask:
    """One request's sequences on their way to a scheduler."""

    number: int
    batch: TokenBatch
    deadline_ms: float = float("inf")
    """Milliseconds from now."""
    trace: bytes = b""
    """Context of the request (traces.py); empty: not traced."""


@dataclass(slots=True)
class Asks:
    """One message, gateway to scheduler."""

    asks: list[Ask] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    ping: int = 0


@dataclass(slots=True)
class Replies:
    """One message, scheduler to gateway."""

    answers: list[tuple[int, Result]] = field(default_factory=list)
    failures: list[tuple[int, RequestError]] = field(default_factory=list)
    pong: int = 0
    draining: bool = False


@dataclass(frozen=True, slots=True)
class File:
    """One small file of the model's folder."""

    path: str
    """Inside the folder, with slashes."""
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Description:
    """What a replica serves."""

    info: ModelInfo
    fingerprint: str
    files: tuple[File, ...]
    version: int = VERSION
    draining: bool = False
    stream_socket: str = ""
    """Path of a Unix socket for Encode's messages without gRPC, beside the one that is called; empty: none."""


_NO_TRACE = bytes(CONTEXT_BYTES)


def _packed(code: str, numbers: Sequence[float]) -> bytes:
    """code: struct's, for each of the numbers."""
    return struct.pack(f"<{len(numbers)}{code}", *numbers)


def _numbers(data: bytes, code: str, what: str, count: int | None = None) -> tuple[Any, ...]:
    """What _packed made; of `count` numbers, where that is known."""
    if count is None:
        count = len(data) // struct.calcsize(f"<{code}")
    try:
        return struct.unpack(f"<{count}{code}", data)
    except struct.error:
        raise Malformed(f"{what}: {len(data)} bytes are not {count} numbers") from None


def _array(data: bytes, kind: str, what: str, count: int | None = None) -> np.ndarray[Any, Any]:
    if len(data) % int(kind[2:]):
        raise Malformed(f"{what}: {len(data)} bytes are not a whole number of {kind[1:]}")
    values = np.frombuffer(data, kind)
    if count is not None and len(values) != count:
        raise Malformed(f"{what}: {len(values)} values where {count} belong")
    return values


def _bytes(array: np.ndarray[Any, Any]) -> bytes:
    """In C's order, little-endian."""
    return (array if sys.byteorder == "little" else array.astype(array.dtype.newbyteorder("<"))).tobytes()


def _lengths(batch: TokenBatch) -> list[int]:
    """Tokens of each sequence."""
    return [len(batch.ids)] if len(batch.cu_seqlens) == 2 else batch.lengths.tolist()


def _parse(kind: type[Any], data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError as e:
        raise Malformed(f"not a {kind.__name__} message: {e}") from None


# Asks


def pack_asks(message: Asks) -> bytes:
    """One Asks message."""
    asks = message.asks
    out = pb.Asks(ping=message.ping)
    if asks:
        batches = [a.batch for a in asks]
        out.numbers = _packed("Q", [a.number for a in asks])
        out.counts = _packed("I", [len(b.cu_seqlens) - 1 for b in batches])
        out.deadlines_ms = np.array([a.deadline_ms for a in asks], "<f4").tobytes()
        out.lengths = b"".join([_packed("I", _lengths(b)) for b in batches])
        out.ids = b"".join([_bytes(b.ids) for b in batches])
        if any(a.trace for a in asks):
            out.traces = b"".join([a.trace or _NO_TRACE for a in asks])
        if any(b.token_types is not None for b in batches):
            types = [bytes(len(b.ids)) if b.token_types is None else b.token_types.tobytes() for b in batches]
            out.token_types = b"".join(types)
        if any(b.spans is not None for b in batches):
            counts = [np.zeros(len(b), np.int32) if b.span_counts is None else b.span_counts for b in batches]
            out.span_counts = np.concatenate(counts).astype("<u4").tobytes()
            out.spans = np.concatenate([b.spans for b in batches if b.spans is not None]).astype("<i4").tobytes()
    if message.cancelled:
        out.cancelled = _packed("Q", message.cancelled)
    return bytes(out.SerializeToString())


def ask_bytes(batch: TokenBatch) -> int:
    """What an ask adds to a message, about."""
    spans = 0 if batch.spans is None else 4 * len(batch) + 8 * len(batch.spans)
    return 16 + 4 * len(batch.cu_seqlens) + (4 if batch.token_types is None else 5) * len(batch.ids) + spans


def read_asks(data: bytes) -> Asks:
    """The message; batches are views of its bytes. Sequences may be empty and ids anything: see tulip/entry.py."""
    got = _parse(pb.Asks, data)
    numbers = _numbers(got.numbers, "Q", "numbers")
    message = Asks([], list(_numbers(got.cancelled, "Q", "cancelled")), got.ping)
    if not numbers:
        return message
    counts = _numbers(got.counts, "I", "counts", len(numbers))
    deadlines = _numbers(got.deadlines_ms, "f", "deadlines_ms", len(numbers))
    lengths = _numbers(got.lengths, "I", "lengths", sum(counts))
    ends = [0, *accumulate(lengths)]
    ids = _array(got.ids, "<i4", "ids", ends[-1])
    types = _array(got.token_types, "<u1", "token_types", len(ids)) if got.token_types else None
    if got.span_counts:
        span_counts = _array(got.span_counts, "<u4", "span_counts", len(lengths)).astype(np.int64)
        spans = _array(got.spans, "<i4", "spans", 2 * int(span_counts.sum())).reshape(-1, 2)
        span_ends = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(span_counts, out=span_ends[1:])
    last = 0
    for number, count, deadline in zip(numbers, counts, deadlines, strict=True):
        if deadline != deadline:
            raise Malformed("deadlines_ms: not a number")
        first, last = last, last + count
        a, b = ends[first], ends[last]
        mine = None if types is None else types[a:b]
        # A message's tokens are far below 2**31: its bytes are bounded.
        bounds = bounds_of_one(b - a) if count == 1 else np.array(ends[first : last + 1], np.int32) - np.int32(a)
        batch = TokenBatch(ids[a:b], bounds, mine)
        if got.span_counts and span_counts[first:last].any():
            counted = span_counts[first:last].astype(np.int32)
            batch = TokenBatch(batch.ids, batch.cu_seqlens, mine, spans[span_ends[first] : span_ends[last]], counted)
        message.asks.append(Ask(number, batch, deadline))
    if got.traces:
        if len(got.traces) != CONTEXT_BYTES * len(numbers):
            raise Malformed(f"traces: {len(got.traces)} bytes where {CONTEXT_BYTES * len(numbers)} belong")
        for at, ask in enumerate(message.asks):
            trace = got.traces[at * CONTEXT_BYTES : (at + 1) * CONTEXT_BYTES]
            ask.trace = b"" if trace == _NO_TRACE else trace
    return message


# Replies


def pack_replies(message: Replies) -> bytes:
    """One Replies message."""
    answers = message.answers
    out = pb.Replies(pong=message.pong, draining=message.draining)
    if answers:
        results = [r for _, r in answers]
        out.numbers = _packed("Q", [n for n, _ in answers])
        out.counts = _packed("I", [len(r.rows) for r in results])
        out.queue_ms = _packed("f", [r.timings.queue_ms for r in results])
        out.device_ms = _packed("f", [r.timings.device_ms for r in results])
        out.width = results[0].rows.shape[1]
        out.rows = b"".join([_bytes(r.rows) for r in results])
    for number, error in message.failures:
        out.failures.append(_pack_failure(number, error))
    return bytes(out.SerializeToString())


def _pack_failure(number: int, error: RequestError) -> pb.Failure:
    return pb.Failure(
        number=number,
        code=error.code,
        message=error.message,
        param=error.param or "",
        retry_after_s=error.retry_after_s if isinstance(error, errors.Overloaded) else 0.0,
    )


def read_replies(data: bytes) -> Replies:
    """The message; rows are views of its bytes, which nobody writes to."""
    got = _parse(pb.Replies, data)
    message = Replies([], [(f.number, _read_failure(f)) for f in got.failures], got.pong, got.draining)
    numbers = _numbers(got.numbers, "Q", "numbers")
    if not numbers:
        return message
    counts = _numbers(got.counts, "I", "counts", len(numbers))
    queue_ms = _numbers(got.queue_ms, "f", "queue_ms", len(numbers))
    device_ms = _numbers(got.device_ms, "f", "device_ms", len(numbers))
    total = sum(counts)
    if got.width < 1:
        raise Malformed("width: rows without a width")
    rows: Float32 = _array(got.rows, "<f4", "rows", total * got.width).reshape(total, got.width)
    last, together = 0, Together(rows)
    for number, count, queue, device in zip(numbers, counts, queue_ms, device_ms, strict=True):
        message.answers.append((number, Result(rows[last : last + count], Timings(0.0, queue, device), together, last)))
        last += count
    return message


def _codes(root: type[RequestError]) -> Iterable[tuple[str, type[RequestError]]]:
    yield root.code, root
    for child in root.__subclasses__():
        yield from _codes(child)


_ERRORS = dict(_codes(RequestError))  # of two with one code the more particular, which comes later


def _read_failure(got: Any) -> RequestError:
    kind = _ERRORS.get(got.code, errors.EngineError)
    message = got.message if got.code in _ERRORS else f"{got.code}: {got.message}"
    if kind is errors.Overloaded:
        return errors.Overloaded(message, retry_after_s=got.retry_after_s or 1.0)
    return kind(message, param=got.param or None) if kind is not errors.MethodNotAllowed else kind(message)


# Describe and Fetch


def pack_describe() -> bytes:
    return bytes(pb.DescribeRequest(version=VERSION).SerializeToString())


def read_describe(data: bytes) -> int:
    """The version that the caller speaks."""
    return int(_parse(pb.DescribeRequest, data).version)


def pack_description(told: Description) -> bytes:
    return bytes(
        pb.Description(
            version=told.version,
            info=msgspec.json.encode(told.info),
            fingerprint=told.fingerprint,
            files=[pb.File(path=f.path, size=f.size, sha256=f.sha256) for f in told.files],
            max_message_bytes=MAX_MESSAGE_BYTES,
            draining=told.draining,
            stream_socket=told.stream_socket,
        ).SerializeToString()
    )


def read_description(data: bytes) -> Description:
    """Fields of the model that we do not know are a newer peer's, and ignored; one that we need and miss is Malformed."""
    got = _parse(pb.Description, data)
    try:
        info = msgspec.json.decode(got.info, type=ModelInfo)
    except msgspec.MsgspecError as e:
        raise Malformed(f"info: {e}") from None
    files = tuple(File(f.path, f.size, f.sha256) for f in got.files)
    return Description(info, got.fingerprint, files, got.version, got.draining, got.stream_socket)


def pack_fetch(path: str) -> bytes:
    return bytes(pb.FetchRequest(path=path).SerializeToString())


def read_fetch(data: bytes) -> str:
    return str(_parse(pb.FetchRequest, data).path)


def pack_piece(data: bytes) -> bytes:
    return bytes(pb.Piece(data=data).SerializeToString())


def read_piece(data: bytes) -> bytes:
    return bytes(_parse(pb.Piece, data).data)
