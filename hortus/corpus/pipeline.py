"""Windows in, parts out: reading, tokenising, the device and writing at the same time, in bounded memory, in order.

    read (a thread) -> vectors (backend; several windows at once) -> write (a thread)

At most AHEAD windows are between reading and writing. A part's record is written after everything of it is on the disk; that
is the moment when it is done. Does not know where vectors come from.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hortus.corpus import manifest
from hortus.corpus.columns import Columns
from hortus.corpus.manifest import REJECTS, Record
from hortus.corpus.output import VECTOR, rejects_of, table_of
from hortus.corpus.plan import Window, part_name
from hortus.corpus.progress import Progress
from hortus.corpus.sinks import Sink
from hortus.corpus.store import Store, Writing
from hortus.corpus.vectors import Backend, Vectors
from hortus.errors import StartError, first_of

AHEAD = 3
"""Windows in memory: one that is written, one on the device, one read and tokenised behind it."""


class Parts:
    """Windows to parts, one part after another. Does what may block; a call waits for the one before it, which a task that was
    cancelled may have left running in its thread."""

    def __init__(
        self, store: Store, schema: pa.Schema, columns: Columns, engine: str, sink: Sink | None = None
    ) -> None:
        """sink: takes the rows in place of Parquet files."""
        self._store, self._schema, self._columns, self._engine, self._sink = store, schema, columns, engine, sink
        self._part: _Part | None = None
        self._one = threading.Lock()

    def take(self, window: Window, vectors: Vectors) -> Record | None:
        """Write a window; the part's record when it was the last."""
        with self._one:
            return self._take(window, vectors)

    def _take(self, window: Window, vectors: Vectors) -> Record | None:
        if self._part is None:
            self._part = _Part(self._store, self._schema, part_name(window.unit, window.part), self._sink)
        part = self._part
        if len(window):
            part.write(table_of(window, vectors, self._schema, self._columns))
            part.reject(rejects_of(window, vectors, self._columns))
        part.rows_in += len(window)
        part.tokens += vectors.tokens
        if not window.ends_part:
            return None
        record = part.commit(window, self._engine)
        self._part = None
        manifest.write(self._store, record)
        return record

    def abandon(self) -> None:
        """Nothing of the part that is not finished stays."""
        with self._one:
            if self._part is not None:
                self._part.abandon()
                self._part = None


class _Part:
    """One part's files while they are written."""

    def __init__(self, store: Store, schema: pa.Schema, name: str, sink: Sink | None) -> None:
        self._store, self.name, self._sink = store, name, sink
        self._file: Writing | None = None
        with contextlib.ExitStack() as opening:
            if sink is not None:
                sink.begin(name)
            else:
                self._file = opening.enter_context(store.create(name + ".parquet"))
                self._writer = writer_of(self._file, schema)
            self._open = opening.pop_all()
        self._rejects: Writing | None = None
        self.rows_in = self.rows = self.rejected = self.tokens = 0

    def write(self, table: pa.Table) -> None:
        if self._sink is not None:
            if len(table):
                self._sink.write(table)
        elif len(table):
            self._writer.write_table(table, row_group_size=len(table))
        self.rows += len(table)

    def reject(self, lines: list[bytes]) -> None:
        if lines and self._rejects is None:
            self._rejects = self._open.enter_context(self._store.create(f"{REJECTS}/{self.name}.jsonl"))
        for line in lines:
            assert self._rejects is not None, "opened above"
            self._rejects.write(line)
        self.rejected += len(lines)

    def commit(self, window: Window, engine: str) -> Record:
        if self._file is not None:
            self._writer.close()
        self._open.close()
        if self._rejects is None:
            self._store.remove(f"{REJECTS}/{self.name}.jsonl")
        return Record(
            name=self.name,
            unit=window.unit,
            part=window.part,
            rows_in=self.rows_in,
            rows=self.rows,
            rejected=self.rejected,
            tokens=self.tokens,
            bytes=self._file.size if self._file is not None else 0,
            sha256=self._file.sha256 if self._file is not None else "",
            ends_unit=window.ends_unit,
            engine=engine,
        )

    def abandon(self) -> None:
        error = _AbandonedError()
        with contextlib.suppress(StartError, pa.ArrowException):  # its last words go into a file that is thrown away
            if self._file is not None:
                self._writer.close()
        with contextlib.suppress(_AbandonedError, StartError):
            self._open.__exit__(_AbandonedError, error, None)


class _AbandonedError(Exception):
    """Makes Store.create throw away what was written."""


def writer_of(file: Writing, schema: pa.Schema) -> Any:
    """Vectors do not compress, and have no words to put into a dictionary; the other columns do both."""
    plain = [name for name in schema.names if name != VECTOR]
    return pq.ParquetWriter(
        file,
        schema,
        use_dictionary=plain,
        write_statistics=plain,
        compression={**dict.fromkeys(plain, "zstd"), f"{VECTOR}.list.element": "none"},
    )


async def run(
    windows: Iterator[Window],
    backend: Backend,
    parts: Parts,
    progress: Progress,
    finished: Callable[[Record], None] = lambda record: None,
) -> None:
    """Everything, until the windows are through. What is raised ends it; parts that are not finished leave nothing."""
    slots = asyncio.Semaphore(AHEAD)
    embedding: asyncio.Queue[tuple[Window, asyncio.Task[Vectors]] | None] = asyncio.Queue()

    async def read(group: asyncio.TaskGroup) -> None:
        while True:
            await slots.acquire()
            window = await asyncio.to_thread(next, windows, None)
            if window is None:
                break
            await embedding.put((window, group.create_task(backend.vectors(window.texts))))
        await embedding.put(None)

    async def write() -> None:
        while (item := await embedding.get()) is not None:
            window, vectors = item[0], await item[1]
            record = await asyncio.to_thread(parts.take, window, vectors)
            slots.release()
            rejected = len(vectors.refused)
            progress.add(
                rows=len(window) - rejected,
                rejected=rejected,
                tokens=vectors.tokens,
                bytes=sum(b.bytes for b in window.blocks),
                skipped=sum(b.skipped for b in window.blocks),
            )
            if record is not None:
                finished(record)
            del item, window, vectors

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(read(group))
            group.create_task(write())
    except BaseExceptionGroup as failures:
        raise first_of(failures) from None
    finally:
        await asyncio.to_thread(parts.abandon)
