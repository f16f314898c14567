"""A window's vectors with the columns that are kept, as rows of Parquet; and the rows that have none, with the reason.

Does not know where the vectors come from, or where the files go.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from hortus.corpus.columns import Columns
from hortus.corpus.plan import Window
from hortus.corpus.read import Block
from hortus.corpus.vectors import TYPES, Vectors, Wish
from hortus.errors import InvalidInput, StartError

VECTOR = "embedding"
CHUNK = ("chunk", "chunk_start", "chunk_end")
"""Number of the chunk in its text, from 0; where it begins and ends there, in characters."""

_CUT_IT = re.compile(r"send `truncate: true`(?: \([^)]*\))?")
"""How a server's clients have a text cut."""


def schema_of(columns: Columns, wish: Wish, values: int) -> pa.Schema:
    """Of the output. StartError when a kept column has a name that is needed."""
    own = [pa.field(name, pa.int32()) for name in CHUNK] if wish.chunked else []
    own.append(pa.field(VECTOR, pa.list_(pa.field("element", pa.from_numpy_dtype(TYPES[wish.precision])), values)))
    for f in own:
        if f.name in columns.schema.names:
            raise StartError(f"--keep {f.name}: the output has a column of that name; rename it in the input")
    return pa.schema([*columns.schema, *own])


def fixed_lists(rows: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """[n, values] as an array of fixed-size lists, without a copy."""
    flat = pa.array(np.ascontiguousarray(rows).reshape(-1), kind.value_type)
    return pa.FixedSizeListArray.from_arrays(flat, type=kind)


def table_of(window: Window, vectors: Vectors, schema: pa.Schema, columns: Columns) -> pa.Table:
    """The window's rows that have vectors, in order."""
    owners = pa.array(vectors.owners)
    arrays: list[Any] = []
    if columns.id is None:
        names = [_made_up(b, number) for b in window.blocks for number in b.numbers]
        arrays.append(pa.array(names, pa.string()).take(owners))
    if columns.kept:
        arrays += window.kept.combine_chunks().take(owners).columns
    if vectors.chunks is not None:
        arrays += [pa.array(np.ascontiguousarray(vectors.chunks[:, i])) for i in range(3)]
    arrays.append(fixed_lists(vectors.rows, schema.field(VECTOR).type))
    return pa.Table.from_arrays(arrays, schema=schema)


def _made_up(block: Block, number: int) -> str:
    """The id of a row that has none of its own: FILE:ROW."""
    return f"{block.file.url}:{number}"


def rejects_of(window: Window, vectors: Vectors, columns: Columns) -> list[bytes]:
    """A JSON line for each row without a vector: file, row (from 0), id, code and reason.

    id: as in the output; null where the row has none that can be read, and then the reason is that."""
    lines = []
    at = 0
    for block in window.blocks:
        for i in range(at, at + len(block)):
            if (error := vectors.refused.get(i)) is not None:
                number = block.numbers[i - at]
                own = _made_up(block, number) if columns.id is None else block.kept.column(0)[i - at].as_py()
                reason = _CUT_IT.sub("give --auto-truncate", error.message)
                told = {"file": block.file.url, "row": number, "id": own, "code": error.code, "reason": reason}
                lines.append(orjson.dumps(told, default=str) + b"\n")
        at += len(block)
    return lines


def with_vectors(table: pa.Table, name: str, rows: npt.NDArray[Any], at: Sequence[int]) -> pa.Table:
    """The table with a column of vectors more: rows[i] in row at[i], null elsewhere."""
    if name in table.column_names:
        raise InvalidInput(f"the table has a column {name!r:.80} already; give another `name`", param="name")
    kind = pa.list_(pa.field("element", pa.from_numpy_dtype(rows.dtype)), rows.shape[1])
    if len(at) == len(table):
        return table.append_column(name, fixed_lists(rows, kind))
    places = np.full(len(table), -1, np.int64)
    places[list(at)] = np.arange(len(at))
    indices = pa.array(np.maximum(places, 0), mask=places < 0)
    return table.append_column(name, fixed_lists(rows, kind).take(indices) if len(at) else pa.nulls(len(table), kind))
