"""`hortus bench corpus`: what `hortus embed` makes of the engine's own speed; and of two Ray actors beside one (--ray).

The peer is the engine alone: the very steps of the corpus, tokenised, sorted and cut beforehand, one behind another as the engine
takes them. What is lost against it is all that `hortus embed` does besides: reading, tokenising, sorting, normalising, writing
Parquet. Both run on one opened engine, in turn, over several windows, as a corpus has them: the first is read and tokenised while
nothing runs. By the clock the rest is hidden where a core is free, and takes the engine's own time where none is; how much there
is to hide is told by processor time, also of each thread (Linux).

Ray's actors are processes that take long to start, so their rate is that between the first and the last part that they finish.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from hortus import config
from hortus.bench.flags import at_most, text_file, whole, written_file
from hortus.bench.results import Record, append, gpu, table
from hortus.bench.shapes import SHAPES, shape_folder
from hortus.bench.texts import Corpus, mixed
from hortus.corpus import command, manifest
from hortus.corpus.output import schema_of
from hortus.corpus.pipeline import Parts, run
from hortus.corpus.store import Store
from hortus.corpus.vectors import Local, take
from hortus.engines import open_model
from hortus.errors import StartError
from hortus.ivy.assemble import Truncate
from hortus.ivy.split import cut
from hortus.ivy.tokenize import Tokenizer
from hortus.local import open_local
from hortus.types import LazyTensor, TokenBatch


def main(argv: Sequence[str]) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="hortus bench corpus", description=(__doc__ or "").split("\n", 1)[0])
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--model", default="demo")
    one.add_argument("--shape", choices=SHAPES, help="random weights of this shape instead of a model")
    parser.add_argument("--rows", type=whole, default=1024, help="of 1 to 11 sentences each, or of --tokens")
    parser.add_argument("--tokens", type=whole, help="of each row, by the model's tokenizer")
    parser.add_argument(
        "--texts", type=text_file, nargs="+", default=(), help="plain text for --tokens and --shape [Lee's corpus]"
    )
    parser.add_argument("--window-rows", type=whole, help="[an eighth of --rows]")
    parser.add_argument("--rounds", type=whole, default=5, help="of each side, in turn")
    parser.add_argument("--threads", type=at_most(1024), help="CPU threads [all]; with --ray of each actor [1]")
    parser.add_argument("--ray", action="store_true", help="two actors against one, instead")
    parser.add_argument("--out", type=written_file, help="append JSON lines to this file")
    args = parser.parse_args(argv)
    if args.texts and not (args.tokens or args.shape):
        parser.error("--texts: rows come from Lee's corpus without --tokens, and a model of --model has its tokenizer")
    if args.ray and args.rows < 24:
        parser.error(f"--rows {args.rows}: the rate of actors is told from 24 parts, so --ray needs at least 24 rows")
    with tempfile.TemporaryDirectory(prefix="hortus-bench-") as work:
        if args.shape:
            device = "cuda" if gpu() else "cpu"
            args.model = str(shape_folder(Path(work), args.shape, texts=args.texts, device=device))
        given = Path(work, "in.parquet")
        texts = exact(args.model, args.rows, args.tokens, args.texts) if args.tokens else mixed(args.rows)
        pq.write_table(pa.table({"text": texts}), given)
        if args.ray:
            records = actors(args.model, given, Path(work), args.rows, args.rounds, args.threads or 1)
        else:
            records = asyncio.run(
                corpus(
                    args.model, given, Path(work), args.rounds, args.threads, args.window_rows or max(1, args.rows // 8)
                )
            )
    for record in records:
        record.hardware = gpu() or record.hardware
    print(table(records))
    if args.out:
        append(args.out, records)
    return 0


def exact(model: str, rows: int, tokens: int, files: Sequence[Path]) -> list[str]:
    """Texts of exactly so many tokens; up to 512 different ones, over and over."""
    folder = open_model(model, None, config.RoseConfig(), weights=False)
    corpus = Corpus(Tokenizer(folder, max_tokens=1 << 20).encode, files)
    different = [corpus.exact(tokens) for _ in range(min(rows, 512))]
    return [different[i % len(different)] for i in range(rows)]


async def corpus(
    model: str, given: Path, work: Path, rounds: int, threads: int | None, window_rows: int
) -> list[Record]:
    """Tokens a second of files to files, against the engine's own over the same steps."""
    flags = {"threads": threads, "auto_truncate": True, "progress": "none", "window_rows": window_rows}
    settings = config.load(flags={k: v for k, v in flags.items() if v is not None})
    shares = ""
    seconds: tuple[list[float], list[float]] = ([], [])
    cpu: tuple[list[float], list[float]] = ([], [])  # of all threads: what other work on the machine changes least
    async with AsyncExitStack() as closing:
        opened = await open_local(model, settings, closing, merge=False)
        info, engine = opened.embedder.info, opened.scheduler.engine
        job = command.job_of([str(given)], model, settings)
        steps: list[TokenBatch] = []
        for window in job.windows(()):
            batch = opened.embedder.tokenizer.encode([str(t) for t in window.texts], truncate=Truncate(True))
            order = np.argsort(-batch.lengths, kind="stable").astype(np.int32)
            steps += [take(batch, order[lo:hi][::-1]) for lo, hi in cut(batch.lengths[order], info.batch_tokens, 1024)]
        rows, tokens = sum(map(len, steps)), sum(s.total_tokens for s in steps)

        def alone() -> None:
            running: deque[LazyTensor] = deque()
            for step in steps:
                running.append(engine.step(step))
                if len(running) == settings.tulip.in_flight:
                    running.popleft().result()
            for last in running:
                last.result()

        async def files() -> None:
            store = Store(tempfile.mkdtemp(dir=work))
            store.prepare(manifest.PARTS, manifest.REJECTS)
            backend = Local(opened.embedder, job.wish)
            parts = Parts(store, schema_of(job.columns, job.wish, backend.values), job.columns, "bench")
            await run(job.windows(()), backend, parts, job.progress((), lambda: None))
            store.release()

        await asyncio.to_thread(alone)
        await files()
        for i in range(rounds):
            for side in (0, 1) if i % 2 == 0 else (1, 0):
                begin, begin_cpu, before = time.perf_counter(), time.process_time(), of_threads()
                await (files() if side == 0 else asyncio.to_thread(alone))
                seconds[side].append(time.perf_counter() - begin)
                cpu[side].append(time.process_time() - begin_cpu)
                if side == 0:
                    shares = told_shares(before, of_threads())
    ratios = np.asarray(seconds[1]) / np.asarray(seconds[0])
    cores = float(np.median(np.asarray(cpu[1]) / np.asarray(cpu[0])))
    told = f"ratios of rounds {ratios.min():.2f} to {ratios.max():.2f}; by processor time {cores:.3f}"
    print("ratio of each round:", " ".join(f"{r:.3f}" for r in ratios), f"by processor time: {cores:.3f}")
    if shares:
        print(f"processor time of the last run of `hortus embed`: {shares}")
    records = []
    for target, mine, ratio in (
        ("hortus embed", seconds[0], float(np.median(ratios))),
        ("engine alone", seconds[1], None),
    ):
        median = float(np.median(mine))
        records.append(
            Record(
                suite="corpus", target=target, model=info.name, dtype=info.dtype, batch=rows,
                tokens=tokens // rows, median_ms=median * 1e3, tokens_per_s=tokens / median, requests_per_s=rows / median,
                rounds=rounds, ratio=ratio, command="hortus bench corpus",
                note=told if ratio else "the same steps",
            )
        )  # fmt: skip
    return records


