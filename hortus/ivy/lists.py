"""JSON lists of any length, written a slice at a time so that others get their turn. Knows orjson. Does not know any API."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import orjson

from hortus.ivy.exchange import Body, body_of
from hortus.types import Float32

SLICE_BYTES = 32 * 1024
"""Written before the event loop gets its turn: under a millisecond, also of short entries."""
SLICE_NUMBERS = 32 * 1024
"""The same of plain numbers, which are written in one call."""


def dumps(told: Any) -> bytes:
    """JSON; float32 numbers in their own digits."""
    return orjson.dumps(told, option=orjson.OPT_SERIALIZE_NUMPY)


async def listed(entries: Iterable[Any]) -> list[bytes]:
    """The entries as JSON, in parts with commas to go between. An entry is asked for when it is written."""
    parts: list[bytes] = []
    some: list[bytes] = []
    size = 0
    for entry in entries:
        some.append(text := dumps(entry))
        size += len(text)
        if size >= SLICE_BYTES:
            parts.append(b",".join(some))
            some, size = [], 0
            await asyncio.sleep(0)
    if some:
        parts.append(b",".join(some))
    return parts


async def numbers(values: Float32) -> list[bytes]:
    """The same of [n] numbers."""
    parts = []
    for at in range(0, len(values), SLICE_NUMBERS):
        parts.append(dumps(np.ascontiguousarray(values[at : at + SLICE_NUMBERS]))[1:-1])
        await asyncio.sleep(0)
    return parts


def around(before: dict[str, Any], name: str, parts: Sequence[bytes], after: dict[str, Any]) -> Body:
    """An object with a list of parts as its field `name`, between others."""
    tail = dumps(after)[1:]
    return body_of(b'%b,"%b":[' % (dumps(before)[:-1], name.encode()), parts, b"],%b" % tail if after else b"]}")
