"""`hortus bench watch`: what it costs a server that somebody has the page's Watch view open.

One server with the fake engine at full rate, the stream of /watch open and closed in turn, so that whatever else the machine does
falls on both. Throughput of a saturated server is the inverse of its processor time a request; both are told.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from hortus.bench.flags import more_than_0, whole, written_file
from hortus.bench.http import TEXT, topology
from hortus.bench.load import closed_loop
from hortus.bench.results import Record, append, median_p99, table
from hortus.config import RoseConfig
from hortus.engines import open_model
from hortus.ivy.watch import Watch
from hortus.metrics import Metrics

CLIENTS = 64


@contextlib.contextmanager
def watching(port: int) -> Iterator[list[int]]:
    """As the page does: read what comes. Gives the bytes that came, piece by piece."""
    seen: list[int] = []
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:

        def read() -> None:
            while data := sock.recv(65536):
                seen.append(len(data))

        sock.sendall(b"GET /watch HTTP/1.1\r\nhost: x\r\n\r\n")
        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield seen
        finally:
            sock.shutdown(socket.SHUT_RDWR)
            reader.join()


def sample_ms(times: int) -> float:
    """Processor time of one sample and its event, where so many requests were answered since the last, median of 50."""
    seen, taken = Watch(Metrics(), lambda: "ready", lambda: None, None, shared_port=False), []
    seen.seconds = deque()
    seen.take()
    for _ in range(50):
        seen.seconds.extend([0.001] * times)
        begin = time.thread_time()
        seen.take()
        taken.append((time.thread_time() - begin) * 1e3)
    return float(np.median(taken))


def main(argv: Sequence[str]) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="hortus bench watch", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=more_than_0, default=4.0, help="of each half of a round")
    parser.add_argument("--rounds", type=whole, default=15)
    parser.add_argument("--out", type=written_file, help="append JSON lines to this file")
    args = parser.parse_args(argv)
    records = watch(args.seconds, args.rounds)
    print(table(records))
    print(records[1].note)
    if args.out:
        append(args.out, records)
    return 0


def watch(seconds: float, rounds: int) -> list[Record]:
    """Unwatched and watched; `ratio` is the median of the rounds' ratios of throughput."""
    model = open_model("demo", None, RoseConfig(), weights=False).name
    body = json.dumps({"model": model, "input": TEXT, "encoding_format": "base64"}).encode()
    latencies: dict[bool, list[float]] = {False: [], True: []}
    rates: dict[bool, list[float]] = {False: [], True: []}
    cpu_us: dict[bool, list[float]] = {False: [], True: []}
    pace: list[float] = []
    with topology() as server:

        def half(watched: bool, keep: bool) -> None:
            before = server.engine_cpu_s()
            load = closed_loop("127.0.0.1", server.port, "/v1/embeddings", body, clients=CLIENTS, seconds=seconds)
            if keep:
                latencies[watched] += load.latencies_ms.tolist()
                rates[watched].append(load.requests_per_s)
                cpu_us[watched].append((server.engine_cpu_s() - before) / len(load.latencies_ms) * 1e6)

        half(False, keep=False)
        for i in range(rounds):
            for watched in (False, True) if i % 2 else (True, False):
                if not watched:
                    half(False, keep=True)
                    continue
                with watching(server.port) as seen:
                    half(True, keep=True)
                pace.append(sum(seen[1:]) / max(len(seen) - 1, 1))
    ratio = float(np.median(np.divide(rates[True], rates[False])))
    dearer = float(np.median(np.divide(cpu_us[True], cpu_us[False])))
    note = f"watched / not, medians of {rounds} rounds: throughput {ratio:.4f}, processor time a request {dearer:.4f}; "
    note += f"{np.median(pace):.0f} bytes a sample, which takes {sample_ms(1000):.2f} ms of processor time at 1,000 requests a "
    note += f"second, {sample_ms(10_000):.2f} ms at 10,000"
    return [
        Record(
            suite="watch", target=f"hortus, {'watched' if watched else 'not watched'}", model=f"fake (as {model})", batch=1,
            tokens=16, clients=CLIENTS, median_ms=median_p99(latencies[watched])[0], p99_ms=median_p99(latencies[watched])[1],
            requests_per_s=float(np.median(rates[watched])), rounds=rounds, ratio=ratio if watched else 1.0,
            note=note if watched else None,
        )
        for watched in (False, True)
    ]  # fmt: skip
