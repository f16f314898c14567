"""The suites: what is asked of every target, in which sizes and by how many clients.

Four that the field's articles use: `latency` (one input), `scoring` (tens of inputs after a vector search), `throughput`
(batches of 100 from 4 client processes) and `concurrency` (1 to 256 clients over HTTP). And ours: `cases`, `short`, `arrivals`,
`mixed`, `start`, `graphs`. Each takes a Run and returns Records; how a case is warmed up, checked and timed is Run's.
"""

from __future__ import annotations

import numpy as np

from hortus.bench import SIZES
from hortus.bench.measure import Run, summary
from hortus.bench.pace import Closed, Load, NoFigureError, Open, checked
from hortus.bench.results import Record, cosines
from hortus.bench.served import Served
from hortus.bench.targets import Target, timed_calls
from hortus.bench.texts import Inputs
from hortus.errors import StartError
from hortus.types import Float32

SCORED = (5, 25, 50)
CLIENTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHORT = 16
"""Tokens of a short query."""
OFFERED = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Offered load, as shares of the most that any target answers."""


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
    run.passed_over("concurrency")
    return [r for n in run.clients(CLIENTS) for r in run.case("concurrency", 1, tokens, n, served=True)]


def short(run: Run) -> list[Record]:
    """Queries of 16 tokens: one client, then full rate."""
    records = run.case("short", 1, SHORT, 1)
    return records + [
        r for n in run.clients((16, 64, 256)) if n > 1 for r in run.case("short", 1, SHORT, n, served=True)
    ]


def arrivals(run: Run) -> list[Record]:
    """Queries of 16 tokens that arrive by chance (Poisson): latency against offered load, from when each was due."""
    requests = run.corpus.several(1, SHORT, 64)
    run.passed_over("arrivals")
    ready = run.ready(requests, served=True)
    full_rate = Closed(max(run.clients((64,))), run.seconds)
    # One scale for all, so that targets compare at the same load: the most that any of them answers.
    tried = [
        run.attempt(t, f"16 tokens from {full_rate.clients} clients", run.timed, t, requests, full_rate) for t in ready
    ]
    targets = [t for t in ready if t in run.targets]
    if not targets:
        return []
    most = max(load.requests_per_s for load in tried if load)
    records = []
    for share in OFFERED:
        loads: dict[str, list[Load]] = {t.name: [] for t in targets}
        for turn in range(run.rounds):
            for target in run.turn(targets, turn):
                if target not in run.targets:
                    continue
                plan = Open(share * most, run.seconds, seed=turn)
                load = run.attempt(target, f"{plan.rate:.1f} requests/s by chance", run.timed, target, requests, plan)
                loads[target.name] += [load] if load else []
        targets = [t for t in targets if t in run.targets]
        for target in [*targets]:  # told at each load, for a run that is cut short
            rounds = loads[target.name]
            record = run.record("arrivals", target, summary(rounds), 1, SHORT, clients=None)
            record.offered_per_s = share * most
            late = np.concatenate([x.late_ms for x in rounds])
            lateness = f"sent at most {np.percentile(late, 99):.2f} ms late (p99)" if len(late) else "none arrived"
            record.note = "; ".join([record.note or "", f"{share:.0%} of the best", lateness])
            if _full(rounds, run.seconds):  # a higher load would only lengthen its queue
                record.note += "; full: higher loads left out"
                targets.remove(target)
            records.append(run.tell(record))
    return [r for r in records if r.target not in run.refused]


def _full(rounds: list[Load], seconds: float) -> bool:
    """Fewer than nine tenths of what arrived a second was answered a second. That each answer takes long is no reason."""
    if not seconds:
        return False
    arrived = sum(len(x.latencies_ms) + sum(x.failed.values()) for x in rounds) / (seconds * len(rounds))
    return sum(len(x.latencies_ms) for x in rounds) / sum(x.seconds for x in rounds) < 0.9 * arrived


def mixed(run: Run) -> list[Record]:
    """Short queries by chance while an index is built: their latency without and with the bulk load, and what bulk gets."""
    [long] = sizes(run, "mixed")
    queries, bulk = run.corpus.several(1, SHORT, 64), run.corpus.several(64, long, 3)
    run.passed_over("mixed")
    run.ready(queries, served=True)
    ready = [t for t in run.ready(bulk, served=True) if isinstance(t, Served)]
    one = Closed(1, run.seconds / 2)
    tried = [run.attempt(t, "16 tokens from one client", run.timed, t, queries, one) for t in ready]
    targets = [t for t in ready if t in run.targets]
    if not targets:
        return []
    # A fifth of what the slowest answers to one client, so that queries alone are no load for any.
    rate = 0.2 * min(load.requests_per_s for load in tried if load)
    quiet: dict[str, list[Load]] = {t.name: [] for t in targets}
    busy: dict[str, list[Load]] = {t.name: [] for t in targets}
    index: dict[str, list[Load]] = {t.name: [] for t in targets}

    def round_of(t: Served, plan: Open) -> None:
        alone = run.timed(t, queries, plan)
        both = run.setting.clients.run([t.job(queries, plan), t.job(bulk, Closed(2, plan.seconds))])
        beside, built = run.still_right(t, queries, both[0]), run.still_right(t, bulk, checked(both[1]))
        quiet[t.name].append(alone)
        busy[t.name].append(run.keep(t, queries, plan, beside, "beside 2 bulk clients"))
        index[t.name].append(run.keep(t, bulk, Closed(2, plan.seconds), built, "bulk beside the queries"))

    for turn in range(run.rounds):
        for t in run.turn(targets, turn):
            run.attempt(t, "queries beside an index", round_of, t, Open(rate, run.seconds, seed=turn))
        targets = [t for t in targets if t in run.targets]
    records = []
    for t in targets:
        for note, rounds in (("queries alone", quiet), ("queries beside 2 bulk clients", busy)):
            seen = summary(rounds[t.name])
            record = run.record("mixed", t, seen, 1, SHORT, clients=None)
            none = "" if seen.answers or seen.failed else "none arrived"
            record.offered_per_s, record.note = rate, "; ".join(filter(None, [note, record.note, none]))
            records.append(run.tell(record))
        record = run.record("mixed", t, summary(index[t.name]), 64, long, clients=2)
        record.note = "; ".join(filter(None, ["bulk beside the queries", record.note]))
        records.append(run.tell(record))
    return records


def start(run: Run) -> list[Record]:
    """From starting a target to its being ready; then the first, second and third answer of a size, and later ones.

    A first answer has nothing before it, so what is timed here is held against the reference afterwards.
    """
    records = []
    run.nothing_held()
    for t in run.targets:
        if t.opened_s:
            record = run.record("start", t, summary([Load(np.array([t.opened_s * 1000]), t.opened_s)]), None, None)
            records.append(run.tell(_once(record)))
    for tokens in sizes(run, "start"):
        requests = run.corpus.several(1, tokens, 13)
        run.nothing_held()
        what = f"the first answers of {tokens} tokens"
        hits = {t: run.attempt(t, what, _hits, t, requests) for t in [*run.targets]}
        wants = [run.truth(r) for r in requests if run.targets]
        for t in [*run.targets]:
            ms, rows = hits[t] or ([], [])
            for got, want in zip(rows, wants, strict=True):
                if t in run.targets:
                    run.attempt(t, what, run.hold, t, got, want)
            for name, part in (("first", ms[:1]), ("second", ms[1:2]), ("third", ms[2:3]), ("later", ms[3:])):
                if t in run.targets:
                    record = run.record("first-hit", t, summary([Load(np.array(part), sum(part) / 1000)]), 1, tokens)
                    record.note = f"{name}; {t.about}"
                    records.append(run.tell(_once(record)))
    return [r for r in records if r.target not in run.refused]


def _hits(target: Target, requests: list[Inputs]) -> tuple[list[float], list[Float32]]:
    """(milliseconds, vectors) of each request, asked once."""
    rows: list[Float32] = []
    ms = [timed_calls([lambda r=r: rows.append(target.vectors(r))], 0)[0][0] for r in requests]  # type: ignore[misc]
    return ms, rows


def _once(record: Record) -> Record:
    """Of what happens once, rates and a 99th percentile say nothing."""
    record.note = "; ".join(words for words in (record.note or "").split("; ") if not words.startswith("p99 of "))
    record.p99_ms = record.requests_per_s = record.tokens_per_s = record.client_cores = None
    return record


def graphs(run: Run) -> list[Record]:
    """Inputs of random length: the share of steps that replay a CUDA graph, as graphs are captured (Hortus on a GPU only)."""
    lengths = np.random.default_rng(0).integers(8, 1 + min(512, run.longest), 200)
    requests = [run.corpus.inputs(1, int(n)) for n in lengths]
    records = []
    run.nothing_held()
    for t in [*run.targets]:
        if not isinstance(t, Served) or not sum((run.attempt(t, "/metrics", t.graph_steps) or {}).values()):
            print(f"  graphs: {t.name} counts no graph steps; passed over", flush=True)
            continue
        records += run.attempt(t, "graphs", graph_records, run, t, requests) or []
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
            records.append(run.kept(record))
        before = now

    [load] = run.setting.clients.run([target.job(requests, Closed(4, run.seconds * run.rounds))], tick)
    run.still_right(target, requests, checked(load))
    return records


def parity(run: Run) -> list[Record]:
    """Vectors against the reference on 200 inputs of mixed length, all at once and one at a time. A target that is further off
    than it may be keeps its line, and is left out of what follows."""
    rng = np.random.default_rng(1)
    texts = [run.corpus.exact(int(n)) for n in rng.integers(8, 1 + min(256, run.longest), 200)]
    together, alone = run.corpus.of(texts), [run.corpus.of([t]) for t in texts[:50]]
    records: list[Record] = []
    if not run.targets:
        return records
    want = run.truth(together)
    for t in [*run.targets]:
        try:
            rows, single = t.vectors(together), np.concatenate([t.vectors(x) for x in alone])
        except StartError as e:
            print(f"  parity: {e}; passed over", flush=True)
            continue
        except Exception as e:  # noqa: BLE001  whatever a target does, the others' figures must not be lost
            run.failed(t, "parity", e)
            continue
        if rows.shape != want.shape or single.shape != want[:50].shape:
            run.failed(t, "parity", NoFigureError(f"vectors of shape {rows.shape}, the reference has {want.shape}"))
            continue
        worst, apart = float(cosines(rows, want).min()), float(cosines(rows[:50], single).min())
        if np.isfinite([worst, apart]).all():
            record = run.record("parity", t, summary([Load(np.zeros(0), 0.0)]), len(texts), None)
            record.cosine, record.note = worst, f"alone against in a batch: cosine {apart:.6f}"
            records.append(run.kept(record))
        run.attempt(t, "parity", run.hold, t, np.concatenate([rows, single]), np.concatenate([want, want[:50]]))
    return records


SUITES = {
    f.__name__: f
    for f in (start, latency, scoring, throughput, cases, concurrency, short, arrivals, mixed, graphs, parity)
}
"""In the order that `start`, which wants targets fresh, comes first."""
