"""The same run over a cluster: Ray Data's actors, each with an engine, each task some parts of a unit.

An actor reads its parts' rows itself, embeds them and writes the files and their records itself, by the code that a run on one
machine uses; only the records travel. So the output folder must be reachable from every node, as the inputs must. A task that is
run twice, because its actor died, makes the same files again. What an actor or a node needs to be brought back is Ray's own.

Does not know how a part is made.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any

from hortus.config import Config
from hortus.corpus import manifest, plan
from hortus.corpus.manifest import Record
from hortus.corpus.output import schema_of
from hortus.corpus.pipeline import Parts, run
from hortus.corpus.progress import Progress
from hortus.corpus.store import Store
from hortus.corpus.vectors import Local
from hortus.errors import StartError
from hortus.local import open_local

try:
    import ray
    import ray.data
except ModuleNotFoundError as e:
    raise StartError(f"--ray needs the package {e.name}: pip install 'hortus[ray]'") from None


@dataclass(frozen=True, slots=True)
class Task:
    """Parts of one unit for one actor to make."""

    unit: int
    parts: range | None
    """None: all, however many there are: rows of a format that does not say how many it has are read one after another."""


def tasks_of(counts: Sequence[Sequence[int | None]], part_rows: int, done: Sequence[Record]) -> list[Task]:
    """What is left to do. Pure.

    counts: of each unit, the rows of its files where known: its parts are tasks of their own then.
    """
    there = {(r.unit, r.part) for r in done}
    ended = {r.unit: r.part for r in done if r.ends_unit}
    tasks: list[Task] = []
    for unit, rows in enumerate(counts):
        known = [n for n in rows if n is not None]
        if len(known) == len(rows):
            parts = max(1, -(-sum(known) // part_rows))
            tasks += [Task(unit, range(p, p + 1)) for p in range(parts) if (unit, p) not in there]
        elif unit not in ended or any((unit, p) not in there for p in range(ended[unit] + 1)):
            tasks.append(Task(unit, None))
    return tasks


class Actor:
    """One engine in one process of the cluster."""

    def __init__(self, packed_job: bytes, engine: str | None) -> None:
        """packed_job: a pickled Job. engine: what the parts must be made by; None: nothing was made yet."""
        job = pickle.loads(packed_job)
        self._job = job
        self._loop = asyncio.new_event_loop()
        self._closing = AsyncExitStack()
        opened = self._loop.run_until_complete(open_local(job.model, job.settings, self._closing, merge=False))
        self._backend = Local(opened.embedder, job.wish)
        self._engine = manifest.engine_name(opened.embedder.info)
        if engine is not None and engine != self._engine:
            raise StartError(f"the parts that are done were made by {engine}, this node has {self._engine}")

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """A task in, the records of its parts out."""
        job, corpus = self._job, self._job.settings.corpus
        store = Store(corpus.out)
        unit = job.units[row["unit"]]
        only = None if row["end"] < 0 else range(row["first"], row["end"])
        records: list[Record] = []
        done = {r.part for r in manifest.records(store, unit.number)} if only is None else set()
        busy = self._backend.busy_s or 0.0
        windows = plan.windows(
            unit,
            job.columns,
            part_rows=corpus.part_rows,
            window_rows=corpus.window_rows,
            done=done,
            only=only,
            counts=job.counts_of(unit.number),
        )
        parts = Parts(store, schema_of(job.columns, job.wish, self._backend.values), job.columns, self._engine)
        silent = Progress("none", total_bytes=0)
        self._loop.run_until_complete(run(windows, self._backend, parts, silent, records.append))
        busy = (self._backend.busy_s or 0.0) - busy
        return {"records": pickle.dumps([asdict(r) for r in records]), "busy_s": busy, "node": os.uname().nodename}


def start(address: str) -> None:
    """Join the cluster at `address` (auto: the one this machine is of), or make one of this machine (local). StartError."""
    try:
        if address == "local":
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        else:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError, OSError) as e:
        raise StartError(f"--ray {address}: {e}") from None


def stop() -> None:
    """Leave the cluster; end it where it was made here."""
    ray.shutdown()


def actors_of(asked: int | None, settings: Config) -> tuple[int, float, float]:
    """(actors, GPUs of each, cores of each) for what the cluster has. StartError when it has too little."""
    there = ray.cluster_resources()
    gpus = int(there.get("GPU", 0)) if settings.rose.device != "cpu" and settings.tulip.fake_delay_ms is None else 0
    cores = float(settings.rose.threads or 1)
    fit = gpus or int(there.get("CPU", 0) // cores)
    count = asked or fit
    if not 1 <= count <= fit:
        kind = f"{gpus} GPUs" if gpus else f"{there.get('CPU', 0):g} cores, {cores:g} an actor (--threads)"
        raise StartError(f"--actors {count}: the cluster has {kind}")
    return count, 1.0 if gpus else 0.0, 0.0 if gpus else cores


def results(
    packed_job: bytes, tasks: Sequence[Task], engine: str | None, *, actors: int, gpus: float, cores: float
) -> Iterator[tuple[list[Record], float]]:
    """(records, seconds of a device) of each task, as they come. StartError, or Ray's own error, ends the run."""
    with warnings.catch_warnings():  # of settings of its own
        warnings.simplefilter("ignore", DeprecationWarning)
        ray.data.DataContext.get_current().enable_progress_bars = False
    rows = [{"unit": t.unit, **_ends(t.parts)} for t in tasks]
    resources: dict[str, float] = {"num_gpus": gpus} if gpus else {"num_cpus": cores}
    found = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        Actor,
        fn_constructor_args=(packed_job, engine),
        compute=ray.data.ActorPoolStrategy(size=min(actors, len(rows))),
        **resources,
    )
    try:
        for row in found.iter_rows():
            yield [Record(**r) for r in pickle.loads(row["records"])], float(row["busy_s"])
    except ray.exceptions.RayError as e:
        raise StartError(why(str(e))) from e


def why(told: str) -> str:
    """What ended the run, of the text of Ray's error: ours, which Ray carries only in an actor's traceback, else Ray's last line.
    Pure."""
    ours = re.findall(r"^hortus\.errors\.\w+: (.+)$", told, re.MULTILINE)
    return str(ours[-1]) if ours else f"the cluster gave up: {told.strip().splitlines()[-1]}"


def _ends(parts: range | None) -> dict[str, int]:
    return {"first": 0, "end": -1} if parts is None else {"first": parts.start, "end": parts.stop}
