"""A whole family of processes under load, and what may befall it. Used by test_grpc_chaos.py.

Clients check every answer: the right vectors in the right order, or one error of the table that says it may be retried. A
connection may break only where a gateway was killed; nothing may outlast its deadline.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from gateway_server import FOLDER

from hortus.errors import TABLE
from hortus.ivy import outputs
from hortus.ivy.tokenize import Tokenizer
from hortus.tulip.fake import fake_rows

RETRYABLE = {wire.http for wire in TABLE.values() if wire.retryable}
STALL_S = 0.3
WORDS = ("cat", "sits", "mat", "rain", "tulip", "garden", "bee", "stone", "river", "light")


@dataclass
class Family:
    """`hortus serve --gateways --replicas` in processes of its own."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int = 0

    def children(self) -> dict[str, psutil.Process]:
        """By name: tulip-0, ivy-1, ..."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if name := re.search(r" ([a-z]+-\d+)@", " ".join(child.cmdline())):
                    found[name[1]] = child
        return found

    def text(self) -> str:
        return self.log.read_text()


@contextlib.contextmanager
def family(where: Path, *flags: str, gateways: int = 2, replicas: int = 2, ready_s: float = 120) -> Iterator[Family]:
    """Started and ready; every process of it is gone at the end, whatever happened."""
    log = where / "log"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("HORTUS_")}
    words = ["serve", "demo", "--served-model-name", "mini", "--port", "0", "--fake-delay-ms", "2"]
    words += ["--gateways", str(gateways), "--replicas", str(replicas), *flags]
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", "hortus.cli", *words], stdout=out, stderr=out, env=environ)
    got = Family(process, log)
    children: list[psutil.Process] = []
    try:
        end = time.monotonic() + ready_s
        while not (told := re.search(r"gateways on http://127.0.0.1:(\d+)", got.text())):
            assert process.poll() is None, f"no start:\n{got.text()}"
            assert time.monotonic() < end, f"no start in time:\n{got.text()}"
            time.sleep(0.05)
        got.port = int(told[1])
        yield got
        if process.poll() is None:  # else the test has killed it
            children = psutil.Process(process.pid).children()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, got.text()
            _, alive = psutil.wait_procs(children, 60)
            assert not alive, f"left behind: {alive}"
    finally:
        with contextlib.suppress(psutil.Error):
            children += psutil.Process(process.pid).children(recursive=True)
        for each in (*children, process):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                each.send_signal(signal.SIGCONT)
                each.kill()
        process.wait(10)


@dataclass
class Load:
    """Closed-loop clients until `stop`, every answer checked."""

    port: int
    deadline_s: float
    """After which an answer counts as hung: the server's own --timeout-s and some slack."""
    seed: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    stop: bool = False
    broken_allowed: bool = False
    """Connections may break now, because a gateway is being killed."""
    stalled_at: float = 0.0
    """When this process itself, and so perhaps the machine, was last held up: what was under way then proves nothing about
    time, and is noted as `excused` if it failed."""
    _vectors: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tokenizer = Tokenizer(FOLDER)

    def vector(self, text: str) -> np.ndarray:
        if text not in self._vectors:
            rows = fake_rows(self._tokenizer.encode([text]), 384)
            self._vectors[text] = outputs.finish(rows, None, True)[0]
        return self._vectors[text]

    async def run(self, clients: int, sizes: tuple[int, ...] = (1, 1, 1, 3, 40)) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_the_clock())
            for n in range(clients):
                group.create_task(self._client(random.Random(self.seed + n), sizes))

    async def _watch_the_clock(self) -> None:
        while not self.stop:
            before = time.monotonic()
            await asyncio.sleep(0.05)
            if time.monotonic() - before > STALL_S:
                self.stalled_at = time.monotonic()

    async def _client(self, rng: random.Random, sizes: tuple[int, ...]) -> None:
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        while not self.stop:
            texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 4))) for _ in range(rng.choice(sizes))]
            begin = time.monotonic()
            try:
                async with asyncio.timeout(self.deadline_s):
                    if connection is None:
                        connection = await asyncio.open_connection("127.0.0.1", self.port)
                    keep = await self._request(*connection, texts)
            except TimeoutError:
                await asyncio.sleep(0.1)  # the clock's watcher first
                self._note("hung", f"no answer after {self.deadline_s} s")
                keep = False
            except (OSError, asyncio.IncompleteReadError) as e:
                await asyncio.sleep(0.1)
                self._note("broken", "" if self.broken_allowed else f"the connection broke: {e!r}")
                keep = False
            took = time.monotonic() - begin
            if took > self.slowest_s:
                await asyncio.sleep(0.1)  # the clock's watcher first
                if self.stalled_at < begin - STALL_S:
                    self.slowest_s = max(self.slowest_s, took)
            if not keep and connection is not None:
                connection[1].close()
                connection = None
        if connection is not None:
            connection[1].close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, texts: list[str]) -> bool:
        body = json.dumps({"model": "mini", "input": texts, "encoding_format": "base64"}).encode()
        writer.write(post(body))
        await writer.drain()
        status, headers, answer = await read_answer(reader)
        if status == 200:
            data = json.loads(answer)["data"]
            for i, text in enumerate(texts):
                got = np.frombuffer(base64.b64decode(data[i]["embedding"]), "<f4")
                if data[i]["index"] != i or not np.allclose(got, self.vector(text), atol=1e-5):
                    self._note("wrong", f"row {i} of {len(texts)} is not that of {text!r}")
            self._note("ok" if len(data) == len(texts) else "wrong", "" if len(data) == len(texts) else "rows missing")
        elif status in RETRYABLE:
            code = json.loads(answer)["error"]["code"]
            self._note(code)
            await asyncio.sleep(0.05)
        else:
            self._note(str(status), f"{status}: {answer[:300]!r}")
        return headers.get("connection") != "close"

    def _note(self, outcome: str, wrong: str = "") -> None:
        if outcome not in ("ok", "wrong") and time.monotonic() - self.stalled_at < self.deadline_s + 2:
            outcome, wrong = "excused", ""
        self.outcomes[outcome] += 1
        if wrong and len(self.wrong) < 20:
            self.wrong.append(wrong)


def post(body: bytes) -> bytes:
    return b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of one answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
    return int(head[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


async def get(port: int, path: str) -> tuple[int, bytes]:
    """One GET on a connection of its own."""
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % path.encode())
        status, _, body = await read_answer(reader)
        writer.close()
        return status, body


async def vanish(port: int, rng: random.Random, count: int = 5) -> None:
    """Clients that send a request, whole or half, and go."""
    body = json.dumps({"model": "mini", "input": ["bee"] * 200}).encode()
    for _ in range(count):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        data = post(body)
        writer.write(data[: rng.choice((len(data), len(data) // 2))])
        await asyncio.sleep(rng.uniform(0, 0.01))
        writer.transport.abort()


async def dawdle(port: int, seconds: float) -> None:
    """A client that asks for much and reads nothing for a while."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(post(json.dumps({"model": "mini", "input": ["stone"] * 1000}).encode()))
    await asyncio.sleep(seconds)
    writer.transport.abort()
    del reader
