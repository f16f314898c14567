"""`hortus embed`: what a person typed, to a run. Wires files, engine, pipeline and output folder, as serve.py wires a server.

Exit status: 0 every row has a vector, 3 some rows were rejected, 130 or 143 stopped by a signal (the same command goes on);
StartError, 1 in the CLI, when it cannot start or go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hortus.config import Config
from hortus.corpus import manifest, plan, read
from hortus.corpus.columns import Columns, settle
from hortus.corpus.files import File, listed
from hortus.corpus.manifest import Record
from hortus.corpus.output import schema_of
from hortus.corpus.pipeline import Parts, run
from hortus.corpus.plan import Unit, Window
from hortus.corpus.progress import Progress
from hortus.corpus.server import Servers
from hortus.corpus.sinks import open_sink, shown
from hortus.corpus.store import Store
from hortus.corpus.vectors import Backend, Local, Wish
from hortus.engines import open_model
from hortus.errors import RequestError, StartError
from hortus.folder import ModelFolder
from hortus.ivy import templates
from hortus.local import open_local

log = logging.getLogger("hortus.corpus")

REJECTED = 3
# Besides all of ROSE's, what of `hortus embed`'s flags is for an engine in this process alone.
_ENGINE_TULIP = ("max_batch_tokens", "step_timeout_s", "fake_delay_ms")
_ENGINE_IVY = ("max_input_chars", "templates", "int8_ranges", "tokenize_threads")


@dataclass(frozen=True, slots=True)
class Job:
    """All that the vectors follow from. Travels to other processes."""

    model: str | None
    settings: Config
    files: tuple[File, ...]
    counts: tuple[int | None, ...]
    """Rows of each file, where it says so without being read."""
    units: tuple[Unit, ...]
    columns: Columns
    wish: Wish

    @property
    def total_rows(self) -> int | None:
        return sum(n for n in self.counts if n is not None) if all(n is not None for n in self.counts) else None

    def progress(self, done: Sequence[Record], busy_s: Callable[[], float | None]) -> Progress:
        """Of a run that has come so far."""
        return Progress(
            self.settings.corpus.progress,
            total_bytes=sum(f.size for f in self.files),
            done_bytes=sum(f.size for r in done if r.ends_unit for f in self.units[r.unit].files),
            total_rows=self.total_rows,
            done_rows=sum(r.rows_in for r in done),
            busy_s=busy_s,
        )

    def counts_of(self, unit: int) -> tuple[int | None, ...]:
        """Rows of the files of a unit."""
        before = sum(len(u.files) for u in self.units[:unit])
        return self.counts[before : before + len(self.units[unit].files)]

    def windows(self, done: Sequence[Record]) -> Iterator[Window]:
        """What is left to do, unit by unit."""
        corpus = self.settings.corpus
        ended = {r.unit: r.part for r in done if r.ends_unit}
        for unit in self.units:
            there = {r.part for r in done if r.unit == unit.number}
            if unit.number in ended and len(there) == ended[unit.number] + 1:
                continue
            yield from plan.windows(
                unit,
                self.columns,
                part_rows=corpus.part_rows,
                window_rows=corpus.window_rows,
                done=there,
                counts=self.counts_of(unit.number),
            )


def embed(inputs: Sequence[str], model: str | None, settings: Config) -> int:
    """Run to the end, or until SIGINT or SIGTERM. Returns the exit status; StartError."""
    if settings.corpus.out is None:
        raise StartError("`hortus embed` needs --out: a folder for the vectors")
    if model is None and settings.corpus.server is None:
        raise StartError("`hortus embed` needs --model (a folder, a hub id, or `demo`) or --server")
    if model is not None and settings.corpus.server is not None:
        raise StartError("--model and --server: give one; servers have their model")
    if settings.corpus.server is not None and (idle := without_engine(settings)):
        raise StartError(
            f"{', '.join(idle)}: nothing here for {'them' if len(idle) > 1 else 'it'} to set with --server: a server has its "
            "engine, and was started with flags of its own"
        )
    if settings.corpus.ray is not None and settings.corpus.server is not None:
        raise StartError("--ray and --server: give one; a server's machines are its own")
    if settings.corpus.ray is not None and settings.corpus.into is not None:
        raise StartError("--ray and --into do not go together yet: write Parquet, and load that")
    if settings.corpus.actors is not None and settings.corpus.ray is None:
        raise StartError("--actors means nothing without --ray")
    with asyncio.Runner() as runner:
        return runner.run(_stoppable(job_of(inputs, model, settings)))


def without_engine(settings: Config) -> list[str]:
    """The flags that were set although they mean nothing to a run over servers. Pure."""
    named = {"rose": [f.name for f in fields(settings.rose)], "tulip": _ENGINE_TULIP, "ivy": _ENGINE_IVY}
    unset = Config()
    return [
        "--" + name.replace("_", "-")
        for section, names in named.items()
        for name in names
        if getattr(getattr(settings, section), name) != getattr(getattr(unset, section), name)
    ]


def job_of(inputs: Sequence[str], model: str | None, settings: Config) -> Job:
    """Looks at the inputs. StartError."""
    corpus = settings.corpus
    store = Store(corpus.out) if corpus.out is not None else None

    def ours(where: Any, path: str) -> bool:
        name = store.name_of(where, path) if store is not None else None
        return name is not None and manifest.is_written(name)

    files = listed(inputs, format=corpus.format, ours=ours)
    columns = settle(files, text=corpus.text, id=corpus.id, keep=corpus.keep)
    with ThreadPoolExecutor(16) as pool:
        counts = tuple(pool.map(read.count, files))
    wish = Wish(
        precision=corpus.precision,
        dimensions=corpus.dimensions,
        prompt_name="" if corpus.prompt_name == "none" else corpus.prompt_name,
        chunk_tokens=corpus.chunk_tokens,
        chunk_overlap=corpus.chunk_overlap,
        contextual=corpus.contextual,
    )
    return Job(model, settings, tuple(files), counts, tuple(plan.units(files)), columns, wish)


async def _stoppable(job: Job) -> int:
    """The run; a signal ends it between two steps."""
    task = asyncio.current_task()
    assert task is not None, "called by a runner"
    loop = asyncio.get_running_loop()
    caught: list[int] = []

    def stop(number: int) -> None:
        if caught:  # asked twice: at once
            os._exit(128 + number)
        caught.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        return await _embed(job)
    except asyncio.CancelledError:
        if not caught:
            raise
        task.uncancel()
        log.warning("stopped; the same command goes on from the last part that is whole")
        return 128 + int(caught[0])
    except RequestError as e:
        raise StartError(e.message) from e
    except OSError as e:  # of a database, or a disk that nobody here asked for
        raise StartError(f"{e}; once that is mended, the same command goes on from the last part that is whole") from e
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _embed(job: Job) -> int:
    corpus = job.settings.corpus
    assert corpus.out is not None, "looked at before"
    store = Store(corpus.out)
    async with AsyncExitStack() as closing:
        await asyncio.to_thread(store.prepare, manifest.PARTS, manifest.REJECTS)
        closing.callback(store.release)
        done = await asyncio.to_thread(manifest.records, store)
        if done:
            log.info("going on after %d parts, %d rows", len(done), sum(r.rows_in for r in done))
        way = _on_cluster if corpus.ray is not None else _here
        progress, what = await way(job, store, done, closing)
        done.sort(key=lambda r: (r.unit, r.part))
        totals = await asyncio.to_thread(manifest.finish, store, what, done)
        progress.end("done", out=corpus.out, parts=len(done), total_rejected=totals["rejected"])
        if totals["rejected"]:
            log.warning(
                "%d of %d rows have no vector; the reasons are in %s/%s",
                totals["rejected"], totals["rows_in"], corpus.out, manifest.REJECTS,
            )  # fmt: skip
        return REJECTED if totals["rejected"] else 0


async def _here(job: Job, store: Store, done: list[Record], closing: AsyncExitStack) -> tuple[Progress, dict[str, Any]]:
    """All that is left, in this process; its records are added to `done`."""
    backend, what, engine = await _open(job, closing)
    manifest.same_engine(store, done, engine)
    schema, into, sink = schema_of(job.columns, job.wish, backend.values), job.settings.corpus.into, None
    if into is not None:
        sink = await asyncio.to_thread(open_sink, into, schema)
        closing.callback(sink.close)
    await asyncio.to_thread(manifest.begin, store, what)
    progress = job.progress(done, lambda: backend.busy_s)
    parts = Parts(store, schema, job.columns, engine, sink)
    try:
        async with progress.telling():
            await run(job.windows(done), backend, parts, progress, done.append)
    except BaseException:
        progress.end("stopped")
        raise
    return progress, what


async def _on_cluster(
    job: Job, store: Store, done: list[Record], closing: AsyncExitStack
) -> tuple[Progress, dict[str, Any]]:
    """The same by the actors of a Ray cluster."""
    from hortus.corpus import cluster

    corpus, rose = job.settings.corpus, job.settings.rose
    assert corpus.ray is not None, "asked for only then"
    assert job.model is not None, "looked at before"
    weights = job.settings.tulip.fake_delay_ms is None
    folder = await asyncio.to_thread(open_model, job.model, None, rose, weights=weights)
    what = await asyncio.to_thread(_identity, job, folder)
    await asyncio.to_thread(manifest.begin, store, what)
    if done:
        manifest.same_engine(store, done, done[0].engine)
    counts = [job.counts_of(u.number) for u in job.units]
    tasks = cluster.tasks_of(counts, corpus.part_rows, done)
    busy_s, actors = 0.0, 1
    progress = job.progress(done, lambda: busy_s / actors)
    if not tasks:
        return progress, what
    # Ray tells of lost actors on standard output, whatever it is told: that would get among the lines of progress.
    closing.enter_context(contextlib.redirect_stdout(sys.stderr))
    closing.callback(cluster.stop)
    await asyncio.to_thread(cluster.start, corpus.ray)
    actors, gpus, cores = cluster.actors_of(corpus.actors, job.settings)
    there = {r.name for r in done}
    engine = done[0].engine if done else None
    found = cluster.results(pickle.dumps(job), tasks, engine, actors=actors, gpus=gpus, cores=cores)
    try:
        async with progress.telling():
            while (result := await asyncio.to_thread(next, found, None)) is not None:
                busy_s += result[1]
                for record in result[0]:
                    if record.name not in there:  # a task that was run twice tells twice
                        there.add(record.name)
                        done.append(record)
                        size = sum(f.size for f in job.units[record.unit].files) if record.ends_unit else 0
                        progress.add(
                            rows=record.rows_in - record.rejected,
                            rejected=record.rejected,
                            tokens=record.tokens,
                            bytes=size,
                        )
                manifest.same_engine(store, done, done[0].engine)
    except BaseException:
        progress.end("stopped")
        raise
    await asyncio.to_thread(store.sweep, manifest.PARTS, manifest.REJECTS)  # of actors that were killed
    done[:] = await asyncio.to_thread(manifest.records, store)
    return progress, what


def _identity(job: Job, folder: ModelFolder) -> dict[str, Any]:
    """What the run is. Reads all of the model's files."""
    ivy = job.settings.ivy
    own = templates.Prompts(folder.prompts, folder.default_prompt_name, adapters=folder.adapters)
    prompts = own if ivy.templates is None else templates.read(ivy.templates, own)
    model = {
        "name": folder.name,
        "sha256": manifest.fingerprint(folder.path),
        "prompt": prompts.choose(job.wish.prompt_name),
    }
    if adapter := prompts.adapter(job.wish.prompt_name):  # several have the same text
        model["adapter"] = folder.adapters[adapter - 1]
    return manifest.identity(model, options_of(job.settings), job.files)


