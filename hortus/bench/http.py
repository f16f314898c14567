"""`hortus bench http` and `grpc`: what everything around the engine costs. The engine is the fake, which takes no time.

So all that is measured is Ivy, Tulip, the links between them, the sockets and the client, whose processor time is reported
beside the server's figures. `http` is one process, beside a server that only answers; `grpc` compares one process with
gateways over one engine, in turn and in rounds: on a shared machine only figures of one run compare.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hortus.bench.flags import cores, duration, whole, written_file
from hortus.bench.load import closed_loop
from hortus.bench.pace import Load
from hortus.bench.results import Record, append, median_p99, table
from hortus.bench.started import Running, bound, free_port, started
from hortus.bench.started import hortus as served_hortus
from hortus.bench.texts import lee_sentences
from hortus.config import RoseConfig
from hortus.cores import usable_cores
from hortus.engines import open_model
from hortus.folder import ModelFolder
from hortus.ivy.tokenize import Tokenizer
from hortus.tulip.fake import FakeEngine
from hortus.types import TokenBatch

TEXT = "the quick brown fox jumps over the lazy dog by the old brown river"
"""16 tokens of all-MiniLM-L6-v2, special ones included (checked)."""


def main(argv: Sequence[str]) -> int:
    """Entry point of both; the first word says which."""
    which = argv[0]
    parser = argparse.ArgumentParser(prog=f"hortus bench {which}", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--seconds", type=duration, default=4.0 if which == "http" else 2.0, help="of each case and round"
    )
    parser.add_argument("--rounds", type=whole, default=5, help="of grpc")
    parser.add_argument(
        "--server-cores", type=cores, default=frozenset(), metavar="LIST",
        help="cores for the server's processes, such as 0,1; the clients get the others",
    )  # fmt: skip
    parser.add_argument(
        "--engine-cores", type=cores, default=frozenset(), metavar="LIST",
        help="of grpc: cores for the engine's process where it has gateways, if not the server's",
    )  # fmt: skip
    parser.add_argument("--out", type=written_file, help="append JSON lines to this file")
    args = parser.parse_args(argv[1:])
    placed = Placed()
    if taken := args.server_cores | args.engine_cores:
        placed = Placed(args.server_cores, args.engine_cores, os.sched_getaffinity(0) - taken)
        if not placed.clients:
            parser.error("--server-cores: the clients need a core too")
    records = http(args.seconds, placed) if which == "http" else grpc(args.seconds, args.rounds, placed)
    print(table(records))
    if args.out:
        append(args.out, records)
    return 0


class Placed(NamedTuple):
    """Cores that processes run on; none: any."""

    server: Collection[int] = ()
    engine: Collection[int] = ()
    """Of the one behind gateways, where it is not on the server's."""
    clients: Collection[int] = ()


@contextmanager
def topology(*flags: str, placed: Placed = Placed()) -> Iterator[Running]:  # noqa: B008
    """`hortus serve demo` with a fake engine and these flags, on a free port."""
    with served_hortus("demo", "--fake-delay-ms", "0", *flags, cores=placed.server) as running:
        if placed.engine and flags:
            running.bind_engine(placed.engine)
        yield running


BARE = """
import asyncio, sys, threading, queue, uvloop
todo, body = queue.SimpleQueue(), b"x" * 2200
answer = b"HTTP/1.1 200 OK\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body) + body
class Bare(asyncio.Protocol):
    def connection_made(self, transport): self.transport = transport
    def data_received(self, data): todo.put(self.transport) if hop else self.transport.write(answer)
async def main():
    loop = asyncio.get_running_loop()
    def run():
        while True:
            loop.call_soon_threadsafe(todo.get().write, answer)
    threading.Thread(target=run, daemon=True).start()
    await (await loop.create_server(Bare, "127.0.0.1", int(sys.argv[1]))).serve_forever()
hop = sys.argv[2] == "hop"
uvloop.run(main())
"""
"""A server that reads nothing and always answers the same: what the machine itself takes for an exchange."""


