"""`hortus bench beside`: short texts by chance, alone and beside texts that are slow to tokenise. The engine is the fake.

200,000 characters of one letter, of base64 and of minified code are asked for again and again by two clients, with `truncate`, so
that only their tokenising is work. Each round takes the short texts alone, then beside each kind; what is compared is the p99 of
one round with that of the same round alone, since a shared machine drifts. What is wanted is a ratio of at most 2.

A short text waits for a core where there are none left: with fewer cores than the server's loop, its tokenising threads
(--tokenize-threads) and the clients need, the figure is the machine's and not the server's. The line says how many there were.
"""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import Sequence

import numpy as np

from hortus.bench.flags import more_than_0, whole, written_file
from hortus.bench.load import Clients, Job, http_request
from hortus.bench.pace import Closed, Load, Open, checked
from hortus.bench.results import Record, append, median_p99, table
from hortus.bench.started import Running
from hortus.bench.started import hortus as served_hortus
from hortus.config import RoseConfig
from hortus.cores import usable_cores
from hortus.engines import open_model

SIZE = 200_000
"""Characters of a slow text."""
SLOW_CLIENTS = 2
SHORT = "the quick brown fox jumps over the lazy dog by the old brown river"
ALONE = "alone"


def slow_texts() -> dict[str, str]:
    """Texts of SIZE characters that tokenizers take long over, by name. The same each time."""
    code = "".join(f"function f{i}(a,b){{return a[{i}]+b.x{i}}};" for i in range(SIZE // 30))
    return {
        "one letter": "a" * SIZE,
        "base64": base64.b64encode(np.random.default_rng(0).bytes(SIZE * 3 // 4)).decode()[:SIZE],
        "minified code": code[:SIZE],
    }


def ratios(beside: Sequence[Load], alone: Sequence[Load]) -> tuple[float, float]:
    """(of medians, of p99): of each round to the same round alone, the median over the rounds. Pure."""
    pairs = [
        np.array(median_p99(b.latencies_ms.tolist())) / np.array(median_p99(a.latencies_ms.tolist()))
        for b, a in zip(beside, alone, strict=True)
    ]
    p50, p99 = np.median(pairs, axis=0)
    return float(p50), float(p99)


def main(argv: Sequence[str]) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="hortus bench beside", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="demo", help="a folder, hub id or demo: its tokenizer is measured [demo]")
    parser.add_argument("--rate", type=more_than_0, default=100.0, help="short texts a second [100]")
    parser.add_argument("--seconds", type=more_than_0, default=5.0, help="of each case and round [5]")
    parser.add_argument("--rounds", type=whole, default=5)
    parser.add_argument("--out", type=written_file, help="append JSON lines to this file")
    args = parser.parse_args(argv)
    name = open_model(args.model, None, RoseConfig(), weights=False).name
    with served_hortus(args.model, "--fake-delay-ms", "0", "--served-model-name", name) as server, Clients() as clients:
        short, slow = measure(server, clients, name, args.rate, args.seconds, args.rounds)
    records = [_record(name, kind, args.rate, short, slow) for kind in short]
    print(table(records))
    if args.out:
        append(args.out, records)
    return 0


def measure(
    server: Running, clients: Clients, model: str, rate: float, seconds: float, rounds: int
) -> tuple[dict[str, list[Load]], dict[str, list[Load]]]:
    """Loads of the short texts, alone and beside each kind of slow ones, and of the slow ones; a list of rounds each.
    RuntimeError when an answer was not 200."""

    def request(text: str) -> bytes:
        told = {"model": model, "input": text, "truncate": True, "encoding_format": "base64"}
        return http_request("127.0.0.1", server.port, "/v1/embeddings", json.dumps(told).encode())

    texts = slow_texts()
    short: dict[str, list[Load]] = {kind: [] for kind in (ALONE, *texts)}
    slow: dict[str, list[Load]] = {kind: [] for kind in texts}
    for turn in range(
        -1, rounds
    ):  # the first is to warm up: processes that read long texts start with the first of them
        plan = Open(rate, seconds if turn >= 0 else min(seconds, 2.0), seed=turn + 1)
        few = Job("127.0.0.1", server.port, [request(SHORT)], plan)
        for kind in short:
            jobs = [few]
            if kind != ALONE:
                jobs.append(Job("127.0.0.1", server.port, [request(texts[kind])], Closed(SLOW_CLIENTS, plan.seconds)))
            loads = [checked(load) for load in clients.run(jobs)]
            if turn >= 0:
                short[kind].append(loads[0])
                if kind != ALONE:
                    slow[kind].append(loads[1])
    return short, slow


def _record(model: str, kind: str, rate: float, short: dict[str, list[Load]], slow: dict[str, list[Load]]) -> Record:
    loads = short[kind]
    median, p99 = np.median([median_p99(load.latencies_ms.tolist()) for load in loads], axis=0)
    note = f"{kind}; {usable_cores()} cores"
    speed = None
    if kind != ALONE:
        p50_ratio, p99_ratio = ratios(loads, short[ALONE])
        speed = 1 / p99_ratio
        took = np.median([np.median(load.latencies_ms) for load in slow[kind]])
        note = f"beside {note}; p50 {p50_ratio:.2f} and p99 {p99_ratio:.2f} times alone; a slow text took {took:.0f} ms"
    return Record(
        suite="beside", target="hortus", model=f"fake (as {model})", batch=1, offered_per_s=rate, median_ms=float(median),
        p99_ms=float(p99), rounds=len(loads), ratio=speed, note=note,
    )  # fmt: skip
