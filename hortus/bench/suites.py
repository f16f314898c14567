"""The suites: what is asked of every target, in which sizes and by how many clients.

Four that the field's articles use: `latency` (one input), `scoring` (tens of inputs after a vector search), `throughput`
(batches of 100 from 4 client processes) and `concurrency` (1 to 256 clients over HTTP). And ours: `cases`, `short`, `arrivals`,
`mixed`, `start`, `graphs`. Each takes a Run and returns Records; how a case is warmed up, checked and timed is Run's.
"""

from __future__ import annotations

import numpy as np

from hortus.bench import SIZES
from hortus.bench.measure import Run, summary
from hortus.bench.pace import Closed, Load, Open
from hortus.bench.results import Record, cosines
from hortus.bench.served import Served
from hortus.bench.targets import timed_calls
from hortus.bench.texts import Inputs
from hortus.errors import StartError

SCORED = (5, 25, 50)
CLIENTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHORT = 16
"""Tokens of a short query."""
OFFERED = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Offered load, as shares of what the first target can do."""


def sizes(run: Run, suite: str) -> list[int]:
    """Tokens of the suite's inputs in this run: all that are wanted, or the largest where the suite has one size."""
    found = run.sizes(SIZES[suite]) if suite in SIZES else []
    return found if suite in ("latency", "start") else found[-1:]


def latency(run: Run) -> list[Record]:
    """Batch 1: one input of 128, 512 and 4096 tokens, one client."""
    return [r for tokens in sizes(run, "latency") for r in run.case("latency", 1, tokens, 1)]


def scoring(run: Run) -> list[Record]:
    """Batch 5, 25 and 50 of 512 tokens, one client."""
    [tokens] = sizes(run, "scoring")
    return [r for batch in SCORED for r in run.case("scoring", batch, tokens, 1)]


def throughput(run: Run) -> list[Record]:
    """Batches of 100 of 512 tokens from 4 client processes (in process: one after another)."""
    [tokens] = sizes(run, "throughput")
    return run.case("throughput", 100, tokens, 4)


def cases(run: Run) -> list[Record]:
    """Sizes as asked for (`--cases`), one client."""
    found = dict.fromkeys((batch, min(tokens, run.longest)) for batch, tokens in run.given)
    return [r for batch, tokens in found for r in run.case("cases", batch, tokens, 1)]


def concurrency(run: Run) -> list[Record]:
    """1 to 256 clients with an input of 128 tokens each, over HTTP."""
    [tokens] = sizes(run, "concurrency")
    return [r for n in run.clients(CLIENTS) for r in run.case("concurrency", 1, tokens, n, served=True)]


def short(run: Run) -> list[Record]:
    """Queries of 16 tokens: one client, then full rate."""
    records = run.case("short", 1, SHORT, 1)
    return records + [r for n in run.clients((16, 64, 256)) for r in run.case("short", 1, SHORT, n, served=True)]


def arrivals(run: Run) -> list[Record]:
    """Queries of 16 tokens that arrive by chance (Poisson): latency against offered load, from when each was due."""
    requests = run.corpus.several(1, SHORT, 64)
    targets = run.ready(requests, served=True)
    if not targets:
        return []
    # One scale for all, so that targets compare at the same load: the most that any of them answers.
    most = max(run.timed(t, requests, Closed(max(run.clients((64,))), run.seconds)).requests_per_s for t in targets)
    loads: dict[tuple[str, float], list[Load]] = {}
    full: set[str] = set()
    for share in OFFERED:
        for turn in range(run.rounds):
            for target in run.turn(targets, turn):
                if target.name in full:
                    continue
                plan = Open(share * most, run.seconds, seed=turn)
                loads.setdefault((target.name, share), []).append(run.timed(target, requests, plan))
        for target in targets:  # a higher load would only lengthen its queue
            if target.name not in full and _full(loads[target.name, share], run.seconds):
                full.add(target.name)
    records = []
    for target in targets:
        for share in OFFERED:
            if rounds := loads.get((target.name, share)):
                record = run.record("arrivals", target, summary(rounds), 1, SHORT)
                record.offered_per_s = share * most
                late = np.concatenate([x.late_ms for x in rounds])
                lateness = f"sent at most {np.percentile(late, 99):.2f} ms late (p99)" if len(late) else "none arrived"
                record.note = "; ".join([record.note or "", f"{share:.0%} of the best", lateness])
                if target.name in full and share == max(s for name, s in loads if name == target.name):
                    record.note += "; full: higher loads left out"
                records.append(run.tell(record))
    return records


def _full(rounds: list[Load], seconds: float) -> bool:
    """Fewer than nine tenths of what arrived a second was answered a second."""
    arrived = sum(len(x.latencies_ms) + sum(x.failed.values()) for x in rounds) / (seconds * len(rounds))
    return sum(len(x.latencies_ms) for x in rounds) / sum(x.seconds for x in rounds) < 0.9 * arrived


