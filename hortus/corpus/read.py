"""Files to blocks of rows: the texts, and the columns that are to be kept.

Parquet columns keep their types. JSONL columns get the types that most of the first thousand rows of the first file with
rows have (of a column that is null in all of these, the next thousand); a value that is of another makes its row one that is
refused. CSV columns are text, and plain text files have none. `NAME:TYPE` says a type. A line that cannot be read is a row
refused, of whatever format; a file that cannot be read ends the run, with its name. Lines that hold nothing are no rows, and
are counted all the same, so that a row's number finds its line.

Does not know windows, parts or vectors.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from hortus.corpus import values
from hortus.corpus.files import File, Stream
from hortus.errors import InvalidInput, StartError

BLOCK_ROWS = 1024
"""Most rows of a block: also what a reader holds beside the windows."""
PROBE_ROWS = 1000
"""Rows of the first file with any that settle the types of JSONL columns."""
PROBES = 50
"""So many times as many are looked through for a value of a column that is null in the first ones."""


@dataclass(frozen=True, slots=True)
class Columns:
    """What is read of every file."""

    text: str
    id: str | None
    schema: pa.Schema
    """Of the kept columns, the id first; `id` of FILE:ROW where there is no other."""
    digits: frozenset[str] = frozenset()
    """Columns that were told to be text: of JSON's whole numbers they take the digits, as Parquet's do."""

    @property
    def kept(self) -> list[str]:
        """Columns that are read from the files, besides the text."""
        return [n for n in self.schema.names if self.id is not None or n != "id"]


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


# Columns


@dataclass(slots=True)
class _Asked:
    name: str
    type: pa.DataType | None = None


def _asked(keep: str | None, id: str | None) -> list[_Asked]:
    """Column names with the types they are to have. StartError."""
    words = [w.strip() for w in (keep or "").split(",") if w.strip()]
    asked: dict[str, _Asked] = {}
    for word in ([id] if id else []) + words:
        name, _, kind = word.rpartition(":") if ":" in word else (word, "", "")
        try:
            told = pa.type_for_alias(kind) if kind else None
        except ValueError:
            raise StartError(f"--keep {word}: no type {kind!r}; such as string, int64, float64, bool") from None
        before = asked.get(name)
        asked[name] = _Asked(name, told or (before.type if before else None))
    return list(asked.values())


def columns(files: Sequence[File], *, text: str, id: str | None, keep: str | None) -> Columns:
    """The columns of the whole corpus, settled by its first file. StartError when it has no such columns."""
    first, asked = files[0], _asked(keep, id)
    if mixed := next((f for f in files if f.format != first.format and asked), None):
        raise StartError(
            f"--keep and --id need inputs of one format; {first.url} is {first.format}, {mixed.url} {mixed.format}"
        )
    names = [a.name for a in asked]
    fields: dict[str, pa.DataType] | None = None
    for file in (f for f in files if f.format == first.format):
        if (fields := _FIELDS[first.format](file, text, names)) is not None:
            break
    if fields is None:  # nothing but empty files
        fields = dict.fromkeys(names, pa.string())
    schema = [pa.field(a.name, a.type or fields[a.name]) for a in asked]
    if id is None:
        if any(f.name == "id" for f in schema):
            raise StartError("--keep id: name it by --id, or there would be two columns `id`")
        schema.insert(0, pa.field("id", pa.string()))
    digits = frozenset(a.name for a in asked if a.type is not None and _is_text(a.type))
    return Columns(text, asked[0].name if id is not None else None, pa.schema(schema), digits)


def _need(file: File, there: Sequence[str], names: Sequence[str], flag: str) -> None:
    for name in names:
        if name not in there:
            raise StartError(f"{file.url}: no column {name!r} ({flag}); it has {', '.join(there)}")


def _parquet_fields(file: File, text: str, names: Sequence[str]) -> dict[str, pa.DataType]:
    with _named(file), file.open() as f:
        schema = pq.read_schema(f)
    check_parquet(file, schema, text, names)
    return {f.name: _plain(f.type) for f in schema}


def _plain(kind: pa.DataType) -> pa.DataType:
    """A dictionary's values: dictionaries differ from file to file."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def check_parquet(file: File, schema: pa.Schema, text: str, names: Sequence[str]) -> None:
    """StartError when the columns are not there or the text column holds none."""
    _need(file, schema.names, [text], "--text")
    _need(file, schema.names, names, "--keep or --id")
    kind = _plain(schema.field(text).type)
    if not _is_text(kind) and not pa.types.is_null(kind):
        raise StartError(f"{file.url}: column {text!r} (--text) is {kind}, not text")


def _jsonl_fields(file: File, text: str, names: Sequence[str]) -> dict[str, pa.DataType] | None:
    with _named(file), file.open() as f:
        rows = (_json(raw, names) for _, raw in _lines(f))
        probe = list(itertools.islice(rows, PROBE_ROWS))
        good = [r for r in probe if isinstance(r, dict)]
        there = list(dict.fromkeys(k for r in good for k in r))
        if probe and not good:
            raise StartError(
                f"{file.url}: of its first {len(probe)} lines none is a JSON object; is it JSON lines (--format)?"
            )
        if not good:
            return None
        _need(file, there, [text], "--text")
        _need(file, there, names, "--keep or --id")
        found = {name: [r.get(name) for r in good] for name in names}
        for _ in range(1, PROBES):
            unknown = [name for name in names if all(v is None for v in found[name])]
            if not unknown or not (probe := list(itertools.islice(rows, PROBE_ROWS))):
                break
            found |= {name: [r.get(name) for r in probe if isinstance(r, dict)] for name in unknown}
    return {name: values.guess(found[name]) for name in names}


