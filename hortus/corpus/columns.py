"""Which columns are read of a corpus, and of what type each is: settled once, by its first file with rows.

Parquet columns keep their types. JSONL columns get the types that most of the first thousand rows of the first file with
rows have (of a column that is null in all of these, the next thousand). CSV columns are text, and plain text files have none.
`NAME:TYPE` says a type. Does not know rows, beyond those.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from hortus.corpus import values
from hortus.corpus.files import File, named
from hortus.corpus.lines import csv_head, csv_rows, json_row, lines
from hortus.errors import StartError

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


def settle(files: Sequence[File], *, text: str, id: str | None, keep: str | None) -> Columns:
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
    digits = frozenset(a.name for a in asked if a.type is not None and is_text(a.type))
    return Columns(text, asked[0].name if id is not None else None, pa.schema(schema), digits)


def _need(file: File, there: list[str], names: Sequence[str], flag: str) -> None:
    """StartError when one of the names is not there, or there twice."""
    for name in names:
        if name not in there:
            raise StartError(f"{file.url}: no column {name!r} ({flag}); it has {', '.join(there)}")
        if there.count(name) > 1:
            raise StartError(f"{file.url}: names its column {name!r} more than once ({flag})")


def _parquet_fields(file: File, text: str, names: Sequence[str]) -> dict[str, pa.DataType]:
    with named(file), file.open() as f:
        schema = pq.read_schema(f)
    check_parquet(file, schema, text, names)
    return {f.name: _plain(f.type) for f in schema}


def _plain(kind: pa.DataType) -> pa.DataType:
    """A dictionary's values: dictionaries differ from file to file."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def check_parquet(file: File, schema: pa.Schema, text: str, names: Sequence[str]) -> None:
    """StartError when the columns are not there or the text column holds none."""
    _need(file, schema.names, [text], "--text")
    _need(file, schema.names, names, "--keep or --id")
    kind = _plain(schema.field(text).type)
    if not is_text(kind) and not pa.types.is_null(kind):
        raise StartError(f"{file.url}: column {text!r} (--text) is {kind}, not text")


def _jsonl_fields(file: File, text: str, names: Sequence[str]) -> dict[str, pa.DataType] | None:
    with named(file), file.open() as f:
        rows = (json_row(raw, names) for _, raw in lines(f))
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
    with named(file), file.open() as f:
        head = csv_head(csv_rows(f))
    if not head:
        return None
    check_csv(file, head, text, names)
    return dict.fromkeys(names, pa.string())


def check_csv(file: File, head: list[str], text: str, names: Sequence[str]) -> None:
    """StartError when the first line does not name the columns, each once."""
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