async def _open(job: Job, closing: AsyncExitStack) -> tuple[Backend, dict[str, Any], str]:
    """(where vectors come from, what the run is, what makes them)."""
    if job.settings.corpus.server is not None:
        return await _open_servers(job, closing)
    assert job.model is not None, "looked at before"
    opened = await open_local(job.model, job.settings, closing, merge=False)
    backend = Local(opened.embedder, job.wish)
    what = await asyncio.to_thread(_identity, job, opened.folder)
    return backend, what, manifest.engine_name(opened.embedder.info)


async def _open_servers(job: Job, closing: AsyncExitStack) -> tuple[Backend, dict[str, Any], str]:
    corpus, wish = job.settings.corpus, job.wish
    assert corpus.server is not None, "asked for only then"
    wish = replace(wish, truncate=True if job.settings.ivy.auto_truncate else None)
    servers = Servers([u.strip() for u in corpus.server.split(",")], wish, key=corpus.server_key)
    closing.callback(servers.close)
    await servers.open()
    what = manifest.identity(servers.model, {**options_of(job.settings), "prompt_name": wish.prompt_name}, job.files)
    return servers, what, servers.engine


def options_of(settings: Config) -> dict[str, Any]:
    """Every option that a vector or a file depends on."""
    corpus, ivy, rose = settings.corpus, settings.ivy, settings.rose
    named = ["text", "id", "keep", "precision", "dimensions"]
    named += ["chunk_tokens", "chunk_overlap", "contextual", "part_rows", "window_rows"]
    told = {name: getattr(corpus, name) for name in named}
    told |= {name: getattr(ivy, name) for name in ("auto_truncate", "max_input_chars")}
    told |= {name: getattr(rose, name) for name in ("max_length", "load_format", "dtype", "attention")}
    told["max_batch_tokens"] = settings.tulip.max_batch_tokens
    told["into"] = corpus.into and shown(corpus.into)
    told["fake"] = settings.tulip.fake_delay_ms is not None
    told["int8_ranges"] = ivy.int8_ranges and hashlib.sha256(Path(ivy.int8_ranges).read_bytes()).hexdigest()
    return told