def _csv_fields(file: File, text: str, names: Sequence[str]) -> dict[str, pa.DataType] | None:
    with _named(file), file.open() as f:
        head = _csv_head(_csv_rows(f))
    if not head:
        return None
    check_csv(file, head, text, names)
    return dict.fromkeys(names, pa.string())


def check_csv(file: File, head: Sequence[str], text: str, names: Sequence[str]) -> None:
    """StartError when the first line does not name the columns, each once."""
    if twice := [name for name in (text, *names) if head.count(name) > 1]:
        raise StartError(f"{file.url}: its first line names {twice[0]!r} more than once")
    _need(file, head, [text], "--text")
    _need(file, head, names, "--keep or --id")


def _text_fields(file: File, text: str, names: Sequence[str]) -> dict[str, pa.DataType]:
    if names:
        raise StartError(f"{file.url}: plain text has no columns; leave out --keep and --id")
    return {}


# Each gives the columns' types, or None of a file that has no rows to tell them.
_FIELDS: dict[str, Callable[[File, str, Sequence[str]], dict[str, pa.DataType] | None]] = {
    "parquet": _parquet_fields,
    "jsonl": _jsonl_fields,
    "csv": _csv_fields,
    "text": _text_fields,
}


# Rows


def count(file: File) -> int | None:
    """Rows of the file when it says so without being read."""
    if file.format != "parquet":
        return None
    with _named(file), file.open() as f:
        return int(pq.read_metadata(f).num_rows)


def blocks(file: File, columns: Columns, skip: int = 0) -> Iterator[Block]:
    """The rows from number `skip` on. StartError names the file when it cannot be read."""
    with _named(file), file.open() as f:
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
            _is_text(column.type) or _is_text(field.type) or pa.types.is_null(column.type)
        ):
            raise pa.ArrowInvalid("a yes or no is no number")  # which a cast makes of it
        return column if column.type == field.type else column.cast(field.type)
    except pa.ArrowException as e:
        raise StartError(f"{file.url}: column {field.name!r} is not {field.type} throughout ({e})") from None


def _no_columns(rows: int) -> pa.Table:
    """A table of rows without columns knows how many it has."""
    return pa.table({"": pa.nulls(rows)}).select([])


@dataclass(slots=True)
class _Lines:
    """Rows of a line format on their way into a block."""

    texts: list[object] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)


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


def _lines(f: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(number, line) of lines that hold something, without their ends, nor the mark that Windows' programs begin a file with."""
    for number, raw in enumerate(f):
        line = raw.rstrip(b"\r\n")
        if number == 0:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line and not line.isspace():
            yield number, line


def _decoded(raw: bytes) -> str | InvalidInput:
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        return InvalidInput(f"the line is not UTF-8: byte 0x{raw[e.start]:02x} at {e.start} ({e.reason})")


def _json(raw: bytes, names: Sequence[str]) -> Any:
    """The row; of the columns `names` whole numbers are whole, however large."""
    try:
        row = orjson.loads(raw)
    except orjson.JSONDecodeError as e:
        line = _decoded(raw)
        return line if isinstance(line, InvalidInput) else InvalidInput(f"the line is not JSON: {e}")
    if not isinstance(row, dict):
        return InvalidInput("the line is no JSON object")
    if any(values.vast(row.get(name), raw) for name in names):
        try:
            return json.loads(raw)  # slower; makes no floats of what is beyond 64 bits
        except RecursionError:
            return InvalidInput("the line is JSON that is nested too deep")
    return row


Row = tuple[int, object, dict[str, Any]]
"""(number, text, the other columns)"""


def _jsonl(file: File, f: BinaryIO, columns: Columns) -> Iterator[Row]:
    names = columns.kept
    for number, raw in _lines(f):
        row = _json(raw, names)
        yield (number, row.get(columns.text), row) if isinstance(row, dict) else (number, row, {})


def _plain_text(file: File, f: BinaryIO, columns: Columns) -> Iterator[Row]:
    for number, raw in _lines(f):
        yield number, _decoded(raw), {}


def _csv_rows(f: BinaryIO) -> Iterator[tuple[int, list[str] | InvalidInput]]:
    """(number, row): the first line is row 0; a row that goes over several lines is one."""
    csv.field_size_limit(1 << 30)
    bad: list[InvalidInput] = []  # lines of the row that is being read

    def lines() -> Iterator[str]:
        for i, raw in enumerate(f):
            raw = raw.removeprefix(b"\xef\xbb\xbf") if i == 0 else raw
            line = _decoded(raw)
            if isinstance(line, InvalidInput):
                bad.append(line)
                line = raw.decode("utf-8", "surrogateescape")  # its commas and quotes still say where the row ends
            yield line

    reader = csv.reader(lines(), strict=True)
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


def _csv_head(rows: Iterator[tuple[int, list[str] | InvalidInput]]) -> list[str]:
    """The names of the columns; none in an empty file. StartError."""
    _, head = next(rows, (0, []))
    if isinstance(head, InvalidInput):
        raise StartError(f"its first line has no names of columns: {head.message}")
    return head


def _csv(file: File, f: BinaryIO, columns: Columns) -> Iterator[Row]:
    rows = _csv_rows(f)
    head = _csv_head(rows)
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


class _named:
    """What goes wrong inside is about this file."""

    def __init__(self, file: File) -> None:
        self.file = file

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StartError) and self.file.url not in str(error):
            raise StartError(f"{self.file.url}: {error}") from None
        if isinstance(error, OSError | EOFError | pa.ArrowException | UnicodeDecodeError):
            raise StartError(f"{self.file.url}: cannot be read as {self.file.format}: {error}") from error