def bare(seconds: float, how: str, placed: Placed) -> list[float]:
    """Milliseconds of each exchange with BARE, answered at once (`direct`) or from a thread and back (`hop`)."""
    port = free_port()
    with (
        started([sys.executable, "-c", BARE, str(port), how], port, ready_s=30, cores=placed.server),
        bound(placed.clients),
    ):
        load = closed_loop("127.0.0.1", port, "/", b"{}", clients=1, seconds=seconds)
    return [float(ms) for ms in load.latencies_ms]


def http(seconds: float = 4.0, placed: Placed = Placed()) -> list[Record]:  # noqa: B008
    """p50 over the engine for one 32-token text; requests a second at 1, 16 and 64 clients; 100 texts in one request."""
    folder = open_model("demo", None, RoseConfig(), weights=False)
    tokenizer = Tokenizer(folder)
    sentences = lee_sentences()
    text = next(s for s in sentences if tokenizer.encode([s]).total_tokens == 32)
    batch = tokenizer.encode([text])
    engine = FakeEngine.like(folder, delay_s=0.0)
    direct = []
    for _ in range(3000):
        begin = time.perf_counter()
        engine.step(batch).result()
        direct.append((time.perf_counter() - begin) * 1000)
    direct_ms = median_p99(direct)[0]
    records: list[Record] = []
    for how, note in (("direct", "a server that only answers"), ("hop", "the same, over a thread and back")):
        median, p99 = median_p99(bare(seconds / 2, how, placed))
        records.append(
            Record(
                suite="http-floor", target="bare", model="none", batch=1, clients=1, median_ms=median, p99_ms=p99, note=note
            )
        )  # fmt: skip

    def cases(server: Running, width: int) -> Callable[..., None]:
        def case(suite: str, inputs: str | list[str], form: str, tokens: int, clients: int, processes: int = 1) -> None:
            body = json.dumps({"model": folder.name, "input": inputs, "encoding_format": form}).encode()
            with bound(placed.clients):
                load = closed_loop(
                    "127.0.0.1",
                    server.port,
                    "/v1/embeddings",
                    body,
                    clients=clients,
                    seconds=seconds,
                    processes=processes,
                )
            median, p99 = median_p99(load.latencies_ms.tolist())
            n = 1 if isinstance(inputs, str) else len(inputs)
            note = f"{form} x {width}; client used {load.client_cpu_s / load.seconds:.0%} of a core"
            if clients == 1 and n == 1:
                note += f"; engine alone {direct_ms * 1000:.0f} us, HTTP adds {median - direct_ms:.3f} ms"
            records.append(
                Record(
                    suite=suite, target="hortus", model=f"fake (as {folder.name})", batch=n, tokens=tokens,
                    clients=clients, median_ms=median, p99_ms=p99, tokens_per_s=load.requests_per_s * tokens * n,
                    requests_per_s=load.requests_per_s, rounds=len(load.latencies_ms), note=note,
                )
            )  # fmt: skip

        return case

    many = [text] * 100
    with topology(placed=placed) as running:
        case = cases(running, engine.info.width)
        case("http-overhead", text, "base64", 32, 1)
        for clients in (16, 64, 256):
            case("http-rate", text, "base64", 32, clients)
        case("http-many", many, "base64", 32, 1)
        case("http-many", many, "float", 32, 1)
    # One thread reads the texts, so that at most one core works on a request at any time.
    with tempfile.TemporaryDirectory() as place:
        wide = _wide(folder, Path(place) / folder.name)
        flags = ("--fake-delay-ms", "0", "--tokenize-threads", "1", "--served-model-name", folder.name)
        with served_hortus(str(wide), *flags, cores=placed.server) as running:
            case = cases(running, WIDE)
            case("http-many-one-core", many, "base64", 32, 1)
            case("http-many-one-core", many, "float", 32, 1)
    return records


