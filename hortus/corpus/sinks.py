"""Vectors straight into a database: LanceDB, Qdrant, Postgres with pgvector. Each is imported when it is asked for.

A part that is written twice, because the run was killed between its rows and its record, is in the database once: LanceDB's rows
carry the name of their part and those of the part go first; Qdrant's and Postgres' are put by their key, the id (and the number
of the chunk), which must therefore differ from row to row. Does not know windows or where vectors come from.
"""

from __future__ import annotations

import json
import uuid
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa

from hortus.corpus.output import CHUNK, VECTOR
from hortus.errors import StartError
from hortus.ivy.outputs import as_numbers
from hortus.types import Float32

KINDS = ("lancedb", "qdrant", "postgres", "postgresql")
_SPACE = uuid.UUID("5f0c7d0e-6d0b-4f57-9d0a-6c1f3f6c9b52")
_POINTS = 512
"""Points a request to Qdrant."""


class Sink(Protocol):
    """Where a part's rows go. Called from one thread at a time; blocks."""

    def begin(self, part: str) -> None:
        """A part begins; what is there of it from a run that was cut off counts for nothing."""

    def write(self, table: pa.Table) -> None:
        """Rows of the part. They are there for good when this returns."""

    def close(self) -> None: ...


def open_sink(url: str, schema: pa.Schema) -> Sink:
    """lancedb:FOLDER#TABLE, qdrant:URL#COLLECTION (or a folder, for its local mode), postgresql://...#TABLE. StartError."""
    where, mark, name = url.rpartition("#")
    kind = where.partition(":")[0]
    if kind not in KINDS or not mark or not name:
        raise StartError(
            f"--into {shown(url)}: expected lancedb:FOLDER#TABLE, qdrant:URL#COLLECTION or postgresql://USER@HOST/DB#TABLE"
        )
    value = schema.field(VECTOR).type.value_type
    if value not in (pa.float32(), pa.float16()):
        raise StartError(f"--into takes --precision float32 or float16, not vectors of {value}")
    try:
        if kind == "lancedb":
            return Lance(where.removeprefix("lancedb:"), name, schema)
        if kind == "qdrant":
            return Qdrant(where.removeprefix("qdrant:"), name, schema)
        return Postgres(where, name, schema)
    except ModuleNotFoundError as e:
        extra = "pgvector" if kind.startswith("postgres") else kind
        raise StartError(f"--into {kind} needs the package {e.name}: pip install 'hortus[{extra}]'") from None


def shown(url: str) -> str:
    """The URL without its password: it goes into errors and the manifest."""
    secret = urlsplit(url).password
    return url if secret is None else url.replace(f":{secret}@", ":...@", 1)


def key_of(schema: pa.Schema) -> list[str]:
    """Columns that name a row: the id, and the number of the chunk where there are any."""
    return [schema.names[0], *(CHUNK[:1] if CHUNK[0] in schema.names else ())]


class Lance:
    """A LanceDB table: the output's columns and `part`."""

    def __init__(self, folder: str, name: str, schema: pa.Schema) -> None:
        import lancedb

        self._part = ""
        wanted = schema.append(pa.field("part", pa.string()))
        database = lancedb.connect(folder)
        if name in database.list_tables().tables:
            self._table = database.open_table(name)
            if not self._table.schema.equals(wanted):
                raise StartError(f"--into: the LanceDB table {name} has other columns than {', '.join(wanted.names)}")
        else:
            self._table = database.create_table(name, schema=wanted)

    def begin(self, part: str) -> None:
        self._part = part
        self._table.delete(f"part = '{part}'")

    def write(self, table: pa.Table) -> None:
        self._table.add(table.append_column("part", pa.array([self._part] * len(table), pa.string())))

    def close(self) -> None:
        """Nothing is held."""


class Qdrant:
    """A Qdrant collection: a point a row, named by its key, with the other columns as payload."""

    def __init__(self, where: str, name: str, schema: pa.Schema) -> None:
        from qdrant_client import QdrantClient, models

        self._models, self._name, self._key = models, name, key_of(schema)
        remote = where.startswith(("http://", "https://"))
        self._client = QdrantClient(url=where) if remote else QdrantClient(path=where)
        half = schema.field(VECTOR).type.value_type == pa.float16()
        size = schema.field(VECTOR).type.list_size
        try:
            if not self._client.collection_exists(name):
                self._client.create_collection(
                    name,
                    models.VectorParams(
                        size=size,
                        distance=models.Distance.COSINE,
                        datatype=models.Datatype.FLOAT16 if half else models.Datatype.FLOAT32,
                    ),
                )
            there = self._client.get_collection(name).config.params.vectors
        except Exception as e:
            self._client.close()
            raise StartError(f"--into qdrant {where}: {e}") from e
        if getattr(there, "size", None) != size:
            self._client.close()
            raise StartError(f"--into: the Qdrant collection {name} has other vectors than one of {size} values")

    def begin(self, part: str) -> None:
        """Points are put by their names."""

    def write(self, table: pa.Table) -> None:
        vectors = matrix(table)
        rows = table.drop_columns([VECTOR]).to_pylist()
        for lo in range(0, len(rows), _POINTS):
            points = [
                self._models.PointStruct(
                    id=str(uuid.uuid5(_SPACE, json.dumps([row[k] for k in self._key], default=str))),
                    vector=vector.tolist(),
                    payload=row,
                )
                for row, vector in zip(rows[lo : lo + _POINTS], vectors[lo : lo + _POINTS], strict=True)
            ]
            self._client.upsert(self._name, points, wait=True)

    def close(self) -> None:
        self._client.close()


