"""Lines of files to what is in them: JSON objects, rows of CSV, texts.

A line that cannot be read is an InvalidInput in its place. Does not know columns, types or blocks.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import orjson

from hortus.corpus import values
from hortus.errors import InvalidInput, StartError


def lines(f: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(number, line) of lines that hold something, without their ends, nor the mark that Windows' programs begin a file with."""
    for number, raw in enumerate(f):
        line = raw.rstrip(b"\r\n")
        if number == 0:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line and not line.isspace():
            yield number, line


def decoded(raw: bytes) -> str | InvalidInput:
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        return InvalidInput(f"the line is not UTF-8: byte 0x{raw[e.start]:02x} at {e.start} ({e.reason})")


def json_row(raw: bytes, names: Sequence[str]) -> Any:
    """The row; of the columns `names` whole numbers are whole, however large."""
    try:
        row = orjson.loads(raw)
    except orjson.JSONDecodeError as e:
        line = decoded(raw)
        return line if isinstance(line, InvalidInput) else InvalidInput(f"the line is not JSON: {e}")
    if not isinstance(row, dict):
        return InvalidInput("the line is no JSON object")
    if any(values.vast(row.get(name), raw) for name in names):
        try:
            return json.loads(raw)  # slower; makes no floats of what is beyond 64 bits
        except RecursionError:
            return InvalidInput("the line is JSON that is nested too deep")
    return row


def csv_rows(f: BinaryIO) -> Iterator[tuple[int, list[str] | InvalidInput]]:
    """(number, row): the first line is row 0; a row that goes over several lines is one."""
    csv.field_size_limit(1 << 30)
    bad: list[InvalidInput] = []  # lines of the row that is being read

    def decoded_lines() -> Iterator[str]:
        for i, raw in enumerate(f):
            raw = raw.removeprefix(b"\xef\xbb\xbf") if i == 0 else raw
            line = decoded(raw)
            if isinstance(line, InvalidInput):
                bad.append(line)
                line = raw.decode("utf-8", "surrogateescape")  # its commas and quotes still say where the row ends
            yield line

    reader = csv.reader(decoded_lines(), strict=True)
    for number in itertools.count():
        bad.clear()
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as e:
            yield number, bad[0] if bad else InvalidInput(f"the line is not CSV: {e}")
            continue
        if bad:
            yield number, bad[0]
        elif row and not (len(row) == 1 and row[0].isspace()):
            yield number, row


def csv_head(rows: Iterator[tuple[int, list[str] | InvalidInput]]) -> list[str]:
    """The names of the columns; none in an empty file. StartError."""
    _, head = next(rows, (0, []))
    if isinstance(head, InvalidInput):
        raise StartError(f"its first line has no names of columns: {head.message}")
    return head
