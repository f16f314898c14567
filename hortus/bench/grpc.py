"""What processes cost and give: one process, gateways over one engine, replicas; the engine is the fake, so that all that is
measured is Ivy, Tulip, the links between them and the client.

Topologies are measured in turn and in rounds, medians over rounds: on a shared machine only figures of one run compare.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hortus.bench.load import Load, closed_loop
from hortus.bench.results import Record, median_p99
from hortus.config import RoseConfig
from hortus.engines import open_model

TEXT = "the quick brown fox jumps over the lazy dog by the old brown river"
"""16 tokens of all-MiniLM-L6-v2, special ones included (checked)."""


@dataclass(frozen=True, slots=True)
class Running:
    """One topology, ready."""

    port: int
    process: int

    def engine_cpu_s(self) -> float:
        """Processor seconds of the first engine process so far (of the whole server where it is one process)."""
        children = Path(f"/proc/{self.process}/task/{self.process}/children").read_text().split()
        for child in (*children, str(self.process)):
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if b"tulip" in words or not children:
                user, system = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
                return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        raise RuntimeError("no engine process")


@contextmanager
def topology(*flags: str, ready_s: float = 120) -> Iterator[Running]:
    """`hortus serve demo` with a fake engine and these flags, on a free port."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("HORTUS_")}
    words = [sys.executable, "-m", "hortus.cli", "serve", "demo", "--fake-delay-ms", "0", "--port", "0", *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=environ)

        def told() -> str:
            log.seek(0)
            return log.read().decode()

        try:
            end = time.monotonic() + ready_s
            while not (found := re.search(r"http://[\d.]+:(\d+)[ \n]", told())) or not _ready(int(found[1])):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the server did not start:\n{told()}")
                time.sleep(0.05)
            yield Running(int(found[1]), process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def grpc(seconds: float = 2.0, rounds: int = 5) -> list[Record]:
    """In process against gateways: latency of one client, requests a second of many, processor time of the scheduler."""
    model = open_model("demo", None, RoseConfig(), weights=False).name
    body = json.dumps({"model": model, "input": TEXT, "encoding_format": "base64"}).encode()
    cores = len(os.sched_getaffinity(0))
    kinds: dict[str, tuple[str, ...]] = {"one process": ()}
    for n in (1, 2, 4):
        if n <= max(2, cores // 2):
            kinds[f"{n} gateways"] = ("--gateways", str(n))
    runs: dict[tuple[str, int], list[Load]] = {}
    cpu_us: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, flags in kinds.items():
            with topology(*flags) as server:
                for clients in (1, 64, 256):
                    before = server.engine_cpu_s()
                    load = closed_loop(
                        "127.0.0.1", server.port, "/v1/embeddings", body,
                        clients=clients, seconds=seconds, processes=1 if clients == 1 else max(1, min(4, cores // 4)),
                    )  # fmt: skip
                    runs.setdefault((kind, clients), []).append(load)
                    if clients == 64:
                        cpu_us[kind].append((server.engine_cpu_s() - before) / len(load.latencies_ms) * 1e6)
    return [_record(model, kind, clients, runs, cpu_us) for kind, clients in runs]


def _record(
    model: str, kind: str, clients: int, runs: dict[tuple[str, int], list[Load]], cpu_us: dict[str, list[float]]
) -> Record:
    loads, base = runs[kind, clients], runs["one process", clients]
    p50, p99 = np.median([median_p99(load.latencies_ms.tolist()) for load in loads], axis=0)
    p50_base = np.median([np.median(load.latencies_ms) for load in base])
    rate = float(np.median([load.requests_per_s for load in loads]))
    rate_base = float(np.median([load.requests_per_s for load in base]))
    note = f"client used {np.median([load.client_cpu_s / load.seconds for load in loads]):.0%} of a core"
    if kind != "one process" and clients == 1:
        note += f"; adds {p50 - p50_base:.2f} ms"
    if kind != "one process" and clients == 64:
        note += f"; the engine's process used {np.median(cpu_us[kind]):.0f} us a request"
    return Record(
        suite="grpc", target=f"hortus, {kind}", model=f"fake (as {model})", batch=1, tokens=16, clients=clients,
        median_ms=float(p50), p99_ms=float(p99), requests_per_s=rate, rounds=len(loads), ratio=rate / rate_base, note=note,
    )  # fmt: skip