WIDE = 1024


def _wide(folder: ModelFolder, to: Path) -> Path:
    """A copy of a folder without weights, whose fake gives vectors of WIDE values."""
    shutil.copytree(folder.path, to, ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "*.onnx"))
    (to / "config.json").write_text(json.dumps(folder.config | {"hidden_size": WIDE}))
    return to


def grpc(seconds: float = 2.0, rounds: int = 5, placed: Placed = Placed()) -> list[Record]:  # noqa: B008
    """In process against gateways: latency of one client, requests a second of many, processor time of the scheduler."""
    folder = open_model("demo", None, RoseConfig(), weights=False)
    model, fake_us = folder.name, _fake_us(folder)
    body = json.dumps({"model": model, "input": TEXT, "encoding_format": "base64"}).encode()
    mine = len(placed.clients) or usable_cores()
    kinds: dict[str, tuple[str, ...]] = {"one process": ()}
    for n in (1, 2, 4):
        if n <= max(2, len(placed.server) or mine // 2):
            kinds[f"{n} gateways"] = ("--gateways", str(n))
    runs: dict[tuple[str, int], list[Load]] = {}
    cpu_us: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, flags in kinds.items():
            with topology(*flags, placed=placed) as server:
                for clients in (1, 64, 256):
                    before = server.engine_cpu_s()
                    with bound(placed.clients):
                        load = closed_loop(
                            "127.0.0.1", server.port, "/v1/embeddings", body,
                            clients=clients, seconds=seconds, processes=1 if clients == 1 else max(1, min(4, mine // 4)),
                        )  # fmt: skip
                    runs.setdefault((kind, clients), []).append(load)
                    if clients == 64:
                        cpu_us[kind].append((server.engine_cpu_s() - before) / len(load.latencies_ms) * 1e6)
    return [_record(model, kind, clients, runs, cpu_us, fake_us) for kind, clients in runs]


def _fake_us(folder: ModelFolder) -> float:
    """Processor time of the fake engine itself, microseconds a sequence of TEXT's length, 16 a step and nothing in between."""
    engine, batch, steps = FakeEngine.like(folder, delay_s=0.0), TokenBatch.of([[*range(16)]] * 16), 1000
    begin = time.process_time()
    for _ in range(steps):
        engine.step(batch).result()
    return (time.process_time() - begin) / (steps * len(batch)) * 1e6


def _record(
    model: str,
    kind: str,
    clients: int,
    runs: dict[tuple[str, int], list[Load]],
    cpu_us: dict[str, list[float]],
    fake_us: float,
) -> Record:
    loads, base = runs[kind, clients], runs["one process", clients]
    p50, p99 = np.median([median_p99(load.latencies_ms.tolist()) for load in loads], axis=0)
    p50_base = np.median([np.median(load.latencies_ms) for load in base])
    rate = float(np.median([load.requests_per_s for load in loads]))
    rate_base = float(np.median([load.requests_per_s for load in base]))
    note = f"client used {np.median([load.client_cpu_s / load.seconds for load in loads]):.0%} of a core"
    if kind != "one process" and clients == 1:
        note += f"; adds {p50 - p50_base:.2f} ms"
    if kind not in ("one process", "1 gateways") and clients > 1:
        single = float(np.median([load.requests_per_s for load in runs["1 gateways", clients]]))
        note += f"; {rate / single:.2f} times 1 gateway"
    if kind != "one process" and clients == 64:
        note += f"; the engine's process used {np.median(cpu_us[kind]):.1f} us a request, {fake_us:.1f} of them the fake engine"
    return Record(
        suite="grpc", target=f"hortus, {kind}", model=f"fake (as {model})", batch=1, tokens=16, clients=clients,
        median_ms=float(p50), p99_ms=float(p99), requests_per_s=rate, rounds=len(loads), ratio=rate / rate_base, note=note,
    )  # fmt: skip