_SQL = ((pa.types.is_integer, "bigint"), (pa.types.is_floating, "double precision"), (pa.types.is_boolean, "boolean"),
        (pa.types.is_date, "date"), (pa.types.is_timestamp, "timestamp"))  # fmt: skip


class Postgres:
    """A table with a pgvector column: `vector`, of float16 `halfvec`. Other columns by type; what has none here as text."""

    def __init__(self, url: str, name: str, schema: pa.Schema) -> None:
        import psycopg
        from psycopg import sql

        self._sql, self._schema = sql, schema
        self._table = sql.Identifier(name)
        vector = schema.field(VECTOR).type
        kind = f"{'halfvec' if vector.value_type == pa.float16() else 'vector'}({vector.list_size})"
        columns = [(f.name, kind if f.name == VECTOR else sql_type(f.type)) for f in schema]
        self._as_text = {f.name for f in schema if f.name != VECTOR and sql_type(f.type) == "text"}
        names = sql.SQL(", ").join(sql.Identifier(n) for n, _ in columns)
        key = sql.SQL(", ").join(map(sql.Identifier, key_of(schema)))
        others = [n for n, _ in columns if n not in key_of(schema)]
        self._copy = sql.SQL("COPY window_rows ({}) FROM STDIN").format(names)
        self._put = sql.SQL(
            "INSERT INTO {table} ({names}) SELECT DISTINCT ON ({key}) {names} FROM window_rows "
            "ON CONFLICT ({key}) DO UPDATE SET {sets}"
        ).format(
            table=self._table, names=names, key=key,
            sets=sql.SQL(", ").join(sql.SQL("{0} = excluded.{0}").format(sql.Identifier(n)) for n in others),
        )  # fmt: skip
        typed = sql.SQL(", ").join(sql.SQL("{} {}").format(sql.Identifier(n), sql.SQL(t)) for n, t in columns)
        try:
            self._connection = psycopg.connect(url, autocommit=True)
            self._connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            self._connection.execute(
                sql.SQL("CREATE TABLE IF NOT EXISTS {} ({}, PRIMARY KEY ({}))").format(self._table, typed, key)
            )
            there = self._connection.execute(
                "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
                "WHERE attrelid = to_regclass(quote_ident(%s)) AND attnum > 0 AND NOT attisdropped",
                [name],
            ).fetchall()
            self._connection.execute(sql.SQL("CREATE TEMP TABLE window_rows ({})").format(typed))
        except psycopg.Error as e:
            raise StartError(f"--into {shown(url)}: {e}") from None
        plain = {n: t.replace("timestamp without time zone", "timestamp") for n, t in there}
        if any(plain.get(n) != t for n, t in columns):
            self._connection.close()
            told = ", ".join(f"{n} {t}" for n, t in columns)
            raise StartError(f"--into: the table {name} has other columns than {told}")

    def begin(self, part: str) -> None:
        """Rows are put by their keys."""

    def write(self, table: pa.Table) -> None:
        columns: list[list[Any]] = []
        for name in table.column_names:
            if name == VECTOR:
                columns.append([f"[{text.decode()}]" for text in as_numbers(matrix(table))])
            elif name in self._as_text:
                values = table.column(name).to_pylist()
                columns.append([v if v is None or isinstance(v, str) else json.dumps(v, default=str) for v in values])
            else:
                columns.append(table.column(name).to_pylist())
        with self._connection.transaction(), self._connection.cursor() as cursor:
            cursor.execute("TRUNCATE window_rows")
            with cursor.copy(self._copy) as copy:
                for row in zip(*columns, strict=True):
                    copy.write_row(row)
            cursor.execute(self._put)

    def close(self) -> None:
        self._connection.close()


def sql_type(kind: pa.DataType) -> str:
    """The type of a column in Postgres."""
    return next((name for test, name in _SQL if test(kind)), "text")


def matrix(table: pa.Table) -> Float32:
    """[rows, values] float32: the vectors of a table."""
    column = table.column(VECTOR).combine_chunks()
    flat: Float32 = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
    return flat.reshape(len(table), -1)