def mixed(run: Run) -> list[Record]:
    """Short queries by chance while an index is built: their latency without and with the bulk load, and what bulk gets."""
    [long] = sizes(run, "mixed")
    queries, bulk = run.corpus.several(1, SHORT, 64), run.corpus.several(64, long, 3)
    targets = [t for t in run.ready(queries, served=True) if isinstance(t, Served)]
    targets = [t for t in targets if t in run.ready(bulk, served=True)]
    if not targets:
        return []
    # A fifth of what the slowest answers to one client, so that queries alone are no load for any.
    rate = 0.2 * min(run.timed(t, queries, Closed(1, run.seconds / 2)).requests_per_s for t in targets)
    quiet: dict[str, list[Load]] = {t.name: [] for t in targets}
    busy: dict[str, list[Load]] = {t.name: [] for t in targets}
    index: dict[str, list[Load]] = {t.name: [] for t in targets}
    for turn in range(run.rounds):
        for t in run.turn(targets, turn):
            plan = Open(rate, run.seconds, seed=turn)
            quiet[t.name].append(run.timed(t, queries, plan))
            few = t.job(queries, plan)
            seen, built = run.setting.clients.run([few, t.job(bulk, Closed(2, run.seconds))])
            busy[t.name].append(run.keep("mixed busy", t, seen))
            index[t.name].append(built)
    records = []
    for t in targets:
        for note, rounds in (("queries alone", quiet), ("queries beside 2 bulk clients", busy)):
            record = run.record("mixed", t, summary(rounds[t.name]), 1, SHORT, clients=None)
            record.offered_per_s, record.note = rate, "; ".join(filter(None, [note, record.note]))
            records.append(run.tell(record))
        record = run.record("mixed", t, summary(index[t.name]), 64, long, clients=2)
        record.note = "; ".join(filter(None, ["bulk beside the queries", record.note]))
        records.append(run.tell(record))
    return records


def start(run: Run) -> list[Record]:
    """From starting a target to its being ready; then the first, second and third answer of a size, and later ones."""
    records = []
    for t in run.targets:
        if t.opened_s:
            record = run.record("start", t, summary([Load(np.array([t.opened_s * 1000]), t.opened_s)]), None, None)
            records.append(run.tell(_once(record)))
    for tokens in sizes(run, "start"):
        requests = run.corpus.several(1, tokens, 13)
        for t in run.targets:
            ms = [timed_calls([lambda t=t, r=r: t.vectors(r)], 0)[0][0] for r in requests]  # type: ignore[misc]
            for name, part in (("first", ms[:1]), ("second", ms[1:2]), ("third", ms[2:3]), ("later", ms[3:])):
                record = run.record("first-hit", t, summary([Load(np.array(part), sum(part) / 1000)]), 1, tokens)
                record.note = f"{name}; {t.about}"
                records.append(run.tell(_once(record)))
    return records


def _once(record: Record) -> Record:
    """Of what happens once, rates and a 99th percentile say nothing."""
    record.p99_ms = record.requests_per_s = record.tokens_per_s = record.client_cores = None
    return record


def graphs(run: Run) -> list[Record]:
    """Inputs of random length: the share of steps that replay a CUDA graph, as graphs are captured (Hortus on a GPU only)."""
    lengths = np.random.default_rng(0).integers(8, 1 + min(512, run.longest), 200)
    requests = [run.corpus.inputs(1, int(n)) for n in lengths]
    records = []
    for t in run.targets:
        if not isinstance(t, Served) or not sum((t.graph_steps() or {}).values()):
            print(f"  graphs: {t.name} counts no graph steps; passed over", flush=True)
            continue
        records += graph_records(run, t, requests)
    return records


def graph_records(run: Run, target: Served, requests: list[Inputs]) -> list[Record]:
    """A line about every half second of `run.seconds` x rounds."""
    records: list[Record] = []
    before = target.graph_steps() or {}

    def tick(at_s: float) -> None:
        nonlocal before
        now = target.graph_steps() or {}
        new = {how: now[how] - before.get(how, 0) for how in now}
        if (steps := sum(new.values())) > 0:
            record = run.record("graphs", target, summary([Load(np.zeros(0), 0.0)]), 1, None, clients=4)
            record.at_s, record.hit_rate, record.note = at_s, new.get("replay", 0) / steps, f"{steps:.0f} steps"
            records.append(record)
        before = now

    run.setting.clients.run([target.job(requests, Closed(4, run.seconds * run.rounds))], tick)
    return records


def parity(run: Run) -> list[Record]:
    """Vectors against the reference on 200 inputs of mixed length, all at once and one at a time."""
    rng = np.random.default_rng(1)
    texts = [run.corpus.exact(int(n)) for n in rng.integers(8, 1 + min(256, run.longest), 200)]
    together, alone = run.corpus.of(texts), [run.corpus.of([t]) for t in texts[:50]]
    records = []
    for t in run.targets:
        try:
            rows, single = t.vectors(together), np.concatenate([t.vectors(x) for x in alone])
        except StartError as e:
            print(f"  parity: {e}; passed over", flush=True)
            continue
        record = run.record("parity", t, summary([Load(np.zeros(0), 0.0)]), len(texts), None)
        record.cosine = float(run.cosines(rows, together).min())
        record.note = f"alone against in a batch: cosine {float(cosines(rows[:50], single).min()):.6f}"
        records.append(record)
    return records


SUITES = {
    f.__name__: f
    for f in (start, latency, scoring, throughput, cases, concurrency, short, arrivals, mixed, graphs, parity)
}
"""In the order that `start`, which wants targets fresh, comes first."""
