"""`hortus bench cpu`: our vectors and our speed against sentence-transformers, in one process, on the real all-MiniLM-L6-v2.

What bounds it: 512 texts of ~100 tokens are ~45k tokens; the model's matrices are 2 x 10.6 M multiply-adds a token, so fp32
matrices alone bound the speed-up near 1.45x. One short text is bound by reading 42 MB of weights and by Python's calls.
Both sides use the same threads and alternate in one run, so drift of the machine hits both alike.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hortus.bench.flags import written_file
from hortus.bench.inprocess import Ours
from hortus.bench.results import Record, append, median_p99, table
from hortus.bench.texts import lee_sentences, mixed
from hortus.config import RoseConfig
from hortus.engines import open_model


def main(argv: Sequence[str]) -> int:
    """Entry point of `hortus bench cpu`."""
    parser = argparse.ArgumentParser(prog="hortus bench cpu", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=written_file, help="append JSON lines to this file")
    args = parser.parse_args(argv)
    from sentence_transformers import SentenceTransformer

    ours = Ours(open_model("demo", None, RoseConfig(), weights=True))
    peer = SentenceTransformer(str(ours.path), device="cpu")
    records = parity(ours, peer) + speed(ours, peer)
    print(table(records))
    if args.out:
        append(args.out, records)
    return 0


def _alternate(ours: Callable[[], object], peer: Callable[[], object], rounds: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each call, taken in turn after one warm-up of each."""
    ours(), peer()
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds):
        for side, call in ((0, ours), (1, peer)) if i % 2 == 0 else ((1, peer), (0, ours)):
            begin = time.perf_counter()
            call()
            times[side].append((time.perf_counter() - begin) * 1000)
    return times


def parity(ours: Ours, peer: Any, count: int = 1000) -> list[Record]:
    """Largest difference from sentence-transformers over `count` real texts of mixed length, in one batch and alone."""
    texts = mixed(count, seed=1)
    want = peer.encode(texts)
    got = ours.embed(texts)
    alone = np.concatenate([ours.embed([t]) for t in texts[:100]])
    worst, worst_alone = float(np.abs(got - want).max()), float(np.abs(alone - got[:100]).max())
    note = f"max |ours - reference| {worst:.1e}; alone vs in a batch {worst_alone:.1e}"
    if worst > 1e-5:
        raise SystemExit(f"parity failed: {note}")
    return [Record(suite="parity", target="hortus", model=ours.name, dtype="float32", batch=count, note=note)]


def speed(ours: Ours, peer: Any, rounds: int = 7, single_rounds: int = 200) -> list[Record]:
    """Throughput on 512 mixed texts and latency of one 16-token text, each against sentence-transformers' encode."""
    import torch

    records = []

    def pair(suite: str, batch: int, tokens: int, a: list[float], b: list[float], note: str) -> None:
        for target, ms, other in (("hortus", a, b), ("sentence-transformers", b, a)):
            median, p99 = median_p99(ms)
            records.append(
                Record(
                    suite=suite, target=target, model=ours.name, dtype="float32", batch=batch, tokens=tokens // batch,
                    clients=1, median_ms=median, p99_ms=p99, tokens_per_s=tokens / median * 1000,
                    requests_per_s=1000 / median, rounds=len(ms), note=note,
                    # Pair by pair, so that the machine's drift cancels.
                    ratio=float(np.median(np.asarray(other) / np.asarray(ms))),
                )
            )  # fmt: skip

    threads = torch.get_num_threads()
    texts = mixed(512)
    batch = ours.tokens(texts)
    a, b = _alternate(lambda: ours.embed(texts), lambda: peer.encode(texts), rounds)
    pair("cpu-throughput", len(texts), batch.total_tokens, a, b, f"texts to vectors, {threads} threads")

    short = next(s for s in lee_sentences() if ours.tokens([s]).total_tokens == 16)
    a, b = _alternate(lambda: ours.embed([short]), lambda: peer.encode([short]), single_rounds)
    pair("cpu-latency", 1, 16, a, b, f"text to vector, {threads} threads")

    # Where ours goes: tokenising, engine, the rest.
    begin = time.perf_counter()
    ours.tokens(texts)
    tokenize_ms = (time.perf_counter() - begin) * 1000
    begin = time.perf_counter()
    ours.vectors(batch)
    engine_ms = (time.perf_counter() - begin) * 1000
    note = f"tokenise {tokenize_ms:.0f} ms, engine and outputs {engine_ms:.0f} ms of the 512 texts"
    records.append(Record(suite="cpu-where", target="hortus", model=ours.name, dtype="float32", batch=512, note=note))
    return records
