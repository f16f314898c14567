"""Files to blocks of rows: the texts, and the columns that are to be kept.

A value that its column does not take makes its row one that is refused. A line that cannot be read is a row refused, of
whatever format; a file that cannot be read ends the run, with its name. Lines that hold nothing are no rows, and are counted
all the same, so that a row's number finds its line. Does not know windows, parts or vectors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from hortus.corpus import values
from hortus.corpus.columns import Columns, check_csv, check_parquet, is_text
from hortus.corpus.files import File, Stream, named
from hortus.corpus.lines import csv_head, csv_rows, decoded, json_row, lines
from hortus.errors import InvalidInput, StartError

BLOCK_ROWS = 1024
"""Most rows of a block: also what a reader holds beside the windows."""


@dataclass(slots=True)
class Block:
    """Some neighbouring rows of one file."""

    file: File
    numbers: Sequence[int]
    """Of each row its place in the file, from 0: rows of Parquet; lines; rows of CSV after the first."""
    texts: list[object]
    """A text each; else what is there instead (None, a number, an InvalidInput that says why the row cannot be read)."""
    kept: pa.Table
    """[rows] the kept columns, without a made-up id."""
    bytes: float = 0.0
    """Of the file, what these rows take: for progress."""
    skipped: float = 0.0
    """Of the file, what was passed over before these rows."""

    def __len__(self) -> int:
        return len(self.texts)

    def slice(self, lo: int, hi: int) -> Block:
        share = self.bytes * (hi - lo) / max(len(self), 1)
        skipped = 0.0 if lo else self.skipped
        kept = self.kept.slice(lo, hi - lo)
        return Block(self.file, self.numbers[lo:hi], self.texts[lo:hi], kept, share, skipped)


def count(file: File) -> int | None:
    """Rows of the file when it says so without being read."""
    if file.format != "parquet":
        return None
    with named(file), file.open() as f:
        return int(pq.read_metadata(f).num_rows)


def blocks(file: File, columns: Columns, skip: int = 0) -> Iterator[Block]:
    """The rows from number `skip` on. StartError names the file when it cannot be read."""
    with named(file), file.open() as f:
        if file.format == "parquet":
            yield from _parquet(file, f, columns, skip)
        else:
            yield from _from_lines(file, f, columns, skip)


def _parquet(file: File, f: BinaryIO, columns: Columns, skip: int) -> Iterator[Block]:
    parquet = pq.ParquetFile(f)
    check_parquet(file, parquet.schema_arrow, columns.text, columns.kept)
    meta = parquet.metadata
    sizes = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
    ends = list(itertools.accumulate(sizes))
    groups = [i for i, end in enumerate(ends) if end > skip]
    if not groups:
        return
    at = ends[groups[0]] - sizes[groups[0]]
    wanted = list(dict.fromkeys([columns.text, *columns.kept]))
    for batch in parquet.iter_batches(BLOCK_ROWS, row_groups=groups, columns=wanted):
        lo = max(0, skip - at)
        if lo < len(batch):
            part = batch.slice(lo)
            arrays = [_cast(part.column(n), columns.schema.field(n), file) for n in columns.kept]
            kept = pa.table(arrays, names=columns.kept) if arrays else _no_columns(len(part))
            share = file.size * len(part) / max(meta.num_rows, 1)
            yield Block(file, range(at + lo, at + len(batch)), _texts(part.column(columns.text)), kept, share)
        at += len(batch)


def _texts(column: pa.Array) -> list[object]:
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        pass
    found: list[object] = []
    for value in column:
        try:
            found.append(value.as_py())
        except UnicodeDecodeError as e:
            found.append(
                InvalidInput(f"the text is not UTF-8: byte 0x{e.object[e.start]:02x} at {e.start} ({e.reason})")
            )
    return found


def _cast(column: pa.Array, field: pa.Field, file: File) -> pa.Array:
    try:
        if pa.types.is_boolean(column.type) != pa.types.is_boolean(field.type) and not (
            is_text(column.type) or is_text(field.type) or pa.types.is_null(column.type)
        ):
            raise pa.ArrowInvalid("a yes or no is no number")  # which a cast makes of it
        return column if column.type == field.type else column.cast(field.type)
    except pa.ArrowException as e:
        raise StartError(f"{file.url}: column {field.name!r} is not {field.type} throughout ({e})") from None


def _no_columns(rows: int) -> pa.Table:
    """A table of rows without columns knows how many it has."""
    return pa.table({"": pa.nulls(rows)}).select([])


def _from_lines(file: File, f: BinaryIO, columns: Columns, skip: int) -> Iterator[Block]:
    rows = {"jsonl": _jsonl, "csv": _csv, "text": _plain_text}[file.format](file, f, columns)
    if skip:
        next(itertools.islice(rows, skip - 1, skip), None)
    told = passed = _taken(f) if skip else 0.0
    while some := list(itertools.islice(rows, BLOCK_ROWS)):
        texts = [text for _, text, _ in some]
        kept = _table([row for _, _, row in some], texts, columns, csv=file.format == "csv")
        here = max(_taken(f), told)
        yield Block(file, [number for number, _, _ in some], texts, kept, here - told, passed)
        told, passed = here, 0.0


def _taken(f: BinaryIO) -> float:
    return f.taken if isinstance(f, Stream) else 0.0


Row = tuple[int, object, dict[str, Any]]
"""(number, text, the other columns)"""


def _jsonl(file: File, f: BinaryIO, columns: Columns) -> Iterator[Row]:
    names = columns.kept
    for number, raw in lines(f):
        row = json_row(raw, names)
        yield (number, row.get(columns.text), row) if isinstance(row, dict) else (number, row, {})


def _plain_text(file: File, f: BinaryIO, columns: Columns) -> Iterator[Row]:
    for number, raw in lines(f):
        yield number, decoded(raw), {}


def _csv(file: File, f: BinaryIO, columns: Columns) -> Iterator[Row]:
    rows = csv_rows(f)
    head = csv_head(rows)
    if head:
        check_csv(file, head, columns.text, columns.kept)
    for number, row in rows:
        if isinstance(row, InvalidInput):
            yield number - 1, row, {}
        elif len(row) != len(head):
            yield number - 1, InvalidInput(f"the line has {len(row)} values, the first line {len(head)}"), {}
        else:
            told = dict(zip(head, row, strict=True))
            yield number - 1, told[columns.text], told


def _table(rows: list[dict[str, Any]], texts: list[object], columns: Columns, *, csv: bool) -> pa.Table:
    """The kept columns. A row with a value that its column does not take is refused in `texts`, and has null there."""
    if not columns.kept:
        return _no_columns(len(rows))
    arrays = []
    for name in columns.kept:
        kind, there = columns.schema.field(name).type, [row.get(name) for row in rows]
        array, bad = values.column(there, kind, csv=csv, digits=name in columns.digits)
        arrays.append(array)
        for i in bad:
            if not isinstance(texts[i], InvalidInput):  # the first reason is told: the id's, if that is at fault
                flag = "--id" if name == columns.id else "--keep"
                texts[i] = InvalidInput(values.unfit(name, flag, there[i], kind))
    return pa.table(arrays, names=columns.kept)
