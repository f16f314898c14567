"""What HTTP costs: the served fake engine against calling the same fake engine directly.

The fake engine takes no time, so everything measured is Ivy, Tulip, the sockets and the client. The client runs in processes of
its own and its processor time is reported beside the server's figures.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time

from hortus.bench.grpc import topology
from hortus.bench.load import closed_loop
from hortus.bench.results import Record, median_p99
from hortus.bench.texts import lee_sentences
from hortus.config import RoseConfig
from hortus.engines import open_model
from hortus.ivy.tokenize import Tokenizer
from hortus.tulip.fake import FakeEngine


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


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


def bare(seconds: float, how: str) -> list[float]:
    """Milliseconds of each exchange with BARE, answered at once (`direct`) or from a thread and back (`hop`)."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", BARE, str(port), how])
    try:
        for _ in range(100):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        load = closed_loop("127.0.0.1", port, "/", b"{}", clients=1, seconds=seconds)
    finally:
        process.kill()
        process.wait()
    return [float(ms) for ms in load.latencies_ms]


def http(seconds: float = 4.0) -> list[Record]:
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
        median, p99 = median_p99(bare(seconds / 2, how))
        records.append(
            Record(
                suite="http-floor", target="bare", model="none", batch=1, clients=1, median_ms=median, p99_ms=p99, note=note
            )
        )  # fmt: skip
    with topology() as running:
        port = running.port

        def case(suite: str, inputs: str | list[str], form: str, tokens: int, clients: int, processes: int = 1) -> None:
            body = json.dumps({"model": folder.name, "input": inputs, "encoding_format": form}).encode()
            load = closed_loop(
                "127.0.0.1", port, "/v1/embeddings", body, clients=clients, seconds=seconds, processes=processes
            )
            median, p99 = median_p99(load.latencies_ms.tolist())
            n = 1 if isinstance(inputs, str) else len(inputs)
            note = f"{form}; client used {load.client_cpu_s / load.seconds:.0%} of a core"
            if clients == 1 and n == 1:
                note += f"; engine alone {direct_ms * 1000:.0f} us, HTTP adds {median - direct_ms:.3f} ms"
            records.append(
                Record(
                    suite=suite, target="hortus", model=f"fake (as {folder.name})", batch=n, tokens=tokens,
                    clients=clients, median_ms=median, p99_ms=p99, tokens_per_s=load.requests_per_s * tokens * n,
                    requests_per_s=load.requests_per_s, rounds=len(load.latencies_ms), note=note,
                )
            )  # fmt: skip

        case("http-overhead", text, "base64", 32, 1)
        for clients in (16, 64, 256):
            case("http-rate", text, "base64", 32, clients)
        many = [text] * 100
        case("http-many", many, "base64", 32, 1)
        case("http-many", many, "float", 32, 1)
    return records