def of_threads() -> dict[str, float]:
    """Processor seconds of this process's threads, by name; empty where the system does not tell."""
    names = {t.native_id: t.name.rstrip("0123456789").rstrip("_-") for t in threading.enumerate()}
    found: defaultdict[str, float] = defaultdict(float)
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            found[names.get(int(path.parent.name), "of libraries")] += int(path.read_text().split()[0]) / 1e9
    return dict(found)


def told_shares(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """What each kind of thread took of the processor time in between, the largest first. Pure."""
    spent = {name: s - before.get(name, 0.0) for name, s in after.items()}
    whole = sum(spent.values())
    return ", ".join(
        f"{n} {s / whole:.1%}" for n, s in sorted(spent.items(), key=lambda x: -x[1]) if s > 0.0005 * whole
    )


def actors(model: str, given: Path, work: Path, rows: int, rounds: int, threads: int) -> list[Record]:
    """Rows a second of two Ray actors and of one, in turn; and what two would be to one on cores that nobody else wants."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    efforts: dict[int, list[float]] = {1: [], 2: []}  # processor seconds of actors a row
    for i in range(rounds):
        for count in (1, 2) if i % 2 == 0 else (2, 1):
            out = Path(tempfile.mkdtemp(dir=work))
            words = f"--part-rows {max(1, rows // 24)} --threads {threads} --auto-truncate --ray local --actors {count}".split()
            words += ["--model", model, "--out", str(out), "--progress", "none"]
            job = subprocess.Popen([sys.executable, "-m", "hortus.cli", "embed", str(given), *words])
            seen: list[tuple[float, float]] = []
            while job.poll() is None:
                seen.append((time.time(), actor_seconds(job.pid)))
                time.sleep(0.5)
            if job.returncode:
                raise StartError(f"`hortus embed --ray local --actors {count}` ended with {job.returncode}")
            made, first, last = span(out)
            begin, end = np.interp([first, last], [at for at, _ in seen], [s for _, s in seen])
            rates[count].append(made / (last - first))
            efforts[count].append(float(end - begin) / made)
            print(
                f"{count} actors: {rates[count][-1]:.2f} rows/s, {efforts[count][-1]:.3f} processor s a row", flush=True
            )
    ratios = np.asarray(rates[2]) / np.asarray(rates[1])
    told = f"; ratios of rounds {ratios.min():.2f} to {ratios.max():.2f}"
    if min(efforts[2]) > 0:
        told += f"; by processor time {2 * np.median(efforts[1]) / np.median(efforts[2]):.2f}"
    return [
        Record(
            suite="corpus-ray", target=f"{count} actors", model=model, batch=rows, requests_per_s=float(np.median(rates[count])),
            rounds=rounds, ratio=float(np.median(ratios)) if count == 2 else None, command="hortus bench corpus --ray",
            note=f"{threads} threads an actor; rows a second" + (told if count == 2 else ""),
        )
        for count in (1, 2)
    ]  # fmt: skip


def span(out: Path) -> tuple[int, float, float]:
    """(rows of all parts but the one that was finished first, when that was, when the last was)."""
    found = sorted((p.stat().st_mtime, orjson.loads(p.read_bytes())["rows"]) for p in out.glob("_parts/*.json"))
    return sum(rows for _, rows in found[1:]), found[0][0], found[-1][0]


def actor_seconds(root: int) -> float:
    """Processor seconds of the Ray actors with an engine below process `root`; 0 where the system does not tell."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = path.joinpath("stat").read_text().rpartition(")")[2].split()
            parents[int(path.name)] = int(fields[1])
            if path.joinpath("cmdline").read_bytes().startswith(b"ray::MapWorker"):
                ticks[int(path.name)] = int(fields[11]) + int(fields[12])

    def below(pid: int) -> bool:
        while pid and pid != root:
            pid = parents.get(pid, 0)
        return pid == root

    return sum(t for pid, t in ticks.items() if below(pid)) / os.sysconf("SC_CLK_TCK")
