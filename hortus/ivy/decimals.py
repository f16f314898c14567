"""Rows of float32 as JSON in C (decimals.c), where that was built. Knows arrays; does not know answers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from pathlib import Path
from typing import cast

import numpy as np

from hortus import native
from hortus.types import Float32

MOST_CHARS = 20
"""Room for a number and its comma, as C wants it: -0.00000123456789 is the longest, and 8 bytes are written at once."""


@functools.cache
def _library() -> Callable[[int, int, int], int] | None:
    # It holds the GIL: a row takes 50 us, less than to get it back may.
    if (library := native.load(Path(__file__).with_suffix(".c"), holding=True)) is None:
        return None
    write = library.hortus_decimals
    write.argtypes, write.restype = [c_void_p, c_int64, c_void_p], c_int64
    return cast(Callable[[int, int, int], int], write)


def texts(rows: Float32) -> list[bytes] | None:
    """[n, width] to the numbers of each row with commas between, each the shortest that reads back as the same float32. None
    where a value is below 2^-24 and not 0, or from 2^23 on, or C was not built."""
    if (write := _library()) is None:
        return None
    rows = np.ascontiguousarray(rows, np.float32)
    count, width = rows.shape
    text = np.empty(width * MOST_CHARS, np.uint8)
    begin, to, found = rows.ctypes.data, text.ctypes.data, []
    for row in range(count):
        if (size := write(begin + row * width * rows.itemsize, width, to)) < 0:
            return None
        found.append(text[:size].tobytes())
    return found
